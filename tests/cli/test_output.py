"""What is printed beside answers."""

import subprocess

import pytest

from jaxrag.base.errors import RequestError
from jaxrag.base.installed import commit
from jaxrag.cli import output
from jaxrag.cli.output import note

TEXT = "the model was loaded with K and V on the device: load_model(..., value_layers=1) frees it"


@pytest.mark.parametrize("terminal", [True, False])
def test_notes_are_broken_for_people_only(monkeypatch, capsys, terminal):
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    note(f"{TEXT}, and {'long' * 30} names stay whole\x1b[31m")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("note: the model")
    assert all(len(line) <= 80 or " " not in line for line in lines) == terminal
    assert (len(lines) > 1) == terminal
    assert "\\x1b[31m" in lines[-1]


def test_a_result_of_the_repository_is_of_a_commit(tmp_path):
    """Nothing is written into benchmarks/results where the tree differs from its commit."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (tmp_path / "code.py").write_text("1\n")
    (results / "old.json").write_text("1\n")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    output._require_commit(results / "x.json", "--out", tmp_path)  # clean
    (results / "old.json").write_text("2\n")  # a new result is no difference
    assert len(commit(tmp_path)) == 40
    (tmp_path / "code.py").write_text("2\n")
    assert commit(tmp_path).endswith("+changes")
    output._require_commit(tmp_path / "x.json", "--out", tmp_path)  # elsewhere
    with pytest.raises(RequestError, match=r"--out .*x.json: results of the repository are of a"):
        output._require_commit(results / "x.json", "--out", tmp_path)

"""The kill -9 experiment, a few rounds of it; ``crash.py`` runs hundreds."""

import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import bases
import crash
import crash_checks
import crash_log
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_killed_processes_lose_nothing_and_leave_nothing_wrong(tmp_path):
    """One round of every kind."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("crash.py"), "--rounds", str(len(crash.NAMES)),
         "--seed", "3", "--folder", tmp_path / "work", "--out", tmp_path / "result.json",
         "--markdown", tmp_path / "result.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["violations"] == 0
    assert set(result["kinds"]) == set(crash.NAMES)
    assert all(counts["rounds"] == 1 for counts in result["kinds"].values())
    assert sum(counts["kills"] for counts in result["kinds"].values()) == 24
    assert sum(counts["acknowledged"] for counts in result["kinds"].values()) > 0
    assert "| all | 15 | 24 |" in (tmp_path / "result.md").read_text()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("crash") / "model"
    bases.make_model(directory)
    return directory


@pytest.fixture
def rounds(tmp_path, model_dir, monkeypatch):
    """Rounds in this process, over a model that is there already."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{Path(__file__).parent}")
    monkeypatch.setattr(crash, "EARLY_KILLS", 0.0)
    shutil.copytree(model_dir, tmp_path / "model")
    with contextlib.ExitStack() as stack:
        yield crash.Rounds(tmp_path, 5, stack)


def test_two_killed_writers_lose_nothing(rounds):
    found = rounds.one("two writers", 1)
    assert "violation" not in found, found
    assert found["counts"]["kills"] == 2
    assert found["counts"]["documents"] > 0
    assert not found["counts"].get("blocks of packed words")
    assert (
        found["counts"]["equal answers"] + found["counts"].get("answers over equal scores", 0) > 0
    )


def test_two_killed_writers_lose_nothing_of_what_is_kept_as_large(rounds):
    found = rounds.one("large", 3)
    assert "violation" not in found, found
    assert found["counts"]["kills"] == 2
    assert found["counts"]["blocks of packed words"] > 0


@pytest.fixture
def calm(tmp_path, model_dir):
    """An experiment before its first round."""
    made = crash_checks.Experiment(
        "remove", tmp_path / "kind", bases.load(model_dir), model_dir, None
    )
    yield made
    made.close()


def test_the_checks_pass_where_nothing_happened(calm):
    counts = calm.check([[]], "0")
    assert counts["documents"] == crash_checks.FIRST


def undone(kb):
    kb.remove([bases.document_id(1)])


def exchanged(kb):
    kb.add([bases.as_document(1, 7)])


def unstored(kb):
    for file in (kb.path / "kv").rglob("commit.json"):
        file.unlink()


def unfound(kb):
    kb._vectors.index.remove(kb._catalog.ids_of_document(bases.document_id(1)))


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (undone, "doc-1 stands as None, expected 0 or 0"),
        (exchanged, "doc-1 stands as 7, expected 0 or 0"),
        (unstored, "noted are"),
        (unfound, "chunks have no vector"),
    ],
)
def test_what_is_lost_is_seen(calm, harm, told):
    with calm._open("rw") as kb:
        harm(kb)
    with pytest.raises(crash_log.WrongError, match=told):
        calm.check([[]], "0")

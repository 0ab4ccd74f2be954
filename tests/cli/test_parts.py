"""`--ray N` of ingest and generate: parts of the work on a Ray cluster."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrag.base.errors import ConfigError
from jaxrag.cli import main
from jaxrag.cli.parts import RayOptions, RayWorker
from jaxrag.serve.answer_files import joined_parts
from jaxrag.serve.batch import BatchReport, all_parts
from jaxrag.serve.question_files import BadQuestion

ROOT = Path(__file__).parents[2]
WITH_RAY = importlib.util.find_spec("ray") is not None


def test_four_parts_a_worker():
    assert RayOptions(ray=3).parts == 12
    assert RayOptions(ray=3, ray_parts=5).parts == 5


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["ingest", "a.txt", "--kb", "kb", "--ray", "2", "--sync"], "--ray 2 deals the documents"),
        (["ingest", "a.txt", "--kb", "kb", "--ray", "2", "--shard", "0/2"], "leave --shard out"),
        (["generate", "--questions=a", "--out=b", "--kb=c", "--ray=2", "--shard=0/2"],
         "--ray 2 deals the questions itself"),
        (["generate", "--questions=a", "--out=b", "--ray=2"], "pass --kb DIR, or --model DIR"),
        (["ingest", "a.txt", "--kb", "kb", "--ray", "4", "--ray-parts", "3"],
         "--ray 4 --ray-parts 3: expected"),
    ],
)  # fmt: skip
def test_what_cannot_be_dealt_is_refused(command, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text('{"question": "A text."}')
    assert main(command) == 1
    assert words in capsys.readouterr().err


@pytest.mark.skipif(WITH_RAY, reason="ray is installed")
def test_without_ray_its_extra_is_named(capsys, tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("A text.")
    assert main(["ingest", str(file), "--kb", str(tmp_path / "kb"), "--ray", "2"]) == 1
    assert "ray is not installed" in capsys.readouterr().err


def test_a_worker_says_why_a_part_failed():
    def fails(shard):
        raise ConfigError(f"no part {shard}")

    found = RayWorker(None, lambda args: fails, 4)({"part": 2})
    assert found == {"part": 2, "report": None, "error": "no part 2/4"}


def test_reports_are_added_up_and_files_joined(tmp_path):
    one = BatchReport(5, 1, 0, 4, (BadQuestion("a", "why"),), 20, 30, 2.0)
    both = all_parts([one, one], 3.0)
    assert (both.questions, both.answered, both.generated_tokens, both.seconds) == (10, 8, 40, 3.0)
    assert len(both.refused) == 2
    for name, text in (("0", "x\n"), ("1", "y\nz\n")):
        (tmp_path / name).write_text(text)
    out = tmp_path / "out"
    out.write_text("before")
    joined_parts(out, [str(tmp_path / "0"), str(tmp_path / "1")])
    assert out.read_text() == "x\ny\nz\n"
    with pytest.raises(ConfigError, match="out: cannot be written"):
        joined_parts(out, [str(tmp_path / "2")])
    assert out.read_text() == "x\ny\nz\n" and len(list(tmp_path.iterdir())) == 3


def run(*command):
    """A command in a process of its own; its output as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "jaxrag", *command, "--json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.skipif(not WITH_RAY, reason="ray is not installed; pip install 'jaxrag[ray]'")
def test_two_workers_do_what_one_process_does(tmp_path):
    answers = {}
    for name, ray in (("one", []), ("two", ["--ray", "2", "--ray-parts", "3"])):
        kb = str(tmp_path / f"kb-{name}")
        report = run(
            "ingest", "examples/village", "--kb", kb, "--model", "checkpoints/synthetic-0.8m/dual",
            "--chunk-by", "sentence", "--chunk-tokens", "20", "--overlap", "0", *ray,
        )  # fmt: skip
        assert (report["documents"], report["chunks"]) == (13, 16)
        out = tmp_path / f"{name}.jsonl"
        command = ["generate", "--questions", "examples/village-questions.jsonl", "--kb", kb,
                   "--k", "6", "--out", str(out), *ray]  # fmt: skip
        report = run(*command)
        assert report["answered"] == report["questions"] > 0
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        answers[name] = {line["id"]: line["token_ids"] for line in lines}
    assert answers["two"] == answers["one"]
    again = run(*command)  # a run that is begun again goes on where it was
    assert (again["answered"], again["earlier"]) == (0, again["questions"])

"""Damaged files are served right, told or refused: some trials of ``flips.py``."""

import collections
import json
import shutil
import subprocess
import sys
from pathlib import Path

import bases
import flips
import pytest

ROOT = Path(__file__).parents[2]
TRIALS = 40
KINDS = ("native", "int8", "int4", "int4-half", "log")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Undamaged knowledge bases of the kinds that need few programs."""
    folder = tmp_path_factory.mktemp("flips")
    bases.make_model(folder / "model")
    model = bases.load(folder / "model")
    return {name: flips.Made(name, folder, model) for name in KINDS}


def test_nothing_damaged_is_believed(made):
    outcomes = collections.Counter()
    for trial in range(TRIALS):
        damage = flips.chosen(3, trial, trial % 6 == 5, made)
        verdict, told = made[damage.base].try_out(damage)
        assert verdict not in flips.BAD, (damage, verdict, told)
        outcomes[verdict] += 1
    assert min(outcomes[verdict] for verdict in ("same", "refused")) > 0, outcomes
    assert all(one.unchanged() for one in made.values())


def shard(made, number):
    """A flipped bit in the middle of a chunk's KV."""
    file, size = made.files["KV"][number]
    return flips.Damage(made.name, file, "KV", size // 2, 3)


def test_damaged_kv_of_a_chunk_that_is_asked_for_is_told(made):
    base = made["native"]
    shards = (shard(base, number) for number in range(len(base.files["KV"])))
    assert "healed" in (base.try_out(damage)[0] for damage in shards)


@pytest.mark.parametrize("name", ["jaxrag.json", "layouts", "owners", "vectors"])
def test_what_is_removed_is_made_again(made, name):
    base = made["native"]
    base._copy()
    gone = base._folder / name
    gone.unlink() if gone.is_file() else shutil.rmtree(gone)
    assert base.repair() == ("whole", "")
    assert gone.exists()


def test_another_answer_is_wrong_whatever_is_noted_of_chunks(made, monkeypatch):
    base = made["native"]
    shards = (shard(base, number) for number in range(len(base.files["KV"])))
    used = next(damage for damage in shards if base.try_out(damage)[0] == "healed")
    answers, told = base._right
    monkeypatch.setattr(base, "_right", ([*answers[:-1], []], told))
    verdict, why = base.try_out(used)
    assert verdict == "WRONG"
    assert "encoded" in why
    assert f"answer {len(answers) - 1}" in why


def test_an_error_of_several_lines_and_one_of_python_are_tracebacks(made, monkeypatch):
    base = made["native"]
    for error in (flips.JaxragError("one\ntwo"), KeyError("encoders")):

        def fail(error=error):
            raise error

        monkeypatch.setattr(base, "_answers", fail)
        assert base.try_out(shard(base, 0))[0] == "traceback"


@pytest.mark.slow
def test_the_command_goes_on_where_it_stopped(tmp_path):
    def run(count):
        done = subprocess.run(
            [sys.executable, ROOT / "tests" / "faults" / "flips.py", "--flips", str(count),
             "--cuts", str(count // 4), "--bases", "native", "neighbours", "attention index",
             "lance", "--folder", tmp_path / "work", "--out", tmp_path / "out.json",
             "--markdown", tmp_path / "out.md"],
            capture_output=True,
            text=True,
            timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads((tmp_path / "out.json").read_text())

    assert (run(20)["flips"], run(60)["flips"]) == (20, 60)
    assert (tmp_path / "out.md").read_text().startswith("# Flipped bits")

"""The kill -9 experiment, a few rounds of it; ``crash.py`` runs hundreds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("level", ["store", "kb"])
def test_a_killed_writer_loses_nothing_and_serves_nothing_wrong(tmp_path, level):
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("crash.py"), "--level", level, "--rounds", "6",
         "--seed", "3", "--folder", tmp_path, "--out", tmp_path / "result.json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["lost"], result["wrong"]) == (0, 0)
    assert result["counts"]["kills"] == 6
    assert result["counts"]["acknowledged"] > 0

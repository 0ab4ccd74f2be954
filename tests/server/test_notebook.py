"""The example notebook prints what it holds, and asks a server of its own."""

import contextlib
import io
import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = json.loads((ROOT / "examples/serving.ipynb").read_text(encoding="utf-8"))
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def printed(cell):
    """What a cell says that it printed."""
    streams = [it for it in cell["outputs"] if it["output_type"] == "stream"]
    assert all(it["name"] == "stdout" for it in streams)
    return "".join("".join(it["text"]) for it in streams)


def test_the_notebook_was_run_in_order():
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    assert not [out for cell in CODE for out in cell["outputs"] if out["output_type"] == "error"]


@pytest.mark.slow
def test_the_notebook_prints_what_it_holds(tmp_path, monkeypatch):
    for name in ("checkpoints", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    names = {}
    try:
        for cell in CODE:
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile("".join(cell["source"]), "serving.ipynb", "exec"), names)
            assert out.getvalue() == printed(cell)
    finally:
        if "server" in names:
            names["server"].kill()
            names["server"].wait()
            names["server"].stdout.close()
        if "client" in names:
            names["client"].close()

"""examples/vllm.ipynb prints what it holds: `make test-vllm VLLM_PYTHON=...`."""

import contextlib
import io
import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = json.loads((ROOT / "examples/vllm.ipynb").read_text(encoding="utf-8"))
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_was_run_in_order():
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    assert not [out for cell in CODE for out in cell["outputs"] if out["output_type"] == "error"]


@pytest.mark.vllm
def test_the_notebook_prints_what_it_holds(tmp_path, monkeypatch):
    if "VLLM_PYTHON" not in os.environ:
        pytest.skip("set VLLM_PYTHON to a python with vLLM for CPUs")
    for name in ("checkpoints", "examples", "jaxrag"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    names = {}
    try:
        for cell in CODE:
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile("".join(cell["source"]), "vllm.ipynb", "exec"), names)
            said = ["".join(it["text"]) for it in cell["outputs"]]
            assert out.getvalue() == "".join(said)
    finally:
        if "server" in names:
            names["server"].kill()
            names["server"].wait()

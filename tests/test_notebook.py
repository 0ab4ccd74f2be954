"""examples/getting-started.ipynb prints what it holds, from ingestion to evaluation."""

import contextlib
import io
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOK = json.loads((ROOT / "examples/getting-started.ipynb").read_text(encoding="utf-8"))
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_it_was_run_in_order():
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    kinds = {out["output_type"] for cell in CODE for out in cell["outputs"]}
    assert kinds == {"stream", "execute_result"}


@pytest.mark.slow
def test_it_prints_what_it_holds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # it needs no checkout
    names = {}
    for cell in CODE:
        said = "".join(
            text for out in cell["outputs"] for text in out.get("text", ()) if "name" in out
        )
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile("".join(cell["source"]), "getting-started.ipynb", "exec"), names)
        assert out.getvalue() == said
    assert not names["work"].exists()
    assert not list(tmp_path.iterdir())

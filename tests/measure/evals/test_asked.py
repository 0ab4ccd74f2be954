"""A run says how long it takes once it knows, and forgets what it needs no more."""

import types

import pytest

from jaxrag.measure.evals import asked
from jaxrag.measure.evals.asked import ITEMS, ask_all, forget, kept
from jaxrag.serve.answer_files import AnswerFile


@pytest.mark.parametrize(
    ("seconds", "left"),
    [(1, ""), (90, "17 questions to go at 90.0 s each: about 26 min"),
     (900, "17 questions to go at 900.0 s each: about 4.2 h")],
)  # fmt: skip
def test_a_long_run_says_how_long_it_takes(tmp_path, monkeypatch, capsys, seconds, left):
    """By the items behind the first, in which programs are compiled."""
    now = [0]

    def ask(item):
        now[0] += 1000 if item.id == "0" else seconds
        return {"id": item.id}

    monkeypatch.setattr(asked.time, "perf_counter", lambda: now[0])
    items = [types.SimpleNamespace(id=str(n)) for n in range(20)]
    file = AnswerFile(tmp_path / "x", {})
    found = ask_all(ask, items, file, progress=True)
    assert [line["id"] for _, line in found] == [item.id for item in items]
    assert [line["seconds"] for _, line in found] == [1000, *[seconds] * 19]
    assert [it for it in capsys.readouterr().err.splitlines() if "to go" in it] == [left] * bool(
        left
    )


def test_items_are_kept_beside_a_result_until_it_is_written(tmp_path):
    out = str(tmp_path / "result.json")
    with kept(out, lambda value: [value], True) as path, AnswerFile(path, {}) as file:
        file.write([{"id": "1"}])
    assert [it.name for it in sorted(tmp_path.iterdir())] == [
        f"result.json{ITEMS}", f"result.json{ITEMS}.settings.json",
    ]  # fmt: skip
    forget(out)
    assert not list(tmp_path.iterdir())
    forget(out)
    forget(None)

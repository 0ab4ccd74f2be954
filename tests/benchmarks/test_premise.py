"""The premise benchmark on sets made here: what is a neighbour, and what is counted of it."""

import json

import premise
import pytest
from retrieval import Question

TOPICS = ["lamp oil wick", "harbour boats rope", "rain cloud storm", "oven bread flour"]


def write_set(folder):
    """HotpotQA in its own files, every question in the words of its two gold passages."""
    corpus = {f"Title {n}": [f"{topic}. ", f"More {topic}."] for n, topic in enumerate(TOPICS)}
    questions = [
        {
            "question": f"{TOPICS[n]} {TOPICS[n + 1]}",
            "supporting_facts": [[f"Title {n}", 0], [f"Title {n + 1}", 0]],
        }
        for n in range(3)
    ]
    (folder / "hotpotqa_train.json").write_text(json.dumps(questions))
    (folder / "hotpotqa_train_corpus.json").write_text(json.dumps(corpus))


def test_shares():
    near = {"a": ["b", "x"], "b": ["x", "y"], "c": ["x", "a"], "x": [], "y": []}
    questions = [Question("q", frozenset("abc")), Question("r", frozenset("ax"))]
    best = [["c", "a"], ["y", "b"]]
    one = premise.shares(questions, near, best, 1)
    assert one == {
        "best two": [[False], [False]],
        "some gold pair": [[True], [False]],
        "gold pairs": [[True, False, False], [False]],  # ab, ac, bc; ax
        "gold seen": [[True, False, False], [False, False]],
    }
    two = premise.shares(questions, near, best, 2)
    assert two["best two"] == [[True], [True]]
    assert two["gold pairs"] == [[True, True, False], [True]]
    assert two["gold seen"] == [[True, False, True], [True, False]]
    assert premise._share(two["gold pairs"])["n"] == 4
    assert premise._share([[]]) is None


def test_a_run(tmp_path, capsys):
    write_set(tmp_path)
    out = tmp_path / "out.json"
    main = ["--data", str(tmp_path), "--out", str(out)]
    code = premise.run_script(
        "", premise.PremiseOptions, premise.measure,
        lambda result: premise.titled(premise.tables(result)), main,
    )  # fmt: skip
    assert code == 0
    rows = json.loads(out.read_text())["rows"]
    assert {(row["retriever"], row["neighbours"]) for row in rows} >= {("bm25", 2), ("bm25", 10)}
    assert all(row["gold pairs"]["n"] == 3 for row in rows)
    assert "gold pairs" in capsys.readouterr().out


def test_a_folder_without_sets(tmp_path):
    with pytest.raises(Exception, match="no HotpotQA or MuSiQue below it"):
        premise.measure(premise.PremiseOptions(data=tmp_path))

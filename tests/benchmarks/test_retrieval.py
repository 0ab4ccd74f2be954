"""The retrieval benchmark on sets made here: gold is read right, recall is what it says."""

import json
import sys

import numpy as np
import retrieval

from jaxrag.library.retrieve.base import Found

TOPICS = ["lamp oil wick", "harbour boats rope", "rain cloud storm", "oven bread flour"]


def write_sets(folder):
    """HotpotQA and RGB in their own files, every question in the words of its gold passages."""
    corpus = {f"Title {n}": [f"{topic}. ", f"More {topic}."] for n, topic in enumerate(TOPICS)}
    questions = [
        {"question": f"{TOPICS[n]} {TOPICS[n + 1]}",
         "supporting_facts": [[f"Title {n}", 0], [f"Title {n}", 1], [f"Title {n + 1}", 0]]}
        for n in range(3)
    ]  # fmt: skip
    (folder / "hotpotqa_train.json").write_text(json.dumps(questions))
    (folder / "hotpotqa_train_corpus.json").write_text(json.dumps(corpus))
    rows = [
        {
            "query": "灯塔在哪里",
            "positive": ["灯塔在岛上。"],
            "negative": ["船在港口。", "下雨了。"],
        },
        {"query": "下雨了吗", "positive": ["下雨了。"], "negative": ["船在港口。"]},
    ]
    (folder / "zh_refine.json").write_text("\n".join(map(json.dumps, rows)))


def test_sets_and_recall(tmp_path):
    write_sets(tmp_path)
    hotpot, chinese = retrieval.read_sets(tmp_path)
    assert (hotpot.name, len(hotpot.passages), len(hotpot.questions)) == ("HotpotQA", 4, 3)
    assert [len(question.gold) for question in hotpot.questions] == [2, 2, 2]
    assert (chinese.name, len(chinese.passages)) == ("RGB zh_refine", 3)
    (tmp_path / "work").mkdir()
    rows = retrieval.run_set(hotpot, None, "exact")
    assert [row["retriever"] for row in rows] == ["bm25", "lsa-256", "bm25 + lsa-256"]
    assert all(row["recall@5"] == 1 and row["ceiling@5"] == 1 for row in rows)
    assert retrieval.table(rows).count("\n") == 5


def test_recall_is_the_share_of_gold_in_the_first_chunks():
    class Fixed:
        def search(self, queries, k, *, where=None):
            return [[Found(i, 1.0) for i in range(k)] for _ in queries]

    questions = [
        retrieval.Question("a", frozenset({"p0", "p7"})),
        retrieval.Question("b", frozenset({"p99"})),
    ]
    result = retrieval.measure(Fixed(), questions, {i: f"p{i}" for i in range(100)})
    assert (result["recall@5"], result["recall@10"]) == (0.25, 0.5)


def test_lsa_finds_texts_of_the_same_topic():
    texts = [f"{topic} {extra}" for topic in TOPICS for extra in ("one", "two", "three")]
    embed = retrieval.lsa(texts)
    made, asked = embed(texts, "passage"), embed(["bread from the oven"], "query")
    np.testing.assert_allclose(np.linalg.norm(made, axis=1), 1, rtol=1e-5)
    assert set(np.argsort(-(made @ asked[0]))[:3].tolist()) == {9, 10, 11}


def test_a_folder_without_sets_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["retrieval.py", "--data", str(tmp_path)])
    assert retrieval.main() == 1
    assert "no set was found" in capsys.readouterr().err

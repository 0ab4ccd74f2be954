"""Rankings: fused, re-ranked, filtered, and answers from outside checked."""

import sys
import threading

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import RetrievalError
from jaxrag.library.retrieve.adapters import GROUP, ask_foreign, retriever_plugin
from jaxrag.library.retrieve.base import Found
from jaxrag.library.retrieve.lance import VectorIndex
from jaxrag.library.retrieve.retrievers import by_vectors, fuse, fused, reranked

WORDS = ["lamp", "sea", "oil", "rain"]
TEXTS = {1: "lamp oil", 2: "sea rain", 3: "lamp lamp sea", 4: "rain"}


def vectors(*texts):
    return np.array([[text.split().count(word) for word in WORDS] for text in texts], np.float32)


class Fixed:
    """Answers every query with the same ranking and notes what it was asked."""

    def __init__(self, *ranking):
        self.ranking = [Found(chunk_id, 1.0) for chunk_id in ranking]
        self.asked = []

    def __call__(self, queries, k):
        self.asked.append((list(queries), k))
        return [self.ranking[:k] for _ in queries]


def test_by_vectors(tmp_path):
    index, none = VectorIndex.open(tmp_path, len(WORDS), "exact"), np.array([], np.int64)
    index.add(np.array(list(TEXTS)), vectors(*TEXTS.values()))
    lamp, rain = by_vectors(index, vectors("lamp", "rain rain"), 2, None, none)
    assert lamp == [Found(3, 2.0), Found(1, 1.0)]
    assert rain == [Found(2, 2.0), Found(4, 2.0)]
    (late,) = by_vectors(index, vectors("lamp"), 4, np.array([2, 3]), none)
    assert [item.chunk_id for item in late] == [3, 2]
    assert by_vectors(index, vectors("lamp"), 1, None, np.array([3])) == [[Found(1, 1.0)]]
    assert by_vectors(index, vectors("lamp")[:0], 3, None, none) == []


def test_reciprocal_rank_fusion():
    first = [Found(1, 9.0), Found(2, 8.0), Found(3, 7.0)]
    second = [Found(3, 0.2), Found(4, 0.1)]
    fused = fuse([first, second], 3)
    assert [item.chunk_id for item in fused] == [3, 1, 2]
    assert fused[0].score == pytest.approx(1 / 63 + 1 / 61)
    assert fused[1].score == pytest.approx(1 / 61)
    assert fuse([first, second], 10)[2:] == [Found(2, 1 / 62), Found(4, 1 / 62)]  # a tie
    assert fuse([], 3) == [] and fuse([[], []], 3) == []


def test_hybrid_asks_both_for_more_than_it_returns():
    one, two = Fixed(*range(1, 101)), Fixed(30, 200)
    found = fused([one, two], ["q", "r"], 2)
    assert [item.chunk_id for item in found[0]] == [30, 1]
    assert len(found) == 2
    assert one.asked == two.asked == [(["q", "r"], 50)]
    fused([one], ["q"], 20)
    assert one.asked[-1] == (["q"], 80)


def test_hybrid_asks_both_at_the_same_time_and_says_what_failed():
    both = threading.Barrier(2)

    def waiting(queries, k):
        both.wait(timeout=300)  # breaks where the other is asked later
        return [[Found(1, 1.0)] for _ in queries]

    assert fused([waiting, waiting], ["q"], 1)[0][0].chunk_id == 1

    def failing(queries, k):
        raise RetrievalError("no words")

    for order in ([failing, Fixed(1)], [Fixed(1), failing]):
        with refused(RetrievalError):
            fused(order, ["q"], 1)


def test_reranker_orders_the_candidates():
    seen = []

    def reranker(question, texts):
        seen.append((question, list(texts)))
        return [len(text) for text in texts]

    texts = lambda ids: {i: TEXTS[i] for i in ids if i in TEXTS}  # noqa: E731
    found = reranked(Fixed(4, 1, 99, 3, 2), reranker, texts, ["q"], 3)
    assert found == [[Found(3, 13.0), Found(1, 8.0), Found(2, 8.0)]]
    assert seen == [("q", [TEXTS[4], TEXTS[1], TEXTS[3], TEXTS[2]])]
    assert reranked(Fixed(), reranker, texts, ["q"], 3) == [[]]
    for bad in (lambda q, t: [1.0], lambda q, t: [float("nan")] * len(t)):
        with refused(RetrievalError):
            reranked(Fixed(1, 2), bad, texts, ["q"], 1)


def test_foreign_answers_are_checked_and_cut():
    class Answers:
        def __init__(self, answer):
            self.answer = answer

        def search(self, queries, k, *, where=None):
            return self.answer

    good = Answers([[(3, 1), (1, 0.5), (3, 0.1), (np.int64(2), np.float32(0))]])
    assert ask_foreign(good, None, ["q"], 2) == [[Found(3, 1.0), Found(1, 0.5)]]
    assert ask_foreign(good, None, ["q"], 9)[0][2] == Found(2, 0.0)
    for answer in ([[("a", 1)]], [[(1.5, 1)]], [[(1, float("inf"))]], [[7]], [[(1, None)]]):
        with refused(RetrievalError):
            ask_foreign(Answers(answer), None, ["q"], 2)
    with refused(RetrievalError, "0"):
        ask_foreign(Answers([]), None, ["q"], 2)


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """Installs a fake package that announces entry points."""

    def install(name, points):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"[{GROUP}]", *(f"{key} = {value}" for key, value in points.items())]
        (folder / "entry_points.txt").write_text("\n".join(lines))

    (tmp_path / "fake_retrievers.py").write_text(
        "class Mine:\n"
        "    def __init__(self, chunks): self.chunks = chunks\n"
        "    def search(self, queries, k, *, where=None): return [[(1, 2.0)] for _ in queries]\n"
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield install
    sys.modules.pop("fake_retrievers", None)


def test_plugin_by_name(distribution):
    distribution("one", {"mine": "fake_retrievers:Mine"})
    made = retriever_plugin("mine")("the chunks")
    assert made.chunks == "the chunks"
    assert ask_foreign(made, None, ["q"], 3) == [[Found(1, 2.0)]]


def test_plugins_that_cannot_be_used(distribution):
    with refused(RetrievalError, "'mine'"):
        retriever_plugin("mine")
    names = {"mine": "Mine", "gone": "Absent", "number": "number"}
    points = {name: f"fake_retrievers:{what}" for name, what in names.items()}
    distribution("one", points | {"lost": "no_such_module:Mine"})
    for name in ("other", "gone", "lost", "number"):
        with refused(RetrievalError):
            retriever_plugin(name)
    distribution("two", {"mine": "fake_retrievers:Other"})
    with refused(RetrievalError):
        retriever_plugin("mine")

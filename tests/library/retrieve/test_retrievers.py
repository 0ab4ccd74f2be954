"""Rankings: fused, re-ranked, filtered, and answers from outside checked."""

import sys
import threading

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import RequestError, RetrievalError
from jaxrag.library.retrieve.adapters import GROUP, ForeignRetriever, retriever_plugin
from jaxrag.library.retrieve.base import Found
from jaxrag.library.retrieve.filters import Filter
from jaxrag.library.retrieve.lance import VectorIndex
from jaxrag.library.retrieve.retrievers import (
    BM25Retriever,
    HybridRetriever,
    Reranked,
    VectorRetriever,
    fuse,
)

WORDS = ["lamp", "sea", "oil", "rain"]
TEXTS = {1: "lamp oil", 2: "sea rain", 3: "lamp lamp sea", 4: "rain"}
YEARS = {1: 2019, 2: 2020, 3: 2020, 4: 2021}


def embed(texts, kind):
    assert kind in ("passage", "query")
    return np.array([[text.split().count(word) for word in WORDS] for text in texts], np.float32)


def chunk_ids(where):
    assert isinstance(where, Filter)
    return np.array([i for i in TEXTS if where.matches({"year": YEARS[i]})], np.int64)


class Fixed:
    """A retriever that answers every query with the same ranking and notes what it was asked."""

    def __init__(self, *ranking):
        self.ranking = [Found(chunk_id, 1.0) for chunk_id in ranking]
        self.asked = []

    def search(self, queries, k, *, where=None):
        self.asked.append((list(queries), k, where))
        return [self.ranking[:k] for _ in queries]


@pytest.fixture
def by_vector(tmp_path):
    index = VectorIndex.open(tmp_path, len(WORDS), "exact")
    index.add(np.array(list(TEXTS)), embed(list(TEXTS.values()), "passage"))
    return VectorRetriever(embed, index, chunk_ids)


def test_vector_retriever(by_vector):
    lamp, rain = by_vector.search(["lamp", "rain rain"], 2)
    assert lamp == [Found(3, 2.0), Found(1, 1.0)]
    assert rain == [Found(2, 2.0), Found(4, 2.0)]
    assert by_vector.search(["lamp"], 4, where={"year": {"$gte": 2020}})[0][0] == Found(3, 2.0)
    assert {item.chunk_id for item in by_vector.search(["lamp"], 4, where={"year": 2020})[0]} == {
        2,
        3,
    }
    by_vector._index.remove(np.array([3]))
    assert by_vector.search(["lamp"], 1) == [[Found(1, 1.0)]]
    assert by_vector.search([], 3) == []
    with refused(RequestError):
        by_vector.search(["lamp"], 1, where={"year": {"$regex": "."}})


def test_bm25_retriever_passes_the_question_and_a_checked_filter_on():
    asked = []

    def search(question, k, where):
        asked.append((question, k, where))
        return [Found(7, 2.5)]

    retriever = BM25Retriever(search)
    assert retriever.search(["a", "b"], 3) == [[Found(7, 2.5)]] * 2
    retriever.search(["c"], 1, where={"year": 2020})
    assert asked == [("a", 3, None), ("b", 3, None), ("c", 1, Filter.parse({"year": 2020}))]
    with refused(RequestError, "k=0"):
        retriever.search(["a"], 0)


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
    found = HybridRetriever([one, two]).search(["q", "r"], 2, where={"year": 1})
    assert [item.chunk_id for item in found[0]] == [30, 1]
    assert len(found) == 2
    assert one.asked == two.asked == [(["q", "r"], 50, {"year": 1})]
    HybridRetriever([one]).search(["q"], 20)
    assert one.asked[-1] == (["q"], 80, None)


def test_hybrid_asks_both_at_the_same_time_and_says_what_failed():
    both = threading.Barrier(2)

    class Waiting:
        def search(self, queries, k, *, where=None):
            both.wait(timeout=20)  # breaks where the other is asked later
            return [[Found(1, 1.0)] for _ in queries]

    assert HybridRetriever([Waiting(), Waiting()]).search(["q"], 1)[0][0].chunk_id == 1

    class Failing:
        def search(self, queries, k, *, where=None):
            raise RetrievalError("no words")

    for order in ([Failing(), Fixed(1)], [Fixed(1), Failing()]):
        with refused(RetrievalError):
            HybridRetriever(order).search(["q"], 1)


def test_reranker_orders_the_candidates():
    seen = []

    def reranker(question, texts):
        seen.append((question, list(texts)))
        return [len(text) for text in texts]

    texts = lambda ids: {i: TEXTS[i] for i in ids if i in TEXTS}  # noqa: E731
    found = Reranked(Fixed(4, 1, 99, 3, 2), reranker, texts).search(["q"], 3)
    assert found == [[Found(3, 13.0), Found(1, 8.0), Found(2, 8.0)]]
    assert seen == [("q", [TEXTS[4], TEXTS[1], TEXTS[3], TEXTS[2]])]
    assert Reranked(Fixed(), reranker, texts).search(["q"], 3) == [[]]
    for bad in (lambda q, t: [1.0], lambda q, t: [float("nan")] * len(t)):
        with refused(RetrievalError):
            Reranked(Fixed(1, 2), bad, texts).search(["q"], 1)


def test_foreign_answers_are_checked_and_cut():
    class Answers:
        def __init__(self, answer):
            self.answer = answer

        def search(self, queries, k, *, where=None):
            return self.answer

    good = Answers([[(3, 1), (1, 0.5), (3, 0.1), (np.int64(2), np.float32(0))]])
    assert ForeignRetriever(good).search(["q"], 2) == [[Found(3, 1.0), Found(1, 0.5)]]
    assert ForeignRetriever(good).search(["q"], 9)[0][2] == Found(2, 0.0)
    for answer in ([[("a", 1)]], [[(1.5, 1)]], [[(1, float("inf"))]], [[7]], [[(1, None)]]):
        with refused(RetrievalError):
            ForeignRetriever(Answers(answer)).search(["q"], 2)
    with refused(RetrievalError, "0"):
        ForeignRetriever(Answers([])).search(["q"], 2)
    with refused(RetrievalError):
        ForeignRetriever(3)


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
    assert ForeignRetriever(made).search(["q"], 3) == [[Found(1, 2.0)]]


def test_plugins_that_cannot_be_used(distribution):
    with refused(RetrievalError, "'mine'"):
        retriever_plugin("mine")
    distribution(
        "one",
        {
            "mine": "fake_retrievers:Mine",
            "gone": "fake_retrievers:Absent",
            "lost": "no_such_module:Mine",
            "number": "fake_retrievers:number",
        },
    )
    with refused(RetrievalError):
        retriever_plugin("other")
    for name in ("gone", "lost"):
        with refused(RetrievalError):
            retriever_plugin(name)
    with refused(RetrievalError):
        retriever_plugin("number")
    distribution("two", {"mine": "fake_retrievers:Other"})
    with refused(RetrievalError):
        retriever_plugin("mine")

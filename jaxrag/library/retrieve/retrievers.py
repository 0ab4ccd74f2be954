"""Retrievers: by words, by vectors, by both, and re-ranked.

They need only callables of the catalog and the embedder, so that any of them can be replaced.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, Protocol

from jaxrag.base.errors import RetrievalError
from jaxrag.library.retrieve.base import (
    NOTHING,
    Found,
    Ids,
    Reranker,
    Retriever,
    Vectors,
    checked_k,
)
from jaxrag.library.retrieve.filters import Filter
from jaxrag.library.retrieve.lance import VectorIndex

RANK_CONSTANT = 60  # of reciprocal rank fusion, the value of its paper
_OVERFETCH = 4  # candidates per result that is asked for, when rankings are fused or re-ranked
_CANDIDATES = 50  # at least

Embed = Callable[[Sequence[str], Literal["passage", "query"]], Vectors]


class _Scored(Protocol):
    @property
    def chunk_id(self) -> int: ...

    @property
    def score(self) -> float: ...


class BM25Retriever:
    """Chunks that share words with the question, as the catalog's full-text index ranks them."""

    def __init__(self, search: Callable[[str, int, Filter | None], Iterable[_Scored]]) -> None:
        """``search(question, k, where)`` is the catalog's."""
        self._search = search

    def search(
        self, queries: Sequence[str], k: int, *, where: Mapping[str, Any] | None = None
    ) -> list[list[Found]]:
        """For every query up to ``k`` chunks by BM25; see ``Retriever``."""
        chosen = None if where is None else Filter.parse(where)
        return [
            [Found(hit.chunk_id, hit.score) for hit in self._search(query, checked_k(k), chosen)]
            for query in queries
        ]


class VectorRetriever:
    """Chunks whose vectors have the largest inner product with the question's."""

    def __init__(
        self,
        embed: Embed,
        index: VectorIndex,
        chunk_ids: Callable[[Filter], Ids],
        strays: Ids | None = None,
    ) -> None:
        """Take the parts.

        Args:
          embed: (texts, "passage" or "query") -> float32 [N, E].
          chunk_ids: the chunks of the documents whose metadata matches, int64 ascending.
          strays: ids in the index that are no chunk's; they take no place in a ranking.
        """
        self._embed = embed
        self._index = index
        self._chunk_ids = chunk_ids
        self._strays = frozenset[int]() if strays is None else frozenset(strays.tolist())

    def search(
        self, queries: Sequence[str], k: int, *, where: Mapping[str, Any] | None = None
    ) -> list[list[Found]]:
        """For every query up to ``k`` chunks by inner product; see ``Retriever``."""
        allowed = None if where is None else self._chunk_ids(Filter.parse(where))
        if not queries:
            return []
        depth = checked_k(k) + (0 if allowed is not None else len(self._strays))
        ids, scores = self._index.search(self._embed(queries, "query"), depth, allowed)
        none = {NOTHING, *self._strays}
        return [
            [Found(i, s) for i, s in zip(named, score, strict=True) if i not in none][:k]
            for named, score in zip(ids.tolist(), scores.tolist(), strict=True)
        ]


class HybridRetriever:
    """Several rankings fused by rank; each is asked for more than is returned."""

    def __init__(self, retrievers: Sequence[Retriever]) -> None:
        """``retrievers`` count equally."""
        self._retrievers = tuple(retrievers)

    def search(
        self, queries: Sequence[str], k: int, *, where: Mapping[str, Any] | None = None
    ) -> list[list[Found]]:
        """For every query up to ``k`` chunks by reciprocal rank fusion; see ``Retriever``.

        All search at the same time, the last one in the thread that asks.
        """
        wanted = _candidates(checked_k(k))
        ask = [partial(it.search, queries, wanted, where=where) for it in self._retrievers]
        with ThreadPoolExecutor(len(ask), "search") as pool:
            others = [pool.submit(one) for one in ask[:-1]]
            last = ask[-1]()
        answers = [*(other.result() for other in others), last]
        return [fuse(rankings, k) for rankings in zip(*answers, strict=True)]


class Reranked:
    """A retriever whose best candidates are put in order by a slower model."""

    def __init__(
        self,
        retriever: Retriever,
        reranker: Reranker,
        texts: Callable[[Sequence[int]], Mapping[int, str]],
    ) -> None:
        """Take the parts.

        Args:
          retriever: finds candidates, four for each chunk asked for and at least 50.
          reranker: (question, texts) -> one score per text, higher is better.
          texts: the texts of those of the chunks that are still there, by id.
        """
        self._retriever = retriever
        self._reranker = reranker
        self._texts = texts

    def search(
        self, queries: Sequence[str], k: int, *, where: Mapping[str, Any] | None = None
    ) -> list[list[Found]]:
        """For every query the up to ``k`` candidates with the best new scores; see ``Retriever``.

        Raises RetrievalError when the re-ranker does not give one finite score per text.
        """
        rankings = self._retriever.search(queries, _candidates(checked_k(k)), where=where)
        return [
            self._rerank(query, found, k) for query, found in zip(queries, rankings, strict=True)
        ]

    def _rerank(self, query: str, found: Sequence[Found], k: int) -> list[Found]:
        texts = self._texts([item.chunk_id for item in found])
        ids = [item.chunk_id for item in found if item.chunk_id in texts]
        if not ids:
            return []
        scores = [float(score) for score in self._reranker(query, [texts[i] for i in ids])]
        if len(scores) != len(ids) or not all(math.isfinite(score) for score in scores):
            raise RetrievalError(
                f"the re-ranker gave {len(scores)} scores for {len(ids)} texts, or one that is no "
                "finite number; it must return one number per text"
            )
        ranked = sorted(zip(scores, ids, strict=True), key=lambda pair: -pair[0])  # stable
        return [Found(chunk_id, score) for score, chunk_id in ranked[:k]]


def fuse(
    rankings: Sequence[Sequence[Found]], k: int, constant: float = RANK_CONSTANT
) -> list[Found]:
    """Reciprocal rank fusion: the score of a chunk is the sum of 1 / (constant + rank).

    Ranks count from 1; a ranking that lacks a chunk adds nothing. Equal sums keep the order in
    which the chunks first appear, in the first ranking before the second.

    Paper: Cormack, Clarke and Buettcher, "Reciprocal rank fusion outperforms Condorcet and
    individual rank learning methods", SIGIR 2009.
    """
    sums: dict[int, float] = {}
    for ranking in rankings:
        for rank, item in enumerate(ranking, 1):
            sums[item.chunk_id] = sums.get(item.chunk_id, 0.0) + 1 / (constant + rank)
    ranked = sorted(sums.items(), key=lambda pair: -pair[1])  # stable
    return [Found(chunk_id, score) for chunk_id, score in ranked[:k]]


def _candidates(k: int) -> int:
    return max(_OVERFETCH * k, _CANDIDATES)

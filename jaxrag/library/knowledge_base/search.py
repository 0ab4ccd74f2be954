"""Finding chunks for questions: by words, by vectors, by both, or by somebody else's retriever.

Whatever an index or a retriever returns goes through the catalog: what it does not hold is not
found, however long the index remembers it.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, get_args

from jaxrag.base.errors import RequestError
from jaxrag.library.catalog import Catalog, Hit
from jaxrag.library.knowledge_base.vectors import ChunkVectors
from jaxrag.library.options import SearchMode
from jaxrag.library.retrieve.adapters import ask_foreign
from jaxrag.library.retrieve.base import Found, Reranker, Retriever
from jaxrag.library.retrieve.filters import Filter
from jaxrag.library.retrieve.retrievers import Ranking, by_vectors, fused, reranked
from jaxrag.library.retrieve.terms import TERMS_VERSION

OTHER_TERMS = (
    "the index of words is of another version, so that words with marks may not be found; open the "
    "knowledge base for writing, as `jaxrag ingest` does, to make it anew"
)


class Hits(list[Hit]):
    """The chunks that were found for a question, best first.

    Attributes:
      notes: what of the knowledge base was not searched, and why; empty where all of it was.
    """

    def __init__(self, hits: Iterable[Hit], notes: tuple[str, ...] = ()) -> None:
        super().__init__(hits)
        self.notes = notes


@dataclasses.dataclass(frozen=True)
class Search:
    """How one knowledge base is searched."""

    catalog: Catalog
    vectors: ChunkVectors | None
    complete: bool  # every chunk has its vector
    retriever: Retriever | None  # used instead of our own, where no mode is named
    reranker: Reranker | None
    terms: int | None  # version of those in the index of words; None: the first

    def run(
        self,
        questions: Sequence[str],
        k: int,
        where: Mapping[str, Any] | None,
        mode: SearchMode | None,
        min_score: float | None = None,
    ) -> list[Hits]:
        """The up to ``k`` best chunks of every question, best first; none below ``min_score``.

        Of equal chunks of several documents the first alone is given.

        Raises RequestError for a bad filter, an unknown mode, or one whose vectors are not there,
        and for a least score where scores are ranks.
        """
        chosen = None if where is None else Filter.parse(where)
        if mode is None and self.retriever is None:
            mode = "hybrid" if self.complete else "bm25"
        rank, notes = self._ranking(mode, where, chosen)
        if min_score is not None:
            _check_least(min_score, mode == "hybrid" and not self.reranker)
        if self.reranker is not None:
            rank = partial(reranked, rank, self.reranker, self.catalog.texts)
        depth = k
        while True:
            rankings = [
                [hit for hit in ranking if min_score is None or hit.score >= min_score]
                for ranking in rank(questions, depth)
            ]
            rows = [_distinct(self.catalog.hits(ranking, chosen)) for ranking in rankings]
            cut = [
                len(hits) < k and len(ranking) >= depth  # some are gone, or equal
                for hits, ranking in zip(rows, rankings, strict=True)
            ]
            if not any(cut):
                return [Hits(hits[:k], notes) for hits in rows]
            depth *= 2

    def _ranking(
        self, mode: SearchMode | None, where: Mapping[str, Any] | None, chosen: Filter | None
    ) -> tuple[Ranking, tuple[str, ...]]:
        """What ranks the chunks, and what is to be said about it."""
        if mode is None:
            return partial(ask_foreign, self.retriever, where), ()
        if mode not in get_args(SearchMode):
            raise RequestError(
                f"mode={mode!r}: expected one of {', '.join(get_args(SearchMode))}, or None"
            )

        def words(queries: Sequence[str], k: int) -> list[list[Found]]:
            return [self.catalog.ranked(query, k, chosen) for query in queries]

        notes: tuple[str, ...] = (OTHER_TERMS,) * (self.terms != TERMS_VERSION)
        if mode == "bm25":
            return words, notes
        if self.vectors is None or not self.complete:
            why = "has no embedder" if self.vectors is None else "has chunks without a vector yet"
            raise RequestError(
                f"mode={mode!r}: {self.catalog.path.parent} {why}; open it with embedder= and "
                "call embed(), or search with mode='bm25'"
            )
        index, embed = self.vectors.index, self.vectors.embedder
        compared = self.vectors.compared(self.catalog, lately=True)
        if mode == "vector":
            notes = ()
        if lost := len(compared.lost):
            notes += (
                f"the vectors of {lost} of {self.catalog.counts()['chunks']} chunks are gone, so "
                "these were not found by meaning; `jaxrag kb verify --repair` makes them again",
            )
        if not index.trusted:
            notes += (
                "the index of vectors cannot be trusted, so all vectors are compared, which takes "
                "longer; the next change of the documents makes it anew",
            )
        # Before the catalog is busy with words.
        allowed = None if chosen is None else self.catalog.chunk_ids(chosen)

        def near(queries: Sequence[str], k: int) -> list[list[Found]]:
            return by_vectors(index, embed(queries, "query"), k, allowed, compared.strays)

        return near if mode == "vector" else partial(fused, (words, near)), notes


def _distinct(hits: Sequence[Hit]) -> list[Hit]:
    """Without chunks whose text one of another document has that comes before."""
    first: dict[str, str] = {}
    return [hit for hit in hits if first.setdefault(hit.text, hit.document_id) == hit.document_id]


def _check_least(min_score: float, ranks: bool) -> None:
    if isinstance(min_score, bool) or not isinstance(min_score, int | float):
        raise RequestError(f"min_score={min_score!r}: expected a number")
    if not math.isfinite(min_score):
        raise RequestError(f"min_score={min_score}: expected a finite number")
    if ranks:
        raise RequestError(
            f"min_score={min_score}: hybrid search scores by rank, which says nothing of how well "
            "a chunk fits; search with mode 'bm25' or 'vector', or with a reranker"
        )

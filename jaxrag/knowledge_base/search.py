"""Finding chunks for questions: by words, by vectors, by both, or by somebody else's retriever.

Whatever an index or a retriever returns goes through the catalog: what it does not hold is not
found, however long the index remembers it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from jaxrag.catalog import Catalog, Hit
from jaxrag.errors import RequestError
from jaxrag.knowledge_base.vectors import ChunkVectors
from jaxrag.retrieve.base import Reranker, Retriever
from jaxrag.retrieve.filters import Filter
from jaxrag.retrieve.plugins import ForeignRetriever
from jaxrag.retrieve.retrievers import BM25Retriever, HybridRetriever, Reranked, VectorRetriever

SearchMode = Literal["bm25", "vector", "hybrid"]


@dataclasses.dataclass(frozen=True)
class Search:
    """How one knowledge base is searched."""

    catalog: Catalog
    vectors: ChunkVectors | None
    complete: bool  # every chunk has its vector
    retriever: Retriever | None  # used instead of our own, where no mode is named
    reranker: Reranker | None

    def run(
        self,
        questions: Sequence[str],
        k: int,
        where: Mapping[str, Any] | None,
        mode: SearchMode | None,
    ) -> list[list[Hit]]:
        """The up to ``k`` best chunks of every question, best first.

        Raises RequestError for a bad filter, an unknown mode, or one whose vectors are not there.
        """
        chosen = None if where is None else Filter.parse(where)
        retriever = self._retriever(mode)
        if self.reranker is not None:
            retriever = Reranked(retriever, self.reranker, self.catalog.texts)
        depth = k
        while True:
            rankings = retriever.search(questions, depth, where=where)
            rows = [self.catalog.hits(ranking, chosen) for ranking in rankings]
            cut = [
                len(hits) < k and len(ranking) >= depth  # chunks that are gone took places
                for hits, ranking in zip(rows, rankings, strict=True)
            ]
            if not any(cut):
                return [hits[:k] for hits in rows]
            depth *= 2

    def _retriever(self, mode: SearchMode | None) -> Retriever:
        if mode is not None and mode not in get_args(SearchMode):
            raise RequestError(
                f"mode={mode!r}: expected one of {', '.join(get_args(SearchMode))}, or None"
            )
        if mode is None and self.retriever is not None:
            return ForeignRetriever(self.retriever)
        words = BM25Retriever(self.catalog.search)
        if mode == "bm25" or (mode is None and not self.complete):
            return words
        if self.vectors is None or not self.complete:
            why = "has no embedder" if self.vectors is None else "has chunks without a vector yet"
            raise RequestError(
                f"mode={mode!r}: {self.catalog.path.parent} {why}; open it with embedder= and "
                "call embed(), or search with mode='bm25'"
            )
        near = VectorRetriever(
            self.vectors.embedder, self.vectors.index, chunk_ids=self.catalog.chunk_ids
        )
        return near if mode == "vector" else HybridRetriever((words, near))

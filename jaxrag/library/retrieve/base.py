"""What a retriever and a re-ranker are to the rest of the program, and checks of vectors."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from jaxrag.base.errors import RequestError, StoreError

Ids = NDArray[np.int64]
Vectors = NDArray[np.float32]

_LOOKED_AT = 20  # chunks whose words are nearest to a text whose chunk is sought
NOTHING = -1  # stands in a search result where fewer than k chunks were found


class Found(NamedTuple):
    """A chunk that was found; a higher score is better."""

    chunk_id: int
    score: float


class Retriever(Protocol):
    """Anything that ranks chunks for questions. Only ``search`` is needed.

    It may answer with ids of chunks that are gone or that ``where`` excludes; the catalog drops
    them. Nothing tells it of chunks that come and go: an index of its own is its own business.
    """

    def search(
        self, queries: Sequence[str], k: int, *, where: Mapping[str, Any] | None = None
    ) -> list[list[Found]]:
        """For every query up to ``k`` chunks, best first; ``where`` is a filter on metadata."""


class Chunks:
    """What a retriever from outside may ask about the chunks of a knowledge base.

    Attributes:
      texts: the texts of those of these chunks that there are, by id.
      of_document: the chunks of a document in order; none when there is no such document.
    """

    def __init__(
        self,
        texts: Callable[[Sequence[int]], Mapping[int, str]],
        of_document: Callable[[str], Sequence[int]],
        search: Callable[[str, int], Iterable[Any]],
    ) -> None:
        """``search`` ranks chunks by the words they share with a text: objects with id and text."""
        self.texts = texts
        self.of_document = of_document
        self._search = search

    def with_text(self, text: str) -> Sequence[int]:
        """The chunks that have this text, or else those that hold it or lie in it, best first.

        Runs of white space count as one space. A text without words is no chunk's.
        """
        wanted = _plain(text)
        near = [
            (hit.chunk_id, _plain(hit.text)) for hit in self._search(text, _LOOKED_AT) if wanted
        ]
        equal = [chunk_id for chunk_id, other in near if other == wanted]
        return equal or [i for i, other in near if wanted in other or other in wanted]


# (question, texts of N chunks) -> N scores, higher is better.
Reranker = Callable[[str, Sequence[str]], Sequence[float]]


def searched_text(title: str, text: str) -> str:
    """What of a chunk is indexed, by words and by vectors: its document's title and its text."""
    return f"{title}\n{text}" if title else text


def checked_rows(ids: Ids, vectors: Vectors, dim: int) -> tuple[Ids, Vectors]:
    """Ids and vectors as contiguous int64 [N] and float32 [N, E].

    Raises RequestError for other shapes, ids that are no integers >= 0 or occur twice, and values
    that are not finite.
    """
    ids, vectors = checked_ids(ids), checked_vectors(vectors, dim)
    if len(ids) != len(vectors):
        raise RequestError(f"{len(ids)} ids for {len(vectors)} vectors; give one id per vector")
    if len(np.unique(ids)) != len(ids):
        raise RequestError("an id occurs twice in one call; give every id one vector")
    return ids, vectors


def checked_ids(ids: Ids) -> Ids:
    """Ids as contiguous int64 [N]; RequestError for what are no integers >= 0."""
    given = np.asarray(ids)
    if given.size == 0:
        return np.zeros(0, np.int64)
    if given.ndim != 1 or given.dtype.kind not in "iu" or given.min() < 0:
        raise RequestError(
            f"ids of shape {given.shape} and type {given.dtype}: expected a row of integers >= 0"
        )
    return np.ascontiguousarray(given, np.int64)


def checked_vectors(vectors: Vectors, dim: int) -> Vectors:
    """Vectors as contiguous float32 [N, E]; RequestError for another shape, NaN or infinity."""
    given = np.asarray(vectors)
    if given.ndim != 2 or given.shape[1] != dim or given.dtype.kind not in "fiu":
        raise RequestError(
            f"vectors of shape {given.shape} and type {given.dtype}: expected float32 [N, {dim}]; "
            "use the embedder that the index was made with"
        )
    made = np.ascontiguousarray(given, np.float32)
    if not np.isfinite(made).all():
        raise RequestError("vectors hold NaN or infinity; look at what the embedder returned")
    return made


def in_order(requested: Ids, ids: Ids, vectors: Vectors, folder: Path) -> Vectors:
    """Rows of ``vectors`` [R, E], whose ids [R] are distinct, as ``requested`` [N] names them.

    Raises StoreError, which names ``folder``, for an id that has no row.
    """
    order = np.argsort(ids)
    if not len(requested):
        return np.zeros((0, vectors.shape[1]), np.float32)
    missing = np.setdiff1d(requested, ids)
    if len(missing):
        raise StoreError(
            f"{folder} has no vector of chunk {missing[0]} and {len(missing) - 1} others; embed "
            "what is missing (`jaxrag kb verify --repair`)"
        )
    return np.ascontiguousarray(vectors[order[np.searchsorted(ids, requested, sorter=order)]])


def checked_k(k: int) -> int:
    """k; RequestError when it is below 1."""
    if k < 1:
        raise RequestError(f"k={k}: expected at least 1 chunk")
    return k


def _plain(text: str) -> str:
    return " ".join(text.split())

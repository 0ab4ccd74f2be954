"""Exact search: a matrix product and a top-k over memory-mapped rows, in JAX on the CPU.

Rows are passed in pieces of power-of-two lengths and queries in padded batches, so that adding a
row or asking one more question compiles nothing new. On a CPU the pieces are used where they lie
in the file's pages; nothing is kept beside them.
"""

import functools
from pathlib import Path
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxrag.base.shapes import bucket
from jaxrag.base.types import Array
from jaxrag.library.retrieve.base import (
    NOTHING,
    Ids,
    Mode,
    Vectors,
    checked_ids,
    checked_k,
    checked_rows,
    checked_vectors,
)
from jaxrag.library.retrieve.rows import RowFile, Rows

_PIECE = 32768  # most rows of one matrix product
_SMALLEST = 1024  # rows; a last piece shorter than this is padded
_QUERIES = 64  # most queries of one matrix product
_GATHER = 8  # gather the rows that count when they are fewer than one of this many


class ExactIndex:
    """A vector index that compares every vector. See ``VectorIndex`` and ``RowFile``."""

    def __init__(self, rows: RowFile) -> None:
        """Use ``ExactIndex.open``."""
        self._rows = rows

    @classmethod
    def open(cls, folder: Path, dim: int, *, mode: Mode = "rw") -> Self:
        """Open the index in a folder; raises what ``RowFile.open`` does."""
        return cls(RowFile.open(folder, dim, "exact", mode=mode))

    def add(self, ids: Ids, vectors: Vectors) -> None:
        """Add vectors [N, E] under ids [N]; see ``VectorIndex``."""
        self._rows.append(*checked_rows(ids, vectors, self._rows.dim))

    def remove(self, ids: Ids) -> None:
        """Forget ids; see ``VectorIndex``."""
        self._rows.remove(checked_ids(ids))

    def search(
        self, vectors: Vectors, k: int, allowed: Ids | None = None
    ) -> tuple[Ids, NDArray[np.float32]]:
        """The up to ``k`` best of each query [Q, E]; see ``VectorIndex``.

        Equal scores are in order of id.
        """
        queries = checked_vectors(vectors, self._rows.dim)
        return search_rows(self._rows.refresh(), queries, checked_k(k), allowed)

    def get(self, ids: Ids) -> Vectors:
        """The vectors of ids [N], float32 [N, E]; see ``VectorIndex``."""
        return self._rows.get(checked_ids(ids))

    def ids(self) -> Ids:
        """Every id, ascending."""
        rows = self._rows.refresh()
        return np.sort(rows.ids[rows.live])

    def __len__(self) -> int:
        return int(self._rows.refresh().live.sum())

    def close(self) -> None:
        """Nothing is held open."""


def search_rows(
    rows: Rows, queries: Vectors, k: int, allowed: Ids | None
) -> tuple[Ids, NDArray[np.float32]]:
    """Exact search of float32 queries [Q, E] over the live rows whose id is allowed.

    Returns ids int64 [Q, k] padded with -1 and scores float32 [Q, k] padded with -inf.
    """
    usable = usable_rows(rows, allowed)
    ids, vectors = rows.ids, rows.vectors
    if int(usable.sum()) * _GATHER < len(usable):
        chosen = np.flatnonzero(usable)
        ids, vectors, usable = ids[chosen], vectors[chosen], usable[chosen]
    out_ids = np.full((len(queries), k), NOTHING, np.int64)
    out_scores = np.full((len(queries), k), -np.inf, np.float32)
    for start in range(0, len(queries), _QUERIES):
        batch = queries[start : start + _QUERIES]
        place, score = _best(batch, vectors, usable, k)
        found = np.where(np.isneginf(score), NOTHING, ids[place]) if len(ids) else place
        order = np.lexsort((found, -score), axis=-1)[:, :k]
        width = order.shape[1]
        end = start + len(batch)
        out_ids[start:end, :width] = np.take_along_axis(found, order, axis=1)
        out_scores[start:end, :width] = np.take_along_axis(score, order, axis=1)
    return out_ids, out_scores


def usable_rows(rows: Rows, allowed: Ids | None) -> NDArray[np.bool_]:
    """Whether each row is live and its id among ``allowed`` (all of them when None), bool [R]."""
    return rows.live if allowed is None else rows.live & np.isin(rows.ids, allowed)


def _best(
    queries: Vectors, vectors: Vectors, usable: NDArray[np.bool_], k: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The best rows of every piece and their scores, [Q, k or more]; -inf where there is none."""
    device = _device()
    padded = np.zeros((bucket(len(queries), 1), queries.shape[1]), np.float32)
    padded[: len(queries)] = queries
    asked = jax.device_put(padded, device)
    answers: list[tuple[int, Array, Array]] = []
    for start, length in _pieces(len(vectors)):
        counted = usable[start : start + length]
        if not counted.any():
            continue
        piece = vectors[start : start + length]
        if len(piece) < length:  # the last one
            piece = np.concatenate([piece, np.zeros((length - len(piece), piece.shape[1]), "f4")])
            counted = np.concatenate([counted, np.zeros(length - len(counted), bool)])
        top = min(bucket(k, 1), length)
        scores, places = _top(asked, *jax.device_put((piece, counted), device), top)
        answers.append((start, scores, places))
    if not answers:
        return np.zeros((len(queries), 0), np.int64), np.zeros((len(queries), 0), np.float32)
    score = np.concatenate([np.asarray(scores) for _, scores, _ in answers], axis=1)
    place = np.concatenate(
        [np.asarray(p).astype(np.int64) + start for start, _, p in answers], axis=1
    )
    # A padding row is never chosen before a real one, and its score says that it is none.
    return np.minimum(place, len(vectors) - 1)[: len(queries)], score[: len(queries)]


@functools.partial(jax.jit, static_argnames="k")
def _top(queries: Array, rows: Array, counted: Array, k: int) -> tuple[Array, Array]:
    scores = jnp.matmul(queries, rows.T, precision="highest")  # [Q, R]
    best, places = jax.lax.top_k(jnp.where(counted[None], scores, -jnp.inf), k)
    return best, places


def _pieces(count: int) -> list[tuple[int, int]]:
    """(start, length) that cover ``count`` rows, lengths being powers of two, largest first."""
    pieces, start, length = [], 0, _PIECE
    while start < count:
        while length > _SMALLEST and length > count - start:
            length //= 2
        pieces.append((start, length))
        start += length
    return pieces


def _device() -> jax.Device:
    """The CPU, where the rows are; the default device where JAX was told to have no CPU."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]

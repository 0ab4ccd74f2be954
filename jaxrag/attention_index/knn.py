"""Exact nearest keys of many queries under inner product, block by block."""

import dataclasses

import numpy as np

from jaxrag.errors import RequestError
from jaxrag.types import HostArray

_QUERIES = 1024  # at a time
_KEYS = 16384


@dataclasses.dataclass(frozen=True, eq=False)
class Neighbours:
    """The best keys of each query: ids [m, k] int32, best first, and scores [m, k] float32."""

    ids: HostArray
    scores: HostArray


def nearest(queries: HostArray, keys: HostArray, k: int) -> Neighbours:
    """The ``k`` keys [S, H] with the largest inner product for each query [m, H], float32 both.

    After the first block of keys only what beats a query's k-th best so far is looked at, so the
    cost is that of the matrix product and one comparison a score. Among equal scores the smaller
    row comes first. Raises RequestError when there are fewer than ``k`` keys.
    """
    if not 1 <= k <= len(keys):
        raise RequestError(f"k={k} of {len(keys)} keys: expected 1 to {len(keys)}")
    ids = np.empty((len(queries), k), np.int32)
    scores = np.empty((len(queries), k), np.float32)
    for start in range(0, len(queries), _QUERIES):
        part = slice(start, start + _QUERIES)
        ids[part], scores[part] = _nearest(queries[part], keys, k)
    return Neighbours(ids, scores)


def _nearest(queries: HostArray, keys: HostArray, k: int) -> tuple[HostArray, HostArray]:
    first = max(_KEYS, k)
    scores = queries @ keys[:first].T
    best, values = _best(
        np.broadcast_to(np.arange(scores.shape[1], dtype=np.int32), scores.shape), scores, k
    )
    for start in range(first, len(keys), _KEYS):
        scores = queries @ keys[start : start + _KEYS].T
        row, column = np.nonzero(scores > values[:, -1:])
        if not len(row):
            continue
        # What beat the bar, as a ragged matrix padded with -inf beside the best so far.
        counts = np.bincount(row, minlength=len(queries))
        place = k + np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        width = k + int(counts.max())
        some_ids = np.zeros((len(queries), width), np.int32)
        some = np.full((len(queries), width), -np.inf, np.float32)
        some_ids[:, :k], some[:, :k] = best, values
        some_ids[row, place], some[row, place] = start + column, scores[row, column]
        best, values = _best(some_ids, some, k)
    return best, values


def _best(ids: HostArray, scores: HostArray, k: int) -> tuple[HostArray, HostArray]:
    """The k best of each row, best first; among equals the smaller id."""
    if scores.shape[1] > k:
        kept = np.argpartition(scores, scores.shape[1] - k, axis=1)[:, -k:]
        ids, scores = np.take_along_axis(ids, kept, 1), np.take_along_axis(scores, kept, 1)
    order = np.lexsort((ids, -scores), axis=1)
    return np.take_along_axis(ids, order, 1), np.take_along_axis(scores, order, 1)

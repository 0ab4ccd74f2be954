"""Exact nearest keys of many queries under inner product, block by block.

``nearest`` runs on the host, ``nearest_on_device`` on the default JAX device, where the product is
a matter of seconds for all heads of a model.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxrag.base.errors import RequestError
from jaxrag.base.types import Array, HostArray

_QUERIES = 1024  # at a time
_KEYS = 16384

Best = tuple[Array, Array]  # ids and scores, [m, k] each


@dataclasses.dataclass(frozen=True, eq=False)
class NearestKeys:
    """The best keys of each query, best first.

    Attributes:
      ids: [m, k] int32 rows of the keys.
      scores: [m, k] float32 inner products.
    """

    ids: HostArray
    scores: HostArray


Knn = Callable[[HostArray, HostArray, int], NearestKeys]  # queries, keys and k, as ``nearest``


def nearest(queries: HostArray, keys: HostArray, k: int) -> NearestKeys:
    """The ``k`` keys [S, H] with the largest inner product for each query [m, H], float32 both.

    After the first block of keys only what beats a query's k-th best so far is looked at, so the
    cost is that of the matrix product and one comparison a score. Among equal scores the smaller
    row comes first. Raises RequestError when there are fewer than ``k`` keys.
    """
    _require(k, keys)
    ids = np.empty((len(queries), k), np.int32)
    scores = np.empty((len(queries), k), np.float32)
    for start in range(0, len(queries), _QUERIES):
        part = slice(start, start + _QUERIES)
        ids[part], scores[part] = _nearest(queries[part], keys, k)
    return NearestKeys(ids, scores)


def nearest_on_device(queries: HostArray, keys: HostArray, k: int) -> NearestKeys:
    """``nearest`` by ``jax.lax.top_k``; where scores are equal or nearly so, ranks may differ."""
    _require(k, keys)
    block = min(max(_KEYS, k), len(keys))
    padded = -len(keys) % block
    blocks = jnp.pad(jnp.asarray(keys, jnp.float32), ((0, padded), (0, 0)))
    blocks = blocks.reshape(-1, block, keys.shape[1])
    found = [
        _top(jnp.asarray(queries[start : start + _QUERIES], jnp.float32), blocks, len(keys), k)
        for start in range(0, len(queries), _QUERIES)
    ]
    return NearestKeys(
        np.concatenate([np.asarray(ids) for ids, _ in found]),
        np.concatenate([np.asarray(scores) for _, scores in found]),
    )


@functools.partial(jax.jit, static_argnames="k")
def _top(queries: Array, blocks: Array, count: int, k: int) -> Best:
    """The best of key blocks [n, block, H], of which only the first ``count`` keys are real."""

    def step(
        best: tuple[Array, Array], at: tuple[Array, Array]
    ) -> tuple[tuple[Array, Array], None]:
        number, keys = at
        scores = jnp.matmul(queries, keys.T, precision=jax.lax.Precision.HIGHEST)
        rows = number * keys.shape[0] + jnp.arange(keys.shape[0], dtype=jnp.int32)
        scores = jnp.where(rows < count, scores, -jnp.inf)
        some, where = jax.lax.top_k(scores, k)
        every = jnp.concatenate([best[1], some], axis=1)
        ids = jnp.concatenate([best[0], rows[where]], axis=1)
        values, chosen = jax.lax.top_k(every, k)
        return (jnp.take_along_axis(ids, chosen, axis=1), values), None

    none = jnp.zeros((queries.shape[0], k), jnp.int32)
    start = (none, jnp.full(none.shape, -jnp.inf, jnp.float32))
    numbers = jnp.arange(blocks.shape[0], dtype=jnp.int32)
    best, _ = jax.lax.scan(step, start, (numbers, blocks))
    return best


def _require(k: int, keys: HostArray) -> None:
    if not 1 <= k <= len(keys):
        raise RequestError(f"k={k} of {len(keys)} keys: expected 1 to {len(keys)}")


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

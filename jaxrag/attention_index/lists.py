"""Query-clustered lists: the keys that similar queries want, scanned together.

Shapes are fixed, so the same search is written twice, in numpy for the host and in jnp for a
device; the two agree.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxrag.types import Array, HostArray


def cluster(queries: HostArray, count: int, rounds: int, seed: int) -> tuple[HostArray, HostArray]:
    """Spherical k-means: unit centroids [C, H] float32, and the cluster of each query [m] int32.

    A cluster that loses all its queries takes the query that its own centroid serves worst. There
    are never more clusters than queries.
    """
    norms = np.linalg.norm(queries, axis=1, keepdims=True)
    unit = queries / np.maximum(norms, np.finfo(np.float32).tiny)
    count = min(count, len(unit))
    rng = np.random.default_rng(seed)
    centroids = unit[np.sort(rng.choice(len(unit), count, replace=False))]
    for _ in range(rounds):
        likeness = unit @ centroids.T
        nearest = likeness.argmax(axis=1)
        sums = np.zeros_like(centroids)
        np.add.at(sums, nearest, unit)
        empty = np.flatnonzero(np.bincount(nearest, minlength=count) == 0)
        worst = np.argsort(likeness[np.arange(len(unit)), nearest], kind="stable")[: len(empty)]
        sums[empty] = unit[worst]
        lengths = np.linalg.norm(sums, axis=1, keepdims=True)
        centroids = np.where(lengths > 0, sums / np.maximum(lengths, 1e-30), centroids)
    return centroids, (unit @ centroids.T).argmax(axis=1).astype(np.int32)


def members(wanted: HostArray, cluster_of: HostArray, clusters: int, cap: int) -> HostArray:
    """The keys of each cluster, most wanted first: [C, width] int32 padded with -1.

    Args:
        wanted: [m, c] int32 keys of each query's list.
        cluster_of: [m] the query's cluster.
        clusters: C.
        cap: keys a cluster may have; the width is that or what the longest list needs.
    """
    keys = int(wanted.max()) + 1
    pairs = np.repeat(cluster_of.astype(np.int64), wanted.shape[1]) * keys + wanted.ravel()
    pairs, met = np.unique(pairs, return_counts=True)
    owner, key = np.divmod(pairs, keys)
    order = np.lexsort((key, -met, owner))
    owner, key = owner[order], key[order]
    sizes = np.bincount(owner, minlength=clusters)
    rank = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    table = np.full((clusters, min(cap, int(sizes.max()))), -1, np.int32)
    kept = rank < cap
    table[owner[kept], rank[kept]] = key[kept]
    return table


def candidates(query: HostArray, centroids: HostArray, table: HostArray, probes: int) -> HostArray:
    """The distinct keys of the ``probes`` nearest lists, ascending: int32."""
    likeness = centroids @ query
    if probes < len(likeness):
        near = np.argpartition(likeness, len(likeness) - probes)[-probes:]
    else:
        near = np.arange(len(likeness))
    found = np.sort(table[near], axis=None)
    return found[(found >= 0) & np.concatenate([[True], found[1:] != found[:-1]])]


class ListArrays(struct.PyTreeNode):
    """One KV head's lists on a device; E sets of lists, one a query head or one in all."""

    keys: Array  # [S, H] in the order of the index
    rows: Array  # [S] int32 the caller's row of each
    centroids: Array  # [E, C, H]
    table: Array  # [E, C, width] int32, -1 padded


def search_lists(
    lists: ListArrays, queries: Array, k: int, probes: int
) -> tuple[Array, Array, Array]:
    """The numpy search as fixed shapes, for ``jax.jit`` with ``k`` and ``probes`` static.

    Args:
        lists: from ``index.ListIndex``; see ``lists_arrays``.
        queries: [G, H], one for each query head.
        k: keys wanted, at most probes x width.
        probes: lists scanned.

    Returns:
        ids [G, k] int32 with -1 where there are fewer, scores [G, k] float32 (-inf there), best
        first, and the number of keys and centroids scanned [G] int32.
    """
    sets, clusters, width = lists.table.shape
    probes = min(probes, clusters)
    queries = queries.astype(jnp.float32)

    def one(query: Array, number: Array) -> tuple[Array, Array, Array]:
        likeness = jnp.einsum(
            "ch,h->c", lists.centroids[number], query, precision=jax.lax.Precision.HIGHEST
        )
        _, near = jax.lax.top_k(likeness, probes)
        found = jnp.sort(lists.table[number][near].reshape(-1))
        first = (found >= 0) & jnp.concatenate([jnp.ones(1, bool), found[1:] != found[:-1]])
        chosen = lists.keys[jnp.maximum(found, 0)].astype(jnp.float32)
        scores = jnp.einsum("sh,h->s", chosen, query, precision=jax.lax.Precision.HIGHEST)
        scores = jnp.where(first, scores, -jnp.inf)
        best, at = jax.lax.top_k(scores, min(k, probes * width))
        ids = jnp.where(best > -jnp.inf, lists.rows[jnp.maximum(found[at], 0)], -1)
        missing = k - best.shape[0]
        return (
            jnp.pad(ids, (0, missing), constant_values=-1),
            jnp.pad(best, (0, missing), constant_values=-jnp.inf),
            first.sum(dtype=jnp.int32) + clusters,
        )

    numbers = jnp.arange(queries.shape[0]) if sets > 1 else jnp.zeros(queries.shape[0], jnp.int32)
    return jax.vmap(one)(queries, numbers)

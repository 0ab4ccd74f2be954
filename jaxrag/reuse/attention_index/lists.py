"""Query-clustered lists: the keys that similar queries want, scanned together."""

import numpy as np

from jaxrag.base.types import HostArray


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


def compact(table: HostArray) -> tuple[HostArray, HostArray]:
    """A table [E, C, width] without its padding.

    Returns the keys of all lists, one list after the other, [n] int32, and where each begins and
    ends, [E, C + 1] int64.
    """
    parts, clusters, _ = table.shape
    there = table >= 0
    ends = np.cumsum(there.sum(2).ravel())
    starts = np.concatenate([[0], ends])
    at = np.arange(parts)[:, None] * clusters + np.arange(clusters + 1)
    return table[there], starts[at]


def nearest_lists(query: HostArray, centroids: HostArray, probes: int) -> HostArray:
    """Numbers of the ``probes`` lists whose centroids [C, H] are most like the query."""
    likeness = np.einsum("ch,h->c", centroids, query)  # BLAS would take threads for it
    if probes >= len(likeness):
        return np.arange(len(likeness))
    return np.argpartition(likeness, len(likeness) - probes)[-probes:]


def distinct(ids: HostArray) -> HostArray:
    """The numbers from 0 on in ``ids``, ascending, each once."""
    ids = np.sort(ids, axis=None)
    return ids[(ids >= 0) & np.concatenate([[True], ids[1:] != ids[:-1]])]


def candidates(query: HostArray, centroids: HostArray, table: HostArray, probes: int) -> HostArray:
    """The distinct keys of the ``probes`` nearest lists, ascending: int32."""
    return distinct(table[nearest_lists(query, centroids, probes)])

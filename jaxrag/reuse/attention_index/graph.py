"""The projection of query-to-key links onto the keys.

It takes the ranked lists of training queries, [m, c] ids of keys with the best first, and gives
links [W, degree] int32 padded with -1, for keys 0 .. W-1.
"""

import numpy as np

from jaxrag.base.types import HostArray

_COUNT_BITS = 24


def project(lists: HostArray, count: int, degree: int, span: int, top: int) -> HostArray:
    """Link the keys that the same queries want; see ``ProjectedGraph``.

    Args:
        lists: [m, c] int32, every id below ``count``.
        count: W, keys of the graph.
        degree: links of a key at most, even.
        span: ranks that a key is linked with, both ways.
        top: first ranks that every other key of a list is linked to.
    """
    ends: list[tuple[HostArray, HostArray]] = []
    width = lists.shape[1]
    for step in range(1, min(span, width - 1) + 1):
        near, far = lists[:, :-step].ravel(), lists[:, step:].ravel()
        ends += [(near, far), (far, near)]
    for first in range(min(top, width - 1)):
        below = lists[:, first + 1 :]
        ends.append((below.ravel(), np.repeat(lists[:, first], below.shape[1])))
    if not ends:
        return np.full((count, degree), -1, np.int32)
    pairs = np.concatenate([source.astype(np.int64) * count + target for source, target in ends])
    pairs, met = np.unique(pairs, return_counts=True)
    source, target = np.divmod(pairs, count)
    proper = source != target
    source, target, met = source[proper], target[proper], met[proper]
    # Most often met first within a key; among equals the smaller id, for the sort is stable.
    rarity = (1 << _COUNT_BITS) - 1 - np.minimum(met, (1 << _COUNT_BITS) - 1)
    order = np.argsort((source << _COUNT_BITS) | rarity, kind="stable")
    source, target = source[order], target[order]
    sizes = np.bincount(source, minlength=count)
    rank = np.arange(len(source)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    kept, place = _half_and_spread(rank, sizes[source], degree)
    links = np.full((count, degree), -1, np.int32)
    links[source[kept], place[kept]] = target[kept]
    return links


def _half_and_spread(rank: HostArray, size: HostArray, degree: int) -> tuple[HostArray, HostArray]:
    """Which candidates stay, by their rank among ``size``, and at which place of the row.

    All where they fit; otherwise the first half of the degree, and as many more at even steps over
    the rest.
    """
    half = degree // 2
    step = np.maximum(size - half, 1) / (degree - half)
    number = np.ceil((rank - half) / step)  # of the even step at or behind this rank
    chosen = (rank >= half) & (number < degree - half)
    chosen &= np.floor(number * step).astype(np.int64) == rank - half
    fits = size <= degree
    kept = fits | (rank < half) | chosen
    place = np.where(fits | (rank < half), rank, half + number.astype(np.int64))
    return kept, place

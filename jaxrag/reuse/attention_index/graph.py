"""The two projections of query-to-key links onto the keys: ours, and RoarGraph's as an ablation.

RoarGraph: A Projected Bipartite Graph for Efficient Cross-Modal Approximate Nearest Neighbor Search
(section 4.2, arXiv:2408.08933).

Both take the ranked lists of training queries, [m, c] ids of keys with the best first, and give
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


def project_roar(lists: HostArray, keys: HostArray, degree: int) -> HostArray:
    """RoarGraph's projection (section 4.2) by the first neighbour, then reverse links.

    ``keys`` [W, H] float32. A candidate is occluded by a link that is nearer to it (by inner
    product) than the key itself is; rows are filled up with occluded ones.
    """
    links: list[list[int]] = [[] for _ in range(len(keys))]
    last = {int(row[0]): number for number, row in enumerate(lists)}
    for pivot, number in last.items():
        links[pivot] = _pruned(pivot, lists[number, 1:], keys, degree)
    for source in range(len(keys)):
        for target in tuple(links[source]):
            row = links[target]
            if source in row:
                continue
            row.append(source)
            if len(row) > degree:
                links[target] = _pruned(target, np.array(row, np.int32), keys, degree)
    table = np.full((len(keys), degree), -1, np.int32)
    for source, row in enumerate(links):
        table[source, : len(row)] = row
    return table


def _pruned(key: int, candidates: HostArray, keys: HostArray, degree: int) -> list[int]:
    """Up to ``degree`` of the candidates by descending inner product, occlusion-pruned, filled."""
    candidates = candidates[candidates != key]
    scores = keys[candidates] @ keys[key]
    order = np.argsort(-scores, kind="stable")
    candidates, scores = candidates[order], scores[order]
    between = keys[candidates] @ keys[candidates].T
    kept: list[int] = []
    for number in range(len(candidates)):
        if len(kept) == degree:
            break
        if not kept or (between[number, kept] <= scores[number]).all():
            kept.append(number)
    taken = set(kept)
    occluded = [number for number in range(len(candidates)) if number not in taken]
    kept += occluded[: degree - len(kept)]
    return [int(candidates[number]) for number in kept]

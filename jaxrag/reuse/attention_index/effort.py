"""The effort of a search, chosen for every query head when its index is built.

Heads differ in how much they have to scan, and no number serves all of them. Queries that nothing
was trained on, placed where questions will come from, say what each needs. A question and its
answer ask otherwise than the documents before them, so the queries of the prompt's end have a say
of their own. RetrievalAttention (arXiv:2409.10516) leaves open how much its search scans.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrag.base.types import HostArray
from jaxrag.reuse.attention_index.index import AttentionIndex
from jaxrag.reuse.attention_index.knn import Knn
from jaxrag.reuse.attention_index.search import Searcher, open_index
from jaxrag.reuse.attention_index.spec import (
    Exact,
    Hnsw,
    Ivf,
    ProjectedGraph,
    QueryLists,
)

_QUERIES = 128  # of a head, about, that an effort is chosen by
_COUNTED = 16  # of them by which the scanned share is estimated
_Open = ProjectedGraph | QueryLists | Ivf | Hnsw  # kinds whose effort may be open
_LEAP = 4  # rungs, a factor of two, between two efforts that are tried first


def choose(
    index: AttentionIndex, keys: HostArray, asked: Sequence[HostArray], k: int, knn: Knn
) -> AttentionIndex | str:
    """The index with the least effort a head that reaches its spec's ``target_recall``.

    A text that says why not, where some head would scan more than its ``most_scanned`` for that.

    Args:
        index: of a kind that has an effort.
        keys: [S, H] float32 in the caller's rows.
        asked: [G, n, H] float32 each, not trained on; every one of them is to reach the target.
        knn: finds exactly what ``asked`` wants.
    """
    assert not isinstance(index.spec, Exact)
    k = min(k, len(index))
    spec, searcher = index.spec, open_index(index)
    asked = [some[:, :: max(1, some.shape[1] // _QUERIES)] for some in asked]
    efforts = []
    for head in range(len(asked[0])):
        queries_of_head = [some[head] for some in asked]
        effort = _least(searcher, head, [(q, knn(q, keys, k).ids) for q in queries_of_head], spec)
        if effort is None:
            return (
                f"exact: no search of most_scanned={spec.most_scanned} of the {len(index)} keys "
                f"finds target_recall={spec.target_recall} of the best {k}"
            )
        efforts.append(effort)
    return dataclasses.replace(index, efforts=tuple(efforts))


def _least(
    searcher: Searcher, head: int, asked: Sequence[tuple[HostArray, HostArray]], spec: _Open
) -> int | None:
    """The least effort whose mean recall of the wanted keys reaches the spec's target.

    For each of ``asked``, queries [n, H] and what they want [n, k]. None where some of them scan
    too many. Recall grows with the effort, so it is tried in leaps, and then rung by rung behind
    the last leap that fell short.
    """
    k, most = asked[0][1].shape[1], spec.most_scanned * len(searcher)
    ladder = _ladder(searcher, k, int(most))

    def recall(queries: HostArray, wanted: HostArray, effort: int) -> float:
        found = searcher.search_head(head, queries, k, effort=effort).ids
        return float((wanted[:, :, None] == found[:, None, :]).any(-1).mean())

    def reaches(effort: int) -> bool:
        return all(recall(*some, effort) >= spec.target_recall for some in asked)

    def affordable(effort: int) -> bool:
        few = (q[:: max(1, len(q) // _COUNTED)] for q, _ in asked)
        each = (searcher.search_head(head, q, k, effort=effort, count=True).scanned for q in few)
        return all(float(scanned.mean()) <= most for scanned in each)

    behind = 0
    for at in (*range(0, len(ladder) - 1, _LEAP), len(ladder) - 1):
        if reaches(ladder[at]):
            between = (effort for effort in ladder[behind:at] if reaches(effort))
            effort = next(between, ladder[at])
            return effort if affordable(effort) else None
        if not affordable(ladder[at]):
            return None
        behind = at + 1
    return None


def _ladder(searcher: Searcher, k: int, most: int) -> Sequence[int]:
    """Efforts worth a try, ascending by a fourth of a doubling: probes, or an ef from k on."""
    first, last = 1, searcher.most_probes
    if last is None:  # a walk, which scans more keys than it keeps
        first, last = k, max(k, most)
    steps = int(_LEAP * np.log2(last / first)) + 1
    rungs = np.rint(first * np.exp2(np.arange(steps) / _LEAP)).astype(int)
    return sorted({*rungs.tolist(), last})

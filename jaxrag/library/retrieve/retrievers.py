"""Rankings: by vectors, of several fused, and re-ranked."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from jaxrag.base.errors import RetrievalError
from jaxrag.library.retrieve.base import NOTHING, Found, Ids, Reranker, Vectors
from jaxrag.library.retrieve.lance import VectorIndex

RANK_CONSTANT = 60  # of reciprocal rank fusion, the value of its paper
_OVERFETCH = 4  # candidates per result that is asked for, when rankings are fused or re-ranked
_CANDIDATES = 50  # at least

Ranking = Callable[[Sequence[str], int], list[list[Found]]]  # (queries, k), best first


def by_vectors(
    index: VectorIndex, vectors: Vectors, k: int, allowed: Ids | None, strays: Ids
) -> list[list[Found]]:
    """Up to ``k`` chunks for each of ``vectors``, those of the largest inner product first.

    Args:
      vectors: of the questions, float32 [N, E].
      allowed: the chunks that may be found, int64 ascending; None: all.
      strays: ids in the index that are no chunk's; they take no place in a ranking.
    """
    depth = k + (0 if allowed is not None else len(strays))
    ids, scores = index.search(vectors, depth, allowed)
    none = {NOTHING, *strays.tolist()}
    return [
        [Found(i, s) for i, s in zip(named, score, strict=True) if i not in none][:k]
        for named, score in zip(ids.tolist(), scores.tolist(), strict=True)
    ]


def fused(rankings: Sequence[Ranking], queries: Sequence[str], k: int) -> list[list[Found]]:
    """Up to ``k`` chunks by reciprocal rank fusion of rankings, which count equally.

    Each is asked for more than is returned, all at the same time, the last one in this thread.
    """
    count = _candidates(k)
    with ThreadPoolExecutor(len(rankings), "search") as pool:
        others = [pool.submit(ranking, queries, count) for ranking in rankings[:-1]]
        last = rankings[-1](queries, count)
    answers = [*(other.result() for other in others), last]
    return [fuse(found, k) for found in zip(*answers, strict=True)]


def reranked(
    ranking: Ranking,
    reranker: Reranker,
    texts: Callable[[Sequence[int]], Mapping[int, str]],
    queries: Sequence[str],
    k: int,
) -> list[list[Found]]:
    """The up to ``k`` candidates of a ranking that a slower model scores best.

    Args:
      ranking: finds candidates, four for each chunk asked for and at least 50.
      reranker: (question, texts) -> one score per text, higher is better.
      texts: the texts of those of the chunks that are still there, by id.

    Raises RetrievalError when the re-ranker does not give one finite score per text.
    """
    rows = []
    for query, found in zip(queries, ranking(queries, _candidates(k)), strict=True):
        known = texts([item.chunk_id for item in found])
        ids = [item.chunk_id for item in found if item.chunk_id in known]
        scores = [float(it) for it in reranker(query, [known[i] for i in ids])] if ids else []
        if len(scores) != len(ids) or not all(math.isfinite(score) for score in scores):
            raise RetrievalError(
                f"the re-ranker gave {len(scores)} scores for {len(ids)} texts, or one that is no "
                "finite number; it must return one number per text"
            )
        best = sorted(map(Found, ids, scores), key=lambda found: -found.score)  # stable
        rows.append(best[:k])
    return rows


def fuse(rankings: Sequence[Sequence[Found]], k: int) -> list[Found]:
    """Reciprocal rank fusion: the score of a chunk is the sum of 1 / (60 + rank).

    Ranks count from 1; a ranking that lacks a chunk adds nothing. Equal sums keep the order in
    which the chunks first appear, in the first ranking before the second.

    Paper: Cormack, Clarke and Buettcher, "Reciprocal rank fusion outperforms Condorcet and
    individual rank learning methods", SIGIR 2009.
    """
    sums: dict[int, float] = {}
    for ranking in rankings:
        for rank, item in enumerate(ranking, 1):
            sums[item.chunk_id] = sums.get(item.chunk_id, 0.0) + 1 / (RANK_CONSTANT + rank)
    ranked = sorted(sums.items(), key=lambda pair: -pair[1])  # stable
    return [Found(chunk_id, score) for chunk_id, score in ranked[:k]]


def _candidates(k: int) -> int:
    return max(_OVERFETCH * k, _CANDIDATES)

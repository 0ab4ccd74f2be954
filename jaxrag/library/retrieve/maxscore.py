"""The best chunks of packed postings, without looking at those that cannot be among them.

The rarest words come first, and common ones are only looked up for the chunks that rarer words
brought near the top (MaxScore: Turtle and Flood, "Query evaluation: strategies and optimizations",
Information Processing and Management 31, 1995). What is found is exactly what adding everything up
finds.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxrag.library.retrieve.packed import Head, Packed, PackedChunks

_WORTH = 2000  # postings of the next term, for each term left, from which early looks save time


@dataclasses.dataclass(frozen=True)
class BM25Weights:
    """The numbers of BM25 for one state of the index; ``unit`` makes weights whole numbers."""

    k1: float
    base: float
    per_term: float
    unit: float

    def weights(
        self, idf: float | NDArray[np.float64], times: NDArray[Any], lengths: NDArray[Any]
    ) -> NDArray[np.float64]:
        """What a term adds to chunks that hold it so many times."""
        weighed: NDArray[np.float64] = np.multiply(times, idf, dtype=np.float64)
        weighed *= self.k1 + 1
        below = times + self.base
        below += self.per_term * lengths
        weighed /= below
        weighed *= self.unit
        weighed += 0.5
        weighed = np.floor(weighed)
        return weighed

    def bound(self, idf: float, heads: Sequence[Head]) -> float:
        """The most that a term adds, given the heads of its rows."""
        most = np.array([head.most for head in heads])
        least = np.array([head.least for head in heads], np.float64)
        return float(self.weights(idf, most, least).max(initial=0.0))


@dataclasses.dataclass(frozen=True, eq=False)
class BestChunks:
    """A search for the ``k`` best chunks of all blocks.

    Attributes:
      idf: of the terms that are searched by.
      heads: of each of them, in the order of blocks.
      allowed: [N] of each place, whether its chunk may be found; None: all may.
    """

    packed: Packed
    chunks: PackedChunks
    idf: Mapping[str, float]
    heads: Mapping[str, Sequence[Head]]
    k: int
    scoring: BM25Weights
    allowed: NDArray[np.bool_] | None

    def found(self, least: float) -> list[tuple[float, int]]:
        """Chunks among which are the best: (score in units, chunk id).

        ``least`` is a score that at least k chunks elsewhere have.
        """
        bounds = {it: self.scoring.bound(value, self.heads[it]) for it, value in self.idf.items()}
        order = sorted((it for it in self.idf if self.heads[it]), key=lambda term: -bounds[term])
        left = [*np.cumsum([bounds[term] for term in reversed(order)])[::-1].tolist(), 0.0]
        scores = self.chunks.zeros()
        brought: list[NDArray[np.intp]] = []  # places that each term so far was the first to reach
        top = _Top(self.k)
        chosen: NDArray[np.intp] | None = None  # places that may win; None: all may still
        for place, term in enumerate(order):
            if chosen is None and least > left[place]:
                chosen = _above(scores, brought, least - left[place])
            elif chosen is not None:
                chosen = chosen[scores[chosen] + left[place] >= least]
            if chosen is not None and not len(chosen):
                break
            places, more = self._added(term, chosen)
            if not len(places):
                continue
            before = scores[places]
            more += before
            scores[places] = more
            if chosen is None:
                brought.append(places[before == 0.0])  # what a word adds is more than 0
                rest = order[place + 1 :]
                if rest and self._holders(rest[0]) > _WORTH * len(rest):
                    fresh = top.take(places, more)
                    least = max(least, top.least(self._whole(fresh, scores, rest)))
        enough = max(least, 1.0)  # what a word adds is a whole number
        best = _above(scores, brought if chosen is None else [chosen], enough)
        found = list(zip(scores[best].tolist(), self.chunks.ids[best].tolist(), strict=True))
        for places in brought:  # nowhere else was anything added
            scores[places] = 0.0
        self.chunks.take_back(scores)
        return found

    def _holders(self, term: str) -> int:
        return sum(head.holders for head in self.heads[term])

    def _added(
        self, term: str, chosen: NDArray[np.intp] | None
    ) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """The places of a term, or those among chosen ones, and what it adds there."""
        found, times = self.packed.postings(self.heads[term], self.chunks)
        if chosen is not None:
            own = np.searchsorted(found, chosen.astype(found.dtype))  # of one type, or all is cast
            own[own == len(found)] = 0
            held = found[own] == chosen
            places, times = chosen[held], times[own[held]]
        else:
            places = found.astype(np.intp)  # NumPy takes twice as long with indexes of 32 bits
            if self.allowed is not None:
                stay = self.allowed[places]
                places, times = places[stay], times[stay]
        return places, self.scoring.weights(self.idf[term], times, self.chunks.lengths[places])

    def _whole(
        self, places: NDArray[np.intp], scores: NDArray[np.float64], order: Sequence[str]
    ) -> NDArray[np.float64]:
        """The scores of places, which ascend, with what terms to come add."""
        whole = scores[places]
        for term in order if len(places) else ():
            own, more = self._added(term, places)
            whole[np.searchsorted(places, own)] += more
        return whole


class _Top:
    """The chunks with the most so far, whose whole scores say early what it takes to win."""

    def __init__(self, k: int) -> None:
        self._k = k
        self._known: set[int] = set()  # places
        self._whole = np.zeros(0)  # the largest whole scores of these, at most k

    def take(self, places: NDArray[np.intp], scores: NDArray[np.float64]) -> NDArray[np.intp]:
        """Those of the k largest of these scores that were not taken yet, ascending."""
        if len(places) > self._k:
            places = places[np.argpartition(scores, -self._k)[-self._k :]]
        fresh = set(places.tolist()) - self._known
        self._known |= fresh
        return np.array(sorted(fresh), np.intp)

    def least(self, whole: NDArray[np.float64]) -> float:
        """The k-th largest of the whole scores of all that were taken; 0 where they are fewer."""
        self._whole = np.sort(np.concatenate([self._whole, whole]))[-self._k :]
        return float(self._whole[0]) if len(self._whole) == self._k else 0.0


def _above(
    scores: NDArray[np.float64], brought: Sequence[NDArray[np.intp]], least: float
) -> NDArray[np.intp]:
    """Those of different places that have at least a score."""
    places = np.concatenate([np.zeros(0, np.intp), *brought])
    found: NDArray[np.intp] = places[scores[places] >= least]
    return found

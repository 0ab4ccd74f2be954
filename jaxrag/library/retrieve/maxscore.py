"""The best chunks of packed postings, without looking at those that cannot be among them.

The rarest words come first, and common ones are only looked up for the chunks that rarer words
brought near the top (MaxScore: Turtle and Flood, "Query evaluation: strategies and optimizations",
Information Processing and Management 31, 1995). What is found is exactly what adding everything up
finds.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from jaxrag.library.retrieve.packed import Head, Packed, PostingBlock, PostingPlaces


@dataclasses.dataclass(frozen=True)
class BM25Weights:
    """The numbers of BM25 for one state of the index; ``unit`` makes weights whole numbers."""

    k1: float
    base: float
    per_term: float
    unit: float

    def weights(
        self, idf: float, times: NDArray[np.int64], lengths: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """What a term adds to chunks that hold it so many times, in the order of SQL's search."""
        found = np.multiply(times, idf, dtype=np.float64)
        found *= self.k1 + 1
        below = times + self.base
        below += self.per_term * lengths
        found /= below
        found *= self.unit
        found += 0.5
        found = np.floor(found)
        return found

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
      heads: of each of them.
      allowed: by chunk id, whether it may be found; None: all may.
    """

    packed: Packed
    idf: Mapping[str, float]
    heads: Mapping[str, Sequence[Head]]
    k: int
    scoring: BM25Weights
    allowed: NDArray[np.bool_] | None

    @functools.cached_property
    def blocks(self) -> dict[int, PostingBlock]:
        """All blocks by number."""
        return {block.number: block for block in self.packed.blocks()}

    def found(self, least: float) -> list[tuple[float, int]]:
        """Chunks among which are the best: (score in units, chunk id).

        ``least`` is a score that at least k chunks elsewhere have.
        """
        blocks = self.blocks
        bounds = {it: self.scoring.bound(value, self.heads[it]) for it, value in self.idf.items()}
        order = sorted((it for it in self.idf if self.heads[it]), key=lambda term: -bounds[term])
        left = np.cumsum([bounds[term] for term in reversed(order)])[::-1].tolist()
        scores = {number: np.zeros(len(block.ids)) for number, block in blocks.items()}
        chosen: dict[int, PostingPlaces] | None = None  # places that may win; None: all may still
        for place, term in enumerate(order):
            if chosen is None and least > left[place]:
                chosen = {
                    it: np.flatnonzero(own >= least - left[place]) for it, own in scores.items()
                }
            elif chosen is not None:
                for number, places in chosen.items():
                    chosen[number] = places[scores[number][places] + left[place] >= least]
            touched = []
            for head in self.heads[term]:
                own = scores[head.block]
                if chosen is not None:
                    places, more = self._added(head, chosen[head.block])
                else:
                    places, times = self.packed.postings(head)
                    block = blocks[head.block]
                    if self.allowed is not None:
                        stay = self.allowed[block.ids[places]]
                        places, times = places[stay], times[stay]
                    more = self.scoring.weights(self.idf[term], times, block.lengths[places])
                if len(places):
                    more += own[places]
                    own[places] = more
                    touched.append(more[more > least])
            if touched:
                least = max(least, _kth(np.concatenate(touched), self.k))
        found: list[tuple[float, int]] = []
        for number, all_scores in scores.items():
            enough = max(least, 1.0)  # what a word adds is a whole number
            best = np.flatnonzero(all_scores >= enough) if chosen is None else chosen[number]
            best = best[all_scores[best] >= enough]
            found += zip(all_scores[best].tolist(), blocks[number].ids[best].tolist(), strict=True)
        return found

    def _added(
        self, head: Head, places: PostingPlaces
    ) -> tuple[PostingPlaces, NDArray[np.float64]]:
        """Which of some places of a block hold a term, and what it adds there."""
        if not len(places):
            return places, np.zeros(0)
        holders, counts = self.packed.stored(head)
        own = np.searchsorted(holders, places.astype(holders.dtype))
        own[own == len(holders)] = 0
        held = holders[own] == places
        places, times = places[held], counts[own[held]].astype(np.int64)
        lengths = self.blocks[head.block].lengths[places]
        return places, self.scoring.weights(self.idf[head.term], times, lengths)


def _kth(scores: NDArray[np.float64], k: int) -> float:
    """The k-th largest; 0 where there are fewer."""
    return float(np.partition(scores, -k)[-k]) if len(scores) >= k else 0.0

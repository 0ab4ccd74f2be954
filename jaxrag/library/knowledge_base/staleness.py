"""Which chunks' neighbours have to be searched again after documents came or went.

A complete search is remembered in the catalog: of which chunks it was, and how they were searched.
Where nothing came or went since, nobody's neighbours are others. Where an exact vector index ranks
them, two chunks' similarity is theirs alone, and the chunks to search again are those that

- have no KV, as new ones, and those whose KV saw a chunk that is gone;
- have fewer neighbours than asked for, because the context ended or there were no more;
- are at least as similar to a new chunk as to the last of their neighbours.

With BM25 a word weighs less the more chunks hold it, and with an approximate index what is found
depends on how it was built: there every change may reorder every list, and all are searched again.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrag.base.errors import StoreError
from jaxrag.base.types import HostArray
from jaxrag.library.catalog import Catalog
from jaxrag.library.retrieve.lance import VectorIndex

_SETTING = "searched"
_ROWS = 2048  # vectors that are compared at once
_ROUNDING = 1e-4  # of two products of the same vectors in other batches, relative to their lengths


@dataclasses.dataclass(frozen=True)
class NeighbourSearch:
    """One search of the neighbours of a knowledge base's chunks, from ``begin`` to ``finish``.

    Attributes:
      catalog: of the knowledge base.
      how: what decides the result besides the chunks, JSON-able.
      chunk_ids: every chunk there was when it began, int64 ascending.
      run: its number; only the search with the highest one may be remembered.
      known: what the last complete search left, where it was such a search.
    """

    catalog: Catalog
    how: Mapping[str, Any]
    chunk_ids: HostArray
    run: int
    known: Mapping[str, Any] | None

    @classmethod
    def begin(cls, catalog: Catalog, how: Mapping[str, Any]) -> "NeighbourSearch":
        """Begin a search. Until it is finished none is remembered, so that a killed one is not."""
        before = catalog.swap(_SETTING, lambda value: {"run": _run_of(value) + 1})
        known = before if before and before.get("how") == how else None
        return cls(catalog, how, catalog.chunk_ids(), _run_of(before) + 1, known)

    def outdated(self, encoders: Sequence[str], top_n: int, index: VectorIndex | None) -> HostArray:
        """The chunks whose neighbours may be others now, or that lack KV: int64 ascending.

        Args:
          encoders: whose KV is looked for.
          top_n: neighbours of a chunk, at most.
          index: what ranks them; None for BM25.
        """
        ids = self.chunk_ids
        if not encoders:
            return ids[:0]
        if self.known is None:
            return ids
        searched = _from_ranges(self.known["chunks"])
        new, gone = np.setdiff1d(ids, searched), np.setdiff1d(searched, ids)
        if not len(new) and not len(gone):
            return _lacking(self.catalog, ids, encoders)
        # Where one of several chunks of a content has left, its content may rank lower now.
        copies = np.isin(gone, _from_ranges(self.known["copies"])).any()
        if index is None or not index.exact or copies or 2 * len(new) >= len(ids):
            return ids
        outdated = np.zeros(len(ids), bool)
        try:
            for encoder in encoders:
                own, last = self.catalog.last_neighbours(encoder, top_n)
                outdated |= ~np.isin(ids, own)
                outdated |= np.isin(ids, own[_entered(index, own, last, new)])
        except StoreError:
            if np.array_equal(self.catalog.chunk_ids(), ids):
                raise
            return ids  # a chunk that left meanwhile took its vector along: all are searched
        return ids[outdated]

    def check(self) -> None:
        """Call after lists were written: a search that began later is not to be remembered then."""
        if _run_of(self.catalog.settings().get(_SETTING)) != self.run:
            self._give_up()

    def finish(self) -> None:
        """Everything that ``outdated`` named was searched; remember it, if nothing interfered."""
        copies = self.catalog.copies()  # before what they are copies of is looked at
        if not np.array_equal(self.catalog.chunk_ids(), self.chunk_ids):
            self._give_up()
            return
        found = {
            "run": self.run,
            "how": dict(self.how),
            "chunks": _to_ranges(self.chunk_ids),
            "copies": _to_ranges(copies),
        }
        self.catalog.swap(_SETTING, lambda value: found if _run_of(value) == self.run else value)
        self.check()

    def _give_up(self) -> None:
        self.catalog.swap(_SETTING, lambda value: {"run": _run_of(value) + 1})


def _run_of(value: Mapping[str, Any] | None) -> int:
    return 0 if value is None else int(value["run"])


def _lacking(catalog: Catalog, ids: HostArray, encoders: Sequence[str]) -> HostArray:
    """Chunks without KV of one of the encoders."""
    lacking = np.zeros(len(ids), bool)
    for encoder in encoders:
        lacking |= ~np.isin(ids, catalog.encoded_ids(encoder))
    return ids[lacking]


def _entered(index: VectorIndex, own: HostArray, last: HostArray, new: HostArray) -> HostArray:
    """Whether one of ``new`` is at least as similar to each of ``own`` as ``last`` is: bool [N].

    Rounding counts as similar: a chunk too many is searched, never one too few.
    """
    entered = np.zeros(len(own), bool)
    for first in range(0, len(new), _ROWS):
        added = index.get(new[first : first + _ROWS])
        longest = np.sqrt(np.square(added).sum(1).max())
        for start in range(0, len(own), _ROWS):
            here = slice(start, start + _ROWS)
            vectors, ends = index.get(own[here]), index.get(last[here])
            lengths = np.sqrt(np.square(vectors).sum(1))
            slack = _ROUNDING * lengths * np.maximum(longest, np.sqrt(np.square(ends).sum(1)))
            entered[here] |= (vectors @ added.T).max(1) >= (vectors * ends).sum(1) - slack
    return entered


def _to_ranges(ids: HostArray) -> list[list[int]]:
    """Ascending ids as first and last of every run."""
    if not len(ids):
        return []
    breaks = np.flatnonzero(np.diff(ids) != 1)
    firsts, lasts = ids[np.r_[0, breaks + 1]], ids[np.r_[breaks, len(ids) - 1]]
    return [[int(first), int(last)] for first, last in zip(firsts, lasts, strict=True)]


def _from_ranges(ranges: Sequence[Sequence[int]]) -> HostArray:
    parts = [np.arange(first, last + 1) for first, last in ranges]
    return np.concatenate([np.zeros(0, np.int64), *parts])

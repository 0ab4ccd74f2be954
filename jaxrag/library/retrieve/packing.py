"""Chunks that came few by few are packed: in steps, each of which is a short transaction.

The rows of such chunks in the table ``postings`` are removed when all are packed, some at a time as
well; until then searches pass over them. Whoever is killed between two steps leaves what the next
goes on with.
"""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from jaxrag.library.retrieve.bm25 import BM25Index
from jaxrag.library.retrieve.packed import damaged
from jaxrag.library.retrieve.terms import gathered

_LOOSE = 512  # chunks beside the packed ones before they are packed as well
_PACKED_AT_ONCE = 4096  # chunks of one step
_CLEARED_AT_ONCE = 1 << 16  # rows of one step


@dataclasses.dataclass(frozen=True)
class Packing:
    """The packing of the chunks of an index; nothing here commits.

    Attributes:
      chunks: how many the index has.
    """

    index: BM25Index
    chunks: int

    def is_due(self) -> bool:
        """Whether ``step`` has something to do."""
        clearing = self.index.packed.clearing()
        return clearing or len(self._loose(_LOOSE)) > 0

    def step(self, texts: Callable[[list[int]], Mapping[int, str]]) -> bool:
        """Do a little; whether there is more to do. In a transaction of its own.

        ``texts`` gives the texts that chunks were added with, by id.
        """
        connection, packed = self.index.connection, self.index.packed
        clearing = packed.clearing()
        chunk_ids = self._loose(1 if clearing else _LOOSE)
        if len(chunk_ids):
            given = texts(chunk_ids.tolist())
            if not given:
                raise damaged(self.index.path, "the lengths of chunks")
            packed.start()
            packed.set_clearing(True)
            packed.put(*gathered(given))
        elif clearing:
            row = connection.execute(
                "SELECT term, chunk_id FROM postings ORDER BY term, chunk_id LIMIT 1 OFFSET ?",
                (_CLEARED_AT_ONCE,),
            ).fetchone()
            before = " WHERE (term, chunk_id) < (?, ?)" if row else ""
            connection.execute(f"DELETE FROM postings{before}", row)
            packed.set_clearing(row is not None)
        return bool(len(chunk_ids) or clearing)

    def _loose(self, least: int) -> NDArray[np.int64]:
        """Some chunks that are not packed, int64 [N] ascending; none where there are fewer."""
        none = np.zeros(0, np.int64)
        if not self.index.is_large(self.chunks):
            return none
        blocks = [block.ids for block in self.index.packed.blocks()]
        count = self.chunks - sum(int(np.count_nonzero(ids)) for ids in blocks)
        if count < least:
            return none
        # Most came last; of several writers one may commit lower ids than are packed.
        last = max((int(ids.max()) for ids in blocks), default=-1)
        for after, most in ((last, _PACKED_AT_ONCE), (-1, -1)):
            rows = self.index.connection.execute(
                "SELECT chunk_id FROM lengths WHERE chunk_id > ? ORDER BY chunk_id LIMIT ?",
                (after, most),
            ).fetchall()
            chunk_ids = np.fromiter((row[0] for row in rows), np.int64, len(rows))
            chunk_ids = chunk_ids[~self.index.packed.holds(chunk_ids)][:_PACKED_AT_ONCE]
            if len(chunk_ids) >= min(count, _PACKED_AT_ONCE):
                break
        return chunk_ids

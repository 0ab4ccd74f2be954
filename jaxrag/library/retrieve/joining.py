"""Few blocks of many: smaller ones are joined in steps, each of which is a short transaction.

The rows of the block that is made are written some at a time. Searches do not see them, as no chunk
is known to be in it, until the last step puts it in the place of those that it was made of; their
rows then go in steps as well. Whoever is killed between two steps leaves what the next packing goes
on with. Where a source has changed meanwhile the work so far is dropped.
"""

import dataclasses
import heapq
import itertools
import json
from collections.abc import Sequence

import numpy as np

from jaxrag.library.retrieve.packed import (
    MOST_CHUNKS,
    Packed,
    PackedRow,
    PostingBlock,
    packed_row,
)

_TIERS = (1 << 12, 1 << 16, MOST_CHUNKS)  # blocks below a size become one of about that size
_TERMS = 512  # of each block that are joined in one step
_DROPPED = 4096  # rows that are removed in one step


@dataclasses.dataclass(frozen=True)
class Joining:
    """The joining of the blocks of a catalog; nothing here commits."""

    packed: Packed

    def step(self) -> bool:
        """Do a little; whether there is more to do. In a transaction of its own."""
        connection = self.packed.connection
        self.packed.start()
        left = connection.execute("SELECT block FROM leftover LIMIT 1").fetchone()
        if left is not None:
            connection.execute(
                "DELETE FROM packed WHERE block = ? AND term IN "
                "(SELECT term FROM packed WHERE block = ? LIMIT ?)",
                (*left, *left, _DROPPED),
            )
            if connection.execute("SELECT changes()").fetchone() == (0,):
                connection.execute("DELETE FROM leftover WHERE block = ?", left)
            return True
        begun = connection.execute("SELECT block, sources, after FROM joining").fetchone()
        if begun is None:
            return self._begin()
        number, sources, after = begun
        known = {block.number: block for block in self.packed.blocks()}
        blocks = [known.get(source) for source, _ in json.loads(sources)]
        if [(it.number, it.xxh3) for it in blocks if it] != [*map(tuple, json.loads(sources))]:
            connection.execute("DELETE FROM joining")
            connection.execute("INSERT INTO leftover VALUES (?)", (number,))
            return True
        self._join(number, [block for block in blocks if block], after)
        return True

    def _begin(self) -> bool:
        """Choose small blocks where they are as many chunks as a larger one."""
        blocks = self.packed.blocks()
        for size in _TIERS:
            small = [block for block in blocks if len(block.ids) < size * 3 // 4]
            chosen: list[PostingBlock] = []
            for block in small:
                if sum(len(it.ids) for it in (*chosen, block)) <= MOST_CHUNKS:
                    chosen.append(block)
            total = sum(len(it.ids) for it in chosen)
            if len(chosen) > 1 and (total >= size * 3 // 4 or len(chosen) < len(small)):
                sources = json.dumps([(block.number, block.xxh3) for block in chosen])
                self.packed.connection.execute(
                    "INSERT INTO joining VALUES (?, ?, '')", (self.packed.new_number(), sources)
                )
                return True
        return False

    def _join(self, number: int, blocks: Sequence[PostingBlock], after: str) -> None:
        """Join the rows of the next terms; behind the last, put the new block in their place."""
        ids = np.concatenate([block.ids for block in blocks])
        stays = ids > 0
        places = np.cumsum(stays) - 1  # of those that stay
        count = int(stays.sum())
        starts = np.cumsum([0, *(len(block.ids) for block in blocks)]).tolist()
        parts = [self.packed.checked_rows(block, after, _TERMS) for block in blocks]
        ends = [part[-1][0].term for part in parts if len(part) == _TERMS]
        last = min(ends, default=None)
        chosen: list[list[PackedRow]] = [
            [
                (head, places[own + start], counts)
                for head, own, counts in part
                if last is None or head.term <= last
            ]
            for part, start in zip(parts, starts, strict=False)
        ]
        rows = []
        merged = heapq.merge(*chosen, key=lambda row: row[0].term)
        for term, group in itertools.groupby(merged, key=lambda row: row[0].term):
            heads, own, counts = zip(*group, strict=True)
            rows.append(
                packed_row(
                    number,
                    count,
                    term,
                    np.concatenate(own),
                    np.concatenate(counts),
                    sum(head.weight for head in heads),
                    max(head.most for head in heads),
                    min(head.least for head in heads),
                )
            )
        self.packed.put_rows(rows)
        connection = self.packed.connection
        if last is not None:
            connection.execute("UPDATE joining SET after = ?", (last,))
            return
        lengths = np.concatenate([block.lengths for block in blocks]).astype(np.int64)
        self.packed.put_chunks(number, ids[stays], lengths[stays])
        for block in blocks:
            connection.execute("DELETE FROM blocks WHERE block = ?", (block.number,))
            connection.execute("INSERT INTO leftover VALUES (?)", (block.number,))
        connection.execute("DELETE FROM joining")

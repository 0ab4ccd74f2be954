"""Postings of many chunks in few rows.

A block holds up to 262,144 chunks, by place. Of every term that they hold it has one row: the
places of the holders, ascending, and how often each holds it. A place is 16 bits; the row of a
block of more chunks begins with how many holders are among each 65,536. The row's head bounds what
the term can add to a score. Postings longer than a few bytes stand in a table of their own, as
SQLite's search through rows passes by fewer pages the shorter these are.

A block is made of the postings of chunks (``bm25``), or of smaller blocks (``joining``), in
transactions of the catalog. A chunk that leaves is taken out of its block's rows
at once.
"""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cachetools
import numpy as np
import xxhash
from numpy.typing import NDArray

from jaxrag.base.errors import DamagedCatalogError
from jaxrag.base.types import Connection

PACKED = 6  # the format of a catalog that may have blocks
MOST_CHUNKS = 1 << 18  # of a block: removing a chunk writes the rows of all of its terms anew
_PART = 16  # bits of a place that are in a row
_ROWS = 2048  # that are read or written at once
_MOST_HELD = 96 << 20  # bytes of postings that are remembered: those asked for last
_LOW = 0xFFFFFFFF
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS blocks (block INTEGER PRIMARY KEY, chunks INTEGER NOT NULL, "
    "xxh3 INTEGER NOT NULL, ids BLOB NOT NULL, lengths BLOB NOT NULL)",
    "CREATE TABLE IF NOT EXISTS packed (block INTEGER, term TEXT, holders INTEGER NOT NULL, "
    "weight INTEGER NOT NULL, most INTEGER NOT NULL, least INTEGER NOT NULL, "
    "content INTEGER NOT NULL, xxh3 INTEGER NOT NULL, postings BLOB NOT NULL, "
    "PRIMARY KEY (block, term)) WITHOUT ROWID",
    # Of longer postings ``packed`` has the number here.
    "CREATE TABLE IF NOT EXISTS lists (number INTEGER PRIMARY KEY, postings BLOB NOT NULL)",
    "CREATE TRIGGER IF NOT EXISTS list_gone AFTER DELETE ON packed "
    "WHEN typeof(old.postings) = 'integer' "
    "BEGIN DELETE FROM lists WHERE number = old.postings; END",
    # Of ``joining.Joining``: the block that is made, digests of its sources, the last term; and
    # blocks whose rows are to go.
    "CREATE TABLE IF NOT EXISTS joining (block INTEGER PRIMARY KEY, sources TEXT NOT NULL, "
    "after TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS leftover (block INTEGER PRIMARY KEY)",
)
_INSERT = "INSERT INTO packed VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
_SHORT = 32  # bytes of postings that stand in the row of their term
_POSTINGS = (
    "COALESCE(lists.postings, CASE typeof(packed.postings) WHEN 'blob' THEN packed.postings END)"
)
_LISTS = "LEFT JOIN lists ON number = packed.postings"

PostingPlaces = NDArray[np.int64]


def damaged(path: Path, what: str) -> DamagedCatalogError:
    """The error for postings that are not as they were written."""
    return DamagedCatalogError(
        f"catalog {path} is damaged: {what} are not as written; run "
        f"`jaxrag kb verify --repair {path.parent}`, or restore a copy"
    )


@dataclasses.dataclass(frozen=True, eq=False)
class PostingBlock:
    """The chunks of a block by place.

    Attributes:
      ids: [N] int64, 0 where a chunk has left.
      lengths: [N] uint32, terms of each chunk, repeats counted.
    """

    number: int
    xxh3: int
    ids: NDArray[np.int64]
    lengths: NDArray[np.uint32]


@dataclasses.dataclass(frozen=True, eq=False)
class PackedChunks:
    """The chunks of all blocks, one block behind the other; a place here counts through them.

    Attributes:
      blocks: the number and the digest of each.
      starts: the place of its first chunk, by number.
      sizes: how many chunks it has, by number.
      ids: [N] int64, 0 where a chunk has left.
      lengths: [N] unsigned, as short as they go, so that they stay in the processor's cache: terms
        of each chunk, repeats counted.
    """

    blocks: tuple[tuple[int, int], ...]
    starts: Mapping[int, int]
    sizes: Mapping[int, int]
    ids: NDArray[np.int64]
    lengths: NDArray[np.unsignedinteger[Any]]
    _held: list[tuple[NDArray[np.int64], NDArray[np.bool_]]] = dataclasses.field(
        default_factory=list, repr=False
    )
    _zeros: list[NDArray[np.float64]] = dataclasses.field(default_factory=list, repr=False)

    @classmethod
    def of(cls, blocks: Sequence[PostingBlock]) -> "PackedChunks":
        """Those of these blocks."""
        ends = itertools.accumulate(len(block.ids) for block in blocks)
        lengths = np.concatenate([block.lengths for block in blocks])
        return cls(
            tuple((block.number, block.xxh3) for block in blocks),
            dict(zip((block.number for block in blocks), (0, *ends), strict=False)),
            {block.number: len(block.ids) for block in blocks},
            np.concatenate([block.ids for block in blocks]),
            lengths.astype(np.min_scalar_type(int(lengths.max()))),
        )

    def zeros(self) -> NDArray[np.float64]:
        """[N] zeros, for one search at a time; to be given back to ``take_back``."""
        try:
            return self._zeros.pop()
        except IndexError:
            return np.zeros(len(self.ids))

    def take_back(self, zeros: NDArray[np.float64]) -> None:
        """Keep what is zeros again: new ones cost more than most searches write."""
        self._zeros[:] = [zeros]

    def hold(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Of every place whether its chunk is among these, which ascend: bool [N].

        Remembered of the last array of ids.
        """
        if not self._held or self._held[0][0] is not ids:
            held = np.zeros(max(int(self.ids.max()), *ids[-1:].tolist(), 0) + 1, bool)
            held[ids] = True
            held[0] = False  # the place of a chunk that left
            self._held[:] = [(ids, held[self.ids])]
        return self._held[0][1]


class Head(NamedTuple):
    """What a term's row of a block says of its postings.

    Attributes:
      holders: how many chunks hold the term.
      weight: the sum of ``bm25`` over them.
      most: a bound of how often one holds it.
      least: a bound of the number of terms of the shortest.
      content: the digest of the postings.
    """

    block: int
    term: str
    holders: int
    weight: int
    most: int
    least: int
    content: int

    @property
    def xxh3(self) -> int:
        """The digest of the head."""
        return _digest(repr(tuple(self)).encode())


PackedRow = tuple[Head, NDArray[np.int64], NDArray[np.int64]]  # places and counts
Held = tuple[NDArray[np.int32], NDArray[Any]]  # ascending places in PackedChunks, and counts


@dataclasses.dataclass(frozen=True, eq=False)
class Packed:
    """The blocks of one catalog; nothing here commits."""

    connection: Connection
    path: Path  # of the catalog, as errors name it
    _blocks: dict[int, PostingBlock] = dataclasses.field(default_factory=dict, repr=False)
    _held: "cachetools.LRUCache[Hashable, Held]" = dataclasses.field(
        default_factory=lambda: cachetools.LRUCache(_MOST_HELD, _nbytes), repr=False
    )
    _together: list[PackedChunks] = dataclasses.field(default_factory=list, repr=False)  # the last

    def is_there(self) -> bool:
        """Whether the catalog may have blocks."""
        (version,) = self.connection.execute("PRAGMA user_version").fetchone()
        return int(version) == PACKED

    def blocks(self) -> list[PostingBlock]:
        """All blocks, ascending; those that did not change are not read again."""
        if not self.is_there():
            return []
        known = self.connection.execute("SELECT block, xxh3 FROM blocks ORDER BY block").fetchall()
        for number in self._blocks.keys() - {number for number, _ in known}:
            del self._blocks[number]
        for number, xxh3 in known:
            held = self._blocks.get(number)
            if held is None or held.xxh3 != xxh3:
                self._blocks[number] = self._block(number)
        return [self._blocks[number] for number, _ in known]

    def _block(self, number: int) -> PostingBlock:
        chunks, xxh3, ids, lengths = self.connection.execute(
            "SELECT chunks, xxh3, ids, lengths FROM blocks WHERE block = ?", (number,)
        ).fetchone()
        if _digest(ids + lengths) != xxh3 or len(ids) != 8 * chunks or len(lengths) != 4 * chunks:
            raise damaged(self.path, "the chunks of packed words")
        return PostingBlock(
            number,
            xxh3,
            np.frombuffer(ids, "<i8"),
            np.frombuffer(lengths, "<u4"),
        )

    def _damaged(self, term: str) -> DamagedCatalogError:
        return damaged(self.path, f"the postings of {term!r}")

    # Changes

    def start(self) -> None:
        """Call before blocks are changed: from then on the catalog may have some."""
        for statement in _SCHEMA:
            self.connection.execute(statement)
        self.connection.execute(f"PRAGMA user_version = {PACKED}")

    def clearing(self) -> bool:
        """Whether the table ``postings`` may hold rows of chunks that are in a block."""
        found = self.connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'clearing'")
        return found.fetchone() is not None

    def set_clearing(self, clearing: bool) -> None:
        """Say whether it may: there is a table of that name as long as it may."""
        if clearing:
            self.connection.execute("CREATE TABLE IF NOT EXISTS clearing (one INTEGER)")
        else:
            self.connection.execute("DROP TABLE clearing")

    def holds(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of some chunks, int64 [N], are in a block: bool [N]."""
        found = np.zeros(len(ids), bool)
        for block in self.blocks():
            found |= np.isin(ids, block.ids)
        return found

    def put(
        self,
        by_term: Iterable[tuple[str, Sequence[tuple[int, int]]]],
        lengths: Sequence[tuple[int, int]],
    ) -> None:
        """Make a block of chunks that are in none, at most MOST_CHUNKS.

        Args:
          by_term: ascending terms, and of each (chunk id, count).
          lengths: (chunk id, number of terms) of every chunk.
        """
        if not lengths:
            return
        ids, own = np.array(sorted(lengths), np.int64).T
        number = self.new_number()
        self.put_chunks(number, ids, own)
        pairs = ((term, np.array(found, np.int64).T) for term, found in by_term)
        self.put_rows(
            _row(number, term, ids, own, np.searchsorted(ids, holders), counts)
            for term, (holders, counts) in pairs
        )

    def new_number(self) -> int:
        """The number of a block to come."""
        (number,) = self.connection.execute(
            "SELECT MAX(COALESCE((SELECT MAX(block) FROM blocks), 0), "
            "COALESCE((SELECT MAX(block) FROM joining), 0), "
            "COALESCE((SELECT MAX(block) FROM packed), 0)) + 1"
        ).fetchone()
        return int(number)

    def put_chunks(self, number: int, ids: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """Set the chunks of a block."""
        parts = ids.astype("<i8").tobytes(), lengths.astype("<u4").tobytes()
        self.connection.execute(
            "INSERT OR REPLACE INTO blocks VALUES (?, ?, ?, ?, ?)",
            (number, len(ids), _digest(b"".join(parts)), *parts),
        )

    def put_rows(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Add rows of terms."""
        (last,) = self.connection.execute("SELECT COALESCE(MAX(number), 0) FROM lists").fetchone()
        for some in itertools.batched(rows, _ROWS):
            lists, made = [], []
            for *head, postings in some:
                if len(postings) > _SHORT:
                    last += 1
                    lists.append((last, postings))
                made.append((*head, last if len(postings) > _SHORT else postings))
            self.connection.executemany("INSERT INTO lists VALUES (?, ?)", lists)
            self.connection.executemany(_INSERT, made)

    def _drop(self, number: int) -> None:
        self.connection.execute("DELETE FROM packed WHERE block = ?", (number,))
        self.connection.execute("DELETE FROM blocks WHERE block = ?", (number,))
        self._blocks.pop(number, None)

    def clear(self) -> None:
        """Forget all blocks."""
        if self.is_there():
            for table in ("packed", "blocks", "joining", "leftover"):
                self.connection.execute(f"DELETE FROM {table}")
            self.connection.execute("DROP TABLE IF EXISTS clearing")
            self._blocks.clear()

    def remove(self, terms_of: Mapping[int, Iterable[str]]) -> None:
        """Take chunks out of their blocks, given their distinct terms by id.

        What no search sees goes altogether, as it may be of these chunks.
        """
        for table in ("joining", "leftover"):
            self.connection.execute(
                f"DELETE FROM packed WHERE block IN (SELECT block FROM {table})"
            )
            self.connection.execute(f"DELETE FROM {table}")
        asked = np.fromiter(terms_of, np.int64)
        for block in self.blocks():
            places = np.flatnonzero(np.isin(block.ids, asked))
            if not len(places):
                continue
            leaving: dict[str, list[int]] = {}
            for place in places.tolist():
                for term in terms_of[int(block.ids[place])]:
                    leaving.setdefault(term, []).append(place)
            ids, lengths = block.ids.copy(), block.lengths.astype(np.int64)
            for some in itertools.batched(sorted(leaving), _ROWS):
                written = []
                among, asked_for = "term IN (SELECT value FROM json_each(?))", json.dumps(some)
                for head, own, counts in self._checked(block, among, asked_for):
                    stay = ~np.isin(own, leaving[head.term])
                    if stay.any():
                        written.append(
                            _row(block.number, head.term, ids, lengths, own[stay], counts[stay])
                        )
                self.connection.execute(
                    f"DELETE FROM packed WHERE block = ? AND {among}", (block.number, asked_for)
                )
                self.put_rows(written)
            ids[places] = lengths[places] = 0
            if ids.any():
                self.put_chunks(block.number, ids, lengths)
            else:
                self._drop(block.number)

    # Reading

    def heads(self, terms: Sequence[str]) -> dict[str, list[Head]]:
        """The heads of the rows of each term. Raises DamagedCatalogError."""
        by_term: dict[str, list[Head]] = {term: [] for term in terms}
        blocks = [block.number for block in self.blocks()]
        if not blocks or not terms:
            return by_term
        rows = self.connection.execute(
            "SELECT packed.block, term, holders, weight, most, least, content, packed.xxh3 "
            "FROM json_each(?) AS numbers CROSS JOIN json_each(?) AS words CROSS JOIN packed "
            "ON packed.block = numbers.value AND term = words.value",
            (json.dumps(blocks), json.dumps(terms)),
        )
        for *values, xxh3 in rows:
            head = Head(*values)
            if head.xxh3 != xxh3:
                raise self._damaged(head.term)
            by_term[head.term].append(head)
        return by_term

    def chunks(self) -> PackedChunks:
        """The chunks of all blocks, of which there is one at least."""
        blocks = self.blocks()
        known = tuple((block.number, block.xxh3) for block in blocks)
        if not self._together or self._together[0].blocks != known:
            self._together[:] = [PackedChunks.of(blocks)]
        return self._together[0]

    def postings(self, heads: Sequence[Head], chunks: PackedChunks) -> Held:
        """The postings of a term, given its heads in the order of blocks.

        They are held against their digests. Raises DamagedCatalogError.
        """
        name = tuple((chunks.starts[head.block], head.content) for head in heads)
        held = self._held.get(name)
        if held is None:
            rows = dict(
                self.connection.execute(
                    f"SELECT block, {_POSTINGS} FROM json_each(?) CROSS JOIN packed "
                    f"ON block = value AND term = ? {_LISTS}",
                    (json.dumps([head.block for head in heads]), heads[0].term),
                ).fetchall()
            )
            places, counts = [], []
            for head in heads:
                data = rows.get(head.block)
                if data is None or _digest(data) != head.content:
                    raise self._damaged(head.term)
                size = chunks.sizes[head.block]
                own, times = self._views(size, head.term, data, head.holders)
                places.append(own + np.int32(chunks.starts[head.block]))
                counts.append(times)
            held = np.concatenate(places), np.concatenate(counts)
            with contextlib.suppress(ValueError):  # of more bytes than are held
                self._held[name] = held
        return held

    def _unpacked(
        self, block: PostingBlock, term: str, postings: bytes | None, holders: int
    ) -> tuple[PostingPlaces, NDArray[np.int64]]:
        places, counts = self._views(len(block.ids), term, postings, holders)
        return places.astype(np.int64), counts.astype(np.int64)

    def _views(
        self, chunks: int, term: str, postings: bytes | None, holders: int
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Places and counts of a row of a block of so many chunks."""
        data, parts = postings or b"", _parts(chunks)
        start = 4 * parts
        width, rest = divmod(len(data) - start - 2 * holders, max(1, holders))
        if width not in (1, 2, 4) or rest:
            raise self._damaged(term)
        places: NDArray[Any] = np.frombuffer(data, "<u2", holders, start)
        if parts:
            sizes = np.frombuffer(data, "<u4", parts)
            if sizes.sum() != holders:
                raise self._damaged(term)
            places = places + np.repeat(np.arange(parts, dtype=np.int32) << _PART, sizes)
        return places, np.frombuffer(data, f"<u{width}", holders, start + 2 * holders)

    def all_postings(self) -> Iterator[tuple[str, NDArray[np.int64], NDArray[np.int64]]]:
        """Term, chunk ids and counts of every row of every block, in no order of terms."""
        for block in self.blocks():
            after: str | None = ""
            while after is not None:
                rows = self.checked_rows(block, after, _ROWS)
                for head, places, counts in rows:
                    yield head.term, block.ids[places], counts
                after = rows[-1][0].term if len(rows) == _ROWS else None

    def checked_rows(self, block: PostingBlock, after: str, limit: int) -> list[PackedRow]:
        """The next rows of a block by term, held against digests. Raises DamagedCatalogError."""
        return self._checked(block, "term > ? ORDER BY term LIMIT ?", after, limit)

    def _checked(self, block: PostingBlock, condition: str, *values: str | int) -> list[PackedRow]:
        found = []
        for *row, xxh3, postings in self.connection.execute(
            f"SELECT block, term, holders, weight, most, least, content, xxh3, {_POSTINGS} "
            f"FROM packed {_LISTS} WHERE block = ? AND {condition}",
            (block.number, *values),
        ).fetchall():
            head = Head(*row)
            if head.xxh3 != xxh3 or postings is None or _digest(postings) != head.content:
                raise self._damaged(head.term)
            found.append((head, *self._unpacked(block, head.term, postings, head.holders)))
        return found


def _nbytes(postings: Held) -> int:
    return sum(part.nbytes for part in postings)


def _row(
    number: int,
    term: str,
    ids: NDArray[np.int64],
    lengths: NDArray[np.int64],
    places: NDArray[np.int64],
    counts: NDArray[np.int64],
) -> tuple[Any, ...]:
    """The row of a term."""
    weight = int(((ids[places] * (2 * counts + 1)) & _LOW).sum())
    least = int(lengths[places].min())
    return packed_row(number, len(ids), term, places, counts, weight, int(counts.max()), least)


def packed_row(
    number: int,
    chunks: int,
    term: str,
    places: NDArray[np.int64],
    counts: NDArray[np.int64],
    weight: int,
    most: int,
    least: int,
) -> tuple[Any, ...]:
    """The row of a term in a block of so many chunks; the last three are those of ``Head``."""
    width = 1 if most < 1 << 8 else 2 if most < 1 << 16 else 4
    own = places & ((1 << _PART) - 1)
    postings = own.astype("<u2").tobytes() + counts.astype(f"<u{width}").tobytes()
    if parts := _parts(chunks):
        postings = np.bincount(places >> _PART, minlength=parts).astype("<u4").tobytes() + postings
    head = Head(number, term, len(places), weight, most, least, _digest(postings))
    return (*head, head.xxh3, postings)


def _parts(chunks: int) -> int:
    """Of how many parts a row of a block of so many chunks tells how many holders they have."""
    return -(-chunks >> _PART) if chunks > 1 << _PART else 0


def _digest(data: bytes) -> int:
    digest = xxhash.xxh3_64_intdigest(data)
    return digest - (1 << 64) if digest >> 63 else digest

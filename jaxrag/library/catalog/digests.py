"""Digests of the catalog's rows and totals of its tables: what was written is what is read.

The checksum of a page sees flipped bits. It does not see a row that another program changed, took
from elsewhere or removed: that is what the column ``xxh3`` and the table ``totals`` are for. They
find accidents, not attackers: whoever may write the file may write digests.
"""

import dataclasses
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from jaxrag.base.errors import DamagedCatalogError
from jaxrag.base.types import Connection, HostArray
from jaxrag.library.catalog.database import damaged

_LOW = 0xFFFFFFFF

# Tells which chunk ids there are, with their number: in SQL, and of an array below.
IDS = f"COUNT(*), COALESCE(SUM(({{0}} * {{0}} + {{0}}) & {_LOW}), 0)"

CREATE_TOTALS = (
    "CREATE TABLE totals (one INTEGER PRIMARY KEY, documents INTEGER NOT NULL, "
    "chunks INTEGER NOT NULL, chunk_ids INTEGER NOT NULL, terms INTEGER NOT NULL, "
    "words INTEGER NOT NULL, settings INTEGER NOT NULL, settings_xxh3 INTEGER NOT NULL, "
    "xxh3 INTEGER NOT NULL)"
)

_EIGHT = struct.Struct("<q").pack
_INTEGER = b"i" + _EIGHT(8)
_NOTHING = b"n" + _EIGHT(0)
_SHORT = 256
_TEXTS = tuple(b"t" + _EIGHT(length) for length in range(_SHORT))  # what stands before short ones


@dataclasses.dataclass(frozen=True)
class DigestTable:
    """A table whose rows have a digest in their last column, ``xxh3``."""

    name: str
    columns: tuple[str, ...]

    def digest(self, values: Iterable[object]) -> int:
        """xxh3-64 of a row as a signed integer: name, then kind, length and bytes of each value."""
        parts = [self.name.encode()]
        add = parts.append
        for value in values:
            if isinstance(value, str):
                data = value.encode()
                add(_TEXTS[len(data)] if len(data) < _SHORT else b"t" + _EIGHT(len(data)))
            elif isinstance(value, int):
                add(_INTEGER)
                data = _EIGHT(value)
            elif isinstance(value, bytes):
                data = value
                add(b"b" + _EIGHT(len(data)))
            elif value is None:
                data = _NOTHING
            else:
                data = str(value).encode()
                add(b"f" + _EIGHT(len(data)))
            add(data)
        found = xxhash.xxh3_64_intdigest(b"".join(parts))
        return found - (1 << 64) if found >> 63 else found

    def insert(self, how: str = "INSERT") -> str:
        """The statement that adds ``row``."""
        places = ", ".join("?" * (len(self.columns) + 1))
        return f"{how} INTO {self.name} VALUES ({places})"

    def row(self, values: Sequence[Any]) -> Sequence[Any]:
        """The values of a row with its digest."""
        return (*values, self.digest(values))

    def select(self) -> str:
        """The columns of a row as a query names them, its digest last."""
        return ", ".join(f"{self.name}.{column}" for column in (*self.columns, "xxh3"))

    def is_whole(self, row: Sequence[Any]) -> bool:
        """Whether the values of a row, its digest last, are those that it was written with."""
        return row[-1] == self.digest(row[:-1])


SETTINGS = DigestTable("settings", ("name", "value"))
DOCUMENTS = DigestTable(
    "documents",
    ("id", "title", "file", "metadata", "digest", "num_chunks", "num_tokens", "added"),
)
CHUNKS = DigestTable(
    "chunks",
    (
        "id", "document_id", "number", "first_char", "last_char", "page", "section", "content_id",
        "text", "ids",
    ),
)  # fmt: skip
# Its digest also covers the content ids of the chunk's contexts, in their order.
KEYS = DigestTable("chunk_keys", ("chunk_id", "encoder", "key"))
TOTALS = DigestTable(
    "totals",
    (
        "one", "documents", "chunks", "chunk_ids", "terms", "words", "settings",
        "settings_xxh3",
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Totals:
    """What the tables hold together.

    Attributes:
      chunk_ids: the sum of id * id + id, 32 bits of each.
      terms: of all chunks, repeats counted.
      words: rows of the table ``terms``.
      settings_xxh3: the sum of their digests, 32 bits of each.
    """

    documents: int = 0
    chunks: int = 0
    chunk_ids: int = 0
    terms: int = 0
    words: int = 0
    settings: int = 0
    settings_xxh3: int = 0

    @classmethod
    def read(cls, connection: Connection, path: Path) -> "Totals":
        """The totals as they are remembered. Raises DamagedCatalogError."""
        row = connection.execute(f"SELECT {TOTALS.select()} FROM totals").fetchone()
        if row is None or not TOTALS.is_whole(row):
            raise unlike(path, "its totals are")
        return cls(*row[1:-1])

    @classmethod
    def counted(cls, connection: Connection) -> "Totals":
        """The totals of what is there."""
        (documents,) = connection.execute("SELECT COUNT(*) FROM documents").fetchone()
        chunks, ids = connection.execute(f"SELECT {IDS.format('id')} FROM chunks").fetchone()
        (terms,) = connection.execute("SELECT COALESCE(SUM(num_terms), 0) FROM lengths").fetchone()
        found = cls(documents, chunks, ids, terms)
        return found.with_words(connection).with_settings(connection)

    def write(self, connection: Connection) -> None:
        """Remember them, in the caller's transaction."""
        values = (1, *dataclasses.astuple(self))
        connection.execute(TOTALS.insert("INSERT OR REPLACE"), TOTALS.row(values))

    def plus(self, **changes: int) -> "Totals":
        """With some of them changed by so much."""
        return dataclasses.replace(
            self, **{name: getattr(self, name) + change for name, change in changes.items()}
        )

    def has_ids(self, chunk_ids: HostArray) -> bool:
        """Whether these, int64 [N], are the ids of all chunks."""
        return len(chunk_ids) == self.chunks and sum_of_ids(chunk_ids) == self.chunk_ids

    def with_words(self, connection: Connection) -> "Totals":
        """With the words as they are now."""
        (words,) = connection.execute("SELECT COUNT(*) FROM terms").fetchone()
        return dataclasses.replace(self, words=words)

    def with_settings(self, connection: Connection) -> "Totals":
        """With the settings as they are now."""
        count, xxh3 = _of_settings(connection.execute("SELECT xxh3 FROM settings").fetchall())
        return dataclasses.replace(self, settings=count, settings_xxh3=xxh3)


def _of_settings(digests: Iterable[Sequence[int]]) -> tuple[int, int]:
    low = [row[0] & _LOW for row in digests]
    return len(low), sum(low)


def sum_of_ids(chunk_ids: Iterable[int] | HostArray) -> int:
    """``Totals.chunk_ids`` of these ids."""
    ids = np.fromiter(chunk_ids, np.int64) if not isinstance(chunk_ids, np.ndarray) else chunk_ids
    return int(((ids * ids + ids) & _LOW).sum())


def unlike(path: Path, what: str) -> DamagedCatalogError:
    """The error for rows that are not as they were written; ``what`` ends in a verb."""
    return damaged(path, f"{what} not as written")


def check_settings(path: Path, rows: Sequence[Sequence[Any]], totals: Totals) -> None:
    """Hold all rows of the settings against their digests. Raises DamagedCatalogError."""
    for row in rows:
        if not SETTINGS.is_whole(row):
            raise unlike(path, f"the setting {row[0]!r} is")
    if _of_settings([row[-1:] for row in rows]) != (totals.settings, totals.settings_xxh3):
        raise unlike(path, "its settings are")


def check_rows(connection: Connection, path: Path, totals: Totals) -> None:
    """Count chunks, lengths and words. Raises DamagedCatalogError for other numbers."""
    chunks = connection.execute(f"SELECT {IDS.format('id')} FROM chunks").fetchone()
    *lengths, terms = connection.execute(
        f"SELECT {IDS.format('chunk_id')}, COALESCE(SUM(num_terms), 0) FROM lengths"
    ).fetchone()
    (words,) = connection.execute("SELECT COUNT(*) FROM terms").fetchone()
    for what, found, known in (
        ("its chunks are", chunks, (totals.chunks, totals.chunk_ids)),
        (
            "the lengths of its chunks are",
            (*lengths, terms),
            (totals.chunks, totals.chunk_ids, totals.terms),
        ),
        ("the words of its chunks are", words, totals.words),
    ):
        if found != known:
            raise unlike(path, what)


def contexts(
    connection: Connection, where: str = "", values: Sequence[Any] = ()
) -> Mapping[tuple[int, str], list[str]]:
    """Content ids in front of chunks that were encoded behind others, in order."""
    found: dict[tuple[int, str], list[str]] = {}
    for chunk_id, encoder, content_id in connection.execute(
        f"SELECT chunk_id, encoder, content_id FROM contexts {where} "
        "ORDER BY chunk_id, encoder, place",
        values,
    ):
        found.setdefault((chunk_id, encoder), []).append(content_id)
    return found

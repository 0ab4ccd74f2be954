"""What is committed in a directory, noted by whoever changes it, so that counting walks no folders.

``ledger/<16 digits of fingerprint>.sqlite`` has a row for every record, and their sums. Whoever is
about to commit or remove a record names its key (table ``changing``), and afterwards says what is
there now. Of a key that was named and not done with, as a killed process leaves it, the record is
read by whoever counts. So what is counted is what is there.

A repository of before there was a ledger is counted by its first writer, in transactions of a part
each, whose writers go on meanwhile: what they say of a key comes after what was read of it.

SQLite's log is of one machine. Over a file system that several share nobody notes, and whoever may
write leaves the file ``shared``: with it, nothing that is noted is believed.

A power cut may undo the last notes, which wait for no disk; a collection of garbage holds them
against the folders.
"""

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrag.base.errors import disk_errors
from jaxrag.kv.store.record import Record
from jaxrag.kv.store.sqlite import connect_checked, store_errors, transaction, use_write_ahead_log

PARTS = tuple(f"{number:02x}" for number in range(256))  # of keys, by their first digits
FOLDER = "ledger"
_SHARED = "shared"  # file there
_BUSY_SECONDS = 60.0
_TURN_SECONDS = 0.05  # of one transaction that counts what was there before
_STALE_SECONDS = 3600.0  # a change that takes longer was killed
_ADVICE = (
    "check the disk and your permissions, or remove the file to count anew while nothing has the "
    "repository open"
)

_ADD = """INSERT INTO sums SELECT 'encoder', new.encoder, 1, new.tokens, new.nbytes
    UNION ALL SELECT 'aux', key, 1, new.tokens, value FROM json_each(new.aux) WHERE true
    ON CONFLICT DO UPDATE SET chunks = chunks + 1, tokens = tokens + excluded.tokens,
    nbytes = nbytes + excluded.nbytes"""
_TAKE = """INSERT INTO sums SELECT 'encoder', old.encoder, 1, old.tokens, old.nbytes
    UNION ALL SELECT 'aux', key, 1, old.tokens, value FROM json_each(old.aux) WHERE true
    ON CONFLICT DO UPDATE SET chunks = chunks - 1, tokens = tokens - excluded.tokens,
    nbytes = nbytes - excluded.nbytes"""
_SCHEMA = (
    """CREATE TABLE records (key BLOB PRIMARY KEY, encoder TEXT NOT NULL, tokens INTEGER NOT NULL,
        nbytes INTEGER NOT NULL, aux TEXT NOT NULL) WITHOUT ROWID""",
    """CREATE TABLE sums (kind TEXT, name TEXT, chunks INTEGER NOT NULL, tokens INTEGER NOT NULL,
        nbytes INTEGER NOT NULL, PRIMARY KEY (kind, name)) WITHOUT ROWID""",
    f"CREATE TRIGGER added AFTER INSERT ON records BEGIN {_ADD}; END",
    f"CREATE TRIGGER taken AFTER DELETE ON records BEGIN {_TAKE}; END",
    "CREATE TABLE changing (change INTEGER PRIMARY KEY, key BLOB NOT NULL, since REAL NOT NULL)",
    "CREATE INDEX changing_by_key ON changing (key)",
    "CREATE TABLE counted (part TEXT PRIMARY KEY) WITHOUT ROWID",
)


@dataclasses.dataclass(frozen=True)
class StoredChunk:
    """What counts of a record."""

    tokens: int
    nbytes: int
    encoder: str
    aux: Mapping[str, int]  # bytes of auxiliary arrays by name

    @classmethod
    def of(cls, record: Record) -> "StoredChunk":
        """What counts of this one."""
        aux = {name: array.nbytes for name, array in record.aux.items()}
        return cls(record.tokens, record.nbytes, record.encoder, aux)


@dataclasses.dataclass
class Sum:
    """Of some chunks together."""

    chunks: int = 0
    tokens: int = 0
    nbytes: int = 0


@dataclasses.dataclass(frozen=True)
class Sums:
    """What is committed: of every encoder its chunks, and of every auxiliary array by name."""

    encoders: dict[str, Sum] = dataclasses.field(default_factory=dict)
    aux: dict[str, Sum] = dataclasses.field(default_factory=dict)

    def add(self, stored: StoredChunk, chunks: int = 1) -> None:
        """Count a record; with -1, no more."""
        of = [(self.encoders, stored.encoder, stored.nbytes)]
        of += [(self.aux, name, nbytes) for name, nbytes in stored.aux.items()]
        for sums, name, nbytes in of:
            own = sums.setdefault(name, Sum())
            own.chunks += chunks
            own.tokens += chunks * stored.tokens
            own.nbytes += chunks * nbytes


class Ledger:
    """The notes of one fingerprint. Safe to share between threads; others open their own."""

    def __init__(
        self,
        path: Path,
        writable: bool,
        listed: Callable[[str], Sequence[str]],
        find: Callable[[Sequence[str]], Mapping[str, object]],
    ) -> None:
        """Bind the file at ``path``, which is opened when it is needed.

        Args:
            path: of the file.
            writable: whether it may be made and changed.
            listed: the keys that have a folder in a part.
            find: of keys a Record each, or anything else where there is none.
        """
        self._path = path
        self._writable = writable
        self._listed = listed
        self._find = find
        self._lock = threading.RLock()
        self._open: Any = None
        self._whole = False  # everything of before is counted

    @contextlib.contextmanager
    def changing(self, key: str) -> Iterator[Callable[[Record | None], None]]:
        """Change the record of a key within; call what this gives with the one that is there now.

        Not called, it says that nothing was changed. What ends in an error is looked up by whoever
        counts.

        Raises:
            StoreError: the file cannot be written.
        """
        name = bytes.fromhex(key)
        self._count()
        with self._transaction() as connection:
            connection.execute("INSERT INTO changing VALUES (NULL, ?, ?)", (name, time.time()))
            change = connection.last_insert_rowid()
        now: list[Record | None] = []
        yield now.append
        with self._transaction() as connection:
            (others,) = connection.execute(
                "SELECT COUNT(*) FROM changing WHERE key = ? AND change != ?", (name, change)
            ).fetchone()
            if now and others:
                return  # which of them came last, only a look at the record tells
            if now:
                _set(connection, name, now[-1])
            connection.execute("DELETE FROM changing WHERE change = ?", (change,))

    def counted(self) -> tuple[Sums, list[str]] | None:
        """What is noted, and the keys that are not in it, as they may be changing.

        None where there is no ledger, not all is counted yet, or others may not note.

        Raises:
            StoreError: the file cannot be read.
        """
        with self._lock, store_errors(self._path, _ADVICE):
            if not self._path.exists() or (self._path.parent / _SHARED).exists():
                return None
            connection = self._connection()
            with transaction(connection, "BEGIN"):
                if not (self._whole or _has_tables(connection)):
                    return None  # whoever was making it was killed
                (parts,) = connection.execute("SELECT COUNT(*) FROM counted").fetchone()
                if parts < len(PARTS):
                    return None
                totals = Sums()
                for kind, name, *numbers in connection.execute(
                    "SELECT * FROM sums WHERE chunks > 0"
                ):
                    sums = totals.encoders if kind == "encoder" else totals.aux
                    sums[name] = Sum(*numbers)
                changing = "SELECT DISTINCT key FROM changing"
                keys = [name.hex() for (name,) in connection.execute(changing)]
                for encoder, tokens, nbytes, aux in connection.execute(
                    f"SELECT encoder, tokens, nbytes, aux FROM records WHERE key IN ({changing})"
                ).fetchall():
                    totals.add(StoredChunk(tokens, nbytes, encoder, json.loads(aux)), -1)
                return totals, keys

    def check(self) -> None:
        """Hold the notes against the folders, and read the records of what differs.

        Raises:
            StoreError: the file cannot be written.
        """
        self._count()
        for part in PARTS:
            with self._transaction() as connection:
                self._check_part(connection, part)

    def _check_part(self, connection: Any, part: str) -> None:
        """``check`` of the keys of one part."""
        among = bytes.fromhex(part), bytes.fromhex(part) + b"\xff" * 20
        rows = connection.execute("SELECT key FROM records WHERE key BETWEEN ? AND ?", among)
        noted = {name.hex() for (name,) in rows}
        stale = (*among, time.time() - _STALE_SECONDS)
        unsure = connection.execute(
            "SELECT key FROM changing WHERE key BETWEEN ? AND ? AND since < ?", stale
        ).fetchall()
        asked = (set(self._listed(part)) ^ noted) | {name.hex() for (name,) in unsure}
        for key, found in self._find(sorted(asked)).items():
            _set(connection, bytes.fromhex(key), found if isinstance(found, Record) else None)
        connection.execute("DELETE FROM changing WHERE key BETWEEN ? AND ? AND since < ?", stale)

    def close(self) -> None:
        """Close the file; it is opened again when it is needed."""
        with self._lock, store_errors(self._path, _ADVICE):
            if self._open is not None:
                self._open.close()
                self._open = None

    def _count(self) -> None:
        """Note what was there before there was a ledger."""
        while not self._whole:
            with self._transaction() as connection:
                end = time.monotonic() + _TURN_SECONDS
                done = {part for (part,) in connection.execute("SELECT part FROM counted")}
                left = [part for part in PARTS if part not in done]
                for part in left:
                    self._check_part(connection, part)
                    connection.execute("INSERT INTO counted VALUES (?)", (part,))
                    if time.monotonic() >= end:
                        break
                self._whole = not left

    def _connection(self) -> Any:  # APSW's; its rows are of any type
        if self._open is None:
            if self._writable:
                self._path.parent.mkdir(exist_ok=True)
            connection = connect_checked(self._path, self._writable, _BUSY_SECONDS)
            if self._writable:
                use_write_ahead_log(connection, _BUSY_SECONDS)
                connection.execute("PRAGMA synchronous = NORMAL")
            self._open = connection
        return self._open

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[Any]:
        with self._lock, store_errors(self._path, _ADVICE):
            connection = self._connection()
            with transaction(connection):
                if not (self._whole or _has_tables(connection)):
                    for statement in _SCHEMA:
                        connection.execute(statement)
                yield connection


def disown(folder: Path) -> None:
    """Say that somebody may change records without a note, as over a shared file system.

    Raises StoreError where that cannot be written.
    """
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _SHARED).touch()


def _has_tables(connection: Any) -> bool:
    return connection.execute("SELECT 1 FROM sqlite_master").fetchone() is not None


def _set(connection: Any, name: bytes, record: Record | None) -> None:
    """Note a record of a key, or none, instead of what was noted."""
    connection.execute("DELETE FROM records WHERE key = ?", (name,))
    if record is not None:
        stored = StoredChunk.of(record)
        row = name, stored.encoder, stored.tokens, stored.nbytes, json.dumps(dict(stored.aux))
        connection.execute("INSERT INTO records VALUES (?, ?, ?, ?, ?)", row)

"""A size limit on a local store: which chunks have to leave so that another one fits.

A limit is that of one fingerprint: it counts the chunks of that fingerprint, and only they leave.
The chunks of others in the same store, another tenant's perhaps, are neither counted nor touched.

The bookkeeping is an SQLite file beside the chunks, shared by every process that opened the store.
A chunk is counted before its bytes are written and struck off after they are gone, so a process
that is killed leaves the count too high, never too low; what it counts too much leaves like any
other chunk.

Heat is the number of reads, each decayed by its age. All reads decay at one rate, so the order of
two chunks changes only when one of them is read: their heat is kept as a logarithm relative to one
fixed moment and never has to be aged (forward decay: Cormode, Shkapenyuk, Srivastava and Xu 2009,
section 3).
"""

import contextlib
import math
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from jaxrag.base.errors import StoreError
from jaxrag.kv.store.namespace import Namespace
from jaxrag.kv.store.record import Record
from jaxrag.kv.store.sqlite import connect, store_errors, transaction, use_write_ahead_log

FILE = "heat.sqlite"
HALF_LIFE_SECONDS = 86_400.0  # a read counts half as much a day later

_FORMAT = 2
_BUSY_SECONDS = 60.0
_PENDING_SECONDS = 3600.0  # a put that takes longer was killed
_FLUSH_SECONDS = 10.0
_FLUSH_READS = 4096
_VICTIMS = 256  # of one round
_ROUNDS = 8  # of one put
_ADVICE = "check the disk and your permissions, or remove the file to count anew"

_SCHEMA = (
    # heat: log2 of the sum over reads of 2^(time of read / half-life). last: time of the last read,
    # for whoever looks into the file. pending: when a put that is not over was admitted, else 0.
    # version: random, per admission.
    """CREATE TABLE chunks (
        fingerprint TEXT NOT NULL, key TEXT NOT NULL, nbytes INTEGER NOT NULL,
        heat REAL NOT NULL, last REAL NOT NULL, pending REAL NOT NULL, version INTEGER NOT NULL,
        PRIMARY KEY (fingerprint, key)) WITHOUT ROWID""",
    # Index, sums and triggers. A fingerprint has its sum from when its chunks were counted.
    "CREATE INDEX chunks_by_heat ON chunks (fingerprint, heat)",
    "CREATE TABLE totals (fingerprint TEXT PRIMARY KEY, nbytes INTEGER NOT NULL) WITHOUT ROWID",
    """CREATE TRIGGER counted AFTER INSERT ON chunks BEGIN
        UPDATE totals SET nbytes = nbytes + new.nbytes WHERE fingerprint = new.fingerprint; END""",
    """CREATE TRIGGER struck AFTER DELETE ON chunks BEGIN
        UPDATE totals SET nbytes = nbytes - old.nbytes WHERE fingerprint = old.fingerprint; END""",
    """CREATE TRIGGER resized AFTER UPDATE OF nbytes ON chunks BEGIN
        UPDATE totals SET nbytes = nbytes - old.nbytes + new.nbytes
        WHERE fingerprint = new.fingerprint; END""",
    f"PRAGMA user_version = {_FORMAT}",
)


Standing = Callable[[], Iterable[tuple[str, int, float]]]  # key, bytes and age in seconds of each


class SizeLimit:
    """The limit of one fingerprint on its own chunks, by key; only they leave.

    Safe to share between threads; others open their own. What leaves to make room is dropped
    within the call that needs it.
    """

    def __init__(
        self,
        path: Path,
        fingerprint: str,
        max_bytes: int | None,
        standing: Standing,
        drop: Callable[[Sequence[str]], object],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the file, or make it; count what is ``standing`` unless that was done.

        Args:
            path: the file; one for all fingerprints of a store.
            fingerprint: whose chunks are counted.
            max_bytes: the limit on the bytes of its chunks; None only counts.
            standing: lists those that are there.
            drop: removes chunks; one that is not there is no error.
            clock: seconds since 1970.

        Raises:
            StoreError: a limit that is no positive number, or a file that cannot be used.
        """
        if max_bytes is not None and (type(max_bytes) is not int or max_bytes < 1):
            raise StoreError(f"max_bytes={max_bytes!r}: expected a positive integer or None")
        self.path = path
        self.fingerprint = fingerprint
        self.max_bytes = max_bytes
        self._drop, self._clock = drop, clock
        self._lock = threading.RLock()
        self._reads: dict[str, tuple[int, float]] = {}  # how many, when the last
        self._flushed = clock()
        with store_errors(path, _ADVICE):
            self._connection = connect(path, _BUSY_SECONDS)
            use_write_ahead_log(self._connection, _BUSY_SECONDS)
            self._connection.create_function("add_log2", 2, _add_log2, deterministic=True)
        try:
            with self._transaction() as connection:
                (version,) = connection.execute("PRAGMA user_version").fetchone()
                if version not in (0, _FORMAT):
                    raise StoreError(
                        f"{path} has format {version}, this version reads {_FORMAT}; remove the "
                        "file to count anew"
                    )
                for statement in _SCHEMA if version == 0 else ():
                    connection.execute(statement)
                self._count(connection, standing)
        except BaseException:
            self._connection.close()
            raise

    @classmethod
    def open(cls, space: Namespace, max_bytes: int | None) -> "SizeLimit | None":
        """The limit of a fingerprint; None when none is given and the repository never had one.

        ``space`` has its chunks however long, sealed or not.

        Chunks that stand there uncounted are counted, which reads their records. What is beyond
        the limit leaves at once.

        Raises:
            StoreError: a limit on something other than a directory, or one that is no positive
                number; the count cannot be read or written.
        """
        backend = space.backend
        if backend.directory is None:
            if max_bytes is None:
                return None
            raise StoreError(
                f"{backend.location}: max_bytes={max_bytes} needs a local directory; put a local "
                "store with this limit in front of it (jaxrag.kv.store.ReadThrough)"
            )
        path = backend.directory / FILE
        if max_bytes is None and not path.exists():
            return None

        def standing() -> Iterator[tuple[str, int, float]]:
            for record in space.find_all():
                if isinstance(record, Record):
                    yield record.key, record.nbytes, record.age

        def drop(keys: Sequence[str]) -> None:
            for key in keys:
                space.delete(key)

        limit = cls(path, space.fingerprint, max_bytes, standing, drop)
        limit._within_limit(None, None, 0, "", ())  # however many leave
        return limit

    def close(self) -> None:
        """Write down the reads that were counted and close the file."""
        with self._lock:
            self._flush_quietly()
            self._connection.close()

    def nbytes(self) -> int:
        """Bytes of the chunks that are counted, those on their way in among them."""
        with self._transaction() as connection:
            return self._total(connection)

    def read(self, keys: Iterable[str]) -> None:
        """Count a read of each chunk. It is written down later, in a batch, or lost: no error."""
        with self._lock:
            now = self._clock()
            for key in keys:
                reads, _ = self._reads.get(key, (0, now))
                self._reads[key] = (reads + 1, now)
            due = now - self._flushed >= _FLUSH_SECONDS
            if due or len(self._reads) >= _FLUSH_READS:
                self._flush_quietly()

    def admit(self, key: str, nbytes: int) -> None:
        """Make room for a chunk and count it; call before a byte of it is written.

        Other puts under way may take the store over its limit until they are settled.

        Raises:
            StoreError: the chunk is larger than the limit, or the file cannot be written.
        """
        if self.max_bytes is not None and nbytes > self.max_bytes:
            raise StoreError(
                f"chunk {key} has {nbytes} bytes, the store may hold max_bytes="
                f"{self.max_bytes}: raise the limit or use smaller chunks"
            )
        now = self._clock()
        self._within_limit(
            _ROUNDS,
            key,
            nbytes,
            "INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?, random()) ON CONFLICT DO UPDATE SET "
            "nbytes = excluded.nbytes, pending = excluded.pending, version = excluded.version",
            (self.fingerprint, key, nbytes, _log2(now), now, now),
        )

    def settle(self, key: str, nbytes: int) -> None:
        """The put of an admitted chunk of so many bytes is over. Makes room where it has to."""
        with self._transaction() as connection:
            connection.execute(
                "UPDATE chunks SET pending = 0, nbytes = ? WHERE fingerprint = ? AND key = ?",
                (nbytes, self.fingerprint, key),
            )
            if self.max_bytes is None or self._total(connection) <= self.max_bytes:
                return
        self._within_limit(_ROUNDS, None, 0, "", ())

    def recount(self, keys: Callable[[], Iterable[str]]) -> None:
        """Strike off what is counted and not among ``keys``, but for what is put meanwhile."""
        with self._transaction() as connection:
            counted = connection.execute(
                "SELECT key, version FROM chunks WHERE fingerprint = ? AND pending < ?",
                (self.fingerprint, self._stalled()),
            ).fetchall()
        standing = set(keys())
        with self._transaction() as connection:
            self._strike(connection, [pair for pair in counted if pair[0] not in standing])

    def strike(self, keys: Iterable[str]) -> None:
        """These chunks are gone."""
        with self._transaction() as connection:
            connection.executemany(
                "DELETE FROM chunks WHERE fingerprint = ? AND key = ?",
                [(self.fingerprint, key) for key in keys],
            )

    def _within_limit(
        self,
        rounds: int | None,
        coming: str | None,
        nbytes: int,
        statement: str,
        values: tuple[str | float, ...],
    ) -> None:
        """Drop chunks until ``nbytes`` more of ``coming`` fit, then execute the statement.

        After so many rounds, or with nothing left to drop, it is executed all the same.
        """
        left: list[tuple[str, int]] = []
        while True:
            with self._transaction(durable=coming is not None) as connection:
                self._flush(connection)
                self._strike(connection, left)
                left = self._coldest(connection, coming, nbytes) if rounds != 0 else []
                if not left:
                    connection.execute(statement, values)
                    return
            self._drop([key for key, _ in left])
            rounds = None if rounds is None else rounds - 1

    def _coldest(
        self, connection: sqlite3.Connection, coming: str | None, nbytes: int
    ) -> list[tuple[str, int]]:
        """Chunks and their versions that must leave before ``nbytes`` more of one chunk fit."""
        if self.max_bytes is None:
            return []
        own = coming or ""
        (held,) = connection.execute(
            "SELECT TOTAL(nbytes) FROM chunks WHERE fingerprint = ? AND key = ?",
            (self.fingerprint, own),
        ).fetchone()
        over = self._total(connection) - held + nbytes - self.max_bytes
        if over <= 0:
            return []
        rows = connection.execute(
            "SELECT key, version, nbytes FROM chunks WHERE fingerprint = ? AND pending < ? AND "
            "key <> ? ORDER BY heat, key LIMIT ?",
            (self.fingerprint, self._stalled(), own, _VICTIMS),
        )
        victims = []
        for key, version, size in rows:
            victims.append((key, version))
            over -= size
            if over <= 0:
                break
        return victims

    def _count(self, connection: sqlite3.Connection, standing: Standing) -> None:
        """Count the chunks that stand already, unless somebody did."""
        added = connection.execute(
            "INSERT OR IGNORE INTO totals VALUES (?, 0)", (self.fingerprint,)
        ).rowcount
        for key, nbytes, age in standing() if added else ():
            created = self._clock() - age
            connection.execute(
                "INSERT INTO chunks VALUES (?, ?, ?, ?, ?, 0, random())",
                (self.fingerprint, key, nbytes, _log2(created), created),
            )

    def _total(self, connection: sqlite3.Connection) -> int:
        (nbytes,) = connection.execute(
            "SELECT nbytes FROM totals WHERE fingerprint = ?", (self.fingerprint,)
        ).fetchone()
        return int(nbytes)

    def _flush(self, connection: sqlite3.Connection) -> None:
        """Write down the reads; a chunk that is not counted was dropped since."""
        connection.executemany(
            "UPDATE chunks SET heat = add_log2(heat, ?), last = ? WHERE fingerprint = ? AND "
            "key = ?",
            [
                (_log2(last) + math.log2(reads), last, self.fingerprint, key)
                for key, (reads, last) in self._reads.items()
            ],
        )
        self._reads.clear()
        self._flushed = self._clock()

    def _flush_quietly(self) -> None:
        # A chunk that was read well must not be refused because its read cannot be counted.
        with contextlib.suppress(StoreError), self._transaction() as connection:
            self._flush(connection)
        self._reads.clear()
        self._flushed = self._clock()

    def _strike(self, connection: sqlite3.Connection, pairs: Iterable[tuple[str, int]]) -> None:
        # A chunk that was put again while it was dropped has another version, and stays.
        connection.executemany(
            "DELETE FROM chunks WHERE fingerprint = ? AND key = ? AND version = ?",
            [(self.fingerprint, key, version) for key, version in pairs],
        )

    def _stalled(self) -> float:
        """Puts admitted before this moment were killed; settled chunks have 0."""
        return self._clock() - _PENDING_SECONDS

    @contextlib.contextmanager
    def _transaction(self, durable: bool = False) -> Iterator[sqlite3.Connection]:
        """One write transaction. A power cut may undo it unless it is ``durable``."""
        with self._lock, store_errors(self.path, _ADVICE):
            self._connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            with transaction(self._connection):
                yield self._connection


def _log2(moment: float) -> float:
    """What one read at ``moment`` adds to a chunk's heat, as its logarithm."""
    return moment / HALF_LIFE_SECONDS


def _add_log2(a: float, b: float) -> float:
    """log2(2^a + 2^b)."""
    high, low = max(a, b), min(a, b)
    return high + math.log2(1 + 2 ** (low - high))

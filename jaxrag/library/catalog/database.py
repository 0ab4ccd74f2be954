"""The SQLite file under the catalog: its tables, how it is opened, and its transactions.

The file is in WAL mode with ``synchronous=FULL``: several processes may read while one writes, and
a returned commit survives a power cut. Each page ends in a checksum of its bytes, which SQLite's
checksum VFS writes with the page and compares at every read: a flipped bit is an error, not a row.
"""

import contextlib
import json
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw

from jaxrag.base.errors import DamagedCatalogError, KnowledgeBaseError, StoreError
from jaxrag.base.types import Connection
from jaxrag.kv.store.sqlite import CHECKSUM_BYTES, connect_checked, use_write_ahead_log
from jaxrag.library.catalog.pages import PAGE_BYTES
from jaxrag.library.retrieve.packed import PACKED

FORMAT = 4  # of one whose postings are not packed; PACKED is that of others
_FORMATS = (FORMAT, PACKED)
BUSY_SECONDS = 60.0
_CHECKPOINT_SECONDS = 1.0  # that a checkpoint waits for readers of an older state
_READING_CACHE = 16 << 20  # bytes; a search of a million chunks passes by pages of SQLite's 2 MB
_COPIED_AT_ONCE = 4096  # pages
_APPLICATION = 0x4A524147  # "JRAG", SQLite's application_id

_OPEN: weakref.WeakSet["Database"] = weakref.WeakSet()  # of this process
_OPEN_LOCK = threading.Lock()

_SCHEMA = (
    "CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL, "
    "xxh3 INTEGER NOT NULL) WITHOUT ROWID",
    """CREATE TABLE documents (
        id TEXT PRIMARY KEY, title TEXT NOT NULL, file TEXT, metadata TEXT NOT NULL,
        digest TEXT NOT NULL, num_chunks INTEGER NOT NULL, num_tokens INTEGER NOT NULL,
        added TEXT NOT NULL, xxh3 INTEGER NOT NULL) WITHOUT ROWID""",
    """CREATE TABLE chunks (
        id INTEGER PRIMARY KEY,
        document_id TEXT NOT NULL REFERENCES documents(id) ON DELETE CASCADE,
        number INTEGER NOT NULL, first_char INTEGER NOT NULL, last_char INTEGER NOT NULL,
        page INTEGER, section TEXT NOT NULL, content_id TEXT NOT NULL,
        text TEXT NOT NULL, ids BLOB NOT NULL, xxh3 INTEGER NOT NULL,
        UNIQUE (document_id, number))""",
    "CREATE INDEX chunks_by_content ON chunks (content_id)",
    """CREATE TABLE chunk_keys (
        chunk_id INTEGER NOT NULL REFERENCES chunks(id) ON DELETE CASCADE,
        encoder TEXT NOT NULL, key TEXT NOT NULL, xxh3 INTEGER NOT NULL,
        PRIMARY KEY (chunk_id, encoder)) WITHOUT ROWID""",
    "CREATE INDEX chunk_keys_by_key ON chunk_keys (key)",
    # What stood in front of a chunk when it was encoded, for encoders that see other chunks.
    """CREATE TABLE contexts (
        chunk_id INTEGER NOT NULL, encoder TEXT NOT NULL, place INTEGER NOT NULL,
        content_id TEXT NOT NULL, PRIMARY KEY (chunk_id, encoder, place),
        FOREIGN KEY (chunk_id, encoder) REFERENCES chunk_keys ON DELETE CASCADE) WITHOUT ROWID""",
    "CREATE INDEX contexts_by_content ON contexts (content_id)",
    # AUTOINCREMENT is not needed: the next reservation starts behind the largest ``last`` ever,
    # and the newest row is never removed.
    "CREATE TABLE reservations (first INTEGER PRIMARY KEY, last INTEGER NOT NULL, made REAL)",
    # Chunks that are gone from the catalog and perhaps not yet from the vector index.
    "CREATE TABLE leaving (chunk_id INTEGER PRIMARY KEY)",
)


class Database:
    """One open catalog file. Safe to share between threads; other processes open their own.

    Transactions have a connection of their own, so that threads which read never wait for one: they
    see the state before it until it is committed.

    Attributes:
      writable: False where its folder cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode = _inode(path)
        self.writable = os.access(path.parent, os.W_OK)
        self._seen = _state(path)  # before it is read
        self._reading = _connect(path, self.writable, _READING_CACHE)
        self._writing: apsw.Connection | None = None  # until the first transaction
        self._writer: int | None = None  # the thread that is in a transaction
        self._changes = 0  # of connections before this one
        self._lock = threading.RLock()  # of the connection that reads
        self._write_lock = threading.RLock()  # of the other one; taken first where both are
        self._depth = 0  # of ``use`` within ``use``
        self._closed = False
        with _OPEN_LOCK:
            _OPEN.add(self)

    def close(self) -> None:
        """Close the file; nothing can be done with it afterwards."""
        with self._write_lock, self._lock:
            self._closed = True
            self._close()
        with _OPEN_LOCK:
            _OPEN.discard(self)

    def _close(self) -> None:
        if self._writing is not None:
            self._writing.close()
            self._writing = None
        self._reading.close()

    @property
    def connection(self) -> apsw.Connection:
        """SQLite's, for this thread now; outside of ``use`` only for objects made on it."""
        if self._writing is not None and self._writer == threading.get_ident():
            return self._writing
        return self._reading

    @contextlib.contextmanager
    def use(self) -> Iterator[Connection]:
        """The connection, held by this thread; SQLite's errors leave as StoreError.

        Those that tell of damage leave as DamagedCatalogError.
        """
        if self._writer == threading.get_ident():
            with _as_store_errors(self.path):
                yield self.connection
            return
        with self._lock, _as_store_errors(self.path):
            if not self._depth and not self.writable:
                self._look_again()
            self._depth += 1
            try:
                yield self.connection
            finally:
                self._depth -= 1

    def _look_again(self) -> None:
        """Open a file anew that others changed: one that is taken as unchanging shows no change."""
        state = _state(self.path)
        if state != self._seen:
            self._changes += self._reading.total_changes() + 1
            self._reading.close()
            self._reading = _connect(self.path, self.writable, _READING_CACHE)
            self._seen = state

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """The connection for several statements that see one state of the file."""
        with self.use():
            connection = self.connection
            try:
                _begin(connection, "BEGIN")
                yield connection
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Connection]:
        """One write transaction: committed at the end, rolled back when anything is raised."""
        if not self.writable:
            raise StoreError(
                f"catalog {self.path}: its folder is read-only; nothing can be changed"
            )
        with self._to_write() as connection:
            try:
                _begin(connection, "BEGIN IMMEDIATE")
                yield connection
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:  # SQLite rolls back by itself when the disk is full
                    connection.execute("ROLLBACK")

    @contextlib.contextmanager
    def _to_write(self) -> Iterator[apsw.Connection]:
        """The connection of transactions, held by this thread."""
        with self._write_lock, _as_store_errors(self.path):
            if self._writing is None:
                if self._closed:
                    raise apsw.ConnectionClosedError("The connection has been closed")
                self._writing = _connect(self.path, self.writable)
            before, self._writer = self._writer, threading.get_ident()
            try:
                yield self._writing
            finally:
                self._writer = before

    def checkpoint(self) -> None:
        """Move what was committed from the write-ahead log into the file, and empty the log.

        SQLite drops every commit of the log from the first damaged frame on without a word. So
        what was acknowledged is not left there. While another process reads an older state, the
        log stays, for the next call to empty.
        """
        with self._to_write() as connection:
            connection.execute(f"PRAGMA busy_timeout = {round(1000 * _CHECKPOINT_SECONDS)}")
            try:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            except (apsw.BusyError, apsw.FullError):
                pass
            finally:
                connection.execute(f"PRAGMA busy_timeout = {round(1000 * BUSY_SECONDS)}")

    def copy_to(self, path: Path, told: Callable[[int], object]) -> None:
        """Write the file as it is now to a new one, while others go on writing; durable at the end.

        Args:
          told: is called with the bytes of every part that was copied.

        Raises StoreError where the new one cannot be written.
        """
        with self.snapshot() as connection:
            connection.execute("SELECT 1 FROM sqlite_master").fetchone()  # from here on one state
            with (
                _unwritable(path),
                contextlib.closing(_connect(path, True)) as copy,
                copy.backup("main", self.connection, "main") as backup,
            ):
                copied = 0
                while not backup.done:
                    backup.step(_COPIED_AT_ONCE)
                    done = backup.page_count - backup.remaining
                    told((done - copied) * PAGE_BYTES)
                    copied = done

    def version(self) -> tuple[int, int]:
        """Another value after every change of the file, by this object or anybody else."""
        with self.use() as connection:
            (others,) = connection.execute("PRAGMA data_version").fetchone()
            return int(others), self._changes + self.connection.total_changes()

    def is_empty(self) -> bool:
        """Whether the file holds no table at all.

        Raises DamagedCatalogError where its first page is cut short.
        """
        with self.use() as connection:
            empty = connection.execute("SELECT 1 FROM sqlite_master").fetchone() is None
            if empty:
                self._check_size()
            return empty

    def use_wal(self) -> None:
        """Switch the file to write-ahead logging, which it remembers."""
        with self.use():
            use_write_ahead_log(self.connection, BUSY_SECONDS)

    def make_tables(self) -> None:
        """Make the tables and mark the file, in the caller's transaction."""
        for statement in _SCHEMA:
            self.connection.execute(statement)
        mark(self.connection)

    def check_format(self) -> None:
        """Find out whether the file can be read here.

        Raises KnowledgeBaseError unless it is a catalog of a format that is read here,
        DamagedCatalogError where its header contradicts that.
        """
        if self._inode is not None and self._inode != _inode(self.path):
            raise StoreError(f"catalog {self.path} was repaired in this moment; open it again")
        if self._header("application_id") != _APPLICATION:
            raise KnowledgeBaseError(
                f"{self.path} is not a knowledge base catalog; name another folder"
            )
        self.check_version()
        # Without the reserved bytes no page is checked, not even the one that says so.
        if self._reserved() != CHECKSUM_BYTES:
            raise damaged(self.path, f"byte 20 is {self._reserved()}, not {CHECKSUM_BYTES}")
        self._check_size()

    def check_version(self) -> None:
        """Raise KnowledgeBaseError for a whole catalog that another version made."""
        with self.use() as connection:
            application, found = self._header("application_id"), self._header("user_version")
            statement = "SELECT 1 FROM sqlite_master WHERE name = 'forgotten'"
            old = found in _FORMATS and connection.execute(statement).fetchone() is None
        if application == _APPLICATION and (old or found not in _FORMATS):
            raise KnowledgeBaseError(
                f"{self.path} has format {found}{old * ' of version 0.1'}, this version reads "
                f"formats {' and '.join(map(str, _FORMATS))} of version 0.2; ingest the documents "
                "again into a new folder"
            )

    def _header(self, name: str) -> int:
        with self.use() as connection:
            return int(connection.execute(f"PRAGMA {name}").fetchone()[0])

    def _reserved(self) -> int:
        """Bytes that the file, without its log, says are reserved in each page."""
        with self.use():
            return int(self.connection.read("main", 0, 0, 100)[1][20])

    def _check_size(self) -> None:
        """Raise DamagedCatalogError for a cut page: SQLite reads what lacks of it as zeros."""
        size = self.path.stat().st_size
        if size % PAGE_BYTES:
            raise damaged(self.path, f"it ends amid a page, after {size} bytes")


def damaged(path: Path, what: str) -> DamagedCatalogError:
    """The error for a catalog that cannot be believed."""
    return DamagedCatalogError(
        f"catalog {path} is damaged: {what}; close whatever has it open and run `jaxrag kb verify "
        f"--repair {path.parent}`, or restore a copy"
    )


def is_open(path: Path) -> bool:
    """Whether this process has the file open: no other descriptor of it may be closed then."""
    with _OPEN_LOCK:
        return any(database.path.resolve() == path.resolve() for database in _OPEN)


def _inode(path: Path) -> int | None:
    """The number of the file itself, which another one in its place does not have."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def _state(path: Path) -> tuple[tuple[int, int, int] | None, ...]:
    """What changes with the file or its log: the number, size and time of each."""
    found: list[tuple[int, int, int] | None] = []
    for one in (path, path.with_name(path.name + "-wal")):
        try:
            stat = one.stat()
        except FileNotFoundError:
            found.append(None)
        else:
            found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(found)


def mark(connection: Connection) -> None:
    """Say that a file is a catalog of FORMAT, in the caller's transaction."""
    connection.execute(f"PRAGMA application_id = {_APPLICATION}")
    connection.execute(f"PRAGMA user_version = {FORMAT}")


def to_json(value: object) -> str:
    """JSON as the catalog's columns hold it."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _begin(connection: apsw.Connection, how: str) -> None:
    """Begin a transaction; one that an interrupt left open between two lines is rolled back."""
    if connection.in_transaction:
        connection.execute("ROLLBACK")
    connection.execute(how)


def _connect(path: Path, writable: bool, cache_bytes: int = 0) -> apsw.Connection:
    """SQLite's connection; ``cache_bytes`` are those of pages that it keeps, 0 as it is wont."""
    with _as_store_errors(path):
        connection = connect_checked(path, writable, BUSY_SECONDS)
        try:
            if cache_bytes:
                connection.execute(f"PRAGMA cache_size = -{cache_bytes >> 10}")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA secure_delete = ON")  # removed text is overwritten
        except BaseException:
            connection.close()
            raise
        return connection


def remove_files(path: Path) -> None:
    """Remove a database and what SQLite leaves beside it."""
    for suffix in ("-journal", "-wal", "-shm", ""):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


@contextlib.contextmanager
def _unwritable(path: Path) -> Iterator[None]:
    try:
        yield
    except (apsw.FullError, apsw.IOError) as error:
        if _tells_damage(error):  # of what is copied
            raise
        raise StoreError(
            f"{path} cannot be written; check the disk, its free space and your permissions"
        ) from error


@contextlib.contextmanager
def _as_store_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (apsw.Error, UnicodeDecodeError) as error:
        if _tells_damage(error):
            raise damaged(path, str(error)) from error
        if isinstance(error, apsw.ConnectionClosedError):
            raise StoreError(f"catalog {path} was closed; open it again") from error
        if isinstance(error, apsw.BusyError | apsw.LockedError):
            fix = f"another process held it for {BUSY_SECONDS:.0f} s; try again when it is done"
        else:
            fix = "check the disk, its free space and your permissions, or restore a copy"
        raise StoreError(f"catalog {path}: {error}; {fix}") from error


def _tells_damage(error: Exception) -> bool:
    """Whether an error of SQLite comes from the bytes of the file."""
    if isinstance(error, apsw.IOError):
        return getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_DATA  # not in its stubs
    if isinstance(error, apsw.SQLError):
        return "no such" in str(error)  # a table or column that every catalog has
    return isinstance(error, apsw.CorruptError | apsw.NotADBError | UnicodeDecodeError)

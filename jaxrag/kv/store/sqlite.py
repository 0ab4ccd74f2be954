"""SQLite files: opened with a checksum in every page, and their write-ahead log.

The library of files with checksums is APSW's SQLite, not that of ``sqlite3``. A process never has
one file open in both: closing it in one drops the POSIX locks of the other.
"""

import contextlib
import functools
import os
import sqlite3
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import apsw.sqlite_extra

from jaxrag.base.errors import StoreError

CHECKSUM_BYTES = 8  # of a page
_CHECKSUMS = "cksmvfs"  # the name under which SQLite knows the checksum VFS
_RETRY_SECONDS = 0.01


def connect_checked(path: Path, writable: bool, busy_seconds: float) -> apsw.Connection:
    """Open a file whose pages have checksums, or make it.

    Raises:
        StoreError: this SQLite has no checksums.
        apsw.Error: the file cannot be opened.
    """
    _load_checksums()
    connection = apsw.Connection(
        _address(path, writable),
        flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE | apsw.SQLITE_OPEN_URI,
        vfs=_CHECKSUMS,
    )
    try:
        connection.set_busy_timeout(round(1000 * busy_seconds))
        connection.reserve_bytes("main", CHECKSUM_BYTES)  # of a file that is yet to be made
    except BaseException:
        connection.close()
        raise
    return connection


def connect(path: Path, busy_seconds: float) -> sqlite3.Connection:
    """Open a file without checksums, or make it; any thread may use it, one at a time."""
    return sqlite3.connect(
        path, timeout=busy_seconds, isolation_level=None, check_same_thread=False
    )


@contextlib.contextmanager
def transaction(connection: Any, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
    """One that writes unless told otherwise: committed when it is left, undone on failure."""
    connection.execute(begin)
    try:
        yield
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


@contextlib.contextmanager
def store_errors(path: Path, advice: str) -> Iterator[None]:
    """StoreError, with advice, for what SQLite or the disk refuses."""
    try:
        yield
    except (sqlite3.Error, apsw.Error, OSError) as error:
        raise StoreError(f"{path}: {error}; {advice}") from error


def use_write_ahead_log(
    connection: sqlite3.Connection | apsw.Connection, busy_seconds: float
) -> None:
    """Switch the file to write-ahead logging, which it remembers.

    Waits for others that write, as every other statement does. SQLite itself does not wait here:
    with a shared lock held it cannot tell a wait for an exclusive one from a deadlock.

    Raises:
        sqlite3.OperationalError, apsw.Error: it is still locked after ``busy_seconds``, or not
            usable.
    """
    last = time.monotonic() + busy_seconds
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except (sqlite3.OperationalError, apsw.BusyError) as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_BUSY)  # only of sqlite3
            if code & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > last:
                raise
        time.sleep(_RETRY_SECONDS)


@functools.cache
def _load_checksums() -> None:
    """Make the checksum VFS known to this process's SQLite, once."""
    connection = apsw.Connection(":memory:")
    try:
        apsw.sqlite_extra.load(connection, "cksumvfs")
    except (apsw.Error, LookupError, apsw.sqlite_extra.NotAvailable) as error:
        raise StoreError(
            f"apsw {apsw.apsw_version()} lacks SQLite's checksum VFS ({error}); install apsw "
            "from its wheels, as constraints.txt pins it"
        ) from error
    finally:
        connection.close()


def _address(path: Path, writable: bool) -> str:
    """The file's URI. Without WAL frames beside it, a read-only file is opened as immutable.

    SQLite opens a WAL file only where it can make a shared-memory file beside it, unless it is
    asked to take it as unchanging. Frames that wait in a WAL file would be left out then.
    """
    address = f"file:{urllib.parse.quote(os.fspath(path.absolute()))}"
    if writable:
        return address
    log = path.with_name(path.name + "-wal")
    waiting = log.exists() and log.stat().st_size > 0
    return f"{address}?{'mode=ro' if waiting else 'immutable=1'}"

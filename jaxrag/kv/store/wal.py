"""SQLite's write-ahead log, switched on while other processes open the same file."""

import sqlite3
import time

import apsw

_RETRY_SECONDS = 0.01


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

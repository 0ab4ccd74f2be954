"""Write-ahead logging while another process is at the file."""

import sqlite3
import threading

import pytest

from jaxrag.kv.store.sqlite import use_write_ahead_log


@pytest.fixture
def held(tmp_path):
    """A file that is not in write-ahead mode yet, and a connection that writes to it."""
    other = sqlite3.connect(tmp_path / "file", isolation_level=None, check_same_thread=False)
    other.execute("CREATE TABLE t (a)")
    other.execute("BEGIN IMMEDIATE")
    yield tmp_path / "file", other
    other.close()


def test_it_waits_for_a_writer(held):
    path, other = held
    release = threading.Timer(0.3, other.execute, ["ROLLBACK"])
    release.start()
    connection = sqlite3.connect(path, isolation_level=None)
    use_write_ahead_log(connection, 60.0)
    assert not release.is_alive()
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


def test_it_gives_up_when_the_time_is_over(held):
    connection = sqlite3.connect(held[0], isolation_level=None)
    with pytest.raises(sqlite3.OperationalError):
        use_write_ahead_log(connection, 0.05)
    connection.close()


def test_another_error_is_raised_at_once(tmp_path):
    (tmp_path / "file").write_bytes(b"not a database" * 100)
    connection = sqlite3.connect(tmp_path / "file", isolation_level=None)
    with pytest.raises(sqlite3.DatabaseError):
        use_write_ahead_log(connection, 60.0)
    connection.close()

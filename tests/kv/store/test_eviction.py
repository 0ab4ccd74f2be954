"""The size limit: who leaves, what is counted, and that several processes may count at once."""

import math
import sqlite3
import threading

import pytest
from refusal import refused

from jaxrag.base.errors import StoreError
from jaxrag.kv.store.eviction import HALF_LIFE_SECONDS, SizeLimit

START = 1_700_000_000.0
MODEL = "ab" * 32


def name(number):
    return f"{number:040x}"


class Shelf:
    """A store that is only names: what was put and not dropped, on a clock that tests turn."""

    def __init__(self, path, max_bytes=100):
        self.now = START
        self.held = set()
        self.heat = SizeLimit(path, MODEL, max_bytes, tuple, self.drop, lambda: self.now)

    def drop(self, names):
        self.held -= set(names)

    def put(self, number, nbytes=10):
        self.heat.admit(name(number), nbytes)
        self.held.add(name(number))
        self.heat.settle(name(number), nbytes)

    def read(self, number, times=1):
        self.heat.read([name(number)] * times)

    def numbers(self):
        return sorted(int(held, 16) for held in self.held)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "heat.sqlite"


def test_reads_fade_with_age(path):
    """Nine reads long ago count less than two today; under LRU the numbers do not matter."""
    shelf = Shelf(path, max_bytes=20)
    shelf.put(1)
    shelf.read(1, 9)
    shelf.put(2)
    shelf.now += 4 * HALF_LIFE_SECONDS  # ten reads are worth 0.6
    shelf.read(2, 1)
    shelf.now += 1
    shelf.put(3)
    assert shelf.numbers() == [2, 3]


def test_heat_is_the_sum_of_decayed_reads(path):
    shelf = Shelf(path)
    shelf.put(1)
    for reads in (3, 5):
        shelf.now += HALF_LIFE_SECONDS
        shelf.read(1, reads)
    shelf.heat.close()
    (heat,) = sqlite3.connect(path).execute("SELECT heat FROM chunks").fetchone()
    expected = 1 / 4 + 3 / 2 + 5
    assert 2 ** (heat - shelf.now / HALF_LIFE_SECONDS) == pytest.approx(expected, rel=1e-9)
    assert math.isfinite(heat)


def test_one_large_chunk_moves_out_many_small_ones(path):
    shelf = Shelf(path)
    for number in range(10):
        shelf.put(number)
        shelf.now += 1
    shelf.put(10, 95)
    assert shelf.numbers() == [10]
    shelf.put(10, 95)  # again: its own bytes count once
    assert shelf.heat.nbytes() == 95


def test_a_put_under_way_is_counted_and_not_dropped(path):
    shelf = Shelf(path, max_bytes=25)
    shelf.heat.admit(name(1), 10)
    shelf.heat.admit(name(2), 10)
    shelf.heat.admit(name(3), 10)
    assert shelf.heat.nbytes() == 30
    for number in (1, 2, 3):
        shelf.held.add(name(number))
        shelf.heat.settle(name(number), 10)
    assert len(shelf.held) == 2
    assert shelf.heat.nbytes() == 20


def test_the_count_of_a_killed_put_is_given_back(path):
    shelf = Shelf(path, max_bytes=20)
    shelf.heat.admit(name(1), 20)
    shelf.now += 3601
    shelf.put(2)
    assert shelf.heat.nbytes() == 10


def test_a_chunk_that_is_put_again_while_it_is_dropped_stays_counted(path):
    shelf = Shelf(path, max_bytes=10)
    other = Shelf(path, max_bytes=10)
    shelf.put(1)

    def drop(names):
        if name(1) in names:  # another process drops it first, and encodes it again
            other.heat.strike([name(1)])
            other.put(1)
        shelf.drop(names)

    shelf.heat._drop = drop
    shelf.heat.settle(name(1), 10)
    shelf.heat.admit(name(2), 10)
    shelf.heat._drop = len
    shelf.heat.settle(name(2), 10)
    assert shelf.heat.nbytes() == 10


def test_reads_of_a_dropped_chunk_are_forgotten(path):
    shelf = Shelf(path, max_bytes=10)
    shelf.put(1)
    shelf.read(1, 100)
    shelf.heat.strike([name(1)])
    shelf.put(2)
    assert shelf.heat.nbytes() == 10


def test_opening_waits_for_another_process_that_opens(path):
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("CREATE TABLE other (nbytes INTEGER)")
    other.execute("BEGIN IMMEDIATE")  # before the file is in write-ahead mode
    release = threading.Timer(0.3, other.execute, ["ROLLBACK"])
    release.start()
    shelf = Shelf(path)
    assert not release.is_alive()
    shelf.put(1)
    assert shelf.heat.nbytes() == 10
    other.close()


def test_a_read_only_count_does_not_fail_a_read(path):
    shelf = Shelf(path)
    shelf.put(1)
    shelf.heat._connection.execute("PRAGMA query_only = ON")
    shelf.now += 1000
    shelf.read(1)
    with refused(StoreError, "heat.sqlite"):
        shelf.put(2)


def test_a_file_of_another_format_or_kind_is_refused(path):
    with refused(StoreError, "max_bytes=0"):
        Shelf(path, 0)
    path.write_bytes(b"not a database" * 100)
    with refused(StoreError):
        Shelf(path)
    path.unlink()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 1")
    connection.close()
    with refused(StoreError, "1"):
        Shelf(path)

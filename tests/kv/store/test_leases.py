"""One process at a time encodes a chunk; one that dies holds up the others for a while only."""

import threading
import time

import pytest
from refusal import refused
from serving import until

from jaxrag.base.errors import StoreError
from jaxrag.kv.store import ChunkStore, leases
from jaxrag.kv.store.leases import Leases

LONG = 60.0  # seconds in which what must happen happens
SHORT = 0.3  # of a lease


@pytest.fixture(params=["directory", "s3"])
def place(request, tmp_path):
    """Where a repository is."""
    if request.param == "s3":
        return request.getfixturevalue("s3_location")
    return tmp_path / "kb"


@pytest.fixture
def holders(place, model):
    """``holders(count, seconds)``: as many processes."""
    made = []

    def make(count=2, seconds=LONG):
        made.extend(Leases(place, model, seconds) for _ in range(count))
        return made[-count:]

    yield make
    for it in made:
        it.close()


def died(holder):
    """It says no more of what it holds."""
    holder._renew = lambda key, generation: None


def test_without_a_bucket_nobody_is_waited_for(s3_location, model):
    """It reads as one without leases, and refuses writes as one that another was first at."""
    holder = Leases(s3_location.replace("//chunks/", "//gone/"), model)
    with refused(StoreError):
        holder.take("ab" * 20)
    holder.close()


def test_one_of_many_gets_a_lease(holders):
    found = holders(8)
    start, won = threading.Barrier(len(found)), []

    def run(holder):
        start.wait()
        if holder.take("ab" * 20):
            won.append(holder)

    threads = [threading.Thread(target=run, args=(it,)) for it in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [winner] = won
    assert winner.take("ab" * 20)  # it is still its own
    assert not any(it.take("ab" * 20) for it in found if it is not winner)
    assert all(it.take(f"{number:040x}") for number, it in enumerate(found))  # of other chunks
    winner.release("ab" * 20)
    until(lambda: found[0].take("ab" * 20))


def test_a_lease_holds_as_long_as_it_is_renewed(holders):
    one, other = holders(seconds=SHORT)
    assert one.take("ab" * 20)
    until_ = time.monotonic() + 4 * SHORT
    while time.monotonic() < until_:
        assert not other.take("ab" * 20)
        time.sleep(0.02)


def test_a_lease_of_a_holder_that_died_is_taken_by_one(holders):
    dead, *others = holders(4, seconds=SHORT)
    died(dead)
    assert dead.take("ab" * 20)
    assert not any(it.take("ab" * 20) for it in others)
    won = []

    def run(holder):
        while not won:
            if holder.take("ab" * 20):
                won.append(holder)

    threads = [threading.Thread(target=run, args=(it,)) for it in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    dead.release("ab" * 20)  # it wakes: the lease is another's
    dead.close()
    assert not [it for it in others if it is not won[0] and it.take("ab" * 20)]


@pytest.mark.parametrize("ahead", [3600.0, -3600.0])
def test_clocks_may_differ(holders, monkeypatch, ahead):
    """A clock that is ahead never keeps others from a dead holder's lease."""
    dead, other = holders(seconds=SHORT)
    died(dead)
    with monkeypatch.context() as changed:
        now = time.time()
        changed.setattr(leases.time, "time", lambda: now + ahead)
        assert dead.take("ab" * 20)
    until(lambda: other.take("ab" * 20))


def test_a_damaged_lease_is_over(place, holders):
    one, other = holders()
    assert one.take("ab" * 20)
    one._backend.write(f"{one._prefix}{'ab' * 20}", b"\xff{")
    assert other.take("ab" * 20)


def test_a_collection_removes_what_the_dead_left(holders):
    dead, other = holders(seconds=SHORT)
    died(dead)
    assert dead.take("ab" * 20) and other.take("cd" * 20)
    until(lambda: other.remove_stale(0.0) or not other.take("cd" * 20) or len(paths(other)) == 1)
    assert paths(other) == ["cd" * 20]
    other.release("cd" * 20)
    until(lambda: not paths(other))


def paths(holder):
    return holder._backend.paths(holder._prefix)


def test_the_thread_ends_with_the_last_lease(holders):
    one, _ = holders()
    assert one.take("ab" * 20)
    one.close()
    assert one._thread is None and not paths(one)
    assert one.take("ab" * 20)  # it is used again


def test_stores_lease_what_is_missing_only(place, model, layout, chunk):
    """Who comes when the chunk has come meanwhile is told to read again."""
    one, other = (ChunkStore.open(place, model, layout, mode="rw") for _ in range(2))
    made = chunk(1)
    assert one.lease(made.key) and not other.lease(made.key)
    one.put(made.key, made.kv, record=made.record)
    one.release(made.key)
    until(lambda: not paths(one._leases))
    assert not other.lease(made.key)
    assert other.get(made.key) is not None
    reader = ChunkStore.open(place, model, layout)
    assert reader.lease(chunk(2).key)  # it keeps nothing: nobody waits for it
    assert other.lease(chunk(2).key)
    for store in (one, other, reader):
        store.close()


def test_where_no_lease_can_be_had_all_may_encode(tmp_path, model, layout, chunk, monkeypatch):
    store = ChunkStore.open(tmp_path / "kb", model, layout, mode="rw")

    def fails(*args):
        raise StoreError("no space left")

    monkeypatch.setattr(store._leases._backend, "write_if", fails)
    assert store.lease(chunk(1).key)
    store.release(chunk(1).key)

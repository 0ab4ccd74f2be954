"""What is known of the folders of chunks: as a look at each would tell, and never needed."""

import os

import pytest

from jaxrag.kv.store import census, reading
from jaxrag.kv.store.ledger import StoredChunk
from jaxrag.kv.store.namespace import Namespace


@pytest.fixture(autouse=True)
def settled(monkeypatch):
    """Folders are taken as settled at once: no test puts twice within one tick of the clock."""
    monkeypatch.setattr(census, "_SETTLED_SECONDS", -1.0)


@pytest.fixture
def read(monkeypatch):
    """The keys whose records were read."""
    keys = []
    find = Namespace.find

    def counting(self, asked):
        keys.extend(asked)
        return find(self, asked)

    monkeypatch.setattr(Namespace, "find", counting)
    return keys


def put(store, *chunks):
    for one in chunks:
        store.put(one.key, one.kv, record=one.record)


def counted(store):
    return {key: seen for key, seen in store.committed() if isinstance(seen, StoredChunk)}


def test_only_what_is_new_is_read(open_store, chunk, read):
    chunks = [chunk(n, tokens=3 + n) for n in range(9)]
    store = open_store()
    put(store, *chunks[:8])
    assert counted(store).keys() == {one.key for one in chunks[:8]}
    read.clear()
    first = counted(open_store())
    assert read == []
    put(store, chunks[8])
    read.clear()
    now = counted(open_store())
    assert read == [chunks[8].key]
    assert now.keys() - first.keys() == {chunks[8].key}
    store.delete([chunks[0].key])
    assert counted(open_store()).keys() == {one.key for one in chunks[1:]}
    records = list(store.records())
    for what in ("tokens", "nbytes"):
        total = sum(getattr(it, what) for it in records)
        assert sum(getattr(it, what) for it in counted(store).values()) == total


def test_a_collection_passes_over_what_is_named_and_as_it_was(open_store, chunk, read):
    chunks = [chunk(n) for n in range(8)]
    store = open_store()
    put(store, *chunks)
    named = {one.key for one in chunks[:6]}
    asked = []

    def live(record):
        asked.append(record.key)
        return record.key in named

    def collect():
        asked.clear()
        read.clear()
        return store.gc(live, grace_seconds=0, named=named.__contains__)

    assert collect().chunks == 2
    assert set(asked) >= {one.key for one in chunks}
    assert collect().chunks == 0
    assert asked == [] and read == []
    named.discard(chunks[0].key)
    report = collect()
    assert report.chunks == 1 and set(asked) == {chunks[0].key}
    assert store.find([chunks[0].key]).keys() == {chunks[0].key}
    assert counted(store).keys() == named


@pytest.mark.parametrize("data", [b"", b"{}", b"0123456789abcdef\n{}", b"\xff" * 99])
def test_a_damaged_file_counts_as_none(open_store, chunk, data):
    store, one = open_store(), chunk(1)
    put(store, one)
    expected = counted(store)
    files = list(store.directory.glob("census/*/*.json"))
    assert len(files) == 1
    flipped = bytearray(files[0].read_bytes())
    flipped[-5] ^= 1
    for wrong in (data, bytes(flipped)):
        files[0].write_bytes(wrong)
        assert counted(open_store()) == expected


def test_a_folder_that_just_changed_is_not_believed(open_store, chunk, monkeypatch):
    monkeypatch.setattr(census, "_SETTLED_SECONDS", 2.0)
    store, one = open_store(), chunk(1)
    put(store, one)
    assert counted(store)
    assert not list(store.directory.glob("census/*/*.json"))
    folder = next(store.directory.glob(f"kv/*/*/{one.key}"))
    os.utime(folder, (1e9, 1e9))
    assert counted(store)
    assert list(store.directory.glob("census/*/*.json"))


def test_a_refused_record_is_told_every_time(open_store, chunk):
    store, one = open_store(), chunk(1)
    put(store, one)
    commit = next(store.directory.glob(f"kv/*/*/{one.key}/commit.json"))
    commit.write_bytes(b"{}")
    for _ in range(2):
        ((key, found),) = open_store().committed()
        assert key == one.key and isinstance(found, reading.Refused)


def test_a_folder_of_the_year_1970_is_looked_at(open_store, chunk):
    store, one = open_store(), chunk(1)  # as archives without times leave them
    put(store, one)
    os.utime(next(store.directory.glob(f"kv/*/*/{one.key}")), (0, 0))
    assert counted(open_store()).keys() == {one.key}
    assert store.gc(lambda record: True, grace_seconds=0, named=lambda key: True).chunks == 0

"""KV in memory whose second sight is on disk."""

import numpy as np
import pytest

from jaxrag.base.errors import ChunkMissing, StoreError
from jaxrag.kv.store import KVLayout, MemoryStore
from jaxrag.kv.store.second_sight import SecondSight


@pytest.fixture
def opened(open_store, model, layout, threads):
    """``opened(max_bytes=None, **options)``: what a new process finds in the folder."""

    def call(memory_bytes=None, **options):
        memory = MemoryStore(model, layout, max_bytes=memory_bytes)
        return SecondSight(memory, open_store(**options), threads)

    return call


def put(store, chunk, **aux):
    store.put(chunk.key, chunk.kv, record=chunk.record, aux=aux or None)


def written(store, *chunks):
    """After both were asked for; what lies on disk."""
    store.sighted([it.key for it in chunks])
    store._threads.submit(lambda: None).result()
    return sorted(store.disk.keys())


def test_what_is_seen_twice_outlives_the_process(opened, chunk):
    once, twice = chunk(1), chunk(2)
    store = opened()
    norms = np.arange(4, dtype=np.float32)
    assert written(store, once, twice) == []  # the first sight of both
    put(store, once)
    put(store, twice, norms=norms)
    assert list(store.disk.keys()) == []
    assert written(store, twice) == [twice.key]
    assert list(store.keys()) == sorted([once.key, twice.key])
    store.close()
    again = opened()
    twice.assert_equal(again.get(twice.key))
    np.testing.assert_array_equal(again.aux(twice.key, "norms"), norms)
    with pytest.raises(ChunkMissing):
        again.get(once.key)


def test_memory_may_lose_what_the_disk_has(opened, chunk):
    first, second = chunk(1), chunk(2)
    store = opened(memory_bytes=first.kv.nbytes + 1)
    put(store, first)
    assert written(store, first) == [first.key]
    put(store, second)  # pushes the first out of memory
    assert list(store.inner.keys()) == [second.key]
    both = store.get_many([first.key, second.key]).kv
    np.testing.assert_array_equal(
        both.view(np.uint16), np.concatenate([first.kv, second.kv], axis=2).view(np.uint16)
    )


def test_what_lies_damaged_is_missing_and_may_be_written_again(opened, chunk, tmp_path):
    one = chunk(1)
    store = opened()
    put(store, one)
    written(store, one)
    store.close()
    (path,) = (it for it in tmp_path.rglob("c/**/*") if it.is_file())
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    again = opened()
    result = again.get_many([one.key], on_missing="skip")
    assert result.kv.shape[2] == 0
    with pytest.raises(ChunkMissing):
        again.get(one.key)
    put(again, one)
    assert written(again, one) == [one.key]
    one.assert_equal(again.disk.get(one.key))


def test_a_store_that_was_closed_writes_no_more(opened, chunk):
    one = chunk(1)
    store = opened()
    put(store, one)
    store.close()
    store.sighted([one.key])
    store._threads.submit(lambda: None).result()
    assert list(opened().disk.keys()) == []


def test_the_disk_keeps_its_bound(opened, chunk):
    chunks = [chunk(number) for number in range(6)]
    store = opened(max_bytes=3 * chunks[0].kv.nbytes)
    for it in chunks:
        put(store, it)
        written(store, it)
    assert 1 <= len(list(store.disk.keys())) <= 3


def test_a_disk_that_fails_costs_time_only(opened, chunk, monkeypatch, caplog):
    one = chunk(1)
    store = opened()
    put(store, one)

    def fails(*given, **named):
        raise StoreError("no space left")

    monkeypatch.setattr(store.disk, "put", fails)
    assert written(store, one) == []
    assert "not written: no space left" in caplog.text
    one.assert_equal(store.get(one.key))


def test_codes_are_refused(open_store, model, threads):
    layout = KVLayout(3, 2, 5, "bfloat16", stored="int8")
    with pytest.raises(StoreError, match="expected native"):
        SecondSight(MemoryStore(model, layout), open_store(layout=layout), threads)

"""What only the store in memory does: stay within its bytes."""

import pytest

from jaxrag.base.errors import ChunkMissing
from jaxrag.kv.store import MemoryStore


def test_least_recently_used_chunks_leave_first(chunk, layout, model):
    store = MemoryStore(model, layout, max_bytes=3 * layout.nbytes(7))
    a, b, c, d = (chunk(number, 7) for number in range(4))
    for one in (a, b, c):
        store.put(one.key, one.kv, record=one.record)
    a.assert_equal(store.get(a.key))  # now b is the oldest
    store.put(d.key, d.kv, record=d.record)
    assert list(store.keys()) == sorted(one.key for one in (a, c, d))
    with pytest.raises(ChunkMissing):
        store.get(b.key)
    read = store.get_many([b.key, d.key], on_missing="skip")
    assert read.missing == (b.key,)
    assert sum(it.nbytes for it in store.records()) <= store.max_bytes


def test_a_chunk_beyond_the_bound_is_kept_alone(chunk, layout, model):
    store = MemoryStore(model, layout, max_bytes=1)
    for one in (chunk(1, 7), chunk(2, 9)):
        store.put(one.key, one.kv, record=one.record)
        one.assert_equal(store.get(one.key))
    assert len(list(store.records())) == 1


def test_listing_chunks_is_no_use_of_them(chunk, layout, model):
    store = MemoryStore(model, layout, max_bytes=3 * layout.nbytes(7))
    first, *others = sorted((chunk(number, 7) for number in range(4)), key=lambda c: c.key)[::-1]
    for one in (first, *others[:2]):
        store.put(one.key, one.kv, record=one.record)
    assert len(list(store.records())) == 3
    store.put(others[2].key, others[2].kv, record=others[2].record)
    assert sorted(store.keys()) == sorted(one.key for one in others)


def test_a_chunk_put_again_counts_once(chunk, layout, model):
    store = MemoryStore(model, layout, max_bytes=2 * layout.nbytes(7))
    a, b = chunk(1, 7), chunk(2, 7)
    for one in (a, b, a, a):
        store.put(one.key, one.kv, record=one.record, replace=True)
    assert len(list(store.records())) == 2
    store.delete([a.key])
    store.put(a.key, a.kv, record=a.record)
    b.assert_equal(store.get(b.key))

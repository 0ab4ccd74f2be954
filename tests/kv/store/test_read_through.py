"""A local copy of a remote store: what it serves, what it drops, what it never hides."""

import concurrent.futures

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import ChunkCorrupt, StoreError
from jaxrag.kv.store import ChunkStore, KVLayout, ReadThrough, Record


def put(store, *chunks):
    for c in chunks:
        store.put(c.key, c.kv, record=c.record)


def data_files(root):
    return sorted(path for path in root.rglob("c/**/*") if path.is_file())


def damage(path):
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.unlink()
    path.write_bytes(data)


@pytest.fixture(params=["directory", "s3"])
def far(request, tmp_path, layout, model):
    """A remote store that is open for writing."""
    place = tmp_path / "far"
    if request.param == "s3":
        place = request.getfixturevalue("s3_location")
    return ChunkStore.open(place, model, layout, mode="rw")


@pytest.fixture
def near(tmp_path, layout, model):
    """``near(**options)``: the local store."""

    def open_(layout=layout, **options):
        return ChunkStore.open(
            tmp_path / "near", model, layout, mode="rw", durable=False, **options
        )

    return open_


def test_the_second_read_is_local(far, near, chunk):
    a, b = chunk(1, 3), chunk(2, 8)
    put(far, a, b)
    store = ReadThrough(far, near())
    for _ in range(2):
        got = store.get_many([b.key, a.key])
        assert got.kv.tobytes() == np.concatenate([b.kv, a.kv], axis=2).tobytes()
    far.delete([a.key, b.key])  # copies remain readable
    assert store.head([a.key]) == [None]  # but the remote store is asked what exists
    a.assert_equal(store.get(a.key))


@pytest.mark.parametrize("how", ["flipped", "truncated", "missing"])
def test_a_damaged_copy_is_fetched_again(far, near, chunk, tmp_path, how):
    c, other = chunk(1), chunk(2, 9)
    put(far, c, other)
    store = ReadThrough(far, near())
    store.get_many([c.key, other.key])
    path = next(p for p in data_files(tmp_path / "near") if p.stat().st_size < 9 * c.kv.nbytes // 7)
    if how == "flipped":
        damage(path)
    elif how == "truncated":
        path.write_bytes(path.read_bytes()[:-30])
    else:
        path.unlink()
    got = store.get_many([other.key, c.key])
    assert (got.missing, got.corrupt) == ((), ())
    assert got.kv.tobytes() == np.concatenate([other.kv, c.kv], axis=2).tobytes()
    c.assert_equal(near().get(c.key))  # healed
    assert len(data_files(tmp_path / "near")) == 2


def test_damage_in_the_remote_is_corrupt_and_leaves_no_copy(tmp_path, near, layout, model, chunk):
    far = ChunkStore.open(tmp_path / "far", model, layout, mode="rw")
    a, b = chunk(1), chunk(2)
    put(far, a)
    damage(data_files(tmp_path / "far")[0])
    put(far, b)
    store = ReadThrough(far, near())
    with refused(ChunkCorrupt, a.key):
        store.get(a.key)
    got = store.get_many([a.key, b.key], on_missing="skip")
    assert got.corrupt == (a.key,)
    assert list(near().keys()) == [b.key]
    assert store.verify().corrupt == (a.key,)
    assert far.put(a.key, a.kv, record=a.record, replace=True).won
    a.assert_equal(store.get(a.key))


def test_the_local_store_stays_within_its_limit(far, near, chunk):
    chunks = [chunk(number) for number in range(6)]
    put(far, *chunks)
    local = near(max_bytes=2 * chunks[0].kv.nbytes)
    store = ReadThrough(far, local)
    for c in chunks * 2:
        c.assert_equal(store.get(c.key))
        assert len(list(local.keys())) <= 2
    got = store.get_many([c.key for c in chunks])
    assert got.kv.tobytes() == np.concatenate([c.kv for c in chunks], axis=2).tobytes()


def test_a_chunk_too_large_to_stay_is_read_all_the_same(far, near, chunk, rng):
    c, small = chunk(1, 30), chunk(2, 3)
    index = rng.standard_normal(5).astype(np.float32)
    far.put(c.key, c.kv, record=c.record, aux={"index": index})
    put(far, small)
    local = near(max_bytes=c.kv.nbytes // 2)
    store = ReadThrough(far, local)
    got = store.get_many([small.key, c.key])
    assert got.kv.tobytes() == np.concatenate([small.kv, c.kv], axis=2).tobytes()
    assert list(local.keys()) == [small.key]
    assert (store.aux(c.key, "index") == index).all()


@pytest.mark.parametrize("tier", ["page", "host"])
def test_prefetch_copies_first(far, near, chunk, tier):
    a, b, absent = chunk(1), chunk(2), chunk(3)
    put(far, a, b)
    store = ReadThrough(far, near())
    assert store.prefetch([a.key, b.key, absent.key], tier).result() >= 2 * a.kv.nbytes
    assert len(list(near().keys())) == 2
    a.assert_equal(store.get(a.key))
    store.close()


def test_threads_that_want_the_same_chunk_agree(far, near, chunk, tmp_path):
    chunks = [chunk(number) for number in range(3)]
    put(far, *chunks)
    store = ReadThrough(far, near())
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        got = list(pool.map(lambda c: (c, store.get(c.key)), chunks * 4))
    for c, kv in got:
        c.assert_equal(kv)
    assert len(data_files(tmp_path / "near")) == 3


def test_stores_that_do_not_fit_together_are_refused(far, near, model, tmp_path):
    other = KVLayout(3, 2, 6, "bfloat16")
    with refused(StoreError, "near2"):
        ReadThrough(far, ChunkStore.open(tmp_path / "near2", model, other, mode="rw"))
    near()
    reader = ChunkStore.open(tmp_path / "near", model, far.layout)
    with refused(StoreError):
        ReadThrough(far, reader)


def test_what_finds_no_room_here_is_read_from_the_remote(
    far, near, chunk, rng, caplog, monkeypatch
):
    """As on a full disk; it is said once, and again after copies could be made."""
    chunks = [chunk(number, 4) for number in range(1, 4)]
    put(far, *chunks)
    here = near()
    store, write = ReadThrough(far, here), here._backend.write

    def full(path, value):
        raise StoreError("near: writing: No space left on device; check the disk")

    monkeypatch.setattr(here._backend, "write", full)
    for one in chunks[:2]:
        one.assert_equal(store.get(one.key))
    said = [it.message for it in caplog.records if "read without a copy" in it.message]
    assert len(said) == 1 and "No space left" in said[0]
    found = here.find([one.key for one in chunks]).values()
    assert not any(isinstance(it, Record) for it in found)
    monkeypatch.setattr(here._backend, "write", write)
    chunks[2].assert_equal(store.get(chunks[2].key))
    far.delete([chunks[2].key])
    chunks[2].assert_equal(store.get(chunks[2].key))

"""Chunks stored as int8: what comes back, on every kind of store."""

import dataclasses

import numpy as np
import pytest

from jaxrag.base.errors import ChunkCorrupt, ChunkMissing, StoreError
from jaxrag.kv.store import KVLayout
from jaxrag.kv.store.quantise import quantise


@pytest.fixture
def small(layout):
    return dataclasses.replace(layout, stored="int8")


def normal(c, seed=0):
    kv = np.random.default_rng(seed).standard_normal(c.kv.shape).astype(c.kv.dtype)
    return dataclasses.replace(c, kv=kv)


def expected(kv):
    elements, scale = quantise(kv)
    return (elements * scale[..., None]).astype(kv.dtype)


def test_every_dtype_comes_back_as_its_integers_say(any_store, chunk, dtype):
    layout = KVLayout(3, 2, 16, dtype, "int8")
    store, a, b = any_store(layout), normal(chunk(1, 4, layout)), normal(chunk(2, 9, layout), 1)
    for c in (a, b):
        assert store.put(c.key, c.kv, record=c.record).won
    got = store.get_many([b.key, a.key])
    assert got.kv.dtype == layout.numpy_dtype
    wanted = np.concatenate([expected(b.kv), expected(a.kv)], axis=2)
    assert got.kv.tobytes() == wanted.tobytes()
    error = np.abs(got.kv.astype(np.float32)[:, :, 9:] - a.kv.astype(np.float32))
    assert 0 < error.max() < 0.03
    elements, scale = quantise(a.kv)
    assert store.aux(a.key, "scale").tobytes() == scale.tobytes()
    record = store.head([a.key])[0]
    assert (record.stored, record.dtype) == ("int8", dtype)
    assert record.nbytes == layout.stored_nbytes(4) == elements.nbytes + scale.nbytes
    assert store.stats().nbytes == layout.stored_nbytes(13)


@pytest.mark.parametrize("verify", ["always", "never"])
def test_into_a_part_of_a_larger_buffer(any_store, chunk, small, verify):
    store, c = any_store(small), normal(chunk(1))
    store.put(c.key, c.kv, record=c.record)
    pool = np.full(small.shape(20), 7, small.numpy_dtype)
    kv = store.get(c.key, pool[:, :, 5:15], verify=verify)
    assert kv.tobytes() == expected(c.kv).tobytes()
    pool[:, :, 5:12] = 7
    assert (pool == 7).all()


def test_the_same_kv_makes_the_same_bytes(open_store, chunk, small, tmp_path):
    c = normal(chunk(1))
    for number in (1, 2):
        store = open_store(layout=small)
        store.put(c.key, c.kv, record=c.record, replace=True)
        record = store.head([c.key])[0]
        digests = (record.xxh3, record.aux)
        if number == 1:
            first = digests
    assert digests == first


def test_numbers_without_an_integer_are_refused(any_store, chunk, small):
    store, c = any_store(small), normal(chunk(1))
    c.kv[1, 0, 3, 1, 2] = np.nan
    with pytest.raises(StoreError, match=f"chunk {c.key}: kv holds NaN or infinity"):
        store.put(c.key, c.kv, record=c.record)
    assert store.head([c.key]) == [None]


@pytest.mark.parametrize("io_mode", ["memmap", "default"])
@pytest.mark.parametrize("array", ["c/0/0/0/0/0", "aux/scale/c/0/0/0/0"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damage_is_refused(open_store, chunk, small, tmp_path, io_mode, array, damage):
    store, c, other = open_store(layout=small), normal(chunk(1)), normal(chunk(2))
    for one in (c, other):
        store.put(one.key, one.kv, record=one.record)
    (path,) = (tmp_path / "kb").glob(f"kv/*/*/{c.key}/*/{array}")
    data = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if damage == "truncate" else bytes([data[0] ^ 1]) + data[1:])
    store = open_store("r", layout=small, io_mode=io_mode)
    with pytest.raises(ChunkMissing if damage == "remove" else ChunkCorrupt, match=c.key):
        store.get(c.key)
    got = store.get_many([c.key, other.key], on_missing="skip")
    assert got.missing + got.corrupt == (c.key,)
    assert got.kv.tobytes() == expected(other.kv).tobytes()


def test_a_native_store_is_not_an_int8_store(open_store, layout, small):
    open_store(layout=layout)
    with pytest.raises(StoreError, match="'stored': 'native'.* expected .*'stored': 'int8'"):
        open_store(layout=small)

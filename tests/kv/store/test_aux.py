"""Auxiliary arrays: kept with their chunk, verified like it."""

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import ChunkMissing, StoreError
from jaxrag.kv.store.record import AUX_DTYPES


def put(store, c, **aux):
    return store.put(c.key, c.kv, record=c.record, aux=aux)


def test_arrays_come_back_bit_for_bit(any_store, chunk):
    store, c = any_store(), chunk(1)
    rng = np.random.default_rng(0)
    arrays = {}
    for number, name in enumerate(AUX_DTYPES):
        shape = (3, 1, 5)[: number % 3 + 1]
        nbytes = int(np.prod(shape)) * np.dtype(name).itemsize
        arrays[f"a_{name}"] = np.frombuffer(rng.bytes(nbytes), name).reshape(shape)
    assert put(store, c, **arrays).won
    for name, array in arrays.items():
        got = store.aux(c.key, name)
        assert (got.dtype, got.shape) == (array.dtype, array.shape)
        assert got.tobytes() == array.tobytes()
    c.assert_equal(store.get(c.key))
    record = store.head([c.key])[0]
    assert record.aux.keys() == arrays.keys()
    assert record.nbytes == c.kv.nbytes + sum(array.nbytes for array in arrays.values())
    assert sum(it.nbytes for it in store.records()) == record.nbytes


def test_a_chunk_without_the_array_and_no_chunk(any_store, chunk):
    store, c = any_store(), chunk(1)
    put(store, c)
    with refused(StoreError, "'x'"):
        store.aux(c.key, "x")
    with pytest.raises(ChunkMissing):
        store.aux(chunk(2).key, "x")


def test_an_array_that_does_not_fit_stores_nothing(any_store, chunk):
    store, c = any_store(), chunk(1)
    with refused(StoreError, "'x'"):
        put(store, c, x=np.zeros((4, 4)).T[:, :2])
    assert store.head([c.key]) == [None]


def test_the_writer_takes_arrays(any_store, chunk):
    store, c = any_store(), chunk(1)
    with store.writer() as writer:
        writer.submit(c.key, c.kv, c.record, aux={"x": np.array([5])})
    assert store.aux(c.key, "x").tolist() == [5]


@pytest.fixture
def stored(open_store, chunk, tmp_path):
    """A store, its chunk, and the one file of the chunk's auxiliary array."""
    store, c = open_store(), chunk(1)
    put(store, c, keys=np.arange(12, dtype=np.float32).reshape(3, 4))
    (path,) = (tmp_path / "kb").glob(f"kv/*/*/{c.key}/*/aux/keys/c/0/0")
    return store, c, path


def test_the_file_holds_the_plain_bytes(stored):
    _, _, path = stored
    assert path.read_bytes() == np.arange(12, dtype="<f4").tobytes()

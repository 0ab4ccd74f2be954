"""Chunks stored as int8: what comes back, on every kind of store."""

import dataclasses

import numpy as np
import pytest

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

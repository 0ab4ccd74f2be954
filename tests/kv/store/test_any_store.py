"""What holds for every kind of store."""

import concurrent.futures
import dataclasses

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import ChunkAbsent, StoreError
from jaxrag.kv.store import KVLayout

SHAPES = [(1, 1, 1, 1), (2, 3, 1, 7), (5, 1, 33, 3), (3, 2, 130, 16)]  # L, K, T, H


def put(store, *chunks):
    return [store.put(c.key, c.kv, record=c.record) for c in chunks]


@pytest.mark.parametrize("sizes", SHAPES)
def test_every_bit_comes_back(any_store, chunk, dtype, sizes):
    layers, heads, tokens, dim = sizes
    layout = KVLayout(layers, heads, dim, dtype)
    store = any_store(layout)
    c = chunk(1, tokens, layout)
    put(store, c)
    c.assert_equal(store.get(c.key))
    assert store.get(c.key).flags.writeable


@pytest.mark.parametrize("value", [0.0, -0.0, np.nan, np.inf, -np.inf])
def test_a_constant_chunk_is_stored_not_skipped(any_store, chunk, dtype, layout, value):
    layout = dataclasses.replace(layout, dtype=dtype)
    c = chunk(1, layout=layout)
    c.kv[...] = value
    store = any_store(layout)
    put(store, c)
    c.assert_equal(store.get(c.key))


def test_what_was_put_does_not_follow_the_callers_array(any_store, chunk):
    store = any_store()
    c = chunk(1)
    put(store, dataclasses.replace(c, kv=(mine := c.kv.copy())))
    mine[...] = 0
    store.get(c.key)[...] = 1
    c.assert_equal(store.get(c.key))


def test_get_many_into_a_part_of_a_larger_buffer(any_store, chunk, layout):
    store = any_store()
    a, b = chunk(1, 3), chunk(2, 8)
    put(store, a, b)
    pool = np.full((layout.num_layers + 1, 2, 40, 2, 5), 7, layout.numpy_dtype)
    out = pool[1:, :, 13:30]
    got = store.get_many([a.key, b.key], out)
    assert np.shares_memory(got.kv, pool)
    assert got.kv.tobytes() == np.concatenate([a.kv, b.kv], axis=2).tobytes()
    assert pool[1:, :, 13:24].tobytes() == got.kv.tobytes()
    pool[1:, :, 13:24] = 7
    assert (pool == 7).all()  # nothing outside was touched


def test_nothing_found_is_an_empty_buffer(any_store, chunk, layout):
    absent = chunk(1).key
    got = any_store().get_many([absent], on_missing="skip")
    assert got.kv.shape == layout.shape(0) and isinstance(got.refused[absent], ChunkAbsent)
    assert got.offsets == {}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda kv: kv.astype(np.float32), "float32"),
        (lambda kv: kv.view(np.uint16), "uint16"),
        (lambda kv: kv[:2], "2"),
        (lambda kv: kv[:, :1], "3"),
        (lambda kv: kv[0], "2"),
        (lambda kv: kv[:, :, :0], "max_tokens=7"),
        (lambda kv: np.concatenate([kv, kv], axis=2), "14"),
        (lambda kv: kv[:, :, ::2], ""),
        (lambda kv: kv.tolist(), ""),
    ],
)
def test_put_refuses_kv_that_does_not_fit(any_store, chunk, change, said):
    store = any_store(max_tokens=7)
    c = chunk(1)
    with refused(StoreError, said):
        store.put(c.key, change(c.kv), record=c.record)
    assert store.head([c.key]) == [None]


def test_put_refuses_a_key_that_is_not_its_records(any_store, chunk):
    store = any_store()
    a, b = chunk(1), chunk(2)
    with refused(StoreError, a.key):
        store.put(b.key, a.kv, record=a.record)
    assert list(store.keys()) == []


def test_a_buffer_that_does_not_fit_is_refused(any_store, chunk, layout):
    store = any_store()
    c = chunk(1, 4)
    put(store, c)
    good = np.zeros(layout.shape(4), layout.numpy_dtype)
    frozen = good.copy()
    frozen.flags.writeable = False
    wide = np.zeros(layout.shape(8), layout.numpy_dtype)
    for out, said in [
        (good[:, :, :3].copy(), "3"),
        (good.astype(np.float32), "float32"),
        (good[:2], "bfloat16"),
        (frozen, ""),
        (wide[:, :, ::2], ""),
        ([1], ""),
    ]:
        with refused(StoreError, said):
            store.get(c.key, out)
    c.assert_equal(store.get(c.key, good))


def test_bad_options_and_keys_are_refused(any_store, chunk):
    store = any_store()
    for keys, options, said in [
        (["../../x"], {}, ""),
        ("ab", {}, "key='a'"),
        ([chunk(1).key], {"on_missing": "ignore"}, "on_missing='ignore'"),
        ([chunk(1).key], {"layers": (0, 4)}, "layers=(0, 4)"),
        ([chunk(1).key], {"layers": (2, 2)}, ""),
        ([chunk(1).key], {"layers": (-1, 2)}, ""),
        ([chunk(1).key], {"layers": 1}, "layers=1"),
        ([chunk(1).key], {"layers": (0, 1.0)}, ""),
    ]:
        with refused(StoreError, said):
            store.get_many(keys, **options)
    with refused(StoreError, "on_corrupt='ignore'"):
        store.head([], on_corrupt="ignore")
    with refused(StoreError, "max_tokens=0"):
        any_store(max_tokens=0)


def test_threads_share_a_store(any_store, chunk):
    store = any_store()
    versions = [chunk(number, seed=seed) for number in range(3) for seed in range(4)]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        puts = list(pool.map(lambda c: (c, put(store, c)[0]), versions))
        gets = list(pool.map(lambda c: (c.key, store.get(c.key)), versions))
    winners = {c.key: c for c, result in puts if result.won}
    assert len(winners) == sum(result.won for _, result in puts) == 3
    for key, kv in gets:
        winners[key].assert_equal(kv)

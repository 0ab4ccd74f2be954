"""KV in 4 bits an element: how near it is, and what comes back on every kind of store."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from refusal import refused

from jaxrag.base.errors import StoreError
from jaxrag.kv.int4 import CHANNELS, GROUP, head_nbytes, pack, unpack, wide_channels
from jaxrag.kv.store import KVLayout, as_stored
from jaxrag.kv.store.layout import STORED
from jaxrag.library.options import FORMATS

PACKED = [form for form in STORED if form != "native"]
FLOATS = st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=False)


@pytest.fixture(params=PACKED)
def small(request, layout):
    return dataclasses.replace(layout, stored=request.param)


def normal(c, seed=0):
    kv = np.random.default_rng(seed).standard_normal(c.kv.shape).astype(c.kv.dtype)
    return dataclasses.replace(c, kv=kv)


def restored(kv):
    packed = pack(kv)
    assert packed.dtype == np.uint8
    assert packed.shape == (
        *kv.shape[:2], 1, kv.shape[3], head_nbytes(kv.shape[2], kv.shape[4]) // 2,
    )  # fmt: skip
    layers = [unpack(layer, kv.shape[2], kv.shape[4]) for layer in packed]
    return np.array([np.stack(layer) for layer in layers])


def test_the_formats_that_options_name_are_those_of_the_store():
    assert FORMATS == STORED


@settings(deadline=None, max_examples=100)
@given(
    hnp.arrays(np.float32, st.tuples(*[st.integers(1, 5)] * 2, st.integers(1, 9)), elements=FLOATS)
)
def test_an_element_is_as_near_as_its_step(thk):
    kv = np.stack([thk, thk[::-1]])[None]
    out = restored(kv).astype(np.float64)
    wide = kv.astype(np.float64)
    k, v = wide[0]
    low, high = k.min(0), k.max(0)
    # Bfloat16 widens a range and a step by up to 1/128 of what they are.
    bound = (high - low + np.abs(low) / 128) / 15 * 0.51 * (1 + 1 / 64) + 1e-37
    assert (np.abs(out[0, 0] - k) <= bound).all()
    step = np.abs(v).max(-1, keepdims=True) / 8 * (1 + 1 / 128)
    assert (np.abs(out[0, 1] - v) <= step * 1.001 + 1e-37).all()


def test_of_several_groups_each_has_its_range_and_the_widest_channel_eight_bits():
    rng = np.random.default_rng(1)
    kv = rng.standard_normal((2, 2, 3 * GROUP + 7, 2, 2 * CHANNELS)).astype(np.float32)
    kv[:, 0, :, 0, [5, 41]] *= 30
    kv[:, 0, GROUP : 2 * GROUP] *= 0.01
    error = np.abs(restored(kv) - kv)
    assert wide_channels(2 * CHANNELS) == 2
    assert error[:, 0, GROUP : 2 * GROUP].max() < 0.15
    widest = np.ptp(kv[:, 0, :, 0][..., [5, 41]], axis=1).max()
    assert error[:, 0, :, 0, [5, 41]].max() <= widest / 255 * 0.55
    assert 0.05 < error[:, 0, :GROUP, 1].max() < 0.3
    assert error[:, 1].max() <= np.abs(kv[:, 1]).max() / 8 * 1.01


def test_the_definition_of_a_small_one():
    kv = np.zeros((1, 2, 2, 1, 2), np.float32)
    kv[0, 0, :, 0] = [[0, 1], [15, 256]]
    kv[0, 1, :, 0] = [[-8, 3], [0, 0]]
    data = pack(kv).reshape(-1).tobytes()
    bf16 = lambda *values: np.array(values, ml_dtypes.bfloat16).tobytes()  # noqa: E731
    # Channel 1 is the wide one: codes 0 and 255, of which the coarse halves are 0 and 15.
    expected = (
        b"\x01\x00" + bf16(0, 1) + bf16(1, 1) + bytes([0x00, 0xFF]) + bytes([0xF0])
        + bf16(1, 0) + bytes([0xB0, 0x88])
    )  # fmt: skip
    assert data == expected + bytes(len(data) - len(expected))
    assert (restored(kv) == kv).all()


def test_zeros_and_constants_come_back():
    kv = np.zeros((1, 2, 3, 1, 4), np.float32)
    kv[0, 0, :, :, 1] = 0.5
    assert (restored(kv) == kv).all()


def test_keys_too_far_apart_are_refused():
    kv = np.ones((1, 2, 2, 1, 2), np.float32)
    kv[0, 0, :, 0, 0] = [3e38, -3e38]
    with refused(StoreError):
        pack(kv)


def test_heads_lie_apart():
    kv = np.random.default_rng(2).standard_normal((1, 2, 9, 4, 6)).astype(np.float32)
    packed = pack(kv)
    k, v = unpack(packed[0][:, :, 1:3], 9, 6)
    whole = restored(kv)[0]
    assert (k == whole[0, :, 1:3]).all() and (v == whole[1, :, 1:3]).all()
    assert (pack(kv[:, :, :, 1:3]) == packed[:, :, :, 1:3]).all()


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_three_tenths_of_bfloat16_at_most(head_dim):
    layout = KVLayout(4, 2, head_dim, "bfloat16", "int4")
    shares = [layout.stored_nbytes(tokens) / layout.nbytes(tokens) for tokens in (64, 256, 1024)]
    assert max(shares) < 0.29
    half = dataclasses.replace(layout, stored="int4-half")
    assert half.stored_nbytes(256) / layout.nbytes(256) < 0.145


@pytest.mark.parametrize("form", PACKED)
def test_every_store_gives_what_the_codes_say(any_store, chunk, dtype, form):
    layout = KVLayout(3, 2, 16, dtype, form)
    store, a, b = any_store(layout), normal(chunk(1, 40, layout)), normal(chunk(2, 90, layout), 1)
    for c in (a, b):
        assert store.put(c.key, c.kv, record=c.record).won
    got = store.get_many([b.key, a.key])
    assert got.kv.dtype == layout.numpy_dtype
    wanted = np.concatenate([as_stored(b.kv, layout), as_stored(a.kv, layout)], axis=2)
    assert got.kv.tobytes() == wanted.tobytes()
    assert store.get(b.key, layers=(1, 2)).tobytes() == wanted[1:2, :, :90].tobytes()
    record = store.head([a.key])[0]
    assert (record.stored, record.dtype, record.shape) == (form, dtype, a.kv.shape)
    assert record.nbytes == layout.stored_nbytes(40)
    assert sum(it.nbytes for it in store.records()) == layout.stored_nbytes(
        40
    ) + layout.stored_nbytes(90)


def test_into_a_part_of_a_larger_buffer(any_store, chunk, small):
    store, c = any_store(small), normal(chunk(1))
    store.put(c.key, c.kv, record=c.record)
    pool = np.full(small.shape(20), 7, small.numpy_dtype)
    kv = store.get(c.key, pool[:, :, 5:15])
    assert kv.tobytes() == as_stored(c.kv, small).tobytes()
    pool[:, :, 5:12] = 7
    assert (pool == 7).all()


def test_numbers_without_a_code_leave_nothing(any_store, chunk, small):
    store, c = any_store(small), normal(chunk(1))
    c.kv[1, 0, 3, 1, 2] = np.nan
    with refused(StoreError, c.key):
        store.put(c.key, c.kv, record=c.record)
    assert store.head([c.key]) == [None]


def test_a_store_of_one_format_is_none_of_another(open_store, layout, small):
    open_store(layout=layout)
    with refused(StoreError, small.stored):
        open_store(layout=small)

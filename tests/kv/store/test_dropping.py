"""Chunks of which some tokens are not stored: which, what the record says, what comes back."""

import dataclasses
import json

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import StoreError
from jaxrag.kv.store import Record, SharedStore, as_stored
from jaxrag.kv.store.dropping import dropped_tokens, from_bits, kept_tokens, to_bits
from jaxrag.kv.store.layout import KEPT, MIN_KEPT, HeadShare
from jaxrag.kv.store.record import _check


@pytest.fixture(params=sorted(KEPT))
def small(request, layout):
    return dataclasses.replace(layout, stored=request.param)


def numbers(c):
    kv = np.random.default_rng(5).standard_normal(c.kv.shape).astype(c.kv.dtype)
    return dataclasses.replace(c, kv=kv)


def put(store, c):
    store.put(c.key, c.kv, record=c.record)
    return store.head([c.key])[0]


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 100])
def test_bits_name_tokens(tokens):
    kept = np.flatnonzero(np.random.default_rng(tokens).integers(0, 2, tokens))
    bits = to_bits(kept, tokens)
    assert len(bits) == 2 * -(-tokens // 8)
    assert (from_bits(bits, tokens) == kept).all()


@pytest.mark.parametrize("bits", ["", "8", "80f", "zz", "0080", "01"])
def test_other_bits_are_refused(bits):
    with pytest.raises(ValueError):
        from_bits(bits, 7)


def test_keys_like_all_others_leave_first():
    rng = np.random.default_rng(0)
    kv = rng.standard_normal((2, 2, 60, 2, 8)).astype(np.float32) * 0.01
    ends = {0, 1, 2, 3, 56, 57, 58, 59}
    kv[:, 0] += 1
    told = np.array([9, 17, 30, 44])
    kv[:, 0, told, :, ::2] *= -1
    assert ends | set(told) <= set(kept_tokens(kv, 20).tolist())
    kv[:, 0, 25] = kv[:, 0].mean(1)  # the most alike
    assert ends | {25, *told} <= set(kept_tokens(kv, 20).tolist())
    assert kept_tokens(kv, 60).tolist() == list(range(60))
    assert len(kept_tokens(kv, 33)) == 33


def test_the_rest_comes_back_as_zeros_and_the_record_says_which(any_store, chunk, small):
    store, c = any_store(small), numbers(chunk(1, 100))
    record = put(store, c)
    kept = from_bits(record.kept, 100)
    assert (
        len(kept)
        == small.kept_tokens(100)
        == max(MIN_KEPT, -(-100 // (2 if "half" in small.stored else 3)))
    )
    kv = store.get(c.key)
    dropped = np.setdiff1d(np.arange(100), kept)
    assert (dropped_tokens(kv) == dropped).all()
    assert not kv[:, :, dropped].view(np.uint16).any()
    assert kv.tobytes() == as_stored(c.kv, small).tobytes()
    near = np.abs(kv.astype(np.float32) - c.kv.astype(np.float32))[:, :, kept]
    assert near.max() < 0.7


def test_a_short_chunk_is_kept_whole(any_store, chunk, small):
    store, c = any_store(small), numbers(chunk(1, MIN_KEPT))
    assert len(from_bits(put(store, c).kept, MIN_KEPT)) == MIN_KEPT
    assert not len(dropped_tokens(store.get(c.key)))


def test_a_record_of_other_tokens_is_refused(open_store, chunk, small):
    record = put(open_store(layout=small), numbers(chunk(1, 100)))
    values = json.loads(record.to_json())
    assert Record.from_json(record.to_json()) == record
    kept = from_bits(record.kept, 100)
    for bits, said in (
        (to_bits(kept[:-1], 100), ""),
        (record.kept[:-2], "100"),
        (None, ""),
        (["ff"], ""),
        ("zz" * 13, ""),
    ):
        body = {**values, "kept": bits}
        body["check"] = _check(body)
        with refused(StoreError, said):
            Record.from_json(json.dumps(body).encode())
    del values["kept"]
    with refused(StoreError, "'kept'"):
        Record.from_json(json.dumps(values).encode())


def test_processes_with_some_of_the_heads_are_refused(open_store, chunk, small):
    store, c = open_store(layout=small), numbers(chunk(1, 100))
    with refused(StoreError, "1"):
        store.begin(c.key, 100, c.record, ways=2)
    with refused(StoreError):
        SharedStore(store, HeadShare(0, 2), lambda value: [value])


def test_a_share_of_the_heads_can_be_read(open_store, chunk, small):
    store, c = open_store(layout=small), numbers(chunk(1, 100))
    put(store, c)
    got = store.get_many([c.key], share=HeadShare(1, 2)).kv
    assert got.tobytes() == np.ascontiguousarray(as_stored(c.kv, small)[:, :, :, 1:]).tobytes()

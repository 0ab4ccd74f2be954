"""What a store lacks is found, encoded and put under the names that everybody asks for."""

import dataclasses

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import StoreError
from jaxrag.kv.store import MemoryStore
from jaxrag.models.model import random_model
from jaxrag.reuse.encode import (
    ENCODERS,
    PREFIX_ENCODER,
    ChunkEncoding,
    ChunkInContext,
    chunk_key,
    encode_chunks,
    encoder_named,
    front,
    prefix_key,
    prefix_provenance,
    provenance,
)


@pytest.fixture(scope="module")
def model(tiny_config):
    return random_model(tiny_config("llama"), seed=1)


@pytest.fixture
def encoding(model, rng):
    store = MemoryStore(model.fingerprint, model.kv_layout)
    return ChunkEncoding(model, store, ids(rng, 5), primer=ids(rng, 11))


def ids(rng, length):
    return rng.integers(3, 101, length).astype(np.int32)


def chunks(encoding, encoder, rng):
    """Three chunks by key; where neighbours are seen, each behind another."""
    parts = [ids(rng, n) for n in (17, 9, 23)]
    seen = ENCODERS[encoder].sees_neighbours
    placed = [ChunkInContext(x, (parts[i - 1],) if seen else ()) for i, x in enumerate(parts)]
    return {encoding.key(encoder, it.ids, it.neighbours): it for it in placed}


@pytest.mark.parametrize("encoder", ENCODERS)
def test_what_is_missing_is_encoded_once_under_its_key(encoding, model, rng, encoder):
    if ENCODERS[encoder].wraps:
        vectors = np.eye(2, model.config.model_dim, dtype=np.float32)
        encoding = dataclasses.replace(encoding, primer=vectors)
    wanted = chunks(encoding, encoder, rng)
    first = next(iter(wanted))
    assert encoding.encode_missing(encoder, {first: wanted[first]}).keys() == {first}
    assert encoding.missing(encoder, wanted).keys() == wanted.keys() - {first}
    assert encoding.encode_missing(encoder, wanted).keys() == wanted.keys() - {first}
    assert encoding.encode_missing(encoder, wanted) == {}
    for key, it in wanted.items():
        origin = (model, encoder, encoding.prefix, it.ids, it.neighbours, encoding.primer)
        assert key == chunk_key(encoding.store.fingerprint, *origin)
        (record,) = encoding.store.head([key])
        assert record.provenance == provenance(*origin)
        reader, before = front(model, encoder_named(encoder), encoding.prefix, encoding.primer)
        ((_, kv),) = encode_chunks(reader, encoder, before, [it.ids], [it.neighbours])
        np.testing.assert_allclose(encoding.store.get(key), kv, rtol=1e-4, atol=1e-5)


def test_the_prefix_is_a_chunk_that_saw_nothing(encoding, model):
    encoding.keep_prefix()
    key = prefix_key(encoding.store.fingerprint, "", encoding.prefix)
    nothing = encoding.prefix[:0]
    assert key == chunk_key(model.fingerprint, model, PREFIX_ENCODER, nothing, encoding.prefix)
    assert list(encoding.store.keys()) == [key]
    assert encoding.store.head([key])[0].provenance == prefix_provenance("", encoding.prefix)
    ChunkEncoding(model, encoding.store, nothing).keep_prefix()
    assert list(encoding.store.keys()) == [key]


def test_an_offer_says_why_a_chunk_is_not_kept(encoding, rng, monkeypatch):
    wanted = chunks(encoding, "isolated", rng)
    (made, *_) = encoding.encode("isolated", wanted)
    assert encoding.offer(made) is None
    damaged = np.zeros_like(made.kv)
    encoding.store.put(made.key, damaged, record=made.record, replace=True)
    assert encoding.offer(made) is None  # puts over what is there
    np.testing.assert_array_equal(encoding.store.get(made.key), made.kv)

    def full(*_):
        raise StoreError("disk full")

    monkeypatch.setattr(encoding.store, "_put", full)
    assert encoding.offer(made) == "disk full"
    with refused(StoreError):
        encoding.encode_missing("after_prefix", chunks(encoding, "after_prefix", rng))
    monkeypatch.setattr(MemoryStore, "writable", False)
    assert "for reading only" in encoding.offer(made)


@pytest.mark.parametrize(
    ("dtype", "value"), [("float32", np.nan), ("bfloat16", np.inf), ("float16", -np.inf)]
)
def test_kv_that_is_no_number_is_not_kept(tiny_config, rng, dtype, value):
    sound = random_model(tiny_config("llama", dtype=dtype), seed=1)
    params = sound.params
    layers = params.layers.replace(v=params.layers.v.at[-1, 0, 0, 0].set(value))
    model = dataclasses.replace(sound, params=params.replace(layers=layers))
    store = MemoryStore(model.fingerprint, model.kv_layout)
    encoding = ChunkEncoding(model, store, ids(rng, 5))
    wanted = chunks(encoding, "isolated", rng)
    with refused(StoreError, dtype):
        encoding.encode_missing("isolated", wanted)
    assert list(store.keys()) == []
    made = next(encoding.encode("isolated", wanted))
    assert "is not kept" in encoding.offer(made)
    sound_encoding = dataclasses.replace(encoding, model=sound)
    assert sound_encoding.encode_missing("isolated", wanted).keys() == wanted.keys()

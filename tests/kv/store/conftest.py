"""Chunks of odd sizes with arbitrary bits, and both kinds of store to put them in."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxrag.base.config import DTYPES
from jaxrag.kv.store import (
    ChunkStore,
    KVLayout,
    MemoryStore,
    Provenance,
    ReadThrough,
    chunk_key,
    content_id,
    context_id,
    fingerprint,
)

FINGERPRINT = fingerprint({"weights": "a model"})
LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=5, dtype="bfloat16")


@dataclasses.dataclass(frozen=True)
class Chunk:
    key: str
    kv: Any
    record: Provenance

    def assert_equal(self, kv):
        assert kv.dtype == self.kv.dtype
        assert kv.shape == self.kv.shape
        assert kv.tobytes() == self.kv.tobytes()


def make_chunk(number, tokens=7, layout=LAYOUT, model=FINGERPRINT, seed=0):
    """The chunk of token ids [number, ...], filled with random bits, NaNs among them."""
    ids = np.full(tokens, number, np.int32)
    record = Provenance("isolated", content_id("tok", ids), context_id("isolated", ids[:0]))
    rng = np.random.default_rng([seed, number, tokens])
    shape = layout.shape(tokens)
    width = layout.numpy_dtype.itemsize
    bits = rng.integers(0, 1 << 8 * width, shape, f"uint{8 * width}")
    key = chunk_key(model, record.content_id, record.context_id)
    return Chunk(key, bits.view(layout.numpy_dtype), record)


@pytest.fixture
def chunk():
    """``chunk(number, tokens=7, layout=LAYOUT, model=FINGERPRINT, seed=0)``: a Chunk."""
    return make_chunk


@pytest.fixture
def open_store(tmp_path):
    """``open_store(mode="rw", model=..., layout=..., ...)`` on one directory."""

    def open_(mode="rw", model=FINGERPRINT, layout=LAYOUT, **options):
        return ChunkStore.open(tmp_path / "kb", model, layout, mode=mode, **options)

    return open_


@pytest.fixture(params=["directory", "directory, default io", "memory", "s3", "tier"])
def any_store(request, open_store, tmp_path):
    """``any_store(layout=LAYOUT)``: an empty store of each kind."""

    def open_(layout=LAYOUT, **options):
        if request.param == "memory":
            return MemoryStore(FINGERPRINT, layout, **options)
        if request.param == "s3":
            location = request.getfixturevalue("s3_location")
            return ChunkStore.open(location, FINGERPRINT, layout, mode="rw", **options)
        if request.param == "tier":
            near = ChunkStore.open(
                tmp_path / "near", FINGERPRINT, layout, mode="rw", durable=False, **options
            )
            return ReadThrough(open_store(layout=layout, **options), near)
        io_mode = "default" if "default" in request.param else "memmap"
        return open_store(layout=layout, io_mode=io_mode, **options)

    return open_


@pytest.fixture(params=DTYPES)
def dtype(request):
    return request.param


@pytest.fixture
def layout():
    return LAYOUT


@pytest.fixture
def model():
    return FINGERPRINT

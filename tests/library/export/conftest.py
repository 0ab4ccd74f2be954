"""A chunk store with a few chunks of odd sizes, and what a plain numpy rotation makes of keys."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxrag.base.rotary import attention_factor, frequencies
from jaxrag.kv.store import ChunkStore, KVLayout, Provenance, chunk_key, content_id, context_id
from jaxrag.library.export import Bundle, ExportedChunk

FINGERPRINT = "5e" * 32
LENGTHS = (7, 12, 5)


@dataclasses.dataclass(frozen=True)
class Chunks:
    """An open store and what was put into it."""

    store: ChunkStore
    bundles: list[Bundle]  # one a chunk, in the order of LENGTHS
    kv: list[Any]  # [L, 2, T, K, H] each

    def joined(self, *order):
        return Bundle("prompt", tuple(self.bundles[i].pieces[0] for i in order))


@pytest.fixture
def fill(tmp_path, tiny_config, rng):
    """``fill(dtype, stored, ways, aux, **config changes)``: Chunks and their config."""

    def make(dtype="bfloat16", stored="native", ways=1, aux=None, **changes):
        config = tiny_config(dtype=dtype, **changes)
        sizes = (config.num_layers, config.num_kv_heads, config.head_dim)
        layout = KVLayout(*sizes, dtype, stored)
        store = ChunkStore.open(
            tmp_path / f"store-{dtype}-{stored}", FINGERPRINT, layout, mode="rw"
        )
        bundles, values = [], []
        for number, length in enumerate(LENGTHS):
            ids = (np.arange(length) + 20 * number).astype(np.int32)
            record = Provenance("isolated", content_id("tok", ids), context_id("isolated", ids[:0]))
            key = chunk_key(FINGERPRINT, record.content_id, record.context_id)
            kv = rng.normal(size=layout.shape(length)).astype(layout.numpy_dtype)
            if ways == 1:
                store.put(key, kv, record=record, aux=aux)
            else:
                attempt = store.begin(key, length, record, ways=ways)
                shards = [np.ascontiguousarray(part) for part in np.split(kv, ways, axis=3)]
                digests = [store.put_shard(attempt, i, shard) for i, shard in enumerate(shards)]
                store.commit(attempt, digests)
            bundles.append(Bundle(key, (ExportedChunk(key, ids),)))
            values.append(kv)
        return Chunks(store, bundles, values), config

    return make


@pytest.fixture
def rotated():
    """``rotated(keys [L, T, K, H], first, rope)``: float64, complex numbers for pairs."""

    def rotate(keys, first, rope):
        keys = np.asarray(keys, np.float64).copy()
        turned = keys[..., : rope.rotary_dim] * attention_factor(rope)
        half = rope.rotary_dim // 2
        if rope.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
        else:
            a, b = turned[..., :half], turned[..., half:]
        angle = (first + np.arange(keys.shape[1]))[:, None, None] * frequencies(rope)
        pairs = (a + 1j * b) * np.exp(1j * angle)
        if rope.interleaved:
            keys[..., 0 : 2 * half : 2], keys[..., 1 : 2 * half : 2] = pairs.real, pairs.imag
        else:
            keys[..., :half], keys[..., half : 2 * half] = pairs.real, pairs.imag
        return keys

    return rotate

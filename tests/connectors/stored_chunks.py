"""Stored chunks without a model: random KV, and a manifest over it."""

import dataclasses
from pathlib import Path

import numpy as np

from jaxrag.base.config import RopeConfig
from jaxrag.connectors import manifest
from jaxrag.kv.store import ChunkStore, KVLayout, Provenance, chunk_key, content_id, context_id
from jaxrag.serve.connector_files import parts_table, write_manifest

FINGERPRINT = "ab" * 32
ROPE = RopeConfig(theta=10000.0, rotary_dim=32, interleaved=False, scaling=None)
LAYOUT = KVLayout(num_layers=2, num_kv_heads=4, head_dim=32, dtype="float32")
NOTHING = np.zeros(0, np.int32)


@dataclasses.dataclass
class Stored:
    """A folder with a store and a manifest, and what is in them."""

    folder: Path
    prefix: np.ndarray
    chunks: list[np.ndarray]
    encoder: str = "isolated"
    layout: KVLayout = LAYOUT
    kv: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def out(self):
        return self.folder / "manifest"

    def key(self, ids, encoder=None):
        encoder = encoder or self.encoder
        seen = NOTHING if encoder == "isolated" else self.prefix
        return chunk_key(FINGERPRINT, content_id("t", ids), context_id(encoder, seen))

    @property
    def prefix_key(self):
        return self.key(self.prefix, "isolated")

    def fill(self):
        draw = np.random.default_rng(7)
        store = ChunkStore.open(self.folder / "store", FINGERPRINT, self.layout, mode="rw")
        for ids in (self.prefix, *self.chunks):
            encoder = "isolated" if ids is self.prefix else self.encoder
            key = self.key(ids, encoder)
            seen = NOTHING if encoder == "isolated" else self.prefix
            record = Provenance(encoder, content_id("t", ids), context_id(encoder, seen))
            kv = draw.standard_normal(self.layout.shape(len(ids))).astype(self.layout.numpy_dtype)
            store.put(key, kv, record=record)
            self.kv[key] = kv
        store.close()
        self.write(self.chunks)
        return self

    def write(self, chunks, **changes):
        model = self.folder / "model"
        model.mkdir(exist_ok=True)
        if not (model / "model.safetensors").exists():
            (model / "model.safetensors").write_bytes(b"weights")
        engine = manifest.ServedModel(
            store=str(self.folder / "store"),
            fingerprint=FINGERPRINT,
            layout=self.layout,
            rope=ROPE,
            tokenizer="t",
            weights=manifest.weights_of(model, self.folder / "memo.json"),
            encoder=self.encoder,
        )
        engine = dataclasses.replace(engine, **changes)
        table = parts_table((content_id("t", ids), ids) for ids in chunks)
        gates = (manifest.Gate("turborag", 0, 50),)
        write_manifest(self.out, manifest.Manifest(engine, self.prefix, gates, table))

    def prompt(self, *numbers, final=5):
        parts = [self.prefix, *(self.chunks[at] for at in numbers)]
        return np.concatenate([*parts, np.arange(9000, 9000 + final, dtype=np.int32)])

    def spans(self, *numbers):
        return [len(self.prefix), *(len(self.chunks[at]) for at in numbers)]


def drawn(folder, encoder="isolated", layout=LAYOUT):
    draw = np.random.default_rng(3)

    def ids(count):
        return draw.integers(0, 500, count).astype(np.int32)

    return Stored(folder, ids(11), [ids(n) for n in (40, 23, 64, 9, 31)], encoder, layout).fill()

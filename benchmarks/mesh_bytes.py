"""Bytes of K and V on a device and on the host, by decode rule and mesh, counted from live arrays.

    python benchmarks/mesh_bytes.py --out benchmarks/results/mesh-bytes.json

A random model of four KV heads answers a batch of questions over the same documents. Then
counted: the pool on the device that has most of it, and K and V in host memory of the process.
"""

import argparse
import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrag.base.config import ModelConfig
from jaxrag.base.sharding import make_mesh
from jaxrag.engine.engine import engine_of
from jaxrag.kv.placement import KVPlacement
from jaxrag.measure.zoo import llama
from jaxrag.models.model import random_model
from jaxrag.reuse.decode import rule_from
from jaxrag.serve.generate import generate

CACHE_TOKENS = 4096
WINDOW = "sink=16,recent=32"
RULES = {
    "dense": ("dense", KVPlacement()),
    "topn, value_layers=1": ("topn:n=32", KVPlacement(value_layers=1)),
    "retrieval": (f"retrieval:k=32,{WINDOW}", KVPlacement()),
    "retrieval, kv=host": (f"retrieval:k=32,{WINDOW}", KVPlacement("host")),
    "topn": ("topn:n=32", KVPlacement()),
    "ivf": (f"ivf:k=32,{WINDOW}", KVPlacement()),
    "ivf, kv=host": (f"ivf:k=32,{WINDOW}", KVPlacement("host")),
    "flat": (f"flat:k=32,{WINDOW}", KVPlacement()),
    "flat, kv=host": (f"flat:k=32,{WINDOW}", KVPlacement("host")),
    "quest": ("quest:budget=64,dense_layers=0", KVPlacement()),
    "infllm": (f"infllm:block=16,blocks=2,{WINDOW}", KVPlacement()),
    "snapkv": ("snapkv:capacity=64,window=16", KVPlacement()),
    "static_window": (f"static_window:{WINDOW}", KVPlacement()),
}
MESHES = ((1, 1, 1), (1, 1, 2), (2, 1, 2))


def most_on_a_device(arrays: Iterable[Any]) -> int:
    """Bytes of these arrays on the device that has most of them."""
    held: dict[int, int] = {}
    for array in arrays:
        for shard in array.addressable_shards:
            held[shard.device.id] = held.get(shard.device.id, 0) + shard.data.nbytes
    return max(held.values(), default=0)


def count(
    config: ModelConfig, sizes: tuple[int, int, int], rule: str, placement: KVPlacement
) -> dict[str, int]:
    """One row of the table."""
    mesh = None if sizes == (1, 1, 1) else make_mesh(*sizes)
    model = random_model(config, mesh=mesh, cache_tokens=CACHE_TOKENS, placement=placement)
    rng = np.random.default_rng(0)
    documents = [rng.integers(5, 100, 200).tolist() for _ in range(2)]
    questions = [rng.integers(5, 100, 12).tolist() for _ in range(4)]
    generate(
        questions, documents=documents, model=model, method="turborag",
        decode=rule_from(rule), max_new_tokens=4, batch_size=4,
    )  # fmt: skip
    cache = engine_of(model).runner.cache
    return {
        "pool on a device": most_on_a_device([cache.pool.k, cache.pool.v]),
        "K and V on the host": 0 if cache.host is None else cache.host.nbytes,
    }


def main() -> None:
    """Count, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 4)  # type: ignore[no-untyped-call]
    config = llama(vocab_size=104, num_heads=8, num_kv_heads=4, num_layers=4, dtype="float32")
    rows = []
    for rule, (decode, placement) in RULES.items():
        for mesh in MESHES:
            counted = count(config, mesh, decode, placement)
            rows.append({"rule": rule, "mesh": ",".join(map(str, mesh)), **counted})
            print(json.dumps(rows[-1]), flush=True)
    if args.out:
        head = {"model": dataclasses.asdict(config), "cache_tokens": CACHE_TOKENS}
        args.out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

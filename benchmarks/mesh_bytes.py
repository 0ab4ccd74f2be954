"""Bytes of K and V on a device and on the host, by decode rule and mesh, counted from live arrays.

    python benchmarks/mesh_bytes.py --out benchmarks/results/mesh_bytes.json

A random model of four KV heads answers a batch of questions over the same documents. Then counted:
the pool's K and V, and what the rule carries, on the device that has most of them; K and V, and the
indexes at their largest, in the host memory of the process.
"""

import argparse
import json
from pathlib import Path

import jax
import numpy as np

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
    "ivf": (f"ivf:k=32,{WINDOW}", KVPlacement()),
    "retrieval, kv=host": (f"retrieval:k=32,{WINDOW}", KVPlacement("host")),
    "quest, kv=host": ("quest:pages=4,dense_layers=0", KVPlacement("host")),
}
MESHES = ((1, 1, 1), (1, 1, 2), (1, 1, 4), (2, 1, 2))


def most_on_a_device(arrays) -> int:
    """Bytes of these arrays on the device that has most of them."""
    held: dict[int, int] = {}
    for array in arrays:
        for shard in array.addressable_shards:
            held[shard.device.id] = held.get(shard.device.id, 0) + shard.data.nbytes
    return max(held.values(), default=0)


def count(config, sizes, rule, placement) -> dict[str, int]:
    """One row of the table."""
    mesh = None if sizes == (1, 1, 1) else make_mesh(*sizes)
    model = random_model(config, mesh=mesh, cache_tokens=CACHE_TOKENS, placement=placement)
    rng = np.random.default_rng(0)
    documents = [rng.integers(5, 100, 200).tolist() for _ in range(2)]
    questions = [rng.integers(5, 100, 12).tolist() for _ in range(4)]
    results = generate(
        questions, documents=documents, model=model, method="turborag",
        decode=rule_from(rule), max_new_tokens=4, batch_size=4,
    )  # fmt: skip
    engine = engine_of(model)
    cache = engine.call(lambda runner: runner.cache)
    carried = engine.call(lambda _: [x for x in jax.live_arrays() if is_carried(x, config)])
    return {
        "weights_device": most_on_a_device(jax.tree.leaves(model.params)),
        "pool_device": most_on_a_device([cache.pool.k, cache.pool.v]),
        "carried_device": most_on_a_device(carried),
        "kv_host": 0 if cache.host is None else cache.host.nbytes,
        "index_host": sum(it.decode.index_bytes for it in results if it.decode is not None),
    }

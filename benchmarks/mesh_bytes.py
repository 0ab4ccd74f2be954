"""Bytes on a device and on the host, by decode rule and mesh, counted from live arrays.

A random model of four KV heads answers a batch of questions over the same documents: on one
device; on two and four devices of one process; on one device of each of two processes. Then
counted: weights, and K and V, on the device that has most of them; K and V in host memory of a
process; and what rules that search hold there beside these, of all questions of the batch. Of two
processes, the one that has most.

example: python benchmarks/mesh_bytes.py --out benchmarks/results/mesh-bytes.json
"""

import argparse
import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrag.base.errors import EngineError
from jaxrag.base.sharding import make_mesh
from jaxrag.cli import run_command
from jaxrag.cli.options import add_json
from jaxrag.cli.output import give_out, require_folder, table
from jaxrag.engine.engine import engine_of
from jaxrag.kv.placement import KVPlacement
from jaxrag.measure.machine import describe
from jaxrag.measure.zoo import llama
from jaxrag.models.model import random_model
from jaxrag.reuse.decode import HostSearch, rule_from
from jaxrag.serve.generate import generate

CONFIG = llama(vocab_size=104, num_heads=8, num_kv_heads=4, num_layers=4, dtype="float32")
CACHE_TOKENS, DOCUMENTS, DOCUMENT_TOKENS, QUESTIONS = 4096, 2, 500, 4
WINDOW = "sink=16,recent=32"
RULES = {
    "dense": ("dense", KVPlacement()),
    "topn": ("topn:n=32", KVPlacement()),
    "topn, value_layers=1": ("topn:n=32", KVPlacement(value_layers=1)),
    "retrieval": (f"retrieval:k=32,{WINDOW}", KVPlacement()),
    "retrieval, kv=host": (f"retrieval:k=32,{WINDOW}", KVPlacement("host")),
    "ivf": (f"ivf:k=32,{WINDOW}", KVPlacement()),
    "ivf, kv=host": (f"ivf:k=32,{WINDOW}", KVPlacement("host")),
    "flat": (f"flat:k=32,{WINDOW}", KVPlacement()),
    "flat, kv=host": (f"flat:k=32,{WINDOW}", KVPlacement("host")),
    "quest": ("quest:budget=64,dense_layers=0", KVPlacement()),
    "infllm": (f"infllm:block=16,blocks=2,{WINDOW}", KVPlacement()),
    "snapkv": ("snapkv:capacity=64,window=16", KVPlacement()),
    "static_window": (f"static_window:{WINDOW}", KVPlacement()),
}
MESHES = ((1, 1, 1), (1, 1, 2), (2, 1, 2))  # of one process
OVER = (1, 1, 2)  # of two
COUNTED = (
    "weights on a device", "K and V on a device", "K and V on the host", "indexes on the host"
)  # fmt: skip

Row = dict[str, Any]


def most_on_a_device(arrays: Iterable[Any]) -> int:
    """Bytes of these arrays on the device of this process that has most of them."""
    held: dict[int, int] = {}
    for array in arrays:
        for shard in array.addressable_shards:
            held[shard.device.id] = held.get(shard.device.id, 0) + shard.data.nbytes
    return max(held.values(), default=0)


class Watch:
    """Sums what requests held beside K and V when they are released."""

    def __init__(self, search: HostSearch) -> None:
        self.nbytes, self._search, self._release = 0, search, search.release
        search.release = self.release  # type: ignore[method-assign]

    def release(self, numbers: Iterable[int]) -> None:
        """In place of the search's own."""
        ended = list(numbers)
        self.nbytes += self._search.account_of(ended).index_bytes
        self._release(ended)


def count(name: str, sizes: tuple[int, int, int]) -> Row:
    """One row, of this process."""
    decode, placement = RULES[name]
    mesh = None if sizes == (1, 1, 1) else make_mesh(*sizes)
    model = random_model(CONFIG, mesh=mesh, cache_tokens=CACHE_TOKENS, placement=placement)
    rng = np.random.default_rng(0)
    documents = [rng.integers(5, 100, DOCUMENT_TOKENS).tolist() for _ in range(DOCUMENTS)]
    questions = [rng.integers(5, 100, 12).tolist() for _ in range(QUESTIONS)]
    runner = engine_of(model).runner
    watch = Watch(runner.host_search)
    generate(
        questions, documents=documents, model=model, method="turborag",
        decode=rule_from(decode), max_new_tokens=4, batch_size=QUESTIONS,
    )  # fmt: skip
    cache = runner.cache
    counted = (
        most_on_a_device(jax.tree.leaves(model.params)),
        most_on_a_device([cache.pool.k, cache.pool.v]),
        0 if cache.host is None else cache.host.nbytes,
        watch.nbytes,
    )
    return dict(zip(COUNTED, counted, strict=True))


def of_two_processes() -> list[Row]:
    """The rows of ``OVER``: of each rule, the most that one of them has."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        coordinator = f"127.0.0.1:{server.getsockname()[1]}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    with tempfile.TemporaryDirectory(prefix="jaxrag-") as folder:
        written = [Path(folder) / f"{rank}.json" for rank in range(2)]
        both = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(rank), coordinator, path], env=environment
            )
            for rank, path in enumerate(written)
        ]
        try:
            codes = [one.wait() for one in both]
        finally:
            for one in both:
                one.kill()
        if codes != [0, 0]:
            raise EngineError(f"the two processes ended with exit codes {codes}")
        found = [json.loads(path.read_text(encoding="utf-8")) for path in written]
    return [
        {name: max(a, b) for (name, a), b in zip(one.items(), other.values(), strict=True)}
        for one, other in zip(*found, strict=True)
    ]


def one_of_two(rank: str, coordinator: str, out: str) -> None:
    """A process of ``of_two_processes``."""
    jax.distributed.initialize(coordinator, 2, int(rank))
    Path(out).write_text(json.dumps([count(name, OVER) for name in RULES]), encoding="utf-8")
    jax.distributed.shutdown()  # type: ignore[no-untyped-call]


def rows() -> Iterator[Row]:
    """Of every rule, mesh and number of processes."""
    over = of_two_processes()
    for name, two in zip(RULES, over, strict=True):
        for mesh in MESHES:
            yield {"rule": name, "processes": 1, "mesh": _written(mesh), **count(name, mesh)}
        yield {"rule": name, "processes": 2, "mesh": _written(OVER), **two}


def _written(mesh: Sequence[int]) -> str:
    return ",".join(map(str, mesh))


def report(result: Row) -> Iterator[str]:
    """A table in MiB."""
    head = ["rule", "processes", "mesh", *COUNTED]
    body = [
        [it["rule"], str(it["processes"]), it["mesh"], *(f"{it[n] / 2**20:.1f}" for n in COUNTED)]
        for it in result["rows"]
    ]
    yield table([head, *body], range(3, len(head)))


def main(argv: Sequence[str] | None = None) -> int:
    """Count, print and write the table; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", metavar="FILE", help="write the result as JSON")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    add_json(parser)
    return run_command(_run, parser.parse_args(argv))


def _run(args: argparse.Namespace) -> None:
    if args.rank:
        one_of_two(*args.rank)
        return
    require_folder(args.out)
    jax.config.update("jax_num_cpu_devices", 4)  # type: ignore[no-untyped-call]
    result = {
        "benchmark": "bytes by mesh",
        "model": dataclasses.asdict(CONFIG),
        "cache_tokens": CACHE_TOKENS,
        "documents": DOCUMENTS,
        "document_tokens": DOCUMENT_TOKENS,
        "questions": QUESTIONS,
        "rows": list(rows()),
        "machine": describe(),
    }
    give_out(args, result, report(result))


if __name__ == "__main__":
    sys.exit(main())

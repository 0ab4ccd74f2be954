"""The engine on a GPU, random weights of a real model: law 13, and what overlap is worth."""

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from gpu_end_to_end import random_weights
from gpu_scenes import TINY, Shape

MODEL = "llama-3-8b"
BATCHES = ("alone", "together", "in another order", "beside others")


def stage_law13(shape: Shape, impl: str, found: MutableMapping[str, Any]) -> None:
    """Law 13 with the bodies of ``impl``: tokens do not depend on what else is in the batch.

    The same requests, of unlike lengths, one at a time, all at once, in another order, and beside
    as many others; under a method that recomputes nothing and under one that selects.
    """
    import numpy as np

    from jaxrag.engine.engine import Engine
    from jaxrag.engine.request import Request
    from jaxrag.reuse.methods import METHODS

    asked = _draw(traffic_of(shape, requests=8, documents=8), shape, impl)
    for name in ("turborag", "fusionrag"):
        answers: dict[str, dict[int, list[int]]] = {}
        for batch in BATCHES:
            model = dataclasses.replace(asked.model)
            engine = model.engine = Engine(model, asked.settings)

            def request(at: int, name: str = name, engine: Any = engine) -> Any:
                one = asked.requests[at]
                method = METHODS[name]
                return Request(one.prompt, engine.memory, method, one.tokens, rows=8)

            count = len(asked.requests) // 2
            order = {
                "alone": [[at] for at in range(count)],
                "together": [list(range(count))],
                "in another order": [list(reversed(range(count)))],
                "beside others": [list(range(2 * count))],
            }[batch]
            answers[batch] = {}
            for turn in order:
                for at, ids in zip(turn, ids_of(engine, [request(at) for at in turn]), strict=True):
                    answers[batch][at] = ids
        first = answers["alone"]
        for batch in BATCHES[1:]:
            equal = [first[at] == answers[batch][at] for at in first]
            found[f"{name}, {batch}"] = {
                "out": 1.0 - float(np.mean(equal)), "requests": len(equal), "ok": all(equal),
            }  # fmt: skip
    found["ok"] = all(row["ok"] for row in found.values())


def stage_engine(shape: Shape, impl: str, found: MutableMapping[str, Any]) -> None:
    """Requests that all come at once: static, inline and asynchronous; and the links to the host.

    Chunk KV comes from a store on the disk, so that the arms differ in what waits for what.
    """
    _links(shape, found)
    traffic = traffic_of(shape, requests=24, documents=24)
    from jaxrag.measure.bench.options import ServeOptions
    from jaxrag.measure.bench.serve import Bench

    model = random_weights(MODEL, shape, impl, 1 << 10)  # Bench gives it the pool of `pool`
    pool = traffic.documents + 8 * (traffic.chunks + 2)
    options = ServeOptions(traffic=traffic, rates=(float("inf"),), rows=8, pool_chunks=pool)
    with _folder() as folder:
        bench = Bench(model, options, folder)
        for arm in options.compared:
            start = time.perf_counter()
            row = bench.measure(arm, float("inf"))
            found[arm.name] = {
                "seconds": row["first_token"]["p50"],
                "tokens_per_second": row["tokens_per_second"],
                "per_token_seconds": row["per_token"]["p50"],
                "good": row["good"],
                "compiled": row["compiled"],
                "arm_seconds": time.perf_counter() - start,
            }
        equal = bench.equal()["arms"]
    if equal is not None:
        found["tokens of all arms"] = {"out": 1.0 - equal, "ok": equal == 1.0}
    found["ok"] = equal is None or equal == 1.0


def _links(shape: Shape, found: MutableMapping[str, Any]) -> None:
    """Bytes a second between host and device, pageable and pinned."""
    import jax
    import numpy as np
    from gpu_stages import refusal

    device = jax.devices()[0]
    size = 1 << (20 if shape is TINY else 30)
    pageable = np.ones(size, np.uint8)
    on_device = jax.block_until_ready(jax.device_put(pageable, device))

    def rate(label: str, move: Any) -> None:
        try:
            jax.block_until_ready(move())
            times = []
            for _ in range(5):
                start = time.perf_counter()
                jax.block_until_ready(move())
                times.append(time.perf_counter() - start)
        except Exception as error:  # a backend without such memory is a result
            found[label] = refusal(error)
            return
        seconds = sorted(times)[len(times) // 2]
        found[label] = {"seconds": seconds, "host_bytes_per_second": size / seconds}

    pinned, there = (
        jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
        for kind in ("pinned_host", "device")
    )
    rate("host to device, pageable", lambda: jax.device_put(pageable, device))
    try:
        kept = jax.block_until_ready(jax.device_put(pageable, pinned))
    except Exception as error:
        found["host to device, pinned"] = refusal(error)
    else:
        rate("host to device, pinned", lambda: jax.device_put(kept, there))
    rate("device to host, pinned", lambda: jax.device_put(on_device, pinned))


@dataclasses.dataclass(frozen=True, eq=False)
class _Asked:
    model: Any
    settings: Any
    requests: list[Any]


def traffic_of(shape: Shape, *, requests: int, documents: int) -> Any:
    """Requests for eight chunks each, or two where the shape is a toy."""
    from jaxrag.measure.bench.options import Traffic

    tiny = shape is TINY
    return Traffic(
        requests=requests, documents=documents, chunk_tokens=shape.chunk, chunks=2 if tiny else 8,
        question=shape.question, answers=(2, 3) if tiny else (16, 32, 64), topics=2, neighbours=1,
    )  # fmt: skip


def _draw(traffic: Any, shape: Shape, impl: str) -> _Asked:
    from jaxrag.engine.state import EngineSettings
    from jaxrag.measure.bench.serve_workload import draw

    tokens = traffic.documents * traffic.chunk_tokens * 3
    rows = 8 * (traffic.chunks * traffic.chunk_tokens + traffic.question + max(traffic.answers))
    model = random_weights(MODEL, shape, impl, tokens + 2 * rows)
    return _Asked(model, EngineSettings(), draw(traffic, model.config.vocab_size))


def ids_of(engine: Any, requests: Sequence[Any]) -> list[list[int]]:
    """The tokens of every request, which are given to the engine together."""
    told: list[list[int]] = [[] for _ in requests]
    for progress in engine.iterate(requests):
        if progress.error is not None:
            raise progress.error
        told[progress.number].extend(progress.new)
    return told


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="jaxrag-gpu-") as name:
        yield Path(name) / "store"

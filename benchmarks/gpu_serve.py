"""Serving on a GPU, random weights of a real model: tiers, slow links, decode rules and ingest.

`serve` is `jaxrag bench serve` at the shapes of Llama-3-8B: requests arrive at a rate and decode
together; chunk KV is in a store on the disk, with and without a tier of host memory between it and
the pool, over links of several speeds. Law 13 stands beside it. `rules` decodes behind a long
context with V, or K and V, in host memory over the real bus; `ingest` encodes every chunk behind
ten neighbours.
"""

import dataclasses
import gc
import tempfile
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from gpu_end_to_end import first_tokens, prompt_of, random_weights
from gpu_engine import MODEL, ids_of, traffic_of
from gpu_scenes import TINY, Shape
from gpu_stages import refusal

Found = MutableMapping[str, Any]

RATES = (4.0, 16.0)  # requests a second
SLOW = 2e9  # bytes a second: a network, or a slow disk
# In order of what is asked first; a stage that is killed leaves its rows.
ARMS = (
    "asynchronous",
    "static",
    "full",
    f"asynchronous:link={SLOW:.0f}",
    f"inline:link={SLOW:.0f}",
    f"asynchronous:engine.arena_bytes=0,link={SLOW:.0f}",
)
# KCache with the values of all layers but one in host memory, then RetrievalAttention. All are in
# host memory where their papers have them.
RULES = ("dense", "static_window", "topn:n=128,device_layers=1", "flat", "ivf", "retrieval")
NEIGHBOURS = 10


def stage_serve(shape: Shape, impl: str, found: Found) -> None:
    """Law 13 over a slow link first; then every arm at every rate; then documents on the disk."""
    model = random_weights(MODEL, shape, impl, 1 << 10)
    with tempfile.TemporaryDirectory(prefix="jaxrag-gpu-") as name:
        folder = Path(name)
        law13_over_a_link(model, shape, folder / "law13", found)
        arms_at_rates(model, shape, folder / "arms", found)
        from_the_disk(model, shape, folder / "disk", found)
    found["ok"] = all(row.get("ok", True) for row in found.values())


def pooled(model: Any, tokens: int, impl: str | None = None) -> Any:
    """The same weights with a pool of so many tokens, when those that are done have left theirs."""
    gc.collect()
    config = dataclasses.replace(model.config, kernels=impl or model.config.kernels)
    return dataclasses.replace(model, config=config, cache_tokens=tokens)


def law13_over_a_link(model: Any, shape: Shape, folder: Path, found: Found) -> None:
    """Tokens of requests alone from memory, and together from the disk over a slow link."""
    from jaxrag.engine.engine import Engine
    from jaxrag.engine.request import Request
    from jaxrag.engine.state import EngineSettings
    from jaxrag.kv.store import ChunkStore
    from jaxrag.measure.bench.serve_workload import draw
    from jaxrag.measure.bench.throttle import SlowLink, Throttled
    from jaxrag.reuse.methods import METHODS

    traffic = traffic_of(shape, requests=4, documents=8 if shape is not TINY else 4)
    tokens = (traffic.documents + 4 * (traffic.chunks + 1)) * traffic.chunk_tokens
    asked = draw(traffic, model.config.vocab_size)
    disk = ChunkStore.open(
        folder, model.fingerprint, model.kv_layout, mode="rw", max_tokens=shape.chunk,
        durable=False,
    )  # fmt: skip

    def answers(store_of: Callable[[Any], Any], together: bool) -> list[list[int]]:
        own = pooled(model, 2 * tokens)
        engine = own.engine = Engine(own, EngineSettings())
        requests = [
            Request(it.prompt, store_of(engine), METHODS["turborag"], it.tokens, rows=4)
            for it in asked
        ]
        turns = [requests] if together else [[it] for it in requests]
        return [ids for turn in turns for ids in ids_of(engine, turn)]

    alone = answers(lambda engine: engine.memory, together=False)
    answers(lambda engine: disk, together=True)  # puts what is not there
    together = answers(lambda engine: Throttled(disk, SlowLink(SLOW)), together=True)
    equal = sum(map(list.__eq__, alone, together)) / len(asked)
    found["law 13, alone and together over a link"] = {
        "out": 1.0 - equal, "requests": len(asked), "ok": equal == 1.0,
    }  # fmt: skip


def arms_at_rates(model: Any, shape: Shape, folder: Path, found: Found) -> None:
    """`jaxrag bench serve`: time to the first token and tokens a second of every arm."""
    from jaxrag.measure.bench.options import ServeOptions
    from jaxrag.measure.bench.serve import Bench

    tiny = shape is TINY
    traffic = traffic_of(shape, requests=4 if tiny else 32, documents=4 if tiny else 48)
    # Half of the documents fit into the pool: the others come through the tiers again.
    pool = traffic.documents // 2 + 8 * (traffic.chunks + 2)
    rates = RATES[-1:] if tiny else RATES
    options = ServeOptions(
        traffic=traffic, rates=rates, rows=8, pool_chunks=pool, arms=";".join(ARMS), patience=30.0
    )
    bench = Bench(pooled(model, 1 << 10), options, folder)
    for rate in reversed(rates):
        for arm in options.compared:
            row = bench.measure(arm, rate)
            first = row["first_token"]
            found[f"{arm.name} at {rate:g}/s"] = {
                "seconds": first["p50"], "p95_seconds": first["p95"],
                "tokens_per_second": row["tokens_per_second"],
                "per_token_seconds": row["per_token"]["p50"],
                "good": row["good"], "read_bytes": row["read_bytes"], "compiled": row["compiled"],
            }  # fmt: skip
    equal = bench.equal()["arms"]
    if equal is not None:
        found["tokens of all arms"] = {"out": 1.0 - equal, "ok": equal == 1.0}


def from_the_disk(model: Any, shape: Shape, folder: Path, found: Found) -> None:
    """First tokens of batches whose chunks are in files, as they are and as int8."""
    from jaxrag.engine.engine import engine_of
    from jaxrag.kv.store import ChunkStore, MemoryStore
    from jaxrag.reuse.methods import METHODS

    asked = dataclasses.replace(shape, question=shape.answer)
    tokens = max(shape.batches_ttft) * (shape.batch_context + 2 * shape.answer)
    model = pooled(model, 2 * tokens + 8_192)
    empty = MemoryStore(model.fingerprint, model.kv_layout, max_tokens=shape.chunk, max_bytes=1)

    def seconds_of(name: str, store: Any, prompts: Sequence[Any]) -> float:
        times = []
        for _ in range(3):  # the first one compiles, and encodes and stores what is missing
            engine_of(model).forget()
            times.append(first_tokens(model, store, METHODS[name], prompts))
        return min(times[1:])

    for batch in sorted({min(shape.batches_ttft), max(shape.batches_ttft)}):
        where = f"{batch} x ({shape.batch_context} + {shape.answer})"
        prompts = [prompt_of(model, asked, shape.batch_context, 50 + b) for b in range(batch)]
        full = seconds_of("full_attention", empty, prompts)
        for stored in ("native", "int8"):
            layout = dataclasses.replace(model.kv_layout, stored=stored)
            store = ChunkStore.open(
                folder / stored, model.fingerprint, layout, mode="rw", max_tokens=shape.chunk,
                durable=False,
            )  # fmt: skip
            seconds = seconds_of("turborag", store, prompts)
            read = len(prompts) * layout.stored_nbytes(shape.batch_context)
            found[f"0 %, {where}, KV from files{', int8' * (stored == 'int8')}"] = {
                "seconds": seconds, "host_bytes_per_second": read / seconds,
                "times_faster_than_full": full / seconds,
            }  # fmt: skip


def rules_context(shape: Shape) -> int:
    """Tokens that the rules decode behind."""
    return max(shape.contexts[-1], 512)


def stage_rules(shape: Shape, impl: str, found: Found) -> None:
    """Seconds a token by decode rule, K and V where the rule's paper has them; see decode_rules.py.

    Rules that keep K or V in host memory run the ``xla`` bodies.
    """
    import decode_rules

    from jaxrag.reuse.decode import rule_from

    tiny = shape is TINY
    context = rules_context(shape)
    question = 8 if tiny else 512  # the queries that an index is trained on
    options = decode_rules.DecodeOptions(
        contexts=(context,), question_tokens=question, steps=2 if tiny else 16,
        warm=1 if tiny else 3, measure=False,
    )  # fmt: skip
    tokens = context + options.steps + options.warm + 64
    weights = random_weights(MODEL, shape, impl, tokens)
    for rule in RULES:
        on_device = rule_from(rule).placement.on_device
        model = pooled(weights, tokens, None if on_device else "xla")
        prompt = decode_rules.prompt_of(model, options, context)
        try:
            row = decode_rules.measure(model, options, prompt, rule)
        except Exception as error:
            found[f"{rule} behind {context}"] = refusal(error)
            continue
        found[f"{rule} behind {context}"] = {
            "seconds": row["seconds"], "best_seconds": row["best_seconds"],
            "tokens_per_second": 1.0 / row["seconds"], "prepare_seconds": row["prepare_seconds"],
            "kv": row["kv"], "host_bytes": row["host_bytes"], "device_bytes": row["device_bytes"],
            "index": row.get("index"),
        }  # fmt: skip


def stage_ingest(shape: Shape, impl: str, found: Found) -> None:
    """Chunks a minute from texts to the committed KV, behind ten neighbours; ingest_throughput.py.

    The knowledge base is on the disk. The first round compiles.
    """
    import ingest_throughput
    import numpy as np

    from jaxrag.models.text import byte_level
    from jaxrag.models.text.tokenizer import Tokenizer

    tiny = shape is TINY
    options = ingest_throughput.IngestOptions(
        tokens=12 * shape.chunk if tiny else 48 * shape.chunk, chunk_tokens=shape.chunk,
        encoder="neighbours", neighbours=NEIGHBOURS, repeats=1,
    )  # fmt: skip
    texts = ingest_throughput.invented_texts(np.random.default_rng(0), options.tokens)
    model = random_weights(MODEL, shape, impl, 4 * options.tokens)
    with tempfile.TemporaryDirectory(prefix="jaxrag-gpu-") as name:
        folder = Path(name)
        (folder / "tokenizer").mkdir()
        byte_level.save(byte_level.train([next(texts)], 400), folder / "tokenizer")
        model = dataclasses.replace(model, tokenizer=Tokenizer.load(folder / "tokenizer"))
        documents, batches = ingest_throughput.corpus(model, texts, options)
        for turn in ("compiling", "measured"):
            one = ingest_throughput.encode_behind(model, documents, batches, options, folder / turn)
            report = one.refreshed
            found[f"behind {NEIGHBOURS} neighbours, {turn}"] = {
                "seconds": report.seconds, "chunks": report.encoded,
                "chunks_per_minute": report.chunks_per_minute,
                "flops_per_second": one.flops / report.seconds,
            }  # fmt: skip

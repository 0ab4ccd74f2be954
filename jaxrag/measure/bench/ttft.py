"""Time to first token: full prefill and reuse of cached chunks, beside a peer's full prefill.

A row is one context length; its measurements alternate, and the first round, which compiles, does
not count. A method that recomputes tokens does so at its own ratio, the selector's passes included.
Chunks encoded behind neighbours have the other chunks of the prompt for neighbours; the time of
that encoding is part of no row.
"""

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrag.engine.engine import Engine, engine_of
from jaxrag.engine.mapping import sequence_of
from jaxrag.engine.request import Prompt, Request
from jaxrag.engine.staging import ChunkLoad
from jaxrag.engine.state import EngineSettings
from jaxrag.kv.cache import PAGE
from jaxrag.kv.store import ChunkStore, KVStore
from jaxrag.library.knowledge_base.neighbours import each_other
from jaxrag.measure.bench.options import CHUNK_TOKENS, TtftOptions
from jaxrag.measure.bench.peer import Peer
from jaxrag.measure.machine import describe, settle
from jaxrag.measure.zoo import LLAMA_100M, random_named, write_random
from jaxrag.models.flops import block_attention_flops
from jaxrag.models.model import Model, load_model
from jaxrag.models.text.progress import progress_bar
from jaxrag.reuse.methods import METHODS, Method

PEER_SCRIPT = Path(__file__).with_name("peer_transformers.py")


def run(options: TtftOptions) -> dict[str, Any]:
    """Measure every context; returns the rows, the machine and the setting, JSON-able."""
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxrag-bench-")))
        path = options.model or str(
            write_random(work / "model", LLAMA_100M, options.dtype, options.seed)
        )
        longest = max(options.contexts) + options.question_tokens
        # Prompts under full attention and their chunks for reuse lie in the pool together.
        tokens = 2 * longest + 8 * PAGE * (longest // CHUNK_TOKENS + 8)
        model = load_model(path, dtype=options.dtype, cache_tokens=tokens)
        # What left the pool comes from the disk: a copy in host memory would be found before.
        model.engine = Engine(model, EngineSettings(arena_bytes=0))
        peer = None
        if options.peer_python:
            peer = Peer(options.peer_python, PEER_SCRIPT, path, options.dtype)
            stack.callback(peer.close)
        store = ChunkStore.open(
            work / "store",
            model.fingerprint,
            model.kv_layout,
            mode="rw",
            max_tokens=CHUNK_TOKENS,
        )
        rows = []
        with progress_bar(len(options.contexts), "ttft", "context") as bar:
            repeats = options.repeats * (len(options.contexts) // len(options.repeats))
            for context, count in zip(options.contexts, repeats, strict=True):
                rows.append(_measure(model, store, work / "store", options, context, count, peer))
                bar.update()
        method = METHODS[options.method]
        return {
            "benchmark": "ttft",
            "model": options.model or random_named(model.config),
            "dtype": options.dtype,
            "method": options.method,
            "encoders": {"first": method.encoder_of(0), "others": method.encoder_of(1)},
            "question_tokens": options.question_tokens,
            "chunk_tokens": CHUNK_TOKENS,
            "rows": rows,
            "peer": None if peer is None else {"name": "transformers", **peer.about},
            "machine": describe(),
        }


_NO_PRIMER = np.zeros(0, np.int32)


class First(NamedTuple):
    """One measurement: seconds to the first token, its id, and what was computed for it."""

    seconds: float
    top: int
    flops: int


def _measure(
    model: Model,
    store: ChunkStore,
    store_path: Path,
    options: TtftOptions,
    context: int,
    repeats: int,
    peer: Peer | None,
) -> dict[str, Any]:
    prompt = _draw(model, options, context)
    whole = np.concatenate((*prompt.chunks, prompt.final))
    full, reuse = METHODS["full_attention"], METHODS[options.method]
    times: dict[str, list[float]] = {name: [] for name in ("full", "pool", "disk", "cold", "peer")}
    tops: dict[str, int] = {}
    flops: dict[str, int] = {}
    engine, chunks = engine_of(model), list(loads_of(model, store, reuse, prompt))
    for _ in range(repeats + 1):
        engine.drop(chunks)
        settle()
        first = first_token(model, store, full, prompt)
        tops["full"], flops["full"] = first.top, first.flops
        times["full"].append(first.seconds)
        for name in ("cold", "disk", "pool"):
            if name == "cold":
                _drop_page_cache(store_path)
            if name != "pool":
                engine.drop(chunks)
            first = first_token(model, store, reuse, prompt)
            flops["reuse"] = first.flops
            times[name].append(first.seconds)
        if peer is not None:
            settle()
            answer = peer.ask({"ids": whole.tolist()})
            tops["peer"] = answer["top"]
            times["peer"].append(answer["seconds"])
    median = {name: statistics.median(t[1:]) for name, t in times.items() if t}
    best = {name: min(t[1:]) for name, t in times.items() if t}
    row: dict[str, Any] = {
        "context": context,
        "prompt_tokens": len(whole),
        "repeats": repeats,
        "seconds": median,
        "best_seconds": best,
        "full_over_pool": median["full"] / median["pool"],
        "full_over_disk": median["full"] / median["disk"],
        "flops": {
            **flops,
            "full_block_attention": block_attention_flops(model.config, len(whole)),
            "reuse_block_attention": block_attention_flops(model.config, len(prompt.final)),
        },
    }
    if peer is not None:
        row["peer_over_full"] = median["peer"] / median["full"]
        row["peer_over_full_best"] = best["peer"] / best["full"]
        row["peer_over_pool"] = median["peer"] / median["pool"]
        row["same_first_token_as_peer"] = tops["peer"] == tops["full"]
    return row


def _draw(model: Model, options: TtftOptions, context: int) -> Prompt:
    """A prompt of random chunks, which have each other for neighbours."""
    rng = np.random.default_rng((options.seed, context))

    def ids(count: int) -> np.ndarray[Any, Any]:
        return rng.integers(3, model.config.vocab_size, count).astype(np.int32)

    chunks = tuple(ids(CHUNK_TOKENS) for _ in range(context // CHUNK_TOKENS))
    neighbours = tuple(each_other(chunks, model.config.max_positions))
    return Prompt(np.zeros(0, np.int32), chunks, ids(options.question_tokens), neighbours)


def first_token(model: Model, store: KVStore, method: Method, prompt: Prompt) -> First:
    """From token ids to the first token's id on the host, through the engine."""
    start = time.perf_counter()
    [progress] = engine_of(model).iterate([_request(store, method, prompt)])
    seconds = time.perf_counter() - start
    if progress.error is not None:
        raise progress.error
    assert progress.outcome is not None  # of its only token
    return First(seconds, progress.new[0], progress.outcome.flops)


def _request(store: KVStore, method: Method, prompt: Prompt) -> Request:
    """For one token. Chunks of random ids are behind no primer: stored they cost nothing."""
    return Request(prompt, store, method, 1, primer=_NO_PRIMER)


def loads_of(model: Model, store: KVStore, method: Method, prompt: Prompt) -> dict[str, ChunkLoad]:
    """By their keys in the pool, the chunks that such a request asks for."""
    return sequence_of(model, _request(store, method, prompt)).loads


def _drop_page_cache(folder: Path) -> None:
    """Ask the system to forget the store's pages, so that the next read comes from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def report(result: dict[str, Any]) -> Iterator[str]:
    """The result as lines of a table."""
    peer = result["peer"]
    repeats = ", ".join(map(str, dict.fromkeys(row["repeats"] for row in result["rows"])))
    yield f"{result['model']}, {result['dtype']}, {result['method']}, question of " + (
        f"{result['question_tokens']} tokens; milliseconds, medians of {repeats}"
    )
    head = f"{'context':>8} {'full':>9} {'pool':>8} {'disk':>8} {'cold':>8} {'full/pool':>9}"
    yield head + (f" {'peer':>9} {'peer/full':>9} {'best':>5} {'peer/pool':>9}" if peer else "")
    for row in result["rows"]:
        ms = {name: 1000 * seconds for name, seconds in row["seconds"].items()}
        line = f"{row['context']:>8} {ms['full']:>9.1f} {ms['pool']:>8.1f} {ms['disk']:>8.1f} "
        line += f"{ms['cold']:>8.1f} {row['full_over_pool']:>9.1f}"
        if peer:
            line += (
                f" {ms['peer']:>9.1f} {row['peer_over_full']:>9.2f}"
                f" {row['peer_over_full_best']:>5.2f} {row['peer_over_pool']:>9.1f}"
            )
        yield line

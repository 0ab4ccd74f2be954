"""Decoding over K and V in host memory, beside dense attention over K and V on the device.

A context of generated heads (``attention_heads``): their keys take the place of the model's in the
cache, their queries train the indexes and take the place of the model's in every step, so that
there is something to find. ``--heads random`` leaves the model's own, which have no structure.
Weights are random: latency, bytes and recall mean something, text does not. What an index scans and
finds is counted in a second pass, which is not timed.

    python benchmarks/away.py --out benchmarks/results/away.json
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import json
import statistics
import time
import weakref
from collections import abc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from attention_heads import Heads, draw
from decode_rules import DecodeOptions
from index import HEADS
from tqdm import tqdm

from jaxrag.base.config import DType, ModelConfig
from jaxrag.base.types import Array, HostArray, on_host
from jaxrag.engine import decoding
from jaxrag.engine.away import start_row
from jaxrag.engine.decoding import DecodeBatch
from jaxrag.engine.engine import Engine, engine_of
from jaxrag.engine.layerwise import LayerPrefill
from jaxrag.engine.prefill import Prefill, Prefilled
from jaxrag.engine.prompt_inspection import inspect_prompts
from jaxrag.engine.request import Prompt, Request, batch_of
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.sequence import Sequence
from jaxrag.kv.cache import PAGE
from jaxrag.kv.cache.host_pool import rows_of
from jaxrag.kv.placement import KVPlacement
from jaxrag.measure.bench.options import CHUNK_TOKENS
from jaxrag.measure.machine import describe
from jaxrag.measure.zoo import random_named
from jaxrag.models.model import random_model
from jaxrag.reuse.attention_index import rotated
from jaxrag.reuse.decode import PromptQueries, rule_from
from jaxrag.reuse.decode.away import AwayAttend
from jaxrag.reuse.methods import METHODS

BLOCK = 32  # steps whose recall is averaged


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
      context: tokens of the prompt, a multiple of CHUNK_TOKENS above ``question``.
      question: its last tokens, which are run; the rest are chunks that are encoded alone.
      steps: tokens that are timed, after ``warm`` others.
      rules: with K and V in host memory; ``dense`` with both on the device comes first.
      heads: "generated" under every rule, "random" under the first.
      dtype: of the model and its KV.
    """

    context: int = 131_072
    question: int = 2048
    steps: int = 32
    warm: int = 4
    rules: tuple[str, ...] = ("retrieval", "flat", "dense", "static_window")
    heads: tuple[str, ...] = ("generated", "random")
    dtype: DType = "float32"
    seed: int = 0

    def config(self) -> ModelConfig:
        """That of ``decode_rules.py`` with heads of 128 dimensions, rotated as the drawn are."""
        options = DecodeOptions(
            contexts=(self.context,), dtype=self.dtype, question_tokens=self.question
        )
        config = options.config()
        room = self.steps + self.warm + 1
        rope = dataclasses.replace(HEADS["ivf24"].rope)
        return dataclasses.replace(
            config, head_dim=128, rope=rope, max_positions=self.context + 2 * room
        )


class Drawn:
    """Generated heads of every layer of a model.

    Attributes:
      keys: [L, K, S, H] float32 at their positions.
      bank: training queries [L, W, N, H] before rotation, at positions [W].
      asked: [L, n, N, H] of the n tokens behind the context.
    """

    def __init__(self, config: ModelConfig, options: Options, count: int) -> None:
        """Draw ``count`` tokens behind the context; heads differ in kind and in their tokens."""
        kinds = [HEADS["ivf24"], HEADS["ivf41"]]
        keys, bank, asked = [], [], []
        for number in range(config.num_layers * config.num_kv_heads):
            made: Heads = draw(
                kinds[number % 2], options.context, train=2048, ask=count, sink=0, recent=0,
                stream=number,
            )  # fmt: skip
            keys.append(made.placed_keys())
            bank.append(made.bank.queries)
            asked.append(made.asked)
        by_layer = (config.num_layers, config.num_kv_heads)
        self.positions = made.bank.positions
        self.keys = np.stack(keys).reshape(*by_layer, *keys[0].shape)
        self.bank, self.asked = (
            np.stack(some)  # [L * K, G, n, H]
            .reshape(config.num_layers, config.num_heads, *some[0].shape[1:])
            .swapaxes(1, 2)
            for some in (bank, asked)
        )


def run(options: Options) -> dict[str, Any]:
    """Measure every kind of heads and every rule; rows, machine and setting, JSON-able."""
    config = options.config()
    tokens = options.context + 2 * (options.steps + options.warm) + 8 * PAGE
    prompt, store, rows = _prompt(config, options), None, []
    cases = [("random", "dense", "device")]
    for heads in options.heads:
        rules = options.rules if heads == "generated" else options.rules[:1]
        cases += [(heads, rule, "host") for rule in rules]
    for heads, text, kv in tqdm(cases, disable=None):
        model = random_model(config, options.seed, cache_tokens=tokens, placement=KVPlacement(kv))
        store = store or engine_of(model).memory
        method = dataclasses.replace(METHODS["turborag"], decode=rule_from(text))
        request = Request(prompt, store, method, options.warm + options.steps + 1)
        drawn = None
        if heads == "generated":
            drawn = Drawn(config, options, options.warm + options.steps)
        row = _measured(engine_of(model), request, options, drawn)
        rows.append({"heads": heads, "rule": text, "kv": kv, **row})
        held = weakref.ref(engine_of(model))
        del model
        while held() is not None:  # the next row counts what is live
            gc.collect()
            time.sleep(0.01)
        jax.clear_caches()
    dense = rows[0]
    for row in rows[1:]:
        row["of_dense"] = row["seconds"] / dense["seconds"]
        row["device_share"] = row["device_bytes"] / dense["device_bytes"]
    return {
        "benchmark": "away",
        "model": random_named(config, shape=True),
        "dtype": options.dtype,
        "options": dataclasses.asdict(options),
        "kv_bytes": options.context * config.kv_bytes_per_token,
        "rows": rows,
        "machine": describe(),
    }


def _prompt(config: ModelConfig, options: Options) -> Prompt:
    rng = np.random.default_rng(options.seed)

    def ids(count: int) -> HostArray:
        return rng.integers(3, config.vocab_size, count).astype(np.int32)

    chunks = (options.context - options.question) // CHUNK_TOKENS
    return Prompt(ids(0), tuple(ids(CHUNK_TOKENS) for _ in range(chunks)), ids(options.question))


def _measured(
    engine: Engine, request: Request, options: Options, drawn: Drawn | None
) -> dict[str, Any]:
    weights = sum(x.nbytes for x in jax.tree.leaves(engine.runner.model.params))

    def live() -> int:
        return sum(x.nbytes for x in jax.live_arrays()) - weights

    began, most = list[float](), 0

    def row(runner: ModelRunner, state: Sequence, there: Prefilled) -> dict[str, Any]:
        there.logits.block_until_ready()
        prefill = {
            "prefill_peak_bytes": most,
            "prefill_seconds": time.perf_counter() - began[0],
        }
        bank = there.bank if drawn is None else _put(runner, state, drawn)
        decode = functools.partial(_decode, runner, state, options, there.logits, bank, drawn, live)
        found = prefill | decode()
        if request.method.decode.searches is not None:
            runner.host_search.measure = True
            found["index"] = decode()["index"]
            runner.host_search.measure = False
        return found

    def watched(how: type[Prefill] | type[LayerPrefill]) -> Any:
        run = how.next_piece

        def next_piece(self: Any) -> int:
            nonlocal most
            began.append(time.perf_counter())
            width = run(self)
            most = max(most, live())
            return width

        return mock.patch.object(how, "next_piece", next_piece)

    with watched(Prefill), watched(LayerPrefill):
        [found] = inspect_prompts(engine, [request], row)
    return found


def _put(runner: ModelRunner, state: Sequence, drawn: Drawn) -> PromptQueries:
    """Generated keys in the place of the model's, and their training queries."""
    pages, offsets, slot_position = state.table.rows(len(state.table.pages))
    slot_position[state.run.slots] = state.run.positions
    slots = np.flatnonzero(slot_position < drawn.keys.shape[2])
    rows, turns = rows_of(pages)[slots], np.repeat(offsets, PAGE)[slots]
    positions, host = slot_position[slots], runner.cache.host
    rope = runner.model.config.rope
    assert host is not None and host.k is not None
    for layer, heads in enumerate(drawn.keys):
        for head, keys in enumerate(heads):
            there = rotated(keys[positions], -turns, rope) if turns.any() else keys[positions]
            host.k[layer, head][rows] = there.astype(host.k.dtype)
    queries = drawn.bank[:, None].astype(np.float32)
    return on_host(PromptQueries, queries, drawn.positions[None].astype(np.int32))


def _decode(
    runner: ModelRunner,
    state: Sequence,
    options: Options,
    logits: Array,
    bank: PromptQueries,
    drawn: Drawn | None,
    live: Callable[[], int],
) -> dict[str, Any]:
    """Seconds of every step, bytes, and where the host's time went."""
    host, placement = runner.host_search, runner.model.placement
    number = host.admit()
    asking: Any = contextlib.nullcontext()
    if drawn is not None:
        ask = functools.partial(_Asked, asked=jnp.asarray(drawn.asked), first=state.next_position)
        asking = mock.patch.object(decoding, "AwayAttend", ask)
    try:
        asking.__enter__()
        key = batch_of(state.request, len(state.table.pages), placement)
        assert key is not None
        batch = DecodeBatch(runner, key)
        start = time.perf_counter()
        begun = start_row(runner, key, state, bank, number)
        batch.join([0], [state], logits, begun)[0].block_until_ready()
        del begun
        prepared = time.perf_counter() - start
        seconds = []
        before = None
        for step in range(options.warm + options.steps):
            if step == options.warm:
                before = dataclasses.replace(host.seconds)
            start = time.perf_counter()
            batch.step(1)[0].block_until_ready()
            seconds.append(time.perf_counter() - start)
        timed = seconds[options.warm :]
        account = host.account_of([number])
        kv = placement.host_bytes(runner.model.config, state.next_position)
        spent = {
            name: (value - getattr(before, name)) / options.steps
            for name, value in dataclasses.asdict(host.seconds).items()
        }
        return {
            "seconds": statistics.median(timed),
            "best_seconds": min(timed),
            "prepare_seconds": prepared,
            "device_bytes": live() - (drawn.asked.nbytes if drawn is not None else 0),
            "host_kv_bytes": kv,
            "host_bytes": kv + account.index_bytes,
            "host_seconds_a_step": spent,
            "index": {
                "keys": account.keys,
                "bytes": account.index_bytes,
                "trained": account.trained,
                "notes": list(account.notes),
                "scanned": account.scanned / max(account.searches, 1)
                / max(account.keys / (runner.model.config.num_layers
                * runner.model.config.num_kv_heads), 1),
                "recall": account.found / max(account.wanted, 1),
            },
        }  # fmt: skip
    finally:
        asking.__exit__(None, None, None)
        host.release([number])
        runner.cache.pool.k.block_until_ready()


@dataclasses.dataclass(frozen=True)
class _Asked(AwayAttend):
    """With ``asked`` [L, n, N, H], from position ``first`` on, in the place of the queries."""

    asked: Any = None
    first: int = 0

    def __call__(self, layer: Array, window: Any, q: Array, *rest: Any) -> Any:
        """Ask what was drawn."""
        position = rest[2].positions[0, 0]
        at = jnp.clip(position - self.first, 0, self.asked.shape[1] - 1)
        return super().__call__(layer, window, self.asked[layer, at][None, None], *rest)


def report(result: dict[str, Any]) -> Iterator[str]:
    """The result as lines of a table."""
    kv = result["kv_bytes"]
    yield f"{result['model']}, {result['dtype']}; {result['options']['context']} tokens"
    yield (
        f"{'heads':<10} {'rule':<16} {'kv':<7} {'ms':>8} {'best':>8} {'of dense':>8} "
        f"{'device MB':>10} {'share':>7} {'peak MB':>8} {'host/KV':>8} {'scanned':>8} {'recall':>7}"
    )
    for row in result["rows"]:
        index = row["index"]
        yield (
            f"{row['heads']:<10} {row['rule']:<16} {row['kv']:<7} {1e3 * row['seconds']:>8.2f} "
            f"{1e3 * row['best_seconds']:>8.2f} {row.get('of_dense', 1.0):>8.2f} "
            f"{row['device_bytes'] / 1e6:>10.2f} {100 * row.get('device_share', 1.0):>6.2f}% "
            f"{row['prefill_peak_bytes'] / 1e6:>8.1f} {row['host_bytes'] / kv:>8.2f} "
            f"{100 * index['scanned']:>7.1f}% {100 * index['recall']:>6.1f}%"
        )
    for row in result["rows"][1:]:
        spent = row["host_seconds_a_step"]
        parts = ", ".join(f"{name} {1e3 * value:.2f}" for name, value in spent.items())
        rest = row["seconds"] - spent["waited"]
        hidden = 1 - spent["waited"] / max(spent["elapsed"], 1e-9)
        yield (
            f"{row['heads']} {row['rule']}: ms a step on the host: {parts}; rest of the step "
            f"{1e3 * rest:.2f}; hidden {100 * hidden:.0f} % of the host's time"
        )
        for note in row["index"]["notes"]:
            yield f"{row['heads']} {row['rule']}: {note}"


def main(arguments: abc.Sequence[str] | None = None) -> None:
    """Measure as the options say, print the table, and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--context", type=int, default=Options.context, metavar="TOKENS")
    parser.add_argument("--question", type=int, default=Options.question, metavar="TOKENS")
    parser.add_argument("--steps", type=int, default=Options.steps, metavar="N")
    parser.add_argument("--rules", default=";".join(Options.rules), metavar="RULE;...")
    parser.add_argument("--heads", default=",".join(Options.heads), metavar="generated,random")
    parser.add_argument("--dtype", default=Options.dtype, metavar="DTYPE")
    parser.add_argument("--out", type=Path, metavar="FILE")
    args = parser.parse_args(arguments)
    options = Options(
        context=args.context,
        question=args.question,
        steps=args.steps,
        rules=tuple(args.rules.split(";")),
        heads=tuple(args.heads.split(",")),
        dtype=args.dtype,
    )
    result = run(options)
    for line in report(result):
        print(line)
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Latency per generated token by context length and decode rule, on random weights.

The context is filled with chunks that are encoded each for itself, behind them a final block whose
tokens are run, so that an index has queries to train on. Weights and text are random: only latency
and bytes mean anything, and recall says how an index does on keys and queries without structure.
Every rule generates the same number of tokens after the same prompt, one at a time; of the steps
after the warm-up the median is reported and the best, which a busy machine disturbs least. What an
index scans and finds is counted in a second pass over as many tokens, block by block of ``BLOCK``,
which is not timed.

example: python benchmarks/decode_rules.py --contexts 4k,128k --decode dense --decode retrieval
"""

import dataclasses
import functools
import itertools
import statistics
import sys
import time
from collections import abc
from collections.abc import Iterator
from typing import Any, Literal

import jax
import numpy as np
from script import run_script

from jaxrag.base.config import DType, ModelConfig
from jaxrag.base.errors import RequestError
from jaxrag.base.options import option, parse_count, parse_counts
from jaxrag.engine.away import start_row
from jaxrag.engine.decoding import DecodeBatch
from jaxrag.engine.engine import engine_of
from jaxrag.engine.prefill import Prefilled
from jaxrag.engine.prompt_inspection import inspect_prompts
from jaxrag.engine.request import Prompt, Request, batch_of
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.sequence import Sequence
from jaxrag.kv.cache import PAGE
from jaxrag.kv.placement import KVPlacement
from jaxrag.measure.bench.options import CHUNK_TOKENS, DRAWN, DTYPE, check_positive
from jaxrag.measure.machine import describe
from jaxrag.measure.zoo import llama, random_named
from jaxrag.models.model import Model, random_model
from jaxrag.models.text.progress import progress_bar
from jaxrag.reuse.decode import Account, rule_from
from jaxrag.reuse.methods import METHODS

BLOCK = 32  # steps whose recall is averaged
_SCORE_EVERY_KEY = ("dense", "flat", "topn")  # rules


@dataclasses.dataclass(frozen=True)
class DecodeOptions:
    """What to measure.

    Attributes:
      measure: also count what indexes scan and find in so many steps, in a pass of its own.
    """

    contexts: tuple[int, ...] = option(
        (4096, 16_384, 65_536, 131_072), "tokens in the cache", "N,...", parse=parse_counts
    )
    rules: tuple[str, ...] = option(
        ("dense", "static_window", "flat", "ivf", "retrieval", "topn"),
        "how generated tokens attend; settings follow a colon, as in topn:n=64; repeatable",
        "RULE",
        flag="--decode",
        repeatable=True,
    )
    dtype: DType = option("float32", DTYPE)
    kv: Literal["device", "host"] | None = option(
        None, "where K and V are", unset="where each rule is meant to have them"
    )
    layers: int = option(4, "of the model", "N")
    question_tokens: int = option(2048, "run, not reused", "N", parse=parse_count)
    steps: int = option(16, "tokens timed, and counted", "N")
    warm: int = option(3, "tokens before them", "N")
    measure: bool = option(True, "leave recall and the share scanned out")
    seed: int = option(0, DRAWN, "N")

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be measured, and rules that the model cannot run."""
        check_positive(self, "layers", "question_tokens", "steps", "warm")
        for context in self.contexts:
            if context % CHUNK_TOKENS or context <= self.question_tokens:
                raise RequestError(
                    f"context {context}: expected a multiple of {CHUNK_TOKENS} above the "
                    f"{self.question_tokens} question tokens"
                )
        for rule in self.rules:
            chosen = rule_from(rule, "rules")
            chosen.check(self.config())
            if self.kv is not None:
                chosen.check_placement(self.config(), KVPlacement(self.kv))

    def config(self) -> ModelConfig:
        """A small Llama: 8 query heads on 2 KV heads of 64 dimensions."""
        longest = max(self.contexts) + self.steps + self.warm + 1
        return llama(
            vocab_size=2048, num_layers=self.layers, model_dim=512, mlp_dim=1024, num_heads=8,
            num_kv_heads=2, head_dim=64, max_positions=max(longest, 4096), dtype=self.dtype,
            eos_ids=(),
        )  # fmt: skip


def rules_of(text: str) -> tuple[str, ...]:
    """Decode rules, split at semicolons, or at commas where no rule has settings."""
    rules = tuple(filter(None, text.split(";" if ";" in text or ":" in text else ",")))
    if not rules:
        raise ValueError(f"{text!r}: expected names such as dense or topn:n=64")
    return rules


def run(options: DecodeOptions) -> dict[str, Any]:
    """Measure every context and rule; returns rows, machine and setting, JSON-able."""
    config = options.config()
    rows = []
    with progress_bar(len(options.contexts) * len(options.rules), "decode", "row") as bar:
        for context in options.contexts:
            tokens = context + options.steps + options.warm + 4 * PAGE
            model = random_model(config, options.seed, cache_tokens=tokens)
            prompt = prompt_of(model, options, context)
            for rule in options.rules:
                bar.set_postfix_str(f"{context} {rule}", refresh=False)
                rows.append(measure(model, options, prompt, rule))
                bar.update()
    return {
        "benchmark": "decode",
        "model": random_named(config, shape=True),
        "dtype": options.dtype,
        "kv_bytes_per_token": config.kv_bytes_per_token,
        "chunk_tokens": CHUNK_TOKENS,
        "question_tokens": options.question_tokens,
        "steps": options.steps,
        "rows": rows,
        "machine": describe(),
    }


def prompt_of(model: Model, options: DecodeOptions, context: int) -> Prompt:
    """Chunks of random ids, the last one shorter, and a question: ``context`` tokens."""
    rng = np.random.default_rng((options.seed, context))

    def ids(count: int) -> np.ndarray[Any, Any]:
        return rng.integers(3, model.config.vocab_size, count).astype(np.int32)

    whole, rest = divmod(context - options.question_tokens, CHUNK_TOKENS)
    chunks = [ids(CHUNK_TOKENS) for _ in range(whole)] + ([ids(rest)] if rest else [])
    return Prompt(np.zeros(0, np.int32), tuple(chunks), ids(options.question_tokens))


def measure(model: Model, options: DecodeOptions, prompt: Prompt, text: str) -> dict[str, Any]:
    """One row: a rule of ``--decode`` behind a prompt, K and V where the options have them."""
    rule, store = rule_from(text), engine_of(model).memory
    method = dataclasses.replace(METHODS["turborag"], decode=rule)
    placement = rule.placement if options.kv is None else KVPlacement(options.kv)
    if placement.host_bytes(model.config, 1):
        model = model.placed(placement)
    count = options.warm + options.steps
    request = Request(prompt, store, method, count + 1)
    look = functools.partial(_row, options=options, text=text)
    [row] = inspect_prompts(engine_of(model), [request], look)
    return row


def _row(
    runner: ModelRunner, state: Sequence, there: Prefilled, options: DecodeOptions, text: str
) -> dict[str, Any]:
    request, config = state.request, runner.model.config
    rule, prompt = request.method.decode, request.prompt
    seconds, prepare_seconds, ids, accounts, state_bytes = generate(
        runner, state, there, request.room
    )
    account = accounts[-1]
    row: dict[str, Any] = {
        "context": prompt.num_tokens,
        "rule": text,
        "kv": runner.model.placement.kv,
        "settings": dataclasses.asdict(rule),
        "seconds": statistics.median(seconds[options.warm :]),
        "best_seconds": min(seconds[options.warm :]),
        "prepare_seconds": prepare_seconds,
        "ids": ids,
        "formula_bytes": dataclasses.asdict(rule.bytes(config, prompt.num_tokens)),
        "state_bytes": state_bytes,
        **_real_bytes(runner, account, state_bytes),
    }
    if rule.searches is not None:
        row["index"] = {
            "bytes": account.index_bytes,
            "trained": account.trained,
            "notes": list(account.notes),
        }
        if options.measure:
            row["index"] |= counted(runner, state, there, options.steps)
    if rule.name in _SCORE_EVERY_KEY:
        row["scanned"] = 1.0
    return row


def generate(
    runner: ModelRunner, state: Sequence, there: Prefilled, count: int
) -> tuple[list[float], float, list[int], list[Account], int]:
    """Seconds of every step, of preparing the rule, the ids, index accounts, state bytes.

    The accounts are those before the first step, after every ``BLOCK`` steps and after the last.
    """
    request = state.request
    host = runner.searches(request.method.decode)
    number = None if host is None else host.admit()
    numbers = [] if number is None else [number]
    there.logits.block_until_ready()
    before = _live_bytes()
    key = batch_of(request, len(state.table.pages), runner.model.placement)
    assert key is not None
    batch = DecodeBatch(runner, key)
    start = time.perf_counter()
    begun = start_row(runner, key, state, there.bank, number)
    ids = [int(batch.join([0], [state], there.logits, begun)[0][0])]  # it comes from prefill
    prepared = time.perf_counter() - start
    carried = _live_bytes() - before
    seconds: list[float] = []
    accounts = [] if host is None else [host.account_of(numbers)]
    while len(seconds) < count:
        for _ in range(min(BLOCK, count - len(seconds))):
            start = time.perf_counter()
            ids.append(int(batch.step(1)[0][0, 0]))
            seconds.append(time.perf_counter() - start)
        accounts.append(Account() if host is None else host.account_of(numbers))
    if host is not None:
        host.release(numbers)
    return seconds, prepared, ids, accounts, carried


def counted(runner: ModelRunner, state: Sequence, there: Prefilled, steps: int) -> dict[str, Any]:
    """What the indexes of a prompt scan and find in so many steps, beside exact search.

    For ``prefilled``. ``keys`` of a head; the share of them ``scanned`` by a search and the
    ``recall`` over all steps and, in ``blocks``, over every ``BLOCK`` of them; ``trained`` indexes,
    and ``notes`` on those that are none.
    """
    host, config = runner.host_search, runner.model.config
    host.measure = True
    try:
        *_, accounts, _ = generate(runner, state, there, steps)
    finally:
        host.measure = False
    per_head = accounts[-1].keys / (config.num_layers * config.num_kv_heads)
    blocks = [_between(*pair, per_head) for pair in itertools.pairwise(accounts)]
    return {
        "keys": int(per_head),
        "trained": accounts[-1].trained,
        "notes": list(accounts[-1].notes),
        **_between(accounts[0], accounts[-1], per_head),
        "block_steps": BLOCK,
        "blocks": blocks,
    }


def _between(before: Account, after: Account, keys: float) -> dict[str, float]:
    """The share of ``keys`` scanned a search, and recall, from one account to a later one."""
    searches, wanted = after.searches - before.searches, after.wanted - before.wanted
    return {
        "scanned": (after.scanned - before.scanned) / max(searches * keys, 1),
        "recall": (after.found - before.found) / max(wanted, 1),
    }


def _real_bytes(runner: ModelRunner, account: Account, state: int) -> dict[str, int]:
    """Bytes of the arrays that hold K and V of the whole cache, and indexes, by where they lie.

    ``state`` is what a row carries on the device: the static pattern, where K and V are away.
    """
    cache, away = runner.cache, runner.model.placement.away
    return {
        "cache_tokens": cache.allocator.num_pages * PAGE,
        "device_bytes": cache.pool.k.nbytes + cache.pool.v.nbytes + away * state,
        "host_bytes": account.index_bytes + (0 if cache.host is None else cache.host.nbytes),
    }


def _live_bytes() -> int:
    return sum(x.nbytes for x in jax.live_arrays())


def report(result: dict[str, Any]) -> Iterator[str]:
    """The result as lines of a table."""
    yield f"{result['model']}, {result['dtype']}; chunks of {result['chunk_tokens']} tokens, each"
    yield f"encoded alone; milliseconds a token, median and best of {result['steps']}; latency only"
    yield (
        f"{'context':>8} {'rule':<16} {'median':>8} {'best':>8} {'of dense':>8} {'prepare s':>9} "
        f"{'scanned':>8} {'recall':>7} {'device MB':>10} {'host MB':>9} {'index MB':>9}"
    )
    dense = {r["context"]: r["seconds"] for r in result["rows"] if r["rule"] == "dense"}
    for row in result["rows"]:
        index = row.get("index", {})
        beside = dense.get(row["context"])
        scanned = index.get("scanned", row.get("scanned"))
        yield (
            f"{row['context']:>8} {row['rule']:<16} {1000 * row['seconds']:>8.2f} "
            f"{1000 * row['best_seconds']:>8.2f} "
            f"{'' if beside is None else f'{row["seconds"] / beside:.2f}':>8} "
            f"{row['prepare_seconds']:>9.2f} {_share(scanned):>8} {_share(index.get('recall')):>7} "
            f"{row['device_bytes'] / 1e6:>10.1f} {row['host_bytes'] / 1e6:>9.1f} "
            f"{index.get('bytes', 0) / 1e6:>9.1f}"
        )
    yield (
        "device and host MB: of the arrays of the cache, and of indexes; formula_bytes of the JSON "
        "result says where the papers place keys and values"
    )
    for row in result["rows"]:
        for note in row.get("index", {}).get("notes", ()):
            yield f"{row['context']} {row['rule']}: {note}"
        if blocks := row.get("index", {}).get("blocks"):
            shares = ", ".join(_share(block["recall"]) for block in blocks)
            yield f"{row['context']} {row['rule']}: recall by {BLOCK} steps: {shares}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}%"


def main(argv: abc.Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    return run_script(__doc__, DecodeOptions, run, report, argv)


if __name__ == "__main__":
    sys.exit(main())

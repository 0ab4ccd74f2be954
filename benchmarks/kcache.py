"""KCache's tables in miniature: tokens a second under fixed device memory, answers, bytes moved.

*throughput* (table 3): prompts of stored chunks in the pool, every row with chunks of its own,
decode together in one batch. The pool takes ``device_bytes`` of device memory, weights not counted,
under ``dense`` with K and V on the device and under ``topn`` with V of most layers in host memory.
Every batch that fits is run, and the largest that does; of others the refusal is recorded. Weights
and text are random: only time and bytes mean anything.

*quality* (table 2): a suite of `jaxrag eval` under dense attention, then with V of the first L
layers read whole and of others the N best rows.

*traffic*: prompts that are computed as a whole, V of most layers in host memory: bytes pushed
there and brought back, as multiples of the bytes of that V; then what decode steps fetch, as
multiples of N rows a query head and layer, and the share of it that heads of a group share.

example: python benchmarks/kcache.py --out benchmarks/results/kcache.json
"""

import argparse
import dataclasses
import itertools
import queue
import statistics
import sys
import time
from collections import abc
from collections.abc import Iterator
from typing import Any

import numpy as np
from decode_rules import DecodeOptions
from tqdm import tqdm

from jaxrag.base.config import DType, ModelConfig
from jaxrag.base.errors import RequestError
from jaxrag.base.options import parse_bytes
from jaxrag.base.types import HostArray
from jaxrag.cli import run_command
from jaxrag.cli.output import give_out, require_folder
from jaxrag.engine.decoding import DecodeBatch, start_decoding
from jaxrag.engine.engine import Engine, engine_of
from jaxrag.engine.mapping import sequence_of
from jaxrag.engine.prefill import Prefilled
from jaxrag.engine.progress import Progress
from jaxrag.engine.prompt_inspection import inspect_prompts
from jaxrag.engine.request import DECODE_BLOCK, Prompt, Request, batch_of
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.sequence import Sequence
from jaxrag.kv.cache import PAGE
from jaxrag.kv.cache.host import Moved
from jaxrag.kv.store import KVStore
from jaxrag.kv.store.memory import MemoryStore
from jaxrag.measure.bench.options import CHUNK_TOKENS
from jaxrag.measure.evals.long.run import run as run_eval
from jaxrag.measure.evals.options import LongOptions
from jaxrag.measure.machine import describe
from jaxrag.measure.zoo import random_named
from jaxrag.models.model import Model, random_model
from jaxrag.reuse.decode import DecodeRule, Dense, TopN
from jaxrag.reuse.methods import METHODS

PARTS = ("throughput", "quality", "traffic")


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
      contexts: tokens of the chunks of a prompt, of throughput.
      batches: rows that decode together.
      device_bytes: of the pool on the device.
      n: rows of V that a query head reads.
      device_layers: layers whose V stays on the device.
      question: tokens of a prompt's final block, which are run.
      steps: tokens that are timed, after ``DECODE_BLOCK`` others.
      layers: of the random model.
      prompts: tokens of a prompt, of traffic.
      model: a model directory, of quality.
      kept: numbers of layers whose V is read whole, L of table 2.
      counts: rows of V that a query head reads, N of table 2.
    """

    parts: tuple[str, ...] = PARTS
    contexts: tuple[int, ...] = (4096, 16_384)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    device_bytes: int = 176_000_000
    n: int = 128
    device_layers: int = 1
    question: int = 16
    steps: int = 64
    layers: int = 4
    dtype: DType = "float32"
    prompts: tuple[int, ...] = (4096, 8192, 16_384)
    model: str = "checkpoints/synthetic-0.8m/long"
    suite: str = "ruler"
    flavour: str = "village"
    tasks: tuple[str, ...] = ("majority", "cwe")
    length: int = 2048
    questions: int = 100
    kept: tuple[int, ...] = (0, 1, 2, 3)
    counts: tuple[int, ...] = (32, 64, 128, 256)
    batch_size: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be measured: RequestError."""
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown:
            raise RequestError(f"--parts {unknown[0]}: expected some of {','.join(PARTS)}")
        for name in ("device_bytes", "n", "question", "layers"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name}={getattr(self, name)}: expected a positive integer")
        if self.steps < 1 or self.steps % DECODE_BLOCK:
            raise RequestError(f"steps={self.steps}: expected a multiple of {DECODE_BLOCK}")
        for batch in self.batches:
            if batch < 1:
                raise RequestError(f"batches: {batch} rows: expected at least 1")
        for context in (*self.contexts, *self.prompts):
            if context < 1 or context % CHUNK_TOKENS:
                raise RequestError(f"context {context}: expected a multiple of {CHUNK_TOKENS}")
        if not 0 <= self.device_layers < self.layers:
            raise RequestError(
                f"device_layers={self.device_layers}: expected fewer than the {self.layers} layers"
            )

    def config(self) -> ModelConfig:
        """That of `decode_rules.py`: 8 query heads on 2 KV heads of 64 dimensions."""
        longest = max(*self.contexts, *self.prompts) + CHUNK_TOKENS
        options = DecodeOptions(
            contexts=(longest,),
            rules=("dense",),
            dtype=self.dtype,
            layers=self.layers,
            question_tokens=self.question,
            steps=self.steps,
            warm=DECODE_BLOCK,
        )
        return options.config()

    @property
    def room(self) -> int:
        """Tokens that a request generates; the first one is drawn from prefill."""
        return 1 + DECODE_BLOCK + self.steps


QUICK = Options(
    contexts=(512, 1024),
    batches=(1, 2, 4),
    device_bytes=3_600_000,
    n=16,
    steps=8,
    layers=2,
    prompts=(1024,),
    suite="infinitebench",
    tasks=("kv_retrieval",),
    length=1000,
    questions=2,
    kept=(0, 1),
    counts=(8, 64),
)


def throughput(options: Options, config: ModelConfig) -> list[dict[str, Any]]:
    """Rows by context, rule and batch."""
    rows: list[dict[str, Any]] = []
    base = random_model(config, options.seed)
    store = MemoryStore(base.fingerprint, base.kv_layout, max_tokens=config.max_positions)
    rules: tuple[DecodeRule, ...] = (
        Dense(),
        TopN(n=options.n, device_layers=options.device_layers),
    )
    with tqdm(total=len(options.contexts) * len(rules), desc="throughput", disable=None) as bar:
        for rule, context in itertools.product(rules, options.contexts):
            tokens = options.device_bytes // rule.placement.device_bytes(config, 1)
            model = dataclasses.replace(
                base, cache_tokens=tokens // PAGE * PAGE, placement=rule.placement
            )
            rows += _batches(model, options, store, rule, context)
            bar.update()
    return sorted(rows, key=lambda row: (row["context"], row["batch"], row["rule"]))


def _batches(
    model: Model, options: Options, store: KVStore, rule: DecodeRule, context: int
) -> list[dict[str, Any]]:
    """All batches of a rule at a context."""
    engine = engine_of(model)
    runner, most = engine.runner, max(options.batches)
    asked = [_request(options, model, store, rule, context, row) for row in range(most)]
    need = sequence_of(model, asked[0]).need(lambda key: False).pages
    fit = min(runner.num_pages // need, most)
    inspect_prompts(engine, asked[:fit], lambda *_: None)  # the pool has their chunks now
    pool = f"the pool of {runner.num_pages * PAGE} tokens"
    refused = f"{pool} holds {fit} prompts of {need * PAGE} tokens with their answers"
    sizes = {batch for batch in options.batches if batch <= fit} | ({fit} if fit else set())
    kv = runner.cache.pool
    of_all = {
        "rule": rule.name,
        "context": context,
        "prompt_tokens": context + options.question,
        "pool_tokens": runner.num_pages * PAGE,
        "device_bytes": kv.k.nbytes + kv.v.nbytes,
        "host_bytes": 0 if runner.cache.host is None else runner.cache.host.nbytes,
    }
    rows = [of_all | _timed(engine, options, asked[:batch]) for batch in sorted(sizes)]
    beyond = [batch for batch in options.batches if batch > fit]
    return rows + [of_all | {"batch": batch, "refused": refused} for batch in beyond]


def _request(
    options: Options, model: Model, store: KVStore, rule: DecodeRule, context: int, row: int
) -> Request:
    """The request of one row: chunks that no other row has, and a question."""
    vocab = model.config.vocab_size
    per_row = context // CHUNK_TOKENS
    chunks = tuple(
        _ids((options.seed, number), CHUNK_TOKENS, vocab)
        for number in range(row * per_row, (row + 1) * per_row)
    )
    final = _ids((options.seed, row, context), options.question, vocab)
    method = dataclasses.replace(METHODS["turborag"], decode=rule)
    return Request(Prompt(final[:0], chunks, final), store, method, options.room)


def _ids(seed: abc.Sequence[int], count: int, vocab: int) -> HostArray:
    return np.random.default_rng(tuple(seed)).integers(3, vocab, count).astype(np.int32)


def _timed(engine: Engine, options: Options, asked: abc.Sequence[Request]) -> dict[str, Any]:
    """Seconds of a batch, of blocks of steps, and what they moved."""
    batch, cache = len(asked), engine.runner.cache
    news: queue.SimpleQueue[tuple[Progress, float, Moved]] = queue.SimpleQueue()

    def sink(progress: Progress) -> None:  # nothing is in flight between two blocks
        news.put((progress, time.perf_counter(), cache.moved))

    left = set(engine.add_all([(dataclasses.replace(it, rows=batch), sink) for it in asked]))
    told: dict[int, list[tuple[float, Moved]]] = {number: [] for number in left}
    while left:
        progress, when, moved = news.get()
        if progress.error is not None:
            raise progress.error
        if progress.new:
            told[progress.number].append((when, moved))
        if progress.last:
            left.discard(progress.number)
    # Of who began last; the first that was told is one token.
    _, *blocks = max(told.values(), key=lambda it: it[0][0])
    seconds = [(b - a) / DECODE_BLOCK for (a, _), (b, _) in itertools.pairwise(blocks)]
    moved = blocks[-1][1] - blocks[0][1]  # without the first block, which compiles
    return {
        "batch": batch,
        "seconds_per_step": statistics.median(seconds),
        "best_seconds_per_step": min(seconds),
        "tokens_per_second": batch / statistics.median(seconds),
        "rows_per_step": moved.rows / options.steps,
        "brought_per_step": moved.brought / options.steps,
    }


def traffic(options: Options, config: ModelConfig) -> list[dict[str, Any]]:
    """Bytes that prefill and steps of decoding move, by tokens of the prompt."""
    rule = TopN(n=options.n, device_layers=options.device_layers)
    model = random_model(
        config, options.seed, cache_tokens=max(options.prompts) + options.room + 4 * PAGE
    )
    model = model.placed(rule.placement)
    return [
        _traffic(options, model, rule, tokens)
        for tokens in tqdm(options.prompts, desc="traffic", disable=None)
    ]


def _traffic(options: Options, model: Model, rule: TopN, tokens: int) -> dict[str, Any]:
    config, engine = model.config, engine_of(model)
    ids = _ids((options.seed, tokens), tokens, config.vocab_size)
    method = dataclasses.replace(METHODS["full_attention"], decode=rule)
    cache = engine.runner.cache
    values, start = cache.values, cache.moved
    assert values is not None

    def moved(runner: ModelRunner, state: Sequence, there: Prefilled) -> tuple[Moved, Moved]:
        np.asarray(there.logits)
        computed = cache.moved
        key = batch_of(state.request, len(state.table.pages))
        assert key is not None
        batch = DecodeBatch(runner, key)
        begun = start_decoding(runner, state, rule, there.bank, key.room)
        batch.join([0], [state], there.logits, begun)
        values.measure = True
        try:
            np.asarray(batch.step(DECODE_BLOCK)[0])
            return computed - start, cache.moved - computed
        finally:
            values.measure = False

    request = Request(Prompt(ids[:0], (), ids), engine.memory, method, options.room)
    [(prefill, step)] = inspect_prompts(engine, [request], moved)
    away = config.num_layers - options.device_layers
    row = config.kv_bytes_per_token // (2 * config.num_layers * config.num_kv_heads)
    of_v = away * tokens * row * config.num_kv_heads
    wanted = away * config.num_heads * options.n * DECODE_BLOCK
    return {
        "prompt_tokens": tokens,
        "host_v_bytes": of_v,
        "prefill": dataclasses.asdict(prefill),
        "pushed_of_v": prefill.pushed / of_v,
        "brought_of_v": prefill.brought / of_v,
        "by": "callback" if values.mapped is None else "kernel, which counts nothing",
        "steps": DECODE_BLOCK,
        "decode": dataclasses.asdict(step),
        "rows_of_n": step.rows / wanted,
        "brought_of_n_rows": step.brought / (wanted * row),
        "calls_per_layer": step.calls / (away * DECODE_BLOCK),
        "distinct_share": step.distinct / max(step.rows, 1),
    }


def run(options: Options) -> dict[str, Any]:
    """Measure; JSON-able."""
    config = options.config()
    found: dict[str, Any] = {
        "benchmark": "kcache",
        "options": dataclasses.asdict(options),
        "model": random_named(config, shape=True),
        "kv_bytes_per_token": config.kv_bytes_per_token,
    }
    if "throughput" in options.parts:
        found["throughput"] = throughput(options, config)
    if "traffic" in options.parts:
        found["traffic"] = traffic(options, config)
    if "quality" in options.parts:
        found["quality"] = quality(options)
    return found | {"machine": describe()}


def quality(options: Options) -> dict[str, Any]:
    """Scores by task, layers kept and N, beside dense attention."""
    settings = list(itertools.product(options.kept, options.counts))
    names = {(kept, n): f"L{kept}_N{n}" for kept, n in settings}
    rules = [f"{names[kept, n]}=topn:n={n},device_layers={kept}" for kept, n in settings]
    result = run_eval(
        LongOptions(
            suite=options.suite,
            flavour=options.flavour,
            model=options.model,
            lengths=(options.length,),
            tasks=options.tasks,
            decode=("dense=dense", *rules),
            questions=options.questions,
            batch_size=options.batch_size,
        )
    )
    (method,) = dict.fromkeys(name.rpartition(", ")[0] for name in result["methods"])
    scores = {(cell["method"], cell["task"]): cell["score"] for cell in result["cells"]}
    same = {
        (one["method"], one["task"]): one["share"]
        for one in result["agreement"]
        if one["length"] is None
    }
    rows = [
        {
            "task": task,
            "device_layers": kept,
            "n": n,
            "score": scores[f"{method}, {names[kept, n]}", task],
            "same_as_dense": same[f"{method}, {names[kept, n]}", task],
        }
        for task in options.tasks
        for kept, n in settings
    ]
    kept_of_eval = ("suite", "flavour", "tasks", "lengths", "questions", "seed", "model")
    return {
        **{name: result[name] for name in kept_of_eval},
        "dense": {task: scores[f"{method}, dense", task] for task in options.tasks},
        "rows": rows,
    }


def report(result: dict[str, Any]) -> Iterator[str]:
    """The result as lines of tables."""
    options = result["options"]
    if "throughput" in result:
        yield (
            f"{result['model']}, {options['dtype']}; {options['device_bytes'] / 1e6:.0f} MB of KV "
            f"on the device; tokens a second, n={options['n']}"
        )
        yield f"{'context':>8} {'batch':>5} {'dense':>10} {'topn':>10} {'of dense':>8}"
        rows = {(row["context"], row["batch"], row["rule"]): row for row in result["throughput"]}
        for context, batch in dict.fromkeys((c, b) for c, b, _ in rows):
            dense, topn = (rows.get((context, batch, rule), {}) for rule in ("dense", "topn"))
            pair = [row.get("tokens_per_second") for row in (dense, topn)]
            share = f"{pair[1] / pair[0]:.2f}" if all(pair) else ""
            cells = " ".join(f"{_rate(row):>10}" for row in (dense, topn))
            yield f"{context:>8} {batch:>5} {cells} {share:>8}"
    for row in result.get("traffic", ()):
        yield (
            f"prompt of {row['prompt_tokens']} tokens: V pushed {row['pushed_of_v']:.2f} times, "
            f"brought back {row['brought_of_v']:.2f} times; a step fetches {row['rows_of_n']:.2f} "
            f"of N rows a head and layer, {row['distinct_share']:.0%} of them different ones, in "
            f"{row['calls_per_layer']:.0f} calls a layer"
        )
    if "quality" in result:
        found = result["quality"]
        counts = options["counts"]
        for task in found["tasks"]:
            yield f"{task}, {options['length']} tokens: dense {_percent(found['dense'][task])}"
            yield f"{'':>4} " + " ".join(f"{f'N={n}':>8}" for n in counts)
            scores = {
                (row["device_layers"], row["n"]): row["score"]
                for row in found["rows"]
                if row["task"] == task
            }
            for kept in options["kept"]:
                cells = " ".join(f"{_percent(scores[kept, n]):>8}" for n in counts)
                yield f"L={kept:<2} {cells}"


def _rate(row: dict[str, Any]) -> str:
    if "refused" in row:
        return "no pages"
    return f"{row['tokens_per_second']:.1f}" if row else ""


def _percent(score: dict[str, float]) -> str:
    return f"{100 * score['value']:.1f}"


def main(argv: abc.Sequence[str] | None = None) -> int:
    """Parse the arguments, run, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for field in dataclasses.fields(Options):
        name, default = f"--{field.name.replace('_', '-')}", field.default
        if isinstance(default, tuple):
            shown = ",".join(map(str, default))
            kind = type(default[0])
            parser.add_argument(name, type=_several(kind), metavar="LIST", help=f"({shown})")
        elif field.name == "device_bytes":
            parser.add_argument(name, type=parse_bytes, metavar="SIZE", help="(176MB)")
        else:
            parser.add_argument(name, type=type(default), help=f"({default})")
    parser.add_argument("--quick", action="store_true", help="small sizes, a minute in all")
    parser.add_argument("--out", metavar="FILE", help="write the result here, as JSON")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return run_command(_main, parser.parse_args(argv))


def _several(kind: type) -> Any:
    """A parser of values with commas between them."""

    def values(text: str) -> tuple[Any, ...]:
        return tuple(kind(part) for part in text.split(",") if part)

    return values


def _main(args: argparse.Namespace) -> int:
    require_folder(args.out)
    names = [field.name for field in dataclasses.fields(Options)]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    result = run(dataclasses.replace(QUICK if args.quick else Options(), **given))
    give_out(args, result, report(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The host's part of attention in one layer, on generated heads, rule by rule.

K and V of the layer are in host memory; every rule attends to what is outside the static pattern,
as in decoding. For every rule and length: recall of the exact top k over the answer, the share of
keys scanned, microseconds of a layer with nothing of it in the processor's caches (the best and the
median of some, and processor time, which other work on the machine changes least), seconds to
build, and bytes beside those of K and V.

example: python benchmarks/host_attention.py --contexts 36864,131072 --dtype bfloat16
"""

import argparse
import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from attention_heads import Heads, draw
from decode_rules import rules_of
from index_measure import BLOCK, HEADS
from tqdm import tqdm

from jaxrag.base.config import DTYPES, DType, ModelConfig
from jaxrag.base.errors import RequestError
from jaxrag.base.types import HostArray
from jaxrag.cli import run_command
from jaxrag.cli.options import add_json
from jaxrag.cli.output import give_out, require_folder
from jaxrag.measure.machine import describe
from jaxrag.measure.zoo import llama
from jaxrag.reuse.attention_index.faiss_objects import faiss_module
from jaxrag.reuse.decode import HostSearch, rule_from
from jaxrag.reuse.decode.far import HostLayer, HostPrompt

RULES = (
    "dense;flat;retrieval:index=lists,index.exact_below=0"
    ";retrieval:index=lists,index.exact_below=0,index.share=group"
    ";retrieval:index=graph,index.exact_below=0"
    ";retrieval:index=graph,index.exact_below=0,index.share=group"
    ";ivf:index=ivf,index.exact_below=0,index.most_scanned=1.0"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contexts", default="36864", metavar="N,...", help="tokens (36864)")
    parser.add_argument(
        "--heads", default="ivf24,ivf41", metavar="NAME,...", help="of a KV head each (ivf24,ivf41)"
    )
    parser.add_argument("--head-dim", type=int, metavar="N", help="of the heads (128)")
    parser.add_argument("--rules", default=RULES, metavar="RULE;...", help="decode rules")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="of K and V (bfloat16)")
    parser.add_argument("--ask", type=int, default=256, metavar="N", help="tokens of the answer")
    parser.add_argument("--threads", type=int, metavar="N", help="of the host (all)")
    parser.add_argument("--cold-mb", type=int, default=128, help="read between two layers (128)")
    parser.add_argument("--out", metavar="FILE", help="write the result as JSON")
    add_json(parser)
    return run_command(_run, parser.parse_args(argv))


def _run(args: argparse.Namespace) -> None:
    require_folder(args.out)
    result = run(
        [int(each) for each in args.contexts.split(",")],
        args.heads.split(","),
        rules_of(args.rules),
        dtype=args.dtype,
        head_dim=args.head_dim,
        ask=args.ask,
        threads=args.threads,
        cold_bytes=args.cold_mb << 20,
    )
    give_out(args, result, report(result))


def run(
    contexts: Sequence[int],
    heads: Sequence[str],
    rules: Sequence[str],
    *,
    dtype: DType,
    ask: int,
    head_dim: int | None = None,
    threads: int | None = None,
    cold_bytes: int = 128 << 20,
    train: int = 2048,
) -> dict[str, Any]:
    """Measure; returns a JSON-able result. RequestError for heads that are not known."""
    if odd := [name for name in heads if name not in HEADS]:
        raise RequestError(f"heads {odd[0]!r}: expected some of {', '.join(HEADS)}")
    rows = []
    for context in contexts:
        drawn = []
        for name in heads:
            spec = HEADS[name]
            if head_dim is not None:
                spec = dataclasses.replace(spec, head_dim=head_dim)
            drawn.append(draw(spec, context, train=train, ask=ask, sink=0, recent=1))
        for rule in tqdm(rules, desc=str(context), disable=None):
            rows.append(measure(drawn, rule, dtype, threads, cold_bytes))
    return {
        "benchmark": "host attention",
        "options": {"heads": list(heads), "dtype": dtype, "ask": ask, "threads": threads},
        "rows": rows,
        "faiss": faiss_module().__version__,
        "machine": describe(),
    }


def measure(
    drawn: Sequence[Heads], name: str, dtype: DType, threads: int | None, cold_bytes: int
) -> dict[str, Any]:
    """One rule on one layer whose KV heads are ``drawn``."""
    context, ask = drawn[0].context, drawn[0].asked.shape[1]
    layer, config = layer_of(drawn, dtype), config_of(drawn, dtype)
    host = HostSearch(threads=threads)
    try:
        start = time.perf_counter()
        far = rule_from(name).far(prompt_of(drawn, layer, config, host))
        if far is None:
            raise RequestError(f"rule {name!r}: nothing is read outside its static pattern")
        built = time.perf_counter() - start
        number = host.admit()
        host.begin(number, [far])
        micros, processor = zip(*timed(host, number, drawn, cold_bytes), strict=True)
        spent = host.seconds
        host.measure, counts = True, [host.account_of([number])]
        for step in range(ask):
            host.attend(number, 0, queries_of(drawn, step), context + step)
            if (step + 1) % BLOCK == 0 or step + 1 == ask:
                counts.append(host.account_of([number]))
    finally:
        host.close()
    blocks = [
        (after.found - before.found) / max(after.wanted - before.wanted, 1)
        for before, after in itertools.pairwise(counts)
    ]
    last, kv = counts[-1], int(layer.k.nbytes + layer.v.nbytes)
    searched = last.searches > 0
    return {
        "rule": name,
        "context": context,
        "recall": last.found / last.wanted if searched else None,
        "recall_of_blocks": blocks if searched else None,
        "scanned": last.scanned / last.searches / context if searched else None,
        "layer_us": statistics.median(micros),
        "best_us": min(micros),
        "processor_us": statistics.median(processor),
        "search_us": spent.search / len(micros) * 1e6,
        "attend_us": spent.attend / len(micros) * 1e6,
        "build_seconds": built,
        "host_bytes": 1 + far.nbytes / kv,
        "notes": list(last.notes),
    }


def timed(
    host: HostSearch, number: int, drawn: Sequence[Heads], cold_bytes: int
) -> Iterator[tuple[float, float]]:
    """Microseconds of a layer, and of processors, each after so many other bytes were read."""
    other = np.ones(cold_bytes // 8)
    for step in np.linspace(0, drawn[0].asked.shape[1] - 1, 24).astype(int).tolist():
        other.sum()
        start, used = time.perf_counter(), time.process_time()
        host.attend(number, 0, queries_of(drawn, step), drawn[0].context + step)
        yield (time.perf_counter() - start) * 1e6, (time.process_time() - used) * 1e6


def queries_of(drawn: Sequence[Heads], step: int) -> HostArray:
    """[K, G, H] float32, before rotation."""
    return np.stack([one.asked[:, step] for one in drawn])


def layer_of(drawn: Sequence[Heads], dtype: DType) -> HostLayer:
    """Their keys at the positions of the context, and random values."""
    ask, dim = drawn[0].asked.shape[1:]
    size = drawn[0].context + ask
    k = np.zeros((len(drawn), size, dim), jnp.dtype(dtype))
    for head, one in zip(k, drawn, strict=True):
        head[: one.context - 1] = one.placed_keys()
    v = np.zeros_like(k)
    v[:] = np.random.default_rng(0).standard_normal(k.shape)
    return HostLayer(k, v, np.arange(size, dtype=np.int32), np.zeros(size, np.int32))


def config_of(drawn: Sequence[Heads], dtype: DType) -> ModelConfig:
    """Of a model of one layer with these heads."""
    group, _, dim = drawn[0].asked.shape
    return llama(
        vocab_size=8, num_layers=1, model_dim=8, mlp_dim=8, num_heads=group * len(drawn),
        num_kv_heads=len(drawn), head_dim=dim, rope=drawn[0].rope, max_positions=1 << 21,
        tie_embeddings=False, dtype=dtype,
    )  # fmt: skip


def prompt_of(
    drawn: Sequence[Heads], layer: HostLayer, config: ModelConfig, host: HostSearch
) -> HostPrompt:
    """A prompt of these heads whose training queries are all that was kept of it."""
    bank = np.concatenate([one.bank.queries for one in drawn]).swapaxes(0, 1)
    context, ask = drawn[0].context, drawn[0].asked.shape[1]
    positions = drawn[0].bank.positions
    return HostPrompt(config, layer, 0, context - 1, ask, bank, positions, host.crew)


def report(result: dict[str, Any]) -> Iterator[str]:
    """The result as lines of a table."""
    yield (
        f"{'rule':<62} {'context':>8} {'recall':>7} {'worst':>6} {'scanned':>8} {'layer us':>9} "
        f"{'best':>7} {'cpu':>7} {'build s':>8} {'bytes':>6}"
    )
    for row in result["rows"]:
        recall = worst = scanned = ""
        if row["recall"] is not None:
            recall, worst = f"{row['recall']:.3f}", f"{min(row['recall_of_blocks']):.3f}"
            scanned = f"{100 * row['scanned']:.2f} %"
        yield (
            f"{row['rule']:<62} {row['context']:>8} {recall:>7} {worst:>6} {scanned:>8} "
            f"{row['layer_us']:>9.0f} {row['best_us']:>7.0f} {row['processor_us']:>7.0f} "
            f"{row['build_seconds']:>8.1f} {row['host_bytes']:>6.2f}"
        )


if __name__ == "__main__":
    sys.exit(main())

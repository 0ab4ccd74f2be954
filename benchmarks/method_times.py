"""Time to first token from text, FLOPs and stored bytes by method, on the shipped models.

Every question is put to every method in turn, in one process, so that times are of the same
moments; chunks are read from where they are kept, in memory. Prompts are those of the synthetic
task (six short documents) and needles in a haystack that is cut into chunks. Stored bytes are those
of the variants of a chunk that a knowledge base keeps for the method.

example: python benchmarks/method_times.py --out results.json
"""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from script import Result, run_script

from jaxrag.base.config import ModelConfig
from jaxrag.base.options import option
from jaxrag.cli.output import titled
from jaxrag.measure.evals.datasets.asking import InProcess, TimedAnswer, settings_of
from jaxrag.measure.evals.datasets.spec import DatasetItem
from jaxrag.measure.evals.long.run import prompts
from jaxrag.measure.evals.options import LongOptions
from jaxrag.measure.evals.statistics import median, plain
from jaxrag.measure.machine import describe
from jaxrag.measure.table import Table
from jaxrag.models.model import load_model
from jaxrag.models.text.progress import followed
from jaxrag.reuse.methods import METHODS, Method
from jaxrag.serve.ask import Ask
from jaxrag.tasks.synthetic import SyntheticTask, sample

LENGTHS = {"1k": 1024, "2k": 2048, "4k": 4096}  # tokens of the long prompts
CHUNK = 256  # tokens of their chunks
_SEED = 7


@dataclasses.dataclass(frozen=True)
class MethodTimesOptions:
    """Of this script."""

    short: str = option("checkpoints/synthetic-0.8m/dual", "of the short prompts", "MODEL")
    long: str = option("checkpoints/synthetic-0.8m/long-dual", "of the long ones", "MODEL")
    methods: tuple[str, ...] = option(
        (
            "full_attention", "full_reuse", "turborag", "turborag_composite", "fusionrag",
            "cacheblend", "cache_craft", "epic",
        ),
        "presets", "NAME,...",
    )  # fmt: skip
    questions: int = option(40, "of each kind", "N", flag="--num")


def measure(options: MethodTimesOptions) -> Result:
    """Short prompts and long ones."""
    return {
        "benchmark": "method_times",
        "questions": options.questions,
        "prompts": {
            "short": _asked(options, options.short, list(_short(options))),
            **{
                name: _asked(options, options.long, list(_long(options, length)))
                for name, length in LENGTHS.items()
            },
        },
        "machine": describe(),
    }


def _short(options: MethodTimesOptions) -> Iterator[DatasetItem]:
    task = SyntheticTask(split="test")
    for number in range(options.questions):
        drawn = sample(task, _SEED, number)
        yield _item(number, drawn.questions[0].question, drawn.chunks)


def _long(options: MethodTimesOptions, length: int) -> Iterator[DatasetItem]:
    rows = prompts(
        LongOptions(
            "infinitebench", options.long, (length,), flavour="village", tasks=("passkey",),
            questions=options.questions, chunk_tokens=CHUNK, seed=_SEED,
        ),
        progress=False,
    )  # fmt: skip
    for number, row in enumerate(rows):
        yield _item(number, row["question"], row["chunks"])


def _item(number: int, question: str, chunks: Sequence[str]) -> DatasetItem:
    documents = tuple(("", chunk) for chunk in chunks)
    return DatasetItem(str(number), str(number), question, documents, ())


def _asked(options: MethodTimesOptions, path: str, items: Sequence[DatasetItem]) -> dict[str, Any]:
    """Rows by method."""
    model = load_model(path)
    ask = Ask(template=model.prompt_format(), max_new_tokens=1)
    named = dict(zip(options.methods, options.methods, strict=True))
    asker = InProcess(settings_of(named, ask, model=model, neighbours="prompt"))
    found: dict[str, list[TimedAnswer]] = {name: [] for name in options.methods}
    for item in followed(items, f"times, {Path(path).name}", "question"):
        for name in options.methods:
            found[name].append(asker.answer(name, item))
    first = found[options.methods[0]]
    return {
        "model": path,
        "tokens": plain(median(np.array([float(it.prompt_tokens) for it in first]))),
        "rows": [
            {"method": name, "stored_bytes": stored_bytes(METHODS[name], model.config)}
            | _row(own, first)
            for name, own in found.items()
        ],
    }


def stored_bytes(method: Method, config: ModelConfig) -> int:
    """That a knowledge base keeps of a chunk token: keys and values, in every variant."""
    encoders = {method.encoder, method.first_encoder} - {None}
    values = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return len(encoders) * values * jnp.dtype(config.dtype).itemsize


def _row(own: Sequence[TimedAnswer], first: Sequence[TimedAnswer]) -> dict[str, Any]:
    pairs = [
        (a.ttft, b.ttft)
        for a, b in zip(own, first, strict=True)
        if a.ttft is not None and b.ttft is not None
    ]
    tokens = {
        name: float(np.mean([it.counts[name] for it in own])) for name in ("reused", "recomputed")
    }
    return {
        "ttft": plain(median(np.array([a for a, _ in pairs]))),
        "first_over_own": plain(median(np.array([b / a for a, b in pairs]))),
        "tokens": tokens,
        "flops": float(np.mean([it.flops for it in own])),
    }


def tables(result: Result) -> Iterator[Table]:
    """A table for each kind of prompt."""
    for found in result["prompts"].values():
        rows = [
            [
                row["method"],
                f"{row['stored_bytes']:,}",
                f"{row['flops'] / 1e6:.0f}",
                *(_shown(row[name], factor) for name, factor in _COLUMNS),
            ]
            for row in found["rows"]
        ]
        first = found["rows"][0]["method"]
        yield Table(
            f"{found['model']}, {found['tokens']['value']:.0f} tokens, {result['questions']} "
            f"questions: stored bytes of a chunk token, FLOPs and time to the first token",
            [["method", "bytes", "MFLOP", "ms", f"{first} / own"], *rows],
        )


_COLUMNS = (("ttft", 1000), ("first_over_own", 1))


def _shown(found: dict[str, Any], factor: float) -> str:
    parts = [found[name] for name in ("value", "low", "high")]
    value, *ends = (None if it is None else f"{factor * it:.3g}" for it in parts)
    return f"{value}" if None in ends else f"{value} [{ends[0]}, {ends[1]}]"


def report(result: Result) -> Iterator[str]:
    """The tables as lines."""
    return titled(tables(result))


if __name__ == "__main__":
    sys.exit(run_script(__doc__, MethodTimesOptions, measure, report))

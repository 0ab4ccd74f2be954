"""Continuous against static batches at saturation: tokens a second of the same engine.

All requests are there at the start. Each asks for a few chunks, popular ones more often (Zipf), and
its answer is as long as it is told, log-uniform between two bounds. A *static* batch takes rows
only when all are empty and ends with its longest answer (``SchedulerSettings.static``); under
*continuous* batching a request joins when a row is free. Nothing else differs: one engine, one
model with random weights, chunk KV in memory, the same requests in the same order. A round that
compiles comes first; then the arms alternate.

``tokens_per_second`` is the median over the rounds; ``ratio`` that of the two. ``bound`` is what
the ratio could be, had every step of the continuous arm all rows filled and prefill no cost.
``compiled`` names programs that were compiled after the first round; ``equal`` says that both arms
gave the same tokens.

example: python benchmarks/continuous.py --out benchmarks/results/continuous.json
"""

import argparse
import dataclasses
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxrag.cli import run_command
from jaxrag.cli.options import add_json
from jaxrag.cli.output import give_out
from jaxrag.engine.admission import SchedulerSettings
from jaxrag.engine.engine import Engine
from jaxrag.engine.request import Prompt, Request
from jaxrag.engine.state import EngineSettings
from jaxrag.measure.machine import describe
from jaxrag.measure.zoo import SMALL_LLAMA
from jaxrag.models.model import random_model
from jaxrag.reuse.methods import METHODS

ARMS = ("static", "continuous")


@dataclasses.dataclass(frozen=True)
class Options:
    """The workload.

    Attributes:
      requests: how many.
      rows: that decode together.
      shortest: tokens of an answer, at least.
      longest: tokens of an answer, at most.
      documents: chunks there are.
      chunk_tokens: of each.
      chunks: that a request asks for.
      question: tokens of its final block.
      rounds: of both arms.
      seed: of everything.
    """

    requests: int = 96
    rows: int = 8
    shortest: int = 8
    longest: int = 256
    documents: int = 40
    chunk_tokens: int = 256
    chunks: int = 4
    question: int = 24
    rounds: int = 3
    seed: int = 0


def run(options: Options) -> dict[str, Any]:
    """All rounds, JSON-able."""
    pool = 2 * options.documents * options.chunk_tokens
    model = random_model(SMALL_LLAMA, seed=options.seed, cache_tokens=pool)
    engines = {
        arm: Engine(model, EngineSettings(scheduler=SchedulerSettings(static=arm == "static")))
        for arm in ARMS
    }
    prompts, lengths = _workload(options, SMALL_LLAMA.vocab_size)
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    answers: dict[str, list[list[int]]] = {}
    before = Counter[str]()
    store = engines["static"].memory
    with tqdm(total=(options.rounds + 1) * len(ARMS), desc="continuous", disable=None) as bar:
        for at in range(options.rounds + 1):
            if at == 1:
                before = _compiled(engines)
            for arm in ARMS:
                requests = [
                    Request(prompt, store, METHODS["turborag"], length, rows=options.rows)
                    for prompt, length in zip(prompts, lengths, strict=True)
                ]
                start = time.perf_counter()
                answers[arm] = _serve(engines[arm], requests)
                if at:
                    seconds[arm].append(time.perf_counter() - start)
                bar.update()
    rates = {arm: sum(lengths) / statistics.median(spent) for arm, spent in seconds.items()}
    return {
        "benchmark": "continuous",
        "options": dataclasses.asdict(options),
        "tokens": sum(lengths),
        "seconds": seconds,
        "tokens_per_second": rates,
        "ratio": rates["continuous"] / rates["static"],
        "ratios": [a / b for a, b in zip(seconds["static"], seconds["continuous"], strict=True)],
        "bound": _steps(lengths, options.rows) * options.rows / sum(lengths),
        "compiled": sorted((_compiled(engines) - before).elements()),
        "equal": answers["static"] == answers["continuous"],
        "machine": describe(),
    }


def _workload(options: Options, vocab_size: int) -> tuple[list[Prompt], list[int]]:
    rng = np.random.default_rng(options.seed)

    def ids(count: int) -> Any:
        return rng.integers(3, vocab_size, count).astype(np.int32)

    library = [ids(options.chunk_tokens) for _ in range(options.documents)]
    popular = 1 / np.arange(1, options.documents + 1)
    popular /= popular.sum()
    prompts = []
    for _ in range(options.requests):
        chosen = rng.choice(options.documents, options.chunks, replace=False, p=popular)
        prompts.append(Prompt(ids(0), tuple(library[i] for i in chosen), ids(options.question)))
    low, high = math.log(options.shortest), math.log(options.longest)
    lengths = np.exp(rng.uniform(low, high, options.requests)).round().astype(int).tolist()
    return prompts, lengths


def _serve(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in requests]
    for progress in engine.iterate(requests):
        if progress.error is not None:
            raise progress.error
        answers[progress.number] += progress.new
    return answers


def _compiled(engines: Mapping[str, Engine]) -> Counter[str]:
    return sum((engine.compiled for engine in engines.values()), Counter[str]())


def _steps(lengths: Sequence[int], rows: int) -> int:
    """Decode steps of static batches in the order of the requests."""
    return sum(max(lengths[at : at + rows]) for at in range(0, len(lengths), rows))


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, run, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for field in dataclasses.fields(Options):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=int,
            default=field.default,
            metavar="N",
            help=f"({field.default})",
        )
    parser.add_argument("--out", metavar="FILE", help="write the result here, as JSON")
    add_json(parser)
    return run_command(_main, parser.parse_args(argv))


def _main(args: argparse.Namespace) -> int:
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(Options)}
    result = run(Options(**given))
    give_out(args, result, [_line(result)])
    return 0


def _line(result: dict[str, Any]) -> str:
    rates = result["tokens_per_second"]
    return (
        f"static {rates['static']:.0f} tokens/s, continuous {rates['continuous']:.0f} tokens/s: "
        f"{result['ratio']:.2f} times (at most {result['bound']:.2f} by the steps alone); "
        f"{len(result['compiled'])} programs compiled while serving, "
        f"tokens {'equal' if result['equal'] else 'DIFFER'}"
    )


if __name__ == "__main__":
    sys.exit(main())

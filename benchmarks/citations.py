"""How right citations are, by task, model and method, and what they cost.

Questions of the synthetic task are answered with ``cite="spans"``; a citation is right if its
passage holds the answer (for questions of one fact: beside the name that is asked for). Then a
random Llama answers over chunks in the pool, with citations and without in alternated rounds.

example: python benchmarks/citations.py --out benchmarks/results/citations.json
"""

import dataclasses
import functools
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rounds import between, in_turn, ratios, spread
from script import Result, run_script
from tqdm import tqdm

from jaxrag.base.options import option, parse_counts
from jaxrag.cli.output import titled
from jaxrag.engine.engine import engine_of
from jaxrag.engine.request import Prompt, Request
from jaxrag.measure.evals.metrics import exact_match
from jaxrag.measure.evals.scoring import draw
from jaxrag.measure.evals.statistics import plain, share
from jaxrag.measure.machine import describe
from jaxrag.measure.table import Table, percent
from jaxrag.measure.zoo import llama
from jaxrag.models.flops import turborag_flops
from jaxrag.models.model import Model, load_model, random_model
from jaxrag.models.spec import num_params
from jaxrag.reuse.methods import METHODS
from jaxrag.serve.generate import generate
from jaxrag.tasks.synthetic import KINDS, Question, Sample, SyntheticTask

_SEED = 7
_FACT = ("hop1", "cross")  # one fact answers these
_SHARES = ("answered", "precision", "recall", "cited_though_wrong")


@dataclasses.dataclass(frozen=True)
class Options:
    """How much."""

    models: tuple[str, ...] = option(
        (
            "synthetic-0.8m/full", "synthetic-0.8m/dual", "synthetic-0.8m/long-dual",
            "synthetic-2.3m/deep-full", "synthetic-2.3m/deep-dual",
        ),
        "in checkpoints/", "NAME,...",
    )  # fmt: skip
    methods: tuple[str, ...] = option(
        ("full_attention", "turborag", "epic", "cacheblend"), "presets", "NAME,..."
    )
    documents: tuple[int, ...] = option((6, 20), "of a sample", "N,...", parse=parse_counts)
    questions: int = option(300, "of each model, method and number of documents", "N")
    layers: int = option(12, "of the random model", "N")
    width: int = option(768, "of the random model", "N")
    chunks: int = option(16, "of 256 tokens, of each of its prompts", "N")
    tokens: tuple[int, ...] = option((32, 128), "of its answers", "N,...", parse=parse_counts)
    rows: tuple[int, ...] = option((1, 8), "of the batch", "N,...", parse=parse_counts)
    repeats: int = option(5, "rounds", "N")


def run(options: Options) -> Result:
    """Both tables."""
    cells = [
        (model, method, documents)
        for model in options.models
        for method in options.methods
        for documents in options.documents
    ]
    loaded = {name: load_model(Path("checkpoints") / name) for name in options.models}
    return {
        "benchmark": "citations",
        "options": dataclasses.asdict(options),
        "right": [
            {"model": model, "method": method, "documents": documents}
            | _judged(options, loaded[model], method, documents)
            for model, method, documents in tqdm(cells, "right", file=sys.stderr)
        ],
        "cost": list(_costs(options)),
        "machine": describe(),
    }


def _judged(options: Options, model: Model, method: str, documents: int) -> Result:
    """Precision and recall of citations, by kind of question."""
    task = SyntheticTask(chunks=(documents, documents), split="test")
    samples = draw(task, _SEED, options.questions)
    rows: list[tuple[str, int, bool, bool, bool]] = []  # kind, sample, answered, cited, right
    for number, sample in enumerate(samples):
        results = generate(
            [it.question for it in sample.questions],
            documents=list(sample.chunks),
            model=model,
            method=method,
            max_new_tokens=8,
            cite="spans",
        )
        for question, result in zip(sample.questions, results, strict=True):
            named = {it.source - 1 for it in result.citations}
            gold = set(_gold(sample, question))
            is_right = exact_match(result.text, [question.answer])
            rows.append((question.kind, number, is_right, bool(named), named <= gold))
    kinds, samples_of, *verdicts = (np.array(column) for column in zip(*rows, strict=True))
    answered, cited, right = verdicts
    told = {}
    for name in ("one fact", *KINDS):
        here = np.isin(kinds, _FACT) if name == "one fact" else kinds == name
        known = here & answered
        told[name] = {
            "questions": int(here.sum()),
            "answered": plain(share(answered[here], samples_of[here])),
            "precision": plain(share(right[known & cited], samples_of[known & cited])),
            "recall": plain(share((cited & right)[known], samples_of[known])),
            "cited_though_wrong": plain(
                share(cited[here & ~answered], samples_of[here & ~answered])
            ),
        }
    return {"kinds": told}


def _gold(sample: Sample, question: Question) -> Iterator[int]:
    """Documents that hold the answer; of one fact also whom it is about."""
    names = set(re.findall(r"[A-Z][a-z]+", question.question.split(" ", 1)[1]))
    for at, text in enumerate(sample.chunks):
        about = names & {*re.findall(r"\w+", text), *sample.subjects[at].split()}
        if question.answer in text and (about or question.kind not in _FACT):
            yield at


def _costs(options: Options) -> Iterator[Result]:
    """Seconds of whole answers with citations over those without, in alternated rounds."""
    config = llama(
        vocab_size=32000,
        num_layers=options.layers,
        model_dim=options.width,
        mlp_dim=3 * options.width,
        num_heads=options.width // 64,
        num_kv_heads=options.width // 64,
        head_dim=64,
        max_positions=8192,
        eos_ids=(),
    )
    model = random_model(config, 0, cache_tokens=16384)
    for rows in options.rows:
        for tokens in options.tokens:
            seconds = in_turn(
                {
                    "without": functools.partial(_seconds, options, model, rows, tokens, False),
                    "with": functools.partial(_seconds, options, model, rows, tokens, True),
                },
                options.repeats,
            )
            context = 256 * options.chunks + 48 + tokens
            read = turborag_flops(config, tokens, context)
            decode = read + 2 * tokens * config.model_dim * config.vocab_size
            mixed = 2 * config.num_layers * config.num_heads * tokens * context * options.chunks
            yield {
                "parameters": num_params(config),
                "rows": rows,
                "tokens": tokens,
                "context": context,
                "flops_of_decode": (read + mixed) / decode,
                "seconds": {name: spread(it) for name, it in seconds.items()},
                "ratio": ratios(seconds["with"], seconds["without"]),
            }


def _seconds(options: Options, model: Model, rows: int, tokens: int, cited: bool) -> float:
    """From when all requests are there until the last has ended; their chunks are in the pool."""
    engine, draws = engine_of(model), np.random.default_rng(0)
    chunks = tuple(
        draws.integers(0, model.config.vocab_size, 256).astype(np.int32)
        for _ in range(options.chunks)
    )
    requests = [
        Request(
            Prompt(
                chunks[0][:0],
                chunks,
                draws.integers(0, model.config.vocab_size, 48).astype(np.int32),
            ),
            engine.memory,
            METHODS["turborag"],
            tokens,
            rows=rows,
            cited=cited,
        )
        for _ in range(rows)
    ]
    start = time.perf_counter()
    for progress in engine.iterate(requests):
        if progress.error is not None:
            raise progress.error
    return time.perf_counter() - start


def report(result: Result) -> Iterator[str]:
    """Both tables."""
    head = ["model", "method", "docs", "kind", "answered", "precision", "recall", "wrong"]
    rows = [
        [
            cell["model"], cell["method"], str(cell["documents"]), kind,
            *(percent(it[name]) for name in _SHARES),
        ]
        for cell in result["right"]
        for kind, it in cell["kinds"].items()
    ]  # fmt: skip
    right = Table("citations of right answers, % (wrong: of wrong answers cited)", [head, *rows], 4)
    costs = [
        [
            str(it["rows"]), str(it["tokens"]), between(it["seconds"]["without"], ".2f"),
            between(it["seconds"]["with"], ".2f"), between(it["ratio"], ".3f"),
            f"{it['flops_of_decode']:.2f}",
        ]
        for it in result["cost"]
    ]  # fmt: skip
    head = ["rows", "tokens", "s without", "s with", "with / without", "FLOPs / decode"]
    return titled([right, Table("cost of whole answers", [head, *costs], 2)])


if __name__ == "__main__":
    sys.exit(run_script(__doc__, Options, run, report))

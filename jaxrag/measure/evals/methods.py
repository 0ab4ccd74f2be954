"""How well methods of reuse answer, at one recompute ratio after the other: `jaxrag eval methods`.

Every method answers the same questions of the synthetic task from cached chunks, as ``generate``
does, and is compared with full attention and with full reuse (FusionRAG section 5.2). The chunks of
all samples stand in one knowledge base; the neighbours that a chunk is encoded behind are found in
it by BM25, so they come from other samples as well as its own. With ``retrieve`` the chunks
of a prompt come from a search (``methods_pool``).
"""

import contextlib
import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxrag.base.types import HostArray
from jaxrag.measure.evals.methods_grid import REFERENCES, Cell, cells_of
from jaxrag.measure.evals.methods_pool import Pool, open_pool
from jaxrag.measure.evals.metrics import exact_match, token_f1
from jaxrag.measure.evals.options import MethodsOptions
from jaxrag.measure.evals.scoring import draw, write
from jaxrag.measure.evals.statistics import (
    LEVEL,
    Estimate,
    by_group,
    difference,
    plain,
    recovery,
    share,
)
from jaxrag.measure.evals.synthetic import ALL, AskedSamples
from jaxrag.measure.subject import described
from jaxrag.models.model import load_model
from jaxrag.models.text.progress import progress_bar
from jaxrag.reuse.encode import encoder_named
from jaxrag.reuse.methods import Method
from jaxrag.serve.answers import Result, serve

HOPS = {"1 hop": ("hop1", "cross", "latest"), "2 hops": ("hop2",)}
SMALLEST_GAP = (
    0.02  # between full attention and full reuse, for a normalised score to mean anything
)
METRICS = ("exact_match", "f1")


@dataclasses.dataclass(frozen=True)
class Answers:
    """What one served method answered; arrays [Q], in the order of the questions."""

    results: list[Result]
    exact_match: HostArray  # bool
    f1: HostArray  # float64


def run(options: MethodsOptions, progress: bool = True) -> dict[str, Any]:
    """Measure; JSON-able, shares as fractions of 1, ``methods_report`` prints it.

    Raises RequestError, ModelError, TokenizerError or ConfigError for a model that cannot be asked,
    before anything is encoded.
    """
    cells = cells_of(options)
    asked = AskedSamples.of(draw(options.task, options.seed, options.questions))
    model = load_model(options.model, dtype=options.dtype)
    written = write(model, asked.samples, options.template, options.retrieve)
    longest = written.prompt_tokens(options.retrieve) + written.answer_tokens
    room = 4 * options.batch_size * longest  # pages are not full, and cacheblend has copies
    model = dataclasses.replace(model, cache_tokens=room)
    written = dataclasses.replace(written, model=model)
    for cell in cells:
        cell.method.check(model.config)
    answers: dict[Method, Answers] = {}
    distinct = {cell.served: cell.method for cell in cells}
    with tempfile.TemporaryDirectory() as folder:
        pool = open_pool(options, written, list(distinct.values()), folder, progress)
        with contextlib.ExitStack() as stack:
            for kb in pool.kbs:
                stack.enter_context(kb)
            total = len(distinct) * len(asked.kind)
            bar = progress_bar(total, "eval", "question", shown=progress)
            stack.enter_context(bar)
            for served, method in distinct.items():
                bar.set_postfix_str(
                    f"{method.name} {method.encoder} {method.recompute_ratio}", refresh=False
                )
                answers[served] = _answer(pool, method, options.batch_size, bar)
    return {
        "task": dataclasses.asdict(options.task),
        "seed": options.seed,
        "questions": {name: int(rows.sum()) for name, rows in _groups(asked).items()},
        "samples": len(asked.samples),
        "interval": f"{LEVEL:.0%}, cluster-robust over samples (evals/statistics.py)",
        "model": described(options.model, model, written.template),
        "neighbours": options.neighbours,
        "retrieve": options.retrieve,
        "encoders": list(options.encoders),
        "ratios": list(options.ratios),
        "cells": [_cell(cell, asked, answers) for cell in cells],
        "differences": paired(cells, asked, answers),
    }


def _answer(pool: Pool, method: Method, batch_size: int, bar: "tqdm[Any]") -> Answers:
    results: list[Result] = []
    for _, questions in pool.asked(method):
        found: dict[int, Result] = {}
        for batch in serve(questions, batch_size):
            found |= batch
            bar.update(len(batch))
        results += [found[i] for i in range(len(questions))]
    golds = [q.answer for sample in pool.written.samples for q in sample.questions]
    both = list(zip((result.text for result in results), golds, strict=True))
    return Answers(
        results=results,
        exact_match=np.array([exact_match(text, [gold]) for text, gold in both], np.bool_),
        f1=np.array([token_f1(text, [gold]) for text, gold in both], np.float64),
    )


def _groups(asked: AskedSamples) -> dict[str, HostArray]:
    """Which questions are of each group, bool [Q]: all, by hops, by kind."""
    rows = asked.groups()
    hops = {name: np.isin(asked.kind, kinds) for name, kinds in HOPS.items()}
    return {ALL: rows.pop(ALL), **{name: row for name, row in hops.items() if row.any()}, **rows}


def _cell(cell: Cell, asked: AskedSamples, answers: Mapping[Method, Answers]) -> dict[str, Any]:
    own = answers[cell.served]
    full, reuse = (answers[cell.served] for cell in REFERENCES)
    counts = [result.counts for result in own.results]
    total = sum(sum(one.values()) for one in counts)
    same = [a.token_ids == b.token_ids for a, b in zip(own.results, full.results, strict=True)]
    return {
        "method": cell.name,
        "encoder": cell.method.encoder,
        "ratio": cell.ratio,
        "exact_match": _by_group(asked, share, own.exact_match),
        "f1": _by_group(asked, share, own.f1),
        "normalised_f1": _by_group(asked, _normalised, reuse.f1, own.f1, full.f1),
        "as_full_attention": plain(share(np.array(same, np.bool_), asked.sample)),
        "recomputed": sum(one["recomputed"] for one in counts) / total,
        "recomputed_tokens": sum(one["recomputed"] for one in counts) / len(counts),
        "encoded_tokens": sum(one["encoded"] for one in counts),
        "flops": float(np.mean([result.flops for result in own.results])),
    }


def _normalised(
    reuse: HostArray, own: HostArray, full: HostArray, samples: HostArray
) -> Estimate | None:
    """FusionRAG equation 11: 0 is full reuse, 1 full attention; None where they are too close."""
    if not len(own) or full.mean() - reuse.mean() < SMALLEST_GAP:
        return None
    return recovery(reuse, own, full, samples)


def paired(
    cells: Sequence[Cell], asked: AskedSamples, answers: Mapping[Method, Answers]
) -> list[dict[str, Any]]:
    """Paired: fusionrag, behind neighbours where it was, against all others at the same ratio."""
    rows, ours = [], [cell for cell in cells if cell.name == "fusionrag"]
    for first in [cell for cell in ours if _sees_neighbours(cell)] or ours:
        for second in cells:
            if second == first or second.ratio not in (None, first.ratio):
                continue
            a, b = answers[first.served], answers[second.served]
            rows.append({
                "first": _label(first),
                "second": _label(second),
                "ratio": first.ratio,
                **{
                    metric: _by_group(asked, difference, getattr(a, metric), getattr(b, metric))
                    for metric in METRICS
                },
            })  # fmt: skip
    return rows


def _sees_neighbours(cell: Cell) -> bool:
    encoder = cell.method.encoder
    return encoder is not None and encoder_named(encoder).sees_neighbours


def _label(cell: Cell) -> str:
    return cell.name if cell.method.encoder is None else f"{cell.name}, {cell.method.encoder}"


def _by_group(asked: AskedSamples, estimate: Any, *values: HostArray) -> dict[str, Any]:
    return by_group(_groups(asked), asked.sample, estimate, *values)

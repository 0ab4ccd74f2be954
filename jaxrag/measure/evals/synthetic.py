"""How many questions of the synthetic task are answered: `jaxrag eval synthetic`.

Every model gets the same questions and reads each of them with full attention, block-wise with
reordered positions, and block-wise with composite positions. That is the comparison of TurboRAG
(tables 1 and 2) and Block-Attention (table 1): what block-wise reading costs a model that was not
trained for it, and how much of that fine-tuning brings back.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrag.base.types import HostArray
from jaxrag.measure.evals.options import ModelRead, SyntheticOptions
from jaxrag.measure.evals.scoring import READS, draw, scored, write
from jaxrag.measure.evals.statistics import LEVEL, by_group, difference, plain, recovery, share
from jaxrag.measure.subject import described
from jaxrag.models.model import load_model
from jaxrag.models.text.progress import progress_bar
from jaxrag.tasks.synthetic import KINDS, Sample

FULL = "full"  # the read that nothing is lost in
ALL = "all"  # every kind of question
HOPS = {"1 hop": ("hop1", "cross", "latest"), "2 hops": ("hop2",)}


@dataclasses.dataclass(frozen=True)
class AskedSamples:
    """The questions of a run; arrays [Q]."""

    samples: tuple[Sample, ...]
    sample: HostArray  # number of each question's sample
    kind: HostArray  # str
    guess: HostArray  # float64, the shortcut's expected score

    @classmethod
    def of(cls, samples: tuple[Sample, ...]) -> "AskedSamples":
        """From the samples."""
        questions = [question for sample in samples for question in sample.questions]
        counts = [len(sample.questions) for sample in samples]
        return cls(
            samples=samples,
            sample=np.repeat(np.arange(len(samples)), counts),
            kind=np.array([question.kind for question in questions]),
            guess=np.array([question.guess for question in questions], np.float64),
        )

    def groups(self) -> dict[str, HostArray]:
        """Which questions are of each group, bool [Q]: all, by hops, each kind that occurs."""
        kinds = HOPS | {kind: (kind,) for kind in KINDS}
        rows = {name: np.isin(self.kind, those) for name, those in kinds.items()}
        every = np.ones(len(self.kind), np.bool_)
        return {ALL: every, **{name: row for name, row in rows.items() if row.any()}}


def run(options: SyntheticOptions, progress: bool = True) -> dict[str, Any]:
    """Measure; JSON-able, shares and differences as fractions of 1, ``synthetic_report`` prints it.

    All models are in memory at once. Raises RequestError, ModelError, TokenizerError or ConfigError
    for a model that cannot be asked.
    """
    asked = AskedSamples.of(draw(options.task, options.seed, options.questions))
    written = {  # all of them before any work: the last one may be the one that cannot be asked
        name: write(load_model(path, dtype=options.dtype), asked.samples, options.template)
        for name, path in options.models.items()
    }
    groups = asked.groups()
    right: dict[ModelRead, HostArray] = {}  # [Q] each
    steps = len(options.models) * len(options.reads) * len(asked.samples)
    with progress_bar(steps, "eval", "question", shown=progress) as bar:
        for cell in (ModelRead(name, read) for name in options.models for read in options.reads):
            bar.set_postfix_str(str(cell), refresh=False)
            right[cell] = scored(written[cell.model], READS[cell.read], bar.update)
    baseline = next(iter(options.models))
    return {
        "task": dataclasses.asdict(options.task),
        "seed": options.seed,
        "questions": {name: int(rows.sum()) for name, rows in groups.items()},
        "samples": len(asked.samples),
        "shortcut": {name: float(asked.guess[r].mean()) for name, r in groups.items()},
        "interval": f"{LEVEL:.0%}, cluster-robust over samples (evals/statistics.py)",
        "cells": [
            cell._asdict() | {"accuracy": by_group(groups, asked.sample, share, values)}
            for cell, values in right.items()
        ],
        "differences": [
            {
                "a": str(a),
                "b": str(b),
                "difference": by_group(groups, asked.sample, difference, right[a], right[b]),
            }
            for a, b in _pairs(options, baseline)
        ],
        "models": {
            name: described(options.models[name], asked_of.model, asked_of.template)
            for name, asked_of in written.items()
        },
        "baseline": baseline,
        "recovery": _recoveries(options, baseline, asked.sample, right),
    }


def _pairs(options: SyntheticOptions, baseline: str) -> list[tuple[ModelRead, ModelRead]]:
    """Each cell against the baseline in full, composite against reordered, and what was asked."""
    pairs = []
    if FULL in options.reads:
        best = ModelRead(baseline, FULL)
        cells = [ModelRead(name, read) for name in options.models for read in options.reads]
        pairs += [(cell, best) for cell in cells if cell != best]
    if {"block", "composite"} <= set(options.reads):
        pairs += [
            (ModelRead(name, "block"), ModelRead(name, "composite")) for name in options.models
        ]
    return list(dict.fromkeys((*pairs, *options.compare)))


def _recoveries(
    options: SyntheticOptions,
    baseline: str,
    samples: HostArray,
    right: Mapping[ModelRead, HostArray],
) -> list[dict[str, Any]]:
    """What each other model brings back of what the baseline loses, by read."""
    if FULL not in options.reads:
        return []
    best = right[ModelRead(baseline, FULL)]
    rows = []
    for model_read, back in right.items():
        if model_read.read != FULL and model_read.model != baseline:
            found = recovery(right[ModelRead(baseline, model_read.read)], back, best, samples)
            rows.append({**model_read._asdict(), "recovery": plain(found)})
    return rows

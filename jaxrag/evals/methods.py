"""How well methods of reuse answer, at one recompute ratio after the other: `jaxrag eval methods`.

Every method answers the same questions of the synthetic task from cached chunks, as ``generate``
does, and is compared with full attention and with full reuse (FusionRAG section 5.2). The chunks of
all samples stand in one knowledge base; the neighbours that a chunk is encoded behind are found in
it by BM25, so they come from other samples as well as its own.
"""

import dataclasses
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxrag.documents import Document
from jaxrag.encode import encoder_named
from jaxrag.engine.sampling import SamplingParams
from jaxrag.evals.deviation import kv_deviation
from jaxrag.evals.methods_grid import REFERENCES, Cell, Options
from jaxrag.evals.metrics import exact_match, token_f1
from jaxrag.evals.scoring import Written, draw, write
from jaxrag.evals.statistics import LEVEL, Estimate, difference, recovery, share
from jaxrag.evals.synthetic import ALL, Asked
from jaxrag.knowledge_base import KnowledgeBase
from jaxrag.methods import Method
from jaxrag.models.model import load_model
from jaxrag.serve.answers import Result, serve
from jaxrag.serve.questions import ReadyQuestion, Settings, prepare, resolve
from jaxrag.text.prompts import template_named
from jaxrag.types import HostArray

HOPS = {"1 hop": ("hop1", "cross", "latest"), "2 hops": ("hop2",)}
SMALLEST_GAP = (
    0.02  # between full attention and full reuse, for a normalised score to mean anything
)
METRICS = ("exact_match", "f1")

Neighbours = tuple[tuple[HostArray, ...], ...]  # of every chunk of a sample


@dataclasses.dataclass(frozen=True)
class Answers:
    """What one served method answered; arrays [Q], in the order of the questions."""

    results: list[Result]
    exact_match: HostArray  # bool
    f1: HostArray  # float64


def run(options: Options, progress: bool = True) -> dict[str, Any]:
    """Measure; JSON-able, shares as fractions of 1, ``methods_report`` prints it.

    Raises RequestError, ModelError, TokenizerError or ConfigError for a model that cannot be asked,
    before anything is encoded.
    """
    template = None if options.template is None else template_named(options.template)
    asked = Asked.of(draw(options.task, options.seed, options.questions))
    model = load_model(options.model, dtype=options.dtype)
    written = write(model, asked.samples, template, options.response_start)
    longest = max(ids.num_positions for ids in written.ids)
    room = 2 * options.batch_size * (longest + _answer_tokens(written))
    model = dataclasses.replace(model, cache_tokens=room)
    written = dataclasses.replace(written, model=model)
    cells = options.cells()
    for cell in cells:
        cell.method.check(model.config)
    answers: dict[Method, Answers] = {}
    deviations: dict[Method, Any] = {}
    distinct = {cell.served: cell.method for cell in cells}
    with tempfile.TemporaryDirectory() as folder:
        kb = _knowledge_base(options, written, list(distinct.values()), folder, progress)
        with kb, tqdm(total=len(distinct) * len(asked.kind), unit="question", desc="eval",
                      disable=None if progress else True) as bar:  # fmt: skip
            pool = _Pool(kb, written)
            for served, method in distinct.items():
                bar.set_postfix_str(f"{method.name} {method.encoder} {method.recompute_ratio}")
                answers[served] = _answer(pool, method, options.batch_size, bar)
                if options.deviation:
                    deviations[served] = _deviation(pool, method, options.deviation)
    return {
        "task": dataclasses.asdict(options.task),
        "seed": options.seed,
        "questions": {name: int(rows.sum()) for name, rows in _groups(asked).items()},
        "samples": len(asked.samples),
        "interval": f"{LEVEL:.0%}, cluster-robust over samples (jaxrag/evals/statistics.py)",
        "model": {
            "path": options.model,
            "weights": model.digest,
            "dtype": model.config.dtype,
            "template": written.template.to_dict(),
        },
        "neighbours": options.neighbours,
        "encoders": list(options.encoders),
        "ratios": list(options.ratios),
        "deviation_samples": min(options.deviation, len(asked.samples)),
        "cells": [_cell(cell, asked, answers, deviations) for cell in cells],
        "differences": _differences(cells, asked, answers),
        "whole": _whole(cells, answers),
    }


def _answer_tokens(written: Written) -> int:
    return max(len(final.response) for ids in written.ids for final in ids.finals)


@dataclasses.dataclass(frozen=True)
class _Pool:
    """The knowledge base with the chunks of all samples, and what is asked of them."""

    kb: KnowledgeBase
    written: Written
    _neighbours: dict[tuple[str, int], Neighbours] = dataclasses.field(default_factory=dict)

    def settings(self, method: Method) -> Settings:
        """What all questions of a cell have in common."""
        return resolve(
            kb=self.kb,
            model=None,
            method=method,
            template=self.written.template,
            k=1,
            max_new_tokens=_answer_tokens(self.written),
            stop=(),
        )

    def questions(self, settings: Settings, only_first: int | None = None) -> list[ReadyQuestion]:
        """Every question, or the first one of so many samples, with its chunks' neighbours."""
        method = settings.method
        names = [name for name in (method.encoder, method.first_encoder) if name is not None]
        seeing = [name for name in names if encoder_named(name).sees_neighbours]
        made = []
        for number, sample in enumerate(self.written.samples[:only_first]):
            neighbours = self._seen(seeing[0], number) if seeing else None
            for question in sample.questions[: None if only_first is None else 1]:
                one = prepare(settings, question.question, sample.chunks, SamplingParams())
                prompt = dataclasses.replace(one.request.prompt, neighbours=neighbours)
                request = dataclasses.replace(one.request, prompt=prompt)
                made.append(dataclasses.replace(one, request=request))
        return made

    def _seen(self, encoder: str, sample: int) -> Neighbours:
        """What each chunk of a sample was encoded behind."""
        if (encoder, sample) not in self._neighbours:
            names = [_name(sample, i) for i in range(len(self.written.samples[sample].chunks))]
            ids = [self.kb.chunks.of_document(name)[0] for name in names]
            found = self.kb.neighbours_of(ids, encoder, self.written.template)
            self._neighbours[encoder, sample] = tuple(found)
        return self._neighbours[encoder, sample]


def _knowledge_base(
    options: Options, written: Written, methods: Sequence[Method], folder: str, progress: bool
) -> KnowledgeBase:
    """Every chunk as a document of its own, encoded in every way that a method wants."""
    encoders = dict.fromkeys(
        encoder for m in methods for encoder in (m.encoder, m.first_encoder) if encoder is not None
    )
    sees = any(encoder_named(encoder).sees_neighbours for encoder in encoders)
    kb = KnowledgeBase.open(
        pathlib.Path(folder) / "kb",
        written.model,
        template=written.template,
        chunk_tokens=max(len(chunk) for ids in written.ids for chunk in ids.chunks),
        overlap=0,
        encoders=list(encoders),
        neighbours=options.neighbours if sees else None,
        similar_by="bm25" if sees else None,
    )
    documents = [
        Document(_name(number, i), text)
        for number, sample in enumerate(written.samples)
        for i, text in enumerate(sample.chunks)
    ]
    kb.add(documents, progress=progress)
    return kb


def _name(sample: int, chunk: int) -> str:
    return f"{sample:05}-{chunk:02}"


def _answer(pool: _Pool, method: Method, batch_size: int, bar: "tqdm[Any]") -> Answers:
    settings = pool.settings(method)
    questions = pool.questions(settings)
    found: dict[int, Result] = {}
    for batch in serve(settings, questions, batch_size):
        found |= batch
        bar.update(len(batch))
    results = [found[i] for i in range(len(questions))]
    golds = [q.answer for sample in pool.written.samples for q in sample.questions]
    both = list(zip((result.text for result in results), golds, strict=True))
    return Answers(
        results=results,
        exact_match=np.array([exact_match(text, [gold]) for text, gold in both], np.bool_),
        f1=np.array([token_f1(text, [gold]) for text, gold in both], np.float64),
    )


def _deviation(pool: _Pool, method: Method, count: int) -> dict[str, Any]:
    settings = pool.settings(method)
    prompts = [one.request.prompt for one in pool.questions(settings, only_first=count)]
    found = kv_deviation(settings.model, settings.store, settings.method, prompts)
    return {
        name: {"k": values[:, 0].tolist(), "v": values[:, 1].tolist()}
        for name, values in found._asdict().items()
    }


def _groups(asked: Asked) -> dict[str, HostArray]:
    """Which questions are of each group, bool [Q]: all, by hops, by kind."""
    rows = asked.groups()
    hops = {name: np.isin(asked.kind, kinds) for name, kinds in HOPS.items()}
    return {ALL: rows.pop(ALL), **{name: row for name, row in hops.items() if row.any()}, **rows}


def _cell(
    cell: Cell,
    asked: Asked,
    answers: Mapping[Method, Answers],
    deviations: Mapping[Method, Any],
) -> dict[str, Any]:
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
        "as_full_attention": _plain(share(np.array(same, np.bool_), asked.sample)),
        "recomputed": sum(one["recomputed"] for one in counts) / total,
        "encoded_tokens": sum(one["encoded"] for one in counts),
        "flops": float(np.mean([result.flops for result in own.results])),
        "deviation": deviations.get(cell.served),
    }


def _normalised(
    reuse: HostArray, own: HostArray, full: HostArray, samples: HostArray
) -> Estimate | None:
    """FusionRAG equation 11: 0 is full reuse, 1 full attention; None where they are too close."""
    if not len(own) or full.mean() - reuse.mean() < SMALLEST_GAP:
        return None
    return recovery(reuse, own, full, samples)


def _differences(
    cells: Sequence[Cell], asked: Asked, answers: Mapping[Method, Answers]
) -> list[dict[str, Any]]:
    """Paired: fusionrag behind neighbours against every other method at the same ratio."""
    rows = []
    for first in cells:
        seeing = first.method.encoder and encoder_named(first.method.encoder).sees_neighbours
        if first.name != "fusionrag" or not seeing:
            continue
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


def _label(cell: Cell) -> str:
    return cell.name if cell.method.encoder is None else f"{cell.name}, {cell.method.encoder}"


def _whole(cells: Sequence[Cell], answers: Mapping[Method, Answers]) -> list[dict[str, Any]]:
    """At ratio 1 every method has to give full attention's tokens: which questions differ."""
    full = answers[REFERENCES[0].served].results
    rows = []
    for cell in cells:
        if cell.ratio == 1:
            own = answers[cell.served].results
            differing = [i for i, (a, b) in enumerate(zip(own, full, strict=True))
                         if a.token_ids != b.token_ids]  # fmt: skip
            rows.append({
                "method": cell.name,
                "encoder": cell.method.encoder,
                "questions": len(own),
                "differing": differing,
            })  # fmt: skip
    return rows


def _by_group(asked: Asked, estimate: Any, *values: HostArray) -> dict[str, Any]:
    return {
        name: _plain(estimate(*(column[rows] for column in values), asked.sample[rows]))
        for name, rows in _groups(asked).items()
    }


def _plain(estimate: Estimate | None) -> dict[str, float] | None:
    return None if estimate is None else estimate._asdict()

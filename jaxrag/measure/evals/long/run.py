"""Long prompts put to a model, by several methods.

Every method answers the same prompts, as ``generate`` does with ``documents=``: one document that
holds the whole haystack, or the chunks it is cut into.
"""

import dataclasses
import itertools
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxrag.base.config import ModelConfig
from jaxrag.base.installed import __version__
from jaxrag.base.types import HostArray
from jaxrag.engine.sampling_params import SamplingParams
from jaxrag.kv.cache import PAGE
from jaxrag.kv.placement import ON_DEVICE
from jaxrag.library.knowledge_base.passages import PassageCorpus
from jaxrag.measure.evals.asked import Line, ask_all, kept
from jaxrag.measure.evals.gate import answered
from jaxrag.measure.evals.long.plan import Item, plan
from jaxrag.measure.evals.options import LongOptions
from jaxrag.measure.evals.statistics import LEVEL, difference, plain, share
from jaxrag.measure.subject import described, format_of
from jaxrag.models.model import Model, load_model
from jaxrag.reuse.decode import DecodeRule
from jaxrag.reuse.decode.footprint import Bytes
from jaxrag.serve.answer_files import AnswerFile
from jaxrag.serve.answers import Result
from jaxrag.serve.ask import Ask
from jaxrag.serve.questions import ReadyQuestion, Settings, prepare, resolve
from jaxrag.tasks.long.case import Frame

_HAYSTACK = "the haystack's own chunks"  # among which their neighbours are found


@dataclasses.dataclass(frozen=True)
class Reply:
    """What one method answered to one prompt."""

    text: str
    token_ids: list[int]
    finish_reason: str
    per_token: float
    notes: list[str]


@dataclasses.dataclass(frozen=True)
class LongAnswers:
    """What one method answered: the replies and their scores [Q] float64, in the plan's order."""

    replies: list[Reply]
    scores: HostArray


@dataclasses.dataclass(frozen=True)
class PromptBatch:
    """Prompts of one task and length that run together, by their places in the plan."""

    id: str
    places: tuple[int, ...]


def prompts(options: LongOptions, progress: bool = True) -> list[dict[str, Any]]:
    """The prompts as rows that `jaxrag train` reads: chunks, question, answers; and what they are.

    Raises as ``run`` does; the methods are not looked at, nor how long the model's context is.
    """
    _, frame = _opened(options)
    return [
        {
            "chunks": [frame.tokenizer.decode(chunk) for chunk in item.fitted.chunks],
            "question": item.fitted.case.question,
            "answers": [item.fitted.case.between.join(item.fitted.case.expected)],
            "task": item.task,
            "length": item.length,
            "depth": item.depth,
        }
        for item in plan(options, frame, sys.maxsize, progress)
    ]


def run(
    options: LongOptions,
    progress: bool = True,
    mesh: Mesh | None = None,
    out: str | None = None,
    first: bool = True,
) -> dict[str, Any]:
    """Measure; JSON-able, scores as fractions of 1, ``report`` prints it.

    Several processes that hold the model on one mesh run this together.

    Args:
      out: where the result is to go; finished prompts are kept beside it and not asked again.
      first: whether this process writes them.

    Raises RequestError, ModelError, TokenizerError, ConfigError or DocumentError for what cannot be
    asked, before the model computes anything.
    """
    model, frame = _opened(options, mesh)
    for method in options.resolved:
        method.check(model.config)
    items = plan(options, frame, model.config.max_positions, progress)
    model = dataclasses.replace(model, cache_tokens=_cache_tokens(options, frame, items))
    models = _by_method(options, model)
    settings = {
        (method.name, task): resolve(
            Ask(
                method=method,
                template=frame.template,
                max_new_tokens=options.answer_tokens(task),
            ),
            model=models[method.name],
        )
        for method in options.resolved
        for task in options.chosen
    }
    firsts = {(item.task, item.length): item for item in reversed(items)}
    for (_, task), one in settings.items():  # what a method refuses, it refuses before any work
        for length in options.lengths:
            _question(one, firsts[task, length])
    made_with = {"options": repr(options), "weights": model.fingerprint, "version": __version__}
    with kept(out, model.exchange, first) as path:
        answers = _answer(options, settings, items, AnswerFile(path, made_with), progress)
    return {
        "suite": options.suite,
        "flavour": options.flavour,
        "tasks": list(options.chosen),
        "lengths": list(options.lengths),
        "depths": list(options.depths) if options.suite == "needle" else None,
        "questions": options.questions,
        "seed": options.seed,
        "split": options.split,
        "chunk_tokens": options.chunk_tokens,
        "filler": list(options.filler),
        "lead": options.lead,
        "decode": dict(options.rules),
        "host_values": options.host_values,
        "answer_tokens": {task: options.answer_tokens(task) for task in options.chosen},
        "interval": f"{LEVEL:.0%} (jaxrag/measure/evals/statistics.py)",
        "model": described(options.model, model, frame.template),
        "methods": {method.name: repr(method) for method in options.resolved},
        **_tables(options, items, answers),
        "costs": _costs(options, model.config, items, answers),
        "notes": {
            name: sorted({note for reply in own.replies for note in reply.notes})
            for name, own in answers.items()
        },
        "items": [_item(i, item, answers) for i, item in enumerate(items)],
    }


def _opened(options: LongOptions, mesh: Mesh | None = None) -> tuple[Model, Frame]:
    """The model, and what is around the haystacks that it is given."""
    model = load_model(options.model, mesh=mesh, dtype=options.dtype)
    template = format_of(model, options.template)
    return model, Frame(model.text_tokenizer(), template, options.chunk_tokens, options.lead)


def _by_method(options: LongOptions, model: Model) -> dict[str, Model]:
    """The model that a method runs on: one with K and V where its rule has them, if asked."""
    if not options.host_values:
        return {method.name: model for method in options.resolved}
    placements = {method.name: method.decode.placement for method in options.resolved}
    models = {placement: model.placed(placement) for placement in placements.values()}
    return {name: models[placement] for name, placement in placements.items()}


def _cache_tokens(options: LongOptions, frame: Frame, items: Sequence[Item]) -> int:
    """Room for a batch of the longest prompts under the method that needs most."""
    need = 0
    _, around = frame.markers()
    for item in items:
        chunks = [len(chunk) + around for chunk in item.fitted.chunks]
        recomputed = max(method.room(chunks) for method in options.resolved)
        own = item.fitted.num_tokens + recomputed + options.answer_tokens(item.task)
        pages = (len(chunks) + 3) * PAGE  # every part begins a page
        need = max(need, own + pages)
    return need * options.batch_size


def _haystack(settings: Settings, chunks: Sequence[HostArray]) -> PassageCorpus:
    """Where neighbours are found: the haystack, as one document of a knowledge base."""
    passages = tuple(("", ids) for ids in chunks)
    return PassageCorpus(_HAYSTACK, passages, settings.model, settings.template)


def _question(settings: Settings, item: Item) -> ReadyQuestion:
    """The prompt of an item, with the beginning of its answer."""
    fitted = item.fitted
    settings = dataclasses.replace(settings, neighbours=_haystack(settings, fitted.chunks))
    question = prepare(settings, fitted.case.question, fitted.chunks, SamplingParams())
    final = np.concatenate((question.prompt.final, fitted.lead))
    prompt = dataclasses.replace(question.prompt, final=final)
    assert prompt.num_tokens == item.length
    return dataclasses.replace(question, prompt=prompt)


def _answer(
    options: LongOptions,
    settings: Mapping[tuple[str, str], Settings],
    items: Sequence[Item],
    file: AnswerFile,
    progress: bool,
) -> dict[str, LongAnswers]:
    """What every method answered; ``settings`` by method and task.

    Prompts of one task and length are asked in batches, by one method after the other.
    """
    names = [method.name for method in options.resolved]

    def ask(batch: PromptBatch) -> Line:
        task = items[batch.places[0]].task
        line: Line = {"id": batch.id}
        for name in names:
            asked = [_question(settings[name, task], items[i]) for i in batch.places]
            line[name] = [_reply(it) for it in answered(asked, options.batch_size)]
        return line

    found: dict[str, dict[int, Reply]] = {name: {} for name in names}
    unit = "prompt" if options.batch_size == 1 else "batch"
    batches = list(_batches(options, items))
    for batch, line in ask_all(ask, batches, file, progress=progress, unit=unit):
        for name, own in found.items():
            own |= zip(batch.places, (Reply(**it) for it in line[name]), strict=True)
    return {
        name: LongAnswers(
            replies := [own[i] for i in range(len(items))], _scores(options, items, replies)
        )
        for name, own in found.items()
    }


def _reply(result: Result) -> Line:
    return {
        "text": result.text,
        "token_ids": [*map(int, result.token_ids)],
        "finish_reason": result.finish_reason,
        "per_token": result.timings["per_token"],
        "notes": list(result.notes),
    }


def _scores(options: LongOptions, items: Sequence[Item], replies: Sequence[Reply]) -> HostArray:
    scores = [
        options.chosen[item.task].score(reply.text, item.fitted.case.expected)
        for item, reply in zip(items, replies, strict=True)
    ]
    return np.array(scores, np.float64)


def _batches(options: LongOptions, items: Sequence[Item]) -> Iterator[PromptBatch]:
    """Items of one task and length, at most a batch of them."""
    places = sorted(range(len(items)), key=lambda i: (items[i].length, items[i].task))
    for _, alike in itertools.groupby(places, lambda i: (items[i].length, items[i].task)):
        for some in itertools.batched(alike, options.batch_size):
            yield PromptBatch(str(some[0]), some)


def placed_bytes(options: LongOptions, rule: DecodeRule, config: ModelConfig, tokens: int) -> Bytes:
    """Bytes of a prompt by where they lie under a rule: of its formula, which a test measures."""
    return rule.bytes(config, tokens, None if options.host_values else ON_DEVICE)


def _costs(
    options: LongOptions,
    config: ModelConfig,
    items: Sequence[Item],
    answers: Mapping[str, LongAnswers],
) -> list[dict[str, Any]]:
    """Of every method and length: the median of a step's seconds, tokens read, bytes."""
    costs = []
    for method, length in itertools.product(options.resolved, options.lengths):
        replies = answers[method.name].replies
        seconds = [
            reply.per_token
            for item, reply in zip(items, replies, strict=True)
            if item.length == length and len(reply.token_ids) > 1
        ]
        rule = method.decode
        costs.append({
            "method": method.name,
            "length": length,
            "rows": options.batch_size,
            "seconds": statistics.median(seconds) if seconds else None,
            "read": sum(rule.tokens().values()) if rule.sparse else None,
            "bytes": dataclasses.asdict(placed_bytes(options, rule, config, length)),
        })  # fmt: skip
    return costs


def _tables(
    options: LongOptions, items: Sequence[Item], answers: Mapping[str, LongAnswers]
) -> dict[str, Any]:
    """Scores by task and length, by depth, and each method against the first."""
    task = np.array([item.task for item in items])
    length = np.array([item.length for item in items])
    depth = np.array([np.nan if item.depth is None else item.depth for item in items])
    first = options.resolved[0].name
    cells: list[dict[str, Any]] = []
    grid: list[dict[str, Any]] = []
    differences: list[dict[str, Any]] = []
    agreement: list[dict[str, Any]] = []
    for name, kind in itertools.product(list(answers)[1:], options.chosen):
        rows = task == kind
        same = np.array([
            _same(*pair)
            for pair in zip(answers[name].replies, answers[first].replies, strict=True)
        ])  # fmt: skip
        for size in (*options.lengths, None):  # None: all of them
            of_length = rows if size is None else rows & (length == size)
            named = {"method": name, "task": kind, "length": size, "with": first}
            agreement.append({**named, "share": _share(same[of_length])})
    for name, kind, size in itertools.product(answers, options.chosen, options.lengths):
        rows = (task == kind) & (length == size)
        scores = answers[name].scores
        named = {"method": name, "task": kind, "length": size}
        cells.append({**named, "score": _share(scores[rows])})
        if name != first:
            less = difference(scores[rows], answers[first].scores[rows], np.arange(rows.sum()))
            differences.append({**named, "minus": first, "difference": plain(less)})
        for place in options.depths if options.suite == "needle" else ():
            of_length = scores[rows & (depth == place)]
            grid.append({**named, "depth": place, "score": _share(of_length)})
    return {
        "cells": cells,
        "grid": grid,
        "differences": differences,
        "agreement": agreement,
    }


def _same(one: Reply, other: Reply) -> bool:
    """Whether two answers are the same tokens and end for the same reason."""
    return (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)


def _share(scores: HostArray) -> dict[str, float] | None:
    return plain(share(scores, np.arange(len(scores))))


def _item(number: int, item: Item, answers: Mapping[str, LongAnswers]) -> dict[str, Any]:
    return {
        "task": item.task,
        "length": item.length,
        "depth": item.depth,
        "needles_at": list(item.fitted.at),
        "chunks": len(item.fitted.chunks),
        "question": item.fitted.case.question,
        "expected": list(item.fitted.case.expected),
        "answers": {name: own.replies[number].text for name, own in answers.items()},
        "scores": {name: float(own.scores[number]) for name, own in answers.items()},
    }

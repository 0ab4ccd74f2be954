"""Long prompts put to a model, by one method after the other.

Every method answers the same prompts, as ``generate`` does with ``documents=``: one document that
holds the whole haystack, or the chunks it is cut into.
"""

import dataclasses
import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxrag.cache import PAGE
from jaxrag.engine.request import DECODE_BLOCK
from jaxrag.engine.sampling import SamplingParams
from jaxrag.evals.long.plan import Item, Options, plan
from jaxrag.evals.statistics import LEVEL, Estimate, difference, share
from jaxrag.models.model import Model, load_model
from jaxrag.serve.answers import Result, serve
from jaxrag.serve.questions import ReadyQuestion, Settings, prepare, resolve
from jaxrag.tasks.long.case import Frame
from jaxrag.text.prompts import template_named
from jaxrag.types import HostArray

FIFTHS = 5  # of the haystack, for the table by depth


@dataclasses.dataclass(frozen=True)
class Answers:
    """What one method answered: the results and their scores [Q] float64, in the plan's order."""

    results: list[Result]
    scores: HostArray


def prompts(options: Options, progress: bool = True) -> list[dict[str, Any]]:
    """The prompts as rows that `jaxrag train` reads: chunks, question, answers; and what they are.

    Raises as ``run`` does; the methods are not looked at, nor how long the model's context is.
    """
    model, frame = _opened(options)
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


def run(options: Options, progress: bool = True) -> dict[str, Any]:
    """Measure; JSON-able, scores as fractions of 1, ``report`` prints it and ``heatmap`` draws it.

    Raises RequestError, ModelError, TokenizerError, ConfigError or DocumentError for what cannot be
    asked, before the model computes anything.
    """
    model, frame = _opened(options)
    for method in options.resolved:
        method.check(model.config)
    items = plan(options, frame, model.config.max_positions, progress)
    model = dataclasses.replace(model, cache_tokens=_cache_tokens(options, frame, items))
    models = _by_method(options, model)
    settings = {
        (method.name, task): resolve(
            kb=None,
            model=models[method.name],
            method=method,
            template=frame.template,
            k=1,
            max_new_tokens=options.answer_tokens(task),
            stop=(),
        )
        for method in options.resolved
        for task in options.chosen
    }
    firsts = {(item.task, item.length): item for item in reversed(items)}
    for (_, task), one in settings.items():  # what a method refuses, it refuses before any work
        for length in options.lengths:
            _question(one, firsts[task, length])
    answers: dict[str, Answers] = {}
    total = len(items) * len(options.resolved)
    silent = None if progress else True
    with tqdm(total=total, unit="question", desc="eval", disable=silent) as bar:
        for method in options.resolved:
            bar.set_postfix_str(method.name)
            own = {task: settings[method.name, task] for task in options.chosen}
            answers[method.name] = _answer(options, own, items, bar)
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
        "interval": f"{LEVEL:.0%} (jaxrag/evals/statistics.py)",
        "model": {
            "path": options.model,
            "weights": model.digest,
            "dtype": model.config.dtype,
            "template": frame.template.to_dict(),
        },
        "methods": {method.name: repr(method) for method in options.resolved},
        **_tables(options, items, answers),
        "notes": {
            name: sorted({note for result in own.results for note in result.notes})
            for name, own in answers.items()
        },
        "items": [_item(i, item, answers) for i, item in enumerate(items)],
    }


def _opened(options: Options) -> tuple[Model, Frame]:
    """The model, and what stands around the haystacks that it is given."""
    model = load_model(options.model, dtype=options.dtype)
    tokenizer = model.text_tokenizer()
    if options.template is None:
        template = model.prompt_format()
    else:
        template = template_named(options.template)
        template.check_markers(tokenizer)
    return model, Frame(tokenizer, template, options.chunk_tokens, options.lead)


def _by_method(options: Options, model: Model) -> dict[str, Model]:
    """The model that a method runs on: one that keeps values in host memory for topn, if asked."""
    hosted: dict[int, Model] = {}
    found: dict[str, Model] = {}
    for method in options.resolved:
        found[method.name] = model
        layers = method.decode.value_layers
        if options.host_values and layers is not None:
            if layers not in hosted:
                hosted[layers] = dataclasses.replace(model, value_layers=layers)
            found[method.name] = hosted[layers]
    return found


def _cache_tokens(options: Options, frame: Frame, items: Sequence[Item]) -> int:
    """Room for a batch of the longest prompts under the method that needs most."""
    need = 0
    _, around = frame.markers()
    for item in items:
        chunks = [len(chunk) + around for chunk in item.fitted.chunks]
        recomputed = max(method.room(chunks) for method in options.resolved)
        own = item.fitted.num_tokens + recomputed + options.answer_tokens(item.task) + DECODE_BLOCK
        pages = (len(chunks) + 3) * PAGE  # every part begins a page
        need = max(need, own + pages)
    return need * options.batch_size


def _question(settings: Settings, item: Item) -> ReadyQuestion:
    """The prompt of an item, with the beginning of its answer."""
    fitted = item.fitted
    question = prepare(settings, fitted.case.question, fitted.chunks, SamplingParams())
    request = question.request
    final = np.concatenate((request.prompt.final, fitted.lead))
    prompt = dataclasses.replace(request.prompt, final=final)
    assert prompt.num_tokens == item.length
    return dataclasses.replace(question, request=dataclasses.replace(request, prompt=prompt))


def _answer(
    options: Options, settings: Mapping[str, Settings], items: Sequence[Item], bar: "tqdm[Any]"
) -> Answers:
    """One method's answers; ``settings`` by task."""
    found: dict[int, Result] = {}
    for task, one in settings.items():
        places = [i for i, item in enumerate(items) if item.task == task]
        questions = [_question(one, items[i]) for i in places]
        for batch in serve(one, questions, options.batch_size):
            found |= {places[i]: result for i, result in batch.items()}
            bar.update(len(batch))
    results = [found[i] for i in range(len(items))]
    scores = [
        options.chosen[item.task].score(result.text, item.fitted.case.expected)
        for item, result in zip(items, results, strict=True)
    ]
    return Answers(results, np.array(scores, np.float64))


def _tables(
    options: Options, items: Sequence[Item], answers: Mapping[str, Answers]
) -> dict[str, Any]:
    """Scores by task and length, by depth, and each method against the first."""
    task = np.array([item.task for item in items])
    length = np.array([item.length for item in items])
    depth = np.array([np.nan if item.depth is None else item.depth for item in items])
    fifth = np.minimum(np.nan_to_num(depth * FIFTHS), FIFTHS - 1).astype(int)
    first = options.resolved[0].name
    cells: list[dict[str, Any]] = []
    grid: list[dict[str, Any]] = []
    by_depth: list[dict[str, Any]] = []
    differences: list[dict[str, Any]] = []
    agreement: list[dict[str, Any]] = []
    for name, one in itertools.product(list(answers)[1:], options.chosen):
        rows = task == one
        same = np.array([
            _same(*pair)
            for pair in zip(answers[name].results, answers[first].results, strict=True)
        ])  # fmt: skip
        for size in (*options.lengths, None):  # None: all of them
            here = rows if size is None else rows & (length == size)
            named = {"method": name, "task": one, "length": size, "with": first}
            agreement.append({**named, "share": _share(same[here])})
    for name, one, size in itertools.product(answers, options.chosen, options.lengths):
        rows = (task == one) & (length == size)
        scores = answers[name].scores
        named = {"method": name, "task": one, "length": size}
        cells.append({**named, "score": _share(scores[rows])})
        if name != first:
            less = difference(scores[rows], answers[first].scores[rows], np.arange(rows.sum()))
            differences.append({**named, "minus": first, "difference": _plain(less)})
        if np.isnan(depth[rows]).any():
            continue
        if options.suite == "needle":
            for place in options.depths:
                here = scores[rows & (depth == place)]
                grid.append({**named, "depth": place, "score": _share(here)})
        else:
            for n in range(FIFTHS):
                by_depth.append({**named, "fifth": n, "score": _share(scores[rows & (fifth == n)])})
    return {
        "cells": cells,
        "grid": grid,
        "by_depth": by_depth,
        "differences": differences,
        "agreement": agreement,
    }


def _same(one: Result, other: Result) -> bool:
    """Whether two answers are the same tokens and end for the same reason."""
    return (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)


def _share(scores: HostArray) -> dict[str, float] | None:
    return _plain(share(scores, np.arange(len(scores))))


def _plain(estimate: Estimate | None) -> dict[str, float] | None:
    return None if estimate is None else estimate._asdict()


def _item(number: int, item: Item, answers: Mapping[str, Answers]) -> dict[str, Any]:
    return {
        "task": item.task,
        "length": item.length,
        "depth": item.depth,
        "needles_at": list(item.fitted.at),
        "chunks": len(item.fitted.chunks),
        "question": item.fitted.case.question,
        "expected": list(item.fitted.case.expected),
        "answers": {name: own.results[number].text for name, own in answers.items()},
        "scores": {name: float(own.scores[number]) for name, own in answers.items()},
    }

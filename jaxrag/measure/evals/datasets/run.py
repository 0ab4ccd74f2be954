"""A data set put to a model by several methods, question by question, so that a run can go on."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from jaxrag.base.errors import ConfigError, ContextExceeded, RequestError
from jaxrag.library.documents import Shard
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.measure.evals.asked import Line, ask_all, kept, lines_of
from jaxrag.measure.evals.datasets.asking import InProcess, TimedAnswer, settings_of
from jaxrag.measure.evals.datasets.corpus import note_in, with_neighbours
from jaxrag.measure.evals.datasets.options import DatasetOptions
from jaxrag.measure.evals.datasets.records import HUB, records_of
from jaxrag.measure.evals.datasets.result import result_of
from jaxrag.measure.evals.datasets.spec import DatasetItem, DatasetReading, DatasetSpec
from jaxrag.measure.evals.datasets.table import dataset_named
from jaxrag.measure.evals.metrics import METRICS
from jaxrag.models.model import Model, load_model
from jaxrag.models.text.prompts import PromptTemplate, template_named
from jaxrag.reuse.methods import method_named
from jaxrag.serve.answer_files import AnswerFile
from jaxrag.serve.ask import Ask


def template_of(options: DatasetOptions) -> PromptTemplate:
    """The prompt of a data set, as one message of a chat where that is asked for."""
    template = dataset_named(options.name).template
    if options.template is not None:
        template = template_named(options.template)
    return dataclasses.replace(template, chat=True) if options.chat else template


def items_of(options: DatasetOptions) -> list[DatasetItem]:
    """The questions of the first ``number`` samples of each file, of all shards.

    How many does not change what they are: what a prompt takes of other records, it takes of all.

    Raises RequestError, with file, line and field, for a record that is none.
    """
    spec = dataset_named(options.name)
    titled = options.template is not None
    reading = DatasetReading(
        options.noise, options.documents, options.earlier, options.seed, titled
    )
    items: list[DatasetItem] = []
    for source in options.data:
        records, samples = records_of(source, spec.fields), set[str]()
        prefix = "" if len(options.data) == 1 else f"{Path(source).name}:"
        for item in spec.items(records, reading):
            samples.add(item.sample)
            if options.number is not None and len(samples) > options.number:
                break
            items.append(
                dataclasses.replace(item, id=prefix + item.id, sample=prefix + item.sample)
            )
    seen: set[str] = set()
    for item in items:
        if item.id in seen:
            raise RequestError(f"{options.data[0]}: two questions have the id {item.id!r}")
        seen.add(item.id)
    return items


def run(
    options: DatasetOptions,
    progress: bool = True,
    load: Callable[[str], Model] = load_model,
    first: bool = True,
) -> dict[str, Any]:
    """Measure; JSON-able, scores as fractions of 1; ``report.tables`` shows it.

    Finished questions are kept as lines beside ``options.out``, and not asked again. Raises
    RequestError or ConfigError for what cannot be asked, before anything is.

    Args:
      load: of the model's directory.
      first: whether this process writes, of several that hold the model and run this together.
    """
    spec = dataset_named(options.name)
    for metric in options.metrics:
        if metric not in METRICS:
            raise RequestError(f"--metric {metric}: expected one of {', '.join(METRICS)}")
    shard = Shard.parse(options.shard)
    for method in options.methods:
        method_named(method)
    items = items_of(options)
    tokens = options.max_new_tokens or spec.max_new_tokens
    with (
        _answerer(options, tokens, load) as answerer,
        kept(options.out, answerer.exchange, first) as path,
    ):
        settings = _settings(options, answerer)
        before = [_lines(it, settings) for it in options.finished] if first else None
        there = [line for lines in answerer.exchange(before)[0] for line in lines]
        ask = functools.partial(answers_to, answerer)
        lines = ask_all(ask, items, AnswerFile(path, settings), there, shard, progress)
        metrics = (options.metrics or spec.metrics) if options.scores else ()
        found = result_of(answerer.methods, metrics, spec.score, lines) | _neighbours_of(answerer)
        return {
            "dataset": options.name,
            **spec.described(),
            "asked": heading(spec, found),
            **found,
            "max_new_tokens": tokens,
            "answer_tokens": options.answer_tokens,
            "files": {source: _digest(source) for source in options.data},
            "model": answerer.about(),
        }


def heading(spec: DatasetSpec, result: Mapping[str, Any]) -> str:
    """What was asked, and what was left out."""
    skipped = sum(result["skipped"].values())
    return (
        f"{spec.title} ({spec.checked}): {result['questions']} questions, {skipped} skipped, "
        f"{result['questions_cut']} of them cut: {result['left_out']} of {result['documents']} "
        f"documents left out{note_in(result)}"
    )


def _neighbours_of(answerer: InProcess) -> dict[str, Any]:
    neighbours = answerer.neighbours()
    return {} if neighbours is None else {"neighbours": neighbours}


@contextlib.contextmanager
def _answerer(
    options: DatasetOptions, tokens: int, load: Callable[[str], Model]
) -> Iterator[InProcess]:
    ask = Ask(template=template_of(options), max_new_tokens=tokens)
    if options.kb is not None:
        with KnowledgeBase.open(options.kb) as remembered:
            path = options.model or remembered.model_path
        if path is None:
            raise RequestError(f"{options.kb} does not remember a model; pass --model DIR")
        with KnowledgeBase.open(options.kb, model=load(path)) as kb:
            yield _in_process(options, ask, kb=kb)
    else:
        assert options.model is not None
        yield _in_process(options, ask, model=load(options.model))


def _in_process(
    options: DatasetOptions,
    ask: Ask,
    *,
    model: Model | None = None,
    kb: KnowledgeBase | None = None,
) -> InProcess:
    named = dict(zip(options.methods, options.methods, strict=True))
    settings = settings_of(
        named, ask, model=model, kb=kb, ratios=options.ratios, controls=options.controls
    )
    numbering = dataset_named(options.name).numbering
    return InProcess(with_neighbours(options, settings, items_of, numbering), options.answer_tokens)


def _settings(options: DatasetOptions, answerer: InProcess) -> dict[str, Any]:
    """What answers were made with; the shard and the metrics do not matter to them."""
    return {
        "dataset": options.name,
        "files": [_digest(source) for source in options.data],
        "methods": list(answerer.methods),
        "answer_tokens": options.answer_tokens,
        "noise": list(options.noise),
        "documents": options.documents,
        "earlier": options.earlier,
        "seed": options.seed,
        "max_new_tokens": options.max_new_tokens,
        "model": answerer.about(),
        **_neighbours_of(answerer),
    }


def _digest(source: str) -> str:
    """Of a file's bytes; a name of the hub is itself."""
    return source if source.startswith(HUB) else xxhash.xxh3_64_hexdigest(Path(source).read_bytes())


def _lines(path: str, settings: Mapping[str, Any]) -> list[Line]:
    """Of questions that were finished elsewhere, under the same settings: ConfigError otherwise."""
    if not Path(path).is_file():
        raise ConfigError(f"--finished {path}: no such file; name a file of finished questions")
    with AnswerFile(path, settings):
        return lines_of(Path(path))


def answers_to(answerer: InProcess, item: DatasetItem) -> Line:
    """All methods' answers to one prompt; documents that do not fit are left out from its end."""
    documents = item.documents
    while True:
        shown = dataclasses.replace(item, documents=documents)
        try:
            answers = {name: answerer.answer(name, shown) for name in answerer.methods}
        except ContextExceeded:
            documents = documents[:-1]
            if documents:
                continue
            return {"id": item.id, "skipped": "no document fits into the model's context"}
        near = answerer.beside_full(shown, answers)
        return {
            "id": item.id,
            "documents": len(item.documents),
            "left_out": len(item.documents) - len(documents),
            "methods": {name: _plain(one) | near.get(name, {}) for name, one in answers.items()},
        }


def _plain(answer: TimedAnswer) -> dict[str, Any]:
    return dataclasses.asdict(answer) | {"notes": list(answer.notes)}

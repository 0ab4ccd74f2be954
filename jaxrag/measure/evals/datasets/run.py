"""A data set put to a model by several methods, question by question, so that a run can go on."""

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from jaxrag.base.errors import ConfigError, ContextExceeded, RequestError
from jaxrag.library.documents import Shard
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.measure.evals.datasets.asking import Answerer, InProcess, TimedAnswer
from jaxrag.measure.evals.datasets.http import OverHttp, ServerGone
from jaxrag.measure.evals.datasets.options import DatasetOptions
from jaxrag.measure.evals.datasets.records import HUB, records_of
from jaxrag.measure.evals.datasets.result import result_of
from jaxrag.measure.evals.datasets.spec import DatasetItem, DatasetReading, DatasetSpec
from jaxrag.measure.evals.datasets.table import dataset_named
from jaxrag.measure.evals.metrics import METRICS
from jaxrag.models.model import Model, load_model
from jaxrag.models.text.progress import progress_bar
from jaxrag.models.text.prompts import PromptTemplate
from jaxrag.reuse.methods import method_named
from jaxrag.serve.answer_files import AnswerFile, written_once

ITEMS = ".items.jsonl"  # behind the name of the result's file

Line = dict[str, Any]


def template_of(options: DatasetOptions) -> PromptTemplate:
    """The prompt of a data set, as one message of a chat where that is asked for."""
    template = dataset_named(options.name).template
    return dataclasses.replace(template, chat=True) if options.chat else template


def items_of(options: DatasetOptions) -> list[DatasetItem]:
    """The questions of the files, of all shards.

    Raises RequestError, with file, line and field, for a record that is none.
    """
    spec = dataset_named(options.name)
    reading = DatasetReading(options.noise, options.documents, options.seed)
    found: list[DatasetItem] = []
    for source in options.data:
        records = records_of(source, spec.fields)[: options.number]
        prefix = "" if len(options.data) == 1 else f"{Path(source).name}:"
        for item in spec.items(records, reading):
            found.append(
                dataclasses.replace(item, id=prefix + item.id, sample=prefix + item.sample)
            )
    seen: set[str] = set()
    for item in found:
        if item.id in seen:
            raise RequestError(f"{options.data[0]}: two questions have the id {item.id!r}")
        seen.add(item.id)
    return found


def run(
    options: DatasetOptions,
    progress: bool = True,
    load: Callable[[str], Model] = load_model,
    first: bool = True,
) -> dict[str, Any]:
    """Measure; JSON-able, scores as fractions of 1; ``report.tables`` shows it.

    Finished questions are kept as lines beside ``options.out``, and not asked again. Raises
    RequestError or ConfigError for what cannot be asked, before anything is; and where a server
    goes, saying how many questions are kept.

    Args:
      load: of the model's directory.
      first: whether this process writes, of several that hold the model and run this together.
    """
    spec = dataset_named(options.name)
    for metric in options.metrics:
        if metric not in METRICS:
            raise RequestError(f"--metric {metric}: expected one of {', '.join(METRICS)}")
    shard = Shard.parse(options.shard)
    for method in options.methods if options.server is None else ():
        method_named(method)
    items = items_of(options)
    with _answerer(options, spec, load) as answerer, _kept(options, answerer, first) as kept:
        settings = _settings(options, answerer)
        before = [_lines(path, settings) for path in options.finished] if first else None
        found = {line["id"]: line for lines in answerer.exchange(before)[0] for line in lines}
        with AnswerFile(kept, settings) as answers:
            own = [it for at, it in enumerate(items) if shard.holds_line(at)]
            waiting = [it for it in own if it.id not in answers.done and it.id not in found]
            kept_before = len(own) - len(waiting)
            bar = progress_bar(len(own), "eval", "question", shown=progress, done=kept_before)
            with bar:
                for number, item in enumerate(waiting, kept_before):
                    try:
                        answers.write([_asked(answerer, options.methods, item)])
                    except ServerGone as error:
                        raise RequestError(
                            f"{error}; {number} questions are kept in {kept}: start it and run "
                            "this again"
                        ) from None
                    bar.update()
        found |= {line["id"]: line for line in _read(kept)}
        lines = [(item, found[item.id]) for item in items if item.id in found]
        return result_of(options, spec, lines) | {
            "files": {source: _digest(source) for source in options.data},
            "model": answerer.about(),
        }


@contextlib.contextmanager
def _answerer(
    options: DatasetOptions, spec: DatasetSpec, load: Callable[[str], Model]
) -> Iterator[Answerer]:
    tokens = options.max_new_tokens or spec.max_new_tokens
    template = template_of(options)
    if options.server is not None:
        yield OverHttp(options.server, options.methods, template, tokens)
    elif options.kb is not None:
        with KnowledgeBase.open(options.kb) as remembered:
            path = options.model or remembered.model_path
        if path is None:
            raise RequestError(f"{options.kb} does not remember a model; pass --model DIR")
        with KnowledgeBase.open(options.kb, model=load(path)) as kb:
            yield InProcess(options.methods, template, tokens, kb=kb)
    else:
        assert options.model is not None
        yield InProcess(options.methods, template, tokens, model=load(options.model))


@contextlib.contextmanager
def _kept(options: DatasetOptions, answerer: Answerer, first: bool) -> Iterator[Path]:
    """Where finished questions are kept: beside the result, or for this run alone."""
    if options.out is not None:
        with written_once(options.out + ITEMS, answerer.exchange, first) as path:
            yield path
        return
    with tempfile.TemporaryDirectory(prefix="jaxrag-") as folder:
        yield Path(folder) / "items.jsonl"


def _settings(options: DatasetOptions, answerer: Answerer) -> dict[str, Any]:
    """What answers were made with; the shard and the metrics do not matter to them."""
    return {
        "dataset": options.name,
        "files": [_digest(source) for source in options.data],
        "methods": list(options.methods),
        "noise": list(options.noise),
        "documents": options.documents,
        "seed": options.seed,
        "max_new_tokens": options.max_new_tokens,
        "model": answerer.about(),
    }


def _digest(source: str) -> str:
    """Of a file's bytes; a name of the hub is itself."""
    return source if source.startswith(HUB) else xxhash.xxh3_64_hexdigest(Path(source).read_bytes())


def _lines(path: str, settings: Mapping[str, Any]) -> list[Line]:
    """Of questions that were finished elsewhere, under the same settings: ConfigError otherwise."""
    if not Path(path).is_file():
        raise ConfigError(f"--finished {path}: no such file; name a file of finished questions")
    with AnswerFile(path, settings):
        return _read(Path(path))


def _read(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _asked(answerer: Answerer, methods: Sequence[str], item: DatasetItem) -> Line:
    """All methods' answers to one prompt; documents that do not fit are left out from its end."""
    documents = item.documents
    while True:
        shown = dataclasses.replace(item, documents=documents)
        try:
            answers = {name: answerer.answer(name, shown) for name in methods}
        except ContextExceeded:
            documents = documents[:-1]
            if documents:
                continue
            return {"id": item.id, "skipped": "no document fits into the model's context"}
        return {
            "id": item.id,
            "documents": len(item.documents),
            "left_out": len(item.documents) - len(documents),
            "methods": {name: _plain(answer) for name, answer in answers.items()},
        }


def _plain(answer: TimedAnswer) -> dict[str, Any]:
    return dataclasses.asdict(answer) | {"notes": list(answer.notes)}

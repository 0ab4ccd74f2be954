"""One's own questions put to one's own knowledge base, method by method: `jaxrag eval own`.

Every method gets the same chunks for a question and answers it alone, greedily, as one of a data
set does (``datasets.asking``): its time is that of chunks which lie in the store. What is compared
with full attention is compared question by question.
"""

import dataclasses
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrag.base.errors import RequestError
from jaxrag.base.installed import __version__
from jaxrag.engine.sampling_params import SamplingParams
from jaxrag.library.documents import Shard
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.measure.evals.asked import Line, ask_all
from jaxrag.measure.evals.datasets.asking import InProcess, settings_of
from jaxrag.measure.evals.datasets.nearness import FULL
from jaxrag.measure.evals.datasets.result import ALL, result_of
from jaxrag.measure.evals.datasets.run import answers_to
from jaxrag.measure.evals.datasets.spec import DatasetItem
from jaxrag.measure.evals.metrics import exact_match, holds, token_f1
from jaxrag.measure.evals.options import OwnOptions
from jaxrag.measure.evals.statistics import plain, share
from jaxrag.measure.table import percent
from jaxrag.reuse.methods import Method, method_named
from jaxrag.serve.answer_files import AnswerFile
from jaxrag.serve.ask import Ask
from jaxrag.serve.compatibility import suiting
from jaxrag.serve.question_files import BadQuestion, FileQuestion, QuestionFile, is_texts
from jaxrag.serve.questions import Settings, prepare

SCORES: dict[str, Callable[[str, Sequence[str]], float]] = {
    "exact_match": exact_match,
    "f1": token_f1,
    "holds": holds,
}
_CUT = 0.2  # share of answers that the bound may end before it is reported


@dataclasses.dataclass(frozen=True)
class Probe:
    """A question with what is right about it.

    Attributes:
      sources: ids of the documents that the answer is in; empty where they are not named.
    """

    question: FileQuestion
    answers: tuple[str, ...]
    sources: tuple[str, ...]


def probes_of(questions: QuestionFile, kb: KnowledgeBase) -> tuple[Probe, ...]:
    """The questions of a file with their right answers.

    Raises RequestError, with the line: a line that is none, without a right answer, with texts to
    answer from, or with a source that the knowledge base does not hold.
    """
    known = {document.id for document in kb.documents()}
    return tuple(_probe(questions, it, known) for it in questions.entries(Shard()))


def _probe(file: QuestionFile, question: FileQuestion | BadQuestion, known: set[str]) -> Probe:
    where = f"{file.path}:{question.line}"
    if isinstance(question, BadQuestion):
        raise RequestError(f"{where}: {question.reason}")
    check_no_texts(file, question)
    answers = _listed(question, "answers", "answer")
    if not is_texts(answers) or not any(map(str.strip, answers)):
        raise RequestError(
            f'{where}: "answers" is {answers!r:.60}; expected one right answer or a list of them, '
            'such as "answers": ["larch"]'
        )
    sources = _listed(question, "sources", "source")
    if sources is not None and not is_texts(sources):
        raise RequestError(
            f'{where}: "sources" is {sources!r:.60}; expected a list of ids of documents'
        )
    for source in sources or ():
        if source not in known:
            raise RequestError(
                f"{where}: source {source!r} is no document of the knowledge base; its ids are "
                "what `jaxrag kb list` shows"
            )
    right = tuple(answer for answer in answers if answer.strip())
    return Probe(question, right, tuple(dict.fromkeys(sources or ())))


def check_no_texts(file: QuestionFile, question: FileQuestion) -> None:
    """Refuse a question that brings texts of its own where chunks are retrieved: RequestError."""
    if question.documents is not None:
        raise RequestError(
            f'{file.path}:{question.line}: "documents" are texts to answer from, and here chunks '
            'are retrieved; leave them out, and name documents that hold the answer in "sources"'
        )


def _listed(question: FileQuestion, *names: str) -> Any:
    """What the line holds under the first of these names that it has; a text as a list."""
    value = next((question.record[name] for name in names if name in question.record), None)
    return [value] if isinstance(value, str) else value


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What was asked, and what every method made of it.

    Attributes:
      items: the questions with their finished lines.
      methods: by name, each with its encoder and its recompute ratio; full attention is the first.
      about: template, k and length of answers.
      notes: about the whole.
    """

    items: tuple[tuple[Probe, Line], ...]
    methods: Mapping[str, tuple[str | None, float | None]]
    about: Mapping[str, Any]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """As of ``eval dataset``; and what was retrieved."""
        lines = [(_item(probe), line) for probe, line in self.items]
        found = result_of(list(self.methods), list(SCORES), _score, lines)
        for row in found["methods"]:
            row["encoder"], row["ratio"] = self.methods[row["method"]]
        first = [(probe, line["methods"][FULL]) for probe, line in self.items]
        recall = np.array([_recall(probe, it["retrieved"]) for probe, it in first if probe.sources])
        estimate = plain(share(recall, np.arange(len(recall))))
        said = "; no question names its sources"
        if estimate is not None:
            k, n = self.about["k"], len(recall)
            said = f"; recall@{k} of sources, in %: {percent(estimate)}, n={n}"
        asked = f"{found['questions']} questions, k={self.about['k']}, template "
        result = {
            "asked": asked + self.about["template"] + said,
            **found,
            **self.about,
            "recall": estimate,
            "with_sources": len(recall),
            "without_chunks": sum(not it["retrieved"] for _, it in first),
        }
        return result | {"notes": [*_warnings(result), *self.notes]}

    def records(self) -> list[dict[str, Any]]:
        """One for each question and method, JSON-able."""
        return [
            {
                "id": probe.question.id,
                "method": name,
                "question": probe.question.text,
                "answers": list(probe.answers),
                **{metric: _score(metric, own["text"], _item(probe)) for metric in SCORES},
                "same_answer": own["token_ids"] == line["methods"][FULL]["token_ids"],
                "sources": list(probe.sources),
                "recall": _recall(probe, own["retrieved"]) if probe.sources else None,
                **own,
                "same_tokens": float(np.mean(own["same"])),
            }
            for name in self.methods
            for probe, line in self.items
            for own in [line["methods"][name]]
        ]


def evaluate(
    kb: KnowledgeBase,
    questions: QuestionFile,
    options: OwnOptions,
    *,
    kept: Path | None = None,
    progress: bool = False,
) -> Evaluation:
    """Ask a knowledge base the questions of a file by several methods.

    Args:
      questions: with their right answers (``probes_of``).
      options: the methods, and how much is retrieved.
      kept: a file of finished questions, which are not asked again; None: there is none.
      progress: show how far it is, on stderr.

    Raises RequestError for a bad line, an unknown method or a question that cannot be served;
    before anything is computed. ConfigError where ``kept`` is of other questions, options, weights
    or documents.
    """
    if kb.model is None:
        raise RequestError(f"{kb.path} was opened without its model; open it with model=")
    probes = probes_of(questions, kb)
    asked = (FULL, *(options.methods or suiting(kb, kb.model)))
    names = {method_named(way).name: way for way in asked}
    ask = Ask(
        template=options.template,
        k=options.k,
        where=options.where,
        max_new_tokens=options.max_new_tokens,
    )
    settings = settings_of(names, ask, kb=kb, ratios=options.ratios, controls=options.controls)
    for probe, tried in itertools.product(probes, settings.values()):
        _check(questions, tried, probe)
    answerer = InProcess(settings, options.max_new_tokens)
    made_with = {
        "version": __version__,
        "questions": questions.digest,
        "options": repr(options),
        "weights": kb.model.fingerprint,
        "knowledge_base": kb.id,
        "changes": kb.changes,
    }
    with tempfile.TemporaryDirectory(prefix="jaxrag-") as folder:
        answers = AnswerFile(kept or Path(folder) / "items.jsonl", made_with)
        ask_one = functools.partial(answers_to, answerer)
        lines = ask_all(ask_one, list(map(_item, probes)), answers, progress=progress)
    first = next(iter(settings.values()))
    notes = dict.fromkeys(note for way in settings.values() for note in _notes(way, questions))
    return Evaluation(
        items=tuple(zip(probes, (dict(line) for _, line in lines), strict=True)),
        methods={name: _asked(way.method) for name, way in settings.items()},
        about={
            "template": first.template.name,
            "k": first.ask.k,
            "max_new_tokens": first.ask.max_new_tokens,
            "answer_tokens": first.ask.max_new_tokens,
        },
        notes=tuple(notes),
    )


def _item(probe: Probe) -> DatasetItem:
    name = str(probe.question.id)
    return DatasetItem(name, name, probe.question.text, (), (probe.answers,))


def _score(metric: str, answer: str, item: DatasetItem) -> float:
    return float(SCORES[metric](answer, item.answers[0]))


def _asked(method: Method) -> tuple[str | None, float | None]:
    return method.encoder, method.recompute_ratio if method.recomputes else None


def _check(file: QuestionFile, settings: Settings, probe: Probe) -> None:
    """RequestError, with the line, for a question that cannot be served."""
    try:
        prepare(settings, probe.question.text, None, SamplingParams())
    except RequestError as error:
        raise RequestError(f"{file.path}:{probe.question.line}: {error}") from None


def _notes(settings: Settings, questions: QuestionFile) -> list[str]:
    """What is to be known of a method's numbers."""
    assert settings.kb is not None
    method = settings.method
    notes = [note if method.name in note else f"{method.name}: {note}" for note in settings.notes]
    gate = settings.kb.gates.get(method.name)
    if gate is not None and gate["probes"] == questions.digest and method.recomputes:
        notes.append(
            f"{method.name}: its ratio was chosen on these very questions, so that its numbers are "
            "better than others would be; keep some questions from the gate"
        )
    return notes


def _warnings(result: Mapping[str, Any]) -> Iterator[str]:
    """What would make a reader of the tables take them for more than they are."""
    rows = result["methods"]
    if result["without_chunks"]:
        yield f"{result['without_chunks']} questions found no chunk, and were asked without any"
    least = _CUT * result["questions"]
    cut = [f"{row['cut_off']} of {row['method']}" for row in rows if row["cut_off"] > least]
    if cut:
        yield (
            f"answers were cut off at {result['max_new_tokens']} tokens ({', '.join(cut)}): the "
            "right one may have come later (--max-new-tokens), and exact match wants nothing else"
        )
    lacked = [row["method"] for row in rows if row["encoded"]]
    if lacked:
        yield (
            f"{', '.join(lacked)}: the knowledge base lacked chunks as they are wanted there; they "
            "were encoded when they were first asked for, and that is in no time"
        )
    if not rows[0]["scores"]["holds"][ALL]["high"] > 0.5:
        yield (
            "full attention itself seldom holds the right answer: that others agree with it says "
            "little; look at retrieval, the template and the model first"
        )


def _recall(probe: Probe, retrieved: Sequence[str]) -> float:
    """Share of the probe's sources that are among what was retrieved."""
    return len(set(retrieved).intersection(probe.sources)) / len(probe.sources)

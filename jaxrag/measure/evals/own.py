"""One's own questions put to one's own knowledge base, method by method: `jaxrag eval own`.

Every method gets the same chunks for a question and answers it alone, greedily. Time to first token
is that of chunks which lie in the store: before every answer the pool is made anew, and an answer
for which something was compiled, or encoded because the store lacked it, is asked for again until
its time is only its own. What is compared with full attention is compared question by question.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrag.base.errors import RequestError
from jaxrag.base.types import HostArray
from jaxrag.engine.engine import engine_of
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.sampling_params import SamplingParams
from jaxrag.library.documents import Shard
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.measure.evals.gate import forced_logits
from jaxrag.measure.evals.metrics import exact_match, holds, token_f1
from jaxrag.measure.evals.options import OwnOptions
from jaxrag.measure.evals.statistics import difference, median, plain, share
from jaxrag.models.text.progress import progress_bar
from jaxrag.reuse.methods import Method
from jaxrag.serve.answers import Result, serve
from jaxrag.serve.ask import Ask
from jaxrag.serve.question_files import BadQuestion, FileQuestion, QuestionFile, is_texts
from jaxrag.serve.questions import ReadyQuestion, Settings, prepare, resolve
from jaxrag.serve.suits import suiting

REFERENCE = "full_attention"
METRICS = ("exact_match", "f1", "holds")
_ATTEMPTS = 3  # at an answer whose time is its own


@dataclasses.dataclass(frozen=True)
class Probe:
    """A question with what is right about it.

    Attributes:
      sources: ids of the documents that the answer is in; empty where they are not named.
    """

    question: FileQuestion
    answers: tuple[str, ...]
    sources: tuple[str, ...]


def probes_of(
    questions: QuestionFile, kb: KnowledgeBase, shard: Shard | None = None
) -> tuple[Probe, ...]:
    """The questions of a file, or of a shard of it, with their right answers.

    Raises RequestError, with the line: a line that is none, without a right answer, with texts to
    answer from, or with a source that the knowledge base does not hold.
    """
    known = {document.id for document in kb.documents()}
    return tuple(_probe(questions, it, known) for it in questions.entries(shard or Shard()))


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
class AskedMethod:
    """A method by its name, its encoder, and its recompute ratio where it recomputes."""

    name: str
    encoder: str | None
    ratio: float | None


@dataclasses.dataclass(frozen=True)
class Answered:
    """One probe, answered by one method: as when it was asked first. JSON-able.

    Attributes:
      text: as of a ``Result``, like the following.
      retrieved: ids of the documents of the chunks.
      ttft: seconds, of chunks that lie in the store and programs that are compiled.
      same: of full attention's answer, given token by token: which tokens of it, and of the one
        behind it, are this method's first choice.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    counts: dict[str, int]
    notes: list[str]
    retrieved: list[str]
    ttft: float
    same: list[bool]

    @classmethod
    def of(cls, result: Result, ttft: float, same: HostArray) -> "Answered":
        """What is kept of an answer; ``same``: bool [T]."""
        return cls(
            text=result.text,
            token_ids=list(map(int, result.token_ids)),
            finish_reason=result.finish_reason,
            counts=result.counts,
            notes=result.notes,
            retrieved=[source.document_id for source in result.sources],
            ttft=ttft,
            same=same.tolist(),
        )


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What was asked, and what every method made of it: answered[method][probe].

    Attributes:
      methods: full attention is the first.
      template: its name.
      k: chunks that were retrieved.
      notes: about the whole.
    """

    probes: tuple[Probe, ...]
    methods: tuple[AskedMethod, ...]
    template: str
    k: int
    max_new_tokens: int
    answered: tuple[tuple[Answered, ...], ...]
    notes: tuple[str, ...]

    def scores(self, method: int) -> dict[str, HostArray]:
        """Of a method by name of the metric, [Q] each."""
        texts = [it.text for it in self.answered[method]]
        golds = [probe.answers for probe in self.probes]
        both = list(zip(texts, golds, strict=True))
        return {
            "exact_match": np.array([exact_match(*it) for it in both], np.bool_),
            "f1": np.array([token_f1(*it) for it in both], np.float64),
            "holds": np.array([holds(*it) for it in both], np.bool_),
        }

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; shares as fractions of 1 and times in seconds, each with its interval."""
        with_sources = [i for i, probe in enumerate(self.probes) if probe.sources]
        recall = np.array([_recall(self.probes[i], self.answered[0][i]) for i in with_sources])
        found = [it.retrieved for it in self.answered[0]]
        return {
            "questions": len(self.probes),
            "with_sources": len(with_sources),
            "k": self.k,
            "max_new_tokens": self.max_new_tokens,
            "template": self.template,
            "without_chunks": sum(not sources for sources in found),
            "recall": plain(share(recall, np.arange(len(recall)))),
            "methods": [self._method(i) for i in range(len(self.methods))],
            "notes": list(self.notes),
        }

    def _method(self, index: int) -> dict[str, Any]:
        own, full = self.answered[index], self.answered[0]
        each = np.arange(len(own))
        scores, of_full = self.scores(index), self.scores(0)
        same = [a.token_ids == b.token_ids for a, b in zip(own, full, strict=True)]
        tokens = np.repeat(each, [len(it.same) for it in own])
        over = np.array([b.ttft / a.ttft for a, b in zip(own, full, strict=True)])
        method = self.methods[index]
        return {
            "method": method.name,
            "encoder": method.encoder,
            "ratio": method.ratio,
            **{name: plain(share(scores[name], each)) for name in METRICS},
            "minus_full": {
                name: plain(difference(scores[name], of_full[name], each)) for name in METRICS
            },
            "same_answer": plain(share(np.array(same), each)),
            "same_tokens": plain(share(np.concatenate([it.same for it in own]), tokens)),
            "ttft": plain(median(np.array([it.ttft for it in own]))),
            "full_over_own": plain(median(over)),
            "tokens": {
                name: float(np.mean([it.counts[name] for it in own]))
                for name in ("reused", "recomputed", "encoded")
            },
            "cut_off": sum(it.finish_reason == "length" for it in own),
        }

    def records(self) -> list[dict[str, Any]]:
        """One for each question and method, JSON-able."""
        lines = []
        for index, method in enumerate(self.methods):
            scores = self.scores(index)
            for i, (probe, own) in enumerate(zip(self.probes, self.answered[index], strict=True)):
                lines.append({
                    "id": probe.question.id,
                    "method": method.name,
                    "question": probe.question.text,
                    "answers": list(probe.answers),
                    "text": own.text,
                    "finish_reason": own.finish_reason,
                    **{name: scores[name][i].item() for name in METRICS},
                    "same_answer": own.token_ids == self.answered[0][i].token_ids,
                    "same_tokens": float(np.mean(own.same)),
                    "ttft": own.ttft,
                    "counts": own.counts,
                    "sources": list(probe.sources),
                    "retrieved": own.retrieved,
                    "recall": _recall(probe, own) if probe.sources else None,
                    "notes": own.notes,
                })  # fmt: skip
        return lines


def evaluate(
    kb: KnowledgeBase,
    questions: QuestionFile,
    options: OwnOptions,
    *,
    shard: Shard | None = None,
    progress: bool = False,
) -> Evaluation:
    """Ask a knowledge base the questions of a file by several methods.

    Args:
      questions: with their right answers (``probes_of``).
      options: the methods, and how much is retrieved.
      shard: lines of the file; None: all.
      progress: show how far it is, on stderr.

    Raises RequestError for a bad line, an unknown method or a question that cannot be served;
    before anything is computed.
    """
    if kb.model is None:
        raise RequestError(f"{kb.path} was opened without its model; open it with model=")
    probes = probes_of(questions, kb, shard)
    names = tuple(dict.fromkeys((REFERENCE, *(options.methods or suiting(kb, kb.model)))))
    settings = tuple(
        resolve(
            Ask(
                method=name,
                template=options.template,
                k=options.k,
                where=options.where,
                max_new_tokens=options.max_new_tokens,
            ),
            kb=kb,
        )
        for name in names
    )
    ready = [[_ready(questions, one, probe) for probe in probes] for one in settings]
    answered: list[list[Answered]] = [[] for _ in settings]
    with progress_bar(len(probes) * len(settings), "eval", "answer", shown=progress) as bar:
        for asked in zip(*ready, strict=True):
            [full, *others] = [_timed(*it) for it in zip(settings, asked, strict=True)]
            shown = [full[0].token_ids[: options.max_new_tokens - 1]]
            [wanted], _ = forced_logits(settings[0], asked[:1], shown)
            first = wanted.argmax(1)
            answered[0].append(Answered.of(*full, np.ones(len(first), np.bool_)))
            bar.update()
            for i, own in enumerate(others, 1):
                [logits], _ = forced_logits(settings[i], asked[i : i + 1], shown)
                answered[i].append(Answered.of(*own, logits.argmax(1) == first))
                bar.update()
    notes = dict.fromkeys(note for one in settings for note in _notes(one, questions))
    return Evaluation(
        probes=probes,
        methods=tuple(_asked(one.method) for one in settings),
        template=settings[0].template.name,
        k=settings[0].ask.k,
        max_new_tokens=settings[0].ask.max_new_tokens,
        answered=tuple(map(tuple, answered)),
        notes=tuple(notes),
    )


def whole(parts: Sequence[Evaluation]) -> Evaluation:
    """The evaluation whose shards these are, in the order of the file."""
    order = sorted((it.question.line, at, i) for at, part in enumerate(parts)
                   for i, it in enumerate(part.probes))  # fmt: skip
    return dataclasses.replace(
        parts[0],
        probes=tuple(parts[at].probes[i] for _, at, i in order),
        answered=tuple(
            tuple(parts[at].answered[method][i] for _, at, i in order)
            for method in range(len(parts[0].methods))
        ),
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
    )


def _asked(method: Method) -> AskedMethod:
    ratio = method.recompute_ratio if method.recomputes else None
    return AskedMethod(method.name, method.encoder, ratio)


def _ready(file: QuestionFile, settings: Settings, probe: Probe) -> ReadyQuestion:
    try:
        return prepare(settings, probe.question.text, None, SamplingParams())
    except RequestError as error:
        raise RequestError(f"{file.path}:{probe.question.line}: {error}") from None


def _timed(settings: Settings, ready: ReadyQuestion) -> tuple[Result, float]:
    """What the question comes to when it is first asked, and seconds to its first token."""
    engine, results = engine_of(settings.model), list[Result]()
    for _ in range(_ATTEMPTS):
        engine.forget()
        engine.call(_make_pool)
        compiled = engine.compiled.total()
        [found] = serve([ready], 1)
        results.append(found[0])
        own = engine.compiled.total() == compiled and not found[0].counts["encoded"]
        if all(settings.model.exchange(own)):  # all processes ask again, or none
            break
    return results[0], results[-1].timings["ttft"]


def _make_pool(runner: ModelRunner) -> None:
    assert runner.cache.pool is not None


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


def _recall(probe: Probe, own: Answered) -> float:
    """Share of the probe's sources that are among what was retrieved."""
    return len(set(own.retrieved).intersection(probe.sources)) / len(probe.sources)

"""Answer a file of questions: many at a time, resumable, no question at the cost of another."""

import dataclasses
import itertools
import os
import time
from collections.abc import Sequence
from typing import Any

import xxhash

from jaxrag.base.errors import RequestError
from jaxrag.kv.store import MemoryStore
from jaxrag.library.documents import Shard
from jaxrag.models.text.progress import progress_bar
from jaxrag.serve.answer_files import AnswerFile
from jaxrag.serve.answers import Result, serve
from jaxrag.serve.ask import check_count
from jaxrag.serve.question_files import BadQuestion, FileQuestion, Id, QuestionFile
from jaxrag.serve.questions import ReadyQuestion, Settings, prepare

_LOOK_AHEAD = 8  # batches whose questions are retrieved together and sorted by length


@dataclasses.dataclass(frozen=True)
class BatchReport:
    """What became of the questions of one run."""

    questions: int  # of the shard
    earlier: int  # answered or refused by an earlier run
    earlier_refused: int  # of these: refused
    answered: int  # by this run
    refused: tuple[BadQuestion, ...]  # by this run
    generated_tokens: int
    reused_tokens: int  # chunk tokens whose KV came from the store
    seconds: float  # from the first question to the last answer

    @property
    def complete(self) -> bool:
        """Whether every question of the shard has an answer."""
        return not self.refused and not self.earlier_refused

    def rates(self) -> dict[str, float]:
        """Per second of this run: questions, generated tokens, reused chunk tokens."""
        return {
            "questions_per_second": self.answered / self.seconds,
            "generated_tokens_per_second": self.generated_tokens / self.seconds,
            "reused_tokens_per_second": self.reused_tokens / self.seconds,
        }


def all_parts(reports: Sequence[BatchReport], seconds: float) -> BatchReport:
    """One report of several parts: counts are added, ``seconds`` is the whole run's."""
    own = ("refused", "seconds")
    names = [field.name for field in dataclasses.fields(BatchReport) if field.name not in own]
    return BatchReport(
        refused=tuple(itertools.chain.from_iterable(report.refused for report in reports)),
        seconds=seconds,
        **{name: sum(getattr(report, name) for report in reports) for name in names},
    )


def question_seed(seed: int, name: Id) -> int:
    """The sampling seed of a question: xxh3 of its id, seeded with the run's seed, low 32 bits.

    It depends on nothing else, so an answer does not depend on the batch, shard or run it is in.
    """
    return xxhash.xxh3_64_intdigest(str(name).encode(), seed=seed) % 2**32


def answer_file(
    questions: QuestionFile,
    out: str | os.PathLike[str],
    settings: Settings,
    *,
    shard: Shard,
    batch_size: int,
    progress: bool = False,
) -> BatchReport:
    """Answer the questions of a shard that ``out`` does not answer yet.

    Every line of ``out`` is a Result with its question's id, or the id and the error for which the
    question was refused. They are written batch by batch, in the order they are ready.

    Args:
      questions: what to answer.
      out: file of JSON lines, made or continued.
      settings: of all questions; each draws from its own seed.
      shard: which lines.
      batch_size: questions that are prefilled and decoded together.
      progress: show how far it is, on stderr.

    Raises:
      ConfigError: ``out`` was begun with other settings, or is in use.
      RequestError, TokenizerError: settings that no question can be served with.
      StoreError: storage that cannot be read or written; what was answered before stays.
    """
    check_count("batch_size", batch_size)
    settings.template.prefix_ids(settings.model.text_tokenizer())
    total = sum(1 for _ in questions.entries(shard))
    answered, generated, reused = 0, 0, 0
    refused: list[BadQuestion] = []
    with AnswerFile(out, _record(questions, settings, shard)) as answers:
        start = time.perf_counter()
        waiting = (q for q in questions.entries(shard) if q.id not in answers.done)
        left = total - len(answers.done)
        with progress_bar(left, "answer", "question", shown=progress) as bar:
            for window in itertools.batched(waiting, batch_size * _LOOK_AHEAD):
                own = _with_store(settings)
                ready, bad = _prepare_all(own, window)
                answers.write({"id": q.id, "error": q.reason} for q in bad)
                refused += bad
                bar.update(len(bad))
                for batch in serve([question for _, question in ready], batch_size):
                    answers.write(_line(ready[i][0], result) for i, result in batch.items())
                    answered += len(batch)
                    generated += sum(len(result.token_ids) for result in batch.values())
                    reused += sum(result.counts["reused"] for result in batch.values())
                    rate = generated / (time.perf_counter() - start)
                    bar.set_postfix_str(f"{rate:.1f} tokens/s", refresh=False)
                    bar.update(len(batch))
    return BatchReport(
        questions=total,
        earlier=len(answers.done),
        earlier_refused=answers.refused,
        answered=answered,
        refused=tuple(refused),
        generated_tokens=generated,
        reused_tokens=reused,
        seconds=time.perf_counter() - start,
    )


def _prepare_all(
    settings: Settings, window: tuple[FileQuestion | BadQuestion, ...]
) -> tuple[list[tuple[Id, ReadyQuestion]], list[BadQuestion]]:
    """Questions that can be served, each with its id, and those that cannot."""
    [sampling] = settings.ask.samplings(1)
    ready: list[tuple[Id, ReadyQuestion]] = []
    bad: list[BadQuestion] = []
    for question in window:
        if isinstance(question, BadQuestion):
            bad.append(question)
            continue
        own = dataclasses.replace(sampling, seed=question_seed(sampling.seed, question.id))
        try:
            prepared = prepare(settings, question.text, question.documents, own)
        except RequestError as error:
            bad.append(BadQuestion(question.id, str(error)))
        else:
            ready.append((question.id, prepared))
    return ready, bad


def _with_store(settings: Settings) -> Settings:
    """Without a knowledge base, KV of documents is kept for one window: memory stays bounded."""
    if settings.kb is not None:
        return settings
    model = settings.model
    limit = model.config.max_positions
    store = MemoryStore(model.fingerprint, model.kv_layout, max_tokens=limit)
    return dataclasses.replace(settings, store=store)


def _line(name: Id, result: Result) -> dict[str, Any]:
    return {"id": name, **result.to_dict()}


def _record(questions: QuestionFile, settings: Settings, shard: Shard) -> dict[str, Any]:
    """Everything that decides the answers; batch size and devices do not."""
    ask, [sampling] = settings.ask, settings.ask.samplings(1)
    return {
        "questions": questions.digest,
        "shard": str(shard),
        "model": settings.model.fingerprint,
        "kb": None if settings.kb is None else str(settings.kb.path),
        "method": settings.method.settings,
        "template": settings.template.to_dict(),
        "k": ask.k,
        "where": ask.where,
        "search_mode": ask.search_mode,
        "min_score": ask.min_score,
        "unanswerable": ask.unanswerable,
        "max_new_tokens": ask.max_new_tokens,
        "sampling": dataclasses.asdict(sampling),
        "stop": list(ask.stop),
        **({} if settings.neighbours == "corpus" else {"neighbours": settings.neighbours}),
    }

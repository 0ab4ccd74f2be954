"""Questions with the engine: their text grows as tokens come, and ends with a Result."""

import asyncio
import contextlib
import dataclasses
import itertools
import queue
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from typing import Any, Literal

from jaxrag.base.errors import KnowledgeBaseError
from jaxrag.engine.attribution import Attribution
from jaxrag.engine.engine import engine_of
from jaxrag.engine.progress import Outcome, Progress, Top
from jaxrag.engine.reuse import PartReuse, token_counts
from jaxrag.engine.sampling_params import FinishReason
from jaxrag.library.documents.document import begun
from jaxrag.serve.ask import check_count
from jaxrag.serve.citing import Citation, citations_of, marked
from jaxrag.serve.compatibility import explained
from jaxrag.serve.conversation import Source, shown_prompt
from jaxrag.serve.output import Answer
from jaxrag.serve.questions import ReadyQuestion

NOTHING_FOUND = "Nothing was found to answer this from."

_AHEAD = 4  # times as many questions are with the engine as it has rows, so that loads come early


@dataclasses.dataclass(frozen=True)
class Result:
    """An answer with its account.

    Attributes:
      text: the answer, or NOTHING_FOUND.
      finish_reason: "stop", "length" (cut off), or "abstained": no chunk was found, and the
        model was not asked.
      timings: seconds: retrieve, wait (until the pool had room), load (storage and encoding to
        pool), compile (programs that the engine did not have yet, once, those of later tokens too),
        prefill (and waiting for a row), ttft (all of them up to the first token on the host),
        per_token (mean of the others, without compiling).
      counts: tokens of chunks and earlier turns: reused + recomputed + encoded; encoded were not
        in the store (whether they were recomputed after that or not, and encoded for it or computed
        in place).
      recomputed: share of these that were computed again, 0..1; a selector with a budget of its
        own, such as cache_craft's, may compute most.
      flops: to the first token, TurboRAG appendix C: prefill with what is recomputed, the
        selector's own passes, and encoding on the fly.
      reuse: of the prefix, every chunk and every turn: what was reused, how, and why not.
      indexes: of a decode rule that searches some, summed over layers and KV heads: keys indexed,
        those of them in indexes that were stored with their chunks, and indexes that were trained
        for the question; empty for other rules.
      notes: reuse that did not happen and why, a recompute ratio that was not named, an index that
        scans all keys and why; empty when everything went as asked.
      citations: which passages parts of the text are from, in order; empty where ``cite`` is "no".
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | Literal["abstained"]
    method: str
    sources: list[Source]
    timings: dict[str, float]
    counts: dict[str, int]
    flops: int
    reuse: list[PartReuse]
    indexes: dict[str, int]
    notes: list[str]
    citations: list[Citation] = dataclasses.field(default_factory=list)
    recomputed: float = 0.0

    def __repr__(self) -> str:
        """The answer and the sums of its account, on one line; ``to_dict`` is all of it."""
        counts = ", ".join(f"{name} {count}" for name, count in self.counts.items())
        return (
            f"<Result {begun(self.text)!r} ({self.finish_reason}), {self.method}: "
            f"{len(self.sources)} sources, {counts}, {len(self.notes)} notes>"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values with exactly these names, ready for JSON."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Piece:
    """What is new of an answer.

    Attributes:
      text: that is certain now; may be "" while there are tokens.
      ids: its new tokens.
      logprobs: of each the logarithm of its probability.
      top: in the place of each the likeliest, best first, if the sampling asks for them.
    """

    text: str
    ids: list[int]
    logprobs: list[float]
    top: list[Top] = dataclasses.field(default_factory=list)


News = Piece | Result | BaseException


class DocumentLeft(KnowledgeBaseError):
    """A document that an answer is made from was removed before its end."""

    def __init__(self) -> None:
        super().__init__(
            "a document that this answer was made from was removed meanwhile; ask again"
        )


class Growing:
    """One answer that grows with the engine's progress, on whichever thread brings that.

    ``notify`` is called with every new piece, then with the Result or what was raised.
    """

    def __init__(self, question: ReadyQuestion, notify: Callable[[News], None]) -> None:
        tokenizer = question.settings.model.tokenizer
        stream = (
            None if tokenizer is None else tokenizer.stream(not question.settings.shown.special)
        )
        self._question, self._notify = question, notify
        least = question.sampling.min_tokens
        self._whole = question.settings.ask.cite == "marks"  # marks are known at its end
        stop = () if question.sampling.guide else tuple(question.settings.ask.stop)
        self._answer = Answer(stop, stream, least, question.settings.shown)

    @property
    def ended(self) -> bool:
        """Whether its text is complete, as at a stop string."""
        return self._answer.finish_reason is not None

    def on_progress(self, progress: Progress) -> bool:
        """Take the engine's progress; whether its text is complete."""
        if progress.error is not None:
            self._notify(progress.error)
            return False
        answer = self._answer
        before = len(answer.token_ids)
        text = answer.push(progress.new, progress.finish_reason)
        ids = answer.token_ids[before:]
        if text or ids:
            kept = slice(len(ids))
            shown = "" if self._whole else text
            self._notify(Piece(shown, ids, progress.logprobs[kept], progress.top[kept]))
        if progress.outcome is not None:
            result = result_of(self._question, answer, progress.outcome)
            if self._whole:
                self._notify(Piece(result.text, [], []))
            self._notify(result)
        return self.ended


class Stream:
    """Iterates over the answer's text pieces; ``result`` is set once it is exhausted.

    Nothing is asked before the first piece is. Leaving the iteration early aborts the request.
    Raises DocumentLeft at its end where a document of it left the knowledge base meanwhile.
    """

    def __init__(self, question: ReadyQuestion) -> None:
        self._question = question
        self.result: Result | None = None
        self._pieces = self._run()

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    def __repr__(self) -> str:
        """Whether it is at its end, on one line."""
        method = self._question.settings.method.name
        state = "not at its end" if self.result is None else repr(self.result)
        return f"<Stream {method}: {state}>"

    @property
    def prompt(self) -> list[dict[str, Any]]:
        """What is asked, part by part: "part", "tokens" and "text" (conversation.shown_prompt)."""
        return shown_prompt(self._question.settings.model, self._question.prompt)

    def _run(self) -> Iterator[str]:
        self._question = _current(self._question)
        if self._question.abstains:
            self.result = abstained(self._question)
            yield self.result.text
            return
        news: queue.SimpleQueue[News] = queue.SimpleQueue()
        engine = engine_of(self._question.settings.model)
        request = dataclasses.replace(self._question, watched=True)
        number: int | None = engine.add(request, Growing(self._question, news.put).on_progress)
        try:
            while self.result is None:
                item = news.get()
                if isinstance(item, Piece):
                    if item.text:
                        yield item.text
                    continue
                number = None
                if isinstance(item, BaseException):
                    raise item
                if not self._question.is_current:
                    raise DocumentLeft
                self.result = item
        finally:
            if number is not None:
                engine.abort(number)


class AsyncStream:
    """As ``Stream``, for ``async for``."""

    def __init__(self, prepared: Callable[[], ReadyQuestion]) -> None:
        """``prepared`` is called on a thread of its own, as it may wait for retrieval."""
        self._prepared = prepared
        self.result: Result | None = None

    async def __aiter__(self) -> AsyncIterator[str]:
        question = await asyncio.to_thread(self._prepared)
        question = dataclasses.replace(question, watched=True)
        async with contextlib.aclosing(_answered(question)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Result):
                    self.result = piece
                else:
                    yield piece


async def answer(question: ReadyQuestion) -> Result:
    """Serve one question; cancelling the task aborts it.

    It is asked anew where a document of it left the knowledge base meanwhile.
    """
    while True:
        question = await asyncio.to_thread(_current, question)
        with contextlib.suppress(DocumentLeft):
            async with contextlib.aclosing(_answered(question)) as pieces:
                *_, last = [piece async for piece in pieces]
            assert isinstance(last, Result)
            return last


async def _answered(question: ReadyQuestion) -> AsyncGenerator[str | Result, None]:
    """The pieces of an answer, and its Result; closing it aborts the request."""
    if question.abstains:
        result = abstained(question)
        yield result.text
        yield result
        return
    loop = asyncio.get_running_loop()
    news: asyncio.Queue[News] = asyncio.Queue()

    def notify(item: News) -> None:
        loop.call_soon_threadsafe(news.put_nowait, item)

    engine = engine_of(question.settings.model)
    number: int | None = engine.add(question, Growing(question, notify).on_progress)
    try:
        while number is not None:
            item = await news.get()
            if isinstance(item, Piece):
                if item.text:
                    yield item.text
                continue
            number = None
            if isinstance(item, BaseException):
                raise item
            if not await asyncio.to_thread(lambda: question.is_current):
                raise DocumentLeft
            yield item
    finally:
        if number is not None:
            engine.abort(number)


def serve(questions: Sequence[ReadyQuestion], batch_size: int) -> Iterator[dict[int, Result]]:
    """Serve questions of one run: yields {index into ``questions``: Result} as they are answered.

    Up to ``batch_size`` of them decode together, in a program of as many rows; one that ends makes
    room for the next. Closing the iterator aborts what is left. A question of which a document left
    the knowledge base meanwhile is made ready anew, also where it was just answered. Raises what
    the first question raises that fails.
    """
    check_count("batch_size", batch_size)
    if not questions:
        return
    engine = engine_of(questions[0].settings.model)
    ready = list(questions)
    news: queue.SimpleQueue[tuple[int, Result | BaseException]] = queue.SimpleQueue()
    with_engine: dict[int, int] = {}  # by index the number there
    waiting = iter(range(len(ready)))

    def notify_of(index: int) -> Callable[[News], None]:
        def notify(item: News) -> None:
            if not isinstance(item, Piece):
                news.put((index, item))

        return notify

    def ask(indices: Iterable[int]) -> dict[int, Result]:
        """Hand questions over, at one moment; returns what the model is not asked."""
        chosen = list(indices)
        for i in chosen:
            ready[i] = _current(ready[i])
        silent = {i: abstained(ready[i]) for i in chosen if ready[i].abstains}
        asked = [
            (
                dataclasses.replace(ready[i], rows=batch_size),
                Growing(ready[i], notify_of(i)).on_progress,
            )
            for i in chosen
            if i not in silent
        ]
        if asked:
            others = (i for i in chosen if i not in silent)
            with_engine.update(zip(others, engine.add_all(asked), strict=True))
        return silent

    try:
        first = len(ready) if engine.settings.lockstep else batch_size * _AHEAD
        silent = ask(itertools.islice(waiting, first))
        while with_engine or silent:
            if silent:
                yield silent
                silent = ask(itertools.islice(waiting, len(silent)))
                continue
            index, item = news.get()
            del with_engine[index]
            if isinstance(item, BaseException):
                raise item
            current = ready[index].is_current or engine.settings.lockstep
            silent = ask(itertools.islice(waiting, 1) if current else [index])
            if current:
                yield {index: item}
    finally:
        for number in with_engine.values():
            engine.abort(number)


def _current(question: ReadyQuestion) -> ReadyQuestion:
    """The question, made ready anew where what it was made from has left."""
    # Processes in lockstep ask the same: none may see a change that the others have not seen.
    if engine_of(question.settings.model).settings.lockstep or question.is_current:
        return question
    return dataclasses.replace(question.prepare_again(), rows=question.rows)


def abstained(question: ReadyQuestion) -> Result:
    """What a question comes to that the model is not asked."""
    return _result(question, NOTHING_FOUND, [], "abstained", Outcome(), [])


def result_of(question: ReadyQuestion, answer: Answer, outcome: Outcome) -> Result:
    """What a question came to, once its answer and the engine's account of it are complete."""
    assert answer.finish_reason is not None
    text, citations = _cited(question, answer, outcome)
    return _result(question, text, answer.token_ids, answer.finish_reason, outcome, citations)


def _result(
    question: ReadyQuestion,
    text: str,
    token_ids: list[int],
    finish_reason: FinishReason | Literal["abstained"],
    outcome: Outcome,
    citations: list[Citation],
) -> Result:
    settings, reuse, why = question.settings, outcome.reuse, list[str]()
    if settings.kb is not None and question.retrieved:
        reuse, why = explained(
            settings.kb, settings.method, settings.template, question.prompt, reuse
        )
    counts = token_counts(outcome.reuse)
    spent = {
        "retrieve": question.retrieve_seconds,
        "wait": outcome.wait_seconds,
        "load": outcome.load_seconds,
        "compile": outcome.compile_seconds,
        "prefill": outcome.prefill_seconds,
    }
    return Result(
        text=text,
        token_ids=token_ids,
        finish_reason=finish_reason,
        method=settings.method.name,
        sources=[] if finish_reason == "abstained" else question.sources,
        timings={
            **spent,
            "ttft": question.retrieve_seconds + outcome.first_seconds,
            "per_token": outcome.per_token,
        },
        counts=counts,
        flops=outcome.flops,
        reuse=reuse,
        indexes=outcome.indexes,
        notes=[*settings.notes, *outcome.notes, *why],
        citations=citations,
        recomputed=counts["recomputed"] / max(1, sum(counts.values())),
    )


def _cited(question: ReadyQuestion, answer: Answer, outcome: Outcome) -> tuple[str, list[Citation]]:
    """The text of an answer, and its citations, as they were asked for."""
    attribution = outcome.attribution
    if attribution is None:
        return answer.text, []
    passages = question.prompt.places
    attribution = Attribution(attribution.votes[:, passages], attribution.most[:, passages])
    numbers = [source.number for source in question.sources]
    tokenizer = question.settings.model.text_tokenizer()
    citations = citations_of(tokenizer, answer.token_ids, answer.text, attribution, numbers)
    return (
        marked(answer.text, citations)
        if question.settings.ask.cite == "marks"
        else (answer.text, citations)
    )

"""Asking a model of this process: every method the same texts, and its time on its own."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jaxrag.engine.engine import engine_of
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.sampling_params import SamplingParams
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.measure.evals.datasets.spec import DatasetItem
from jaxrag.measure.subject import described
from jaxrag.models.model import Model
from jaxrag.models.text.prompts import PromptTemplate
from jaxrag.serve.answers import Result, serve
from jaxrag.serve.ask import Ask
from jaxrag.serve.conversation import Passage
from jaxrag.serve.questions import Settings, prepare, resolve

ATTEMPTS = 3  # at a time in which nothing was compiled, and nothing encoded that is kept


@dataclasses.dataclass(frozen=True)
class TimedAnswer:
    """What a method answered to one question.

    Attributes:
      prompt_tokens: all of them.
      first: seconds to the first token when it was first asked, from its text.
      ttft: the same when its chunks were kept and its programs compiled; None where no attempt
        came to that.
      counts: chunk tokens of that answer: reused, recomputed, encoded.
      flops: to its first token.
    """

    text: str
    finish_reason: str
    prompt_tokens: int
    first: float
    ttft: float | None
    counts: Mapping[str, int]
    flops: int
    notes: Sequence[str]


class Answerer(Protocol):
    """Who is asked: a model of this process, or a server."""

    def about(self) -> dict[str, Any]:
        """What a result says of it, JSON-able; equal for one that gives the same answers."""
        ...

    def answer(self, method: str, item: DatasetItem) -> TimedAnswer:
        """One method's answer. Raises ContextExceeded for a prompt that does not fit."""
        ...

    def exchange(self, value: Any) -> list[Any]:
        """What every process that asks passes, the first of them first."""
        ...


class InProcess:
    """A model of this process; KV of documents is kept in its memory, or in a knowledge base."""

    def __init__(
        self,
        methods: Sequence[str],
        template: PromptTemplate,
        max_new_tokens: int,
        *,
        model: Model | None = None,
        kb: KnowledgeBase | None = None,
    ) -> None:
        """Of one of both. Raises RequestError for a method that the model cannot have."""
        self._settings: dict[str, Settings] = {
            name: resolve(
                Ask(method=name, template=template, max_new_tokens=max_new_tokens),
                kb=kb,
                model=model,
            )
            for name in methods
        }
        self._model = next(iter(self._settings.values())).model
        self._template = template

    def about(self) -> dict[str, Any]:
        """The model."""
        return described(str(self._model.path), self._model, self._template)

    def exchange(self, value: Any) -> list[Any]:
        """Of the processes that hold the model."""
        return self._model.exchange(value)

    def answer(self, method: str, item: DatasetItem) -> TimedAnswer:
        """Ask until the time is only its own; chunks are read from where they are kept."""
        settings = self._settings[method]
        answered, first, tokens = self._asked(settings, item, settings.ask.max_new_tokens)
        again, seconds = answered, first
        for _ in range(ATTEMPTS - 1):
            if self._is_own(again):
                break
            engine_of(self._model).forget()
            engine_of(self._model).call(_make_pool)
            again, seconds, _ = self._asked(settings, item, 1)
        own = self._is_own(again)
        return TimedAnswer(
            text=answered.text,
            finish_reason=answered.finish_reason,
            prompt_tokens=tokens,
            first=first,
            ttft=seconds if own else None,
            counts=again.counts,
            flops=again.flops,
            notes=again.notes,
        )

    def _is_own(self, answer: Result) -> bool:
        """``is_own`` in every process that holds the model: all ask again, or none."""
        return all(self.exchange(is_own(answer.timings, answer.counts)))

    def _asked(
        self, settings: Settings, item: DatasetItem, max_new_tokens: int
    ) -> tuple[Result, float, int]:
        """An answer, seconds from the texts to its first token, tokens of its prompt."""
        start = time.perf_counter()
        passages = [Passage(text, title) for title, text in item.documents]
        ready = prepare(settings, item.question, passages, SamplingParams())
        request = dataclasses.replace(ready.request, max_new_tokens=max_new_tokens)
        ready = dataclasses.replace(ready, request=request)
        prepared = time.perf_counter() - start
        [found] = serve([ready], 1)
        seconds = prepared + found[0].timings["ttft"] - found[0].timings["retrieve"]
        return found[0], seconds, request.prompt.num_tokens


def is_own(timings: Mapping[str, float], counts: Mapping[str, int]) -> bool:
    """Was nothing compiled or encoded for this answer?"""
    return not timings["compile"] and not counts["encoded"]


def _make_pool(runner: ModelRunner) -> None:
    assert runner.cache.pool is not None

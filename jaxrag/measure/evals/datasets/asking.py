"""Asking a model of this process: every method the same texts, and its time on its own."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrag.engine.engine import engine_of
from jaxrag.engine.sampling_params import SamplingParams
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.library.options import NeighboursFrom
from jaxrag.measure.evals.asked import Line
from jaxrag.measure.evals.datasets.corpus import NeighboursAccount, account_of
from jaxrag.measure.evals.datasets.nearness import FULL, ShownAnswer, at_ratios, with_controls
from jaxrag.measure.evals.datasets.spec import DatasetItem
from jaxrag.measure.subject import described
from jaxrag.models.model import Model
from jaxrag.reuse.methods import Method, method_named
from jaxrag.serve.answers import Result, serve
from jaxrag.serve.ask import Ask
from jaxrag.serve.conversation import Passage
from jaxrag.serve.questions import ReadyQuestion, Settings, prepare, resolve

ATTEMPTS = 3  # at a time in which nothing was compiled, and nothing encoded that is kept


@dataclasses.dataclass(frozen=True)
class TimedAnswer:
    """What a method answered to one question.

    Attributes:
      prompt_tokens: all of them.
      token_ids: of the answer.
      retrieved: ids of the documents of its chunks.
      first: seconds to the first token when it was first asked, from its text.
      ttft: the same when its chunks were kept and its programs compiled; None where no attempt
        came to that.
      counts: chunk tokens of that answer: reused, recomputed, encoded.
      encoded: of those, how many were encoded when it was first asked.
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
    encoded: int
    token_ids: Sequence[int]
    retrieved: Sequence[str]


class InProcess:
    """A model of this process; KV of documents is kept in its memory, or in a knowledge base."""

    def __init__(self, settings: Mapping[str, Settings], compared: int = 16) -> None:
        """Of methods by name, all of one model; see ``settings_of``.

        Args:
          compared: tokens of full attention's answer, at most, along which they are.
        """
        self._settings = settings
        self._compared = compared
        self._model = next(iter(settings.values())).model

    @property
    def methods(self) -> Sequence[str]:
        """Names of its settings."""
        return list(self._settings)

    def about(self) -> dict[str, Any]:
        """What a result says of the model, JSON-able; equal for one that gives the same answers."""
        template = next(iter(self._settings.values())).template
        return described(str(self._model.path), self._model, template)

    def neighbours(self) -> NeighboursAccount | None:
        """What a result says of the neighbours of given passages; None: no method sees any."""
        return account_of(self._settings)

    def exchange(self, value: Any) -> list[Any]:
        """What every process that holds the model passes, the first of them first."""
        return self._model.exchange(value)

    def answer(self, method: str, item: DatasetItem) -> TimedAnswer:
        """Ask until the time is only its own; chunks are read from where they are kept.

        Raises ContextExceeded for a prompt that does not fit.
        """
        settings = self._settings[method]
        answered, first, tokens = self._asked(settings, item, settings.ask.max_new_tokens)
        again, seconds = answered, first
        for _ in range(ATTEMPTS - 1):
            if self._is_own(again):
                break
            engine_of(self._model).forget()
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
            encoded=answered.counts["encoded"],
            token_ids=list(map(int, answered.token_ids)),
            retrieved=[source.document_id for source in answered.sources],
        )

    def beside_full(
        self, item: DatasetItem, answers: Mapping[str, TimedAnswer]
    ) -> Mapping[str, Line]:
        """How near to full attention each method is, of which these are the answers.

        Along full attention's answer and a right one; nothing where full attention is none of them.
        """
        if FULL not in answers:
            return {}
        ready = {name: _ready(settings, item) for name, settings in self._settings.items()}
        ids, most = answers[FULL].token_ids, self._compared - 1
        whole = ShownAnswer.by(self._settings[FULL], ready[FULL], ids, item, most)
        found = {name: whole.to(settings, ready[name]) for name, settings in self._settings.items()}
        return {
            name: {part: line[part] for part in ("kl", "same", "gold")}
            for name, line in found.items()
        }

    def _is_own(self, answer: Result) -> bool:
        """``is_own`` in every process that holds the model: all ask again, or none."""
        return all(self.exchange(is_own(answer.timings, answer.counts)))

    def _asked(
        self, settings: Settings, item: DatasetItem, max_new_tokens: int
    ) -> tuple[Result, float, int]:
        """An answer, seconds from the texts to its first token, tokens of its prompt."""
        start = time.perf_counter()
        ready = dataclasses.replace(_ready(settings, item), max_new_tokens=max_new_tokens)
        prepared = time.perf_counter() - start
        [results] = serve([ready], 1)
        seconds = prepared + results[0].timings["ttft"] - results[0].timings["retrieve"]
        return results[0], seconds, ready.prompt.num_tokens


def _ready(settings: Settings, item: DatasetItem) -> ReadyQuestion:
    passages = [Passage(text, title) for title, text in item.documents]
    return prepare(settings, item.talk, passages or None, SamplingParams())


def settings_of(
    methods: Mapping[str, str],
    ask: Ask,
    *,
    model: Model | None = None,
    kb: KnowledgeBase | None = None,
    neighbours: NeighboursFrom = "corpus",
    ratios: Sequence[float] = (),
    controls: bool = False,
) -> dict[str, Settings]:
    """The same asked by every method, of one of both; ``neighbours`` as of ``Settings``.

    Args:
      methods: each with what it is called here.
      ratios: at which those that recompute a part are asked, in place of their own.
      controls: also ask with tokens at random, see ``with_controls``.

    Raises RequestError for a method that the model cannot have.
    """
    each: Mapping[str, str | Method] = methods
    if ratios:
        each = at_ratios({name: method_named(method) for name, method in methods.items()}, ratios)
    found = {
        name: resolve(
            dataclasses.replace(ask, method=one), kb=kb, model=model, neighbours=neighbours
        )
        for name, one in each.items()
    }
    return with_controls(found) if controls else found


def is_own(timings: Mapping[str, float], counts: Mapping[str, int]) -> bool:
    """Was nothing compiled or encoded for this answer?"""
    return not timings["compile"] and not counts["encoded"]

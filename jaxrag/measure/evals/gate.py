"""The quality gate: which recompute ratio a method needs on a knowledge base, if any will do.

Probe questions are answered with full attention. Then every method and ratio is shown the same
answers, token by token (teacher forcing), over the chunks as it reuses them, and is asked for each
next token: does it choose the same one, and how far is its distribution from full attention's?
"""

import dataclasses
import functools
import itertools
from collections import abc
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxrag.base.errors import KnowledgeBaseError, RequestError
from jaxrag.base.shapes import bucket
from jaxrag.base.sharding import to_host
from jaxrag.base.types import Array, HostArray, Step
from jaxrag.engine.engine import engine_of
from jaxrag.engine.prefill import Prefilled
from jaxrag.engine.prompt_inspection import inspect_prompts
from jaxrag.engine.request import Request
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.sampling_params import SamplingParams
from jaxrag.engine.sequence import Sequence
from jaxrag.engine.steps import run_tokens
from jaxrag.kv.cache import PagePool, PageTable
from jaxrag.library.documents import Shard
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.measure.evals.options import GateOptions, Target
from jaxrag.measure.evals.statistics import Estimate, share
from jaxrag.models.decoder import Decoder, unembed
from jaxrag.models.model import Model
from jaxrag.models.text.progress import progress_bar
from jaxrag.reuse.decode import Dense
from jaxrag.reuse.methods import METHODS, method_named
from jaxrag.reuse.select import NoTokens
from jaxrag.serve.answers import Result, serve
from jaxrag.serve.ask import Ask
from jaxrag.serve.compatibility import gate_subject
from jaxrag.serve.question_files import BadQuestion, QuestionFile
from jaxrag.serve.questions import ReadyQuestion, Settings, prepare, resolve

RATIOS = (0.0, 0.05, 0.10, 0.15, 0.20, 0.30, 0.50)  # at 1 nothing is gained


@dataclasses.dataclass(frozen=True)
class Measured:
    """One ratio. Intervals are cluster-robust over questions."""

    ratio: float
    recomputed: float  # share of the chunk tokens
    agreement: Estimate
    kl: float
    answers: Estimate
    meets: bool


@dataclasses.dataclass(frozen=True)
class GateReport:
    """What was measured; ``ratio`` is the smallest that meets the target, None where none does."""

    method: str
    questions: int
    answer_tokens: int  # that were compared, of all questions
    target: Target
    measured: tuple[Measured, ...]
    ratio: float | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        values = dataclasses.asdict(self)
        for row, one in zip(values["measured"], self.measured, strict=True):
            row |= {"agreement": one.agreement._asdict(), "answers": one.answers._asdict()}
        values["measured"] = list(values["measured"])
        return values


def gate(
    kb: KnowledgeBase, questions: QuestionFile, options: GateOptions, *, progress: bool = False
) -> GateReport:
    """Measure a method at every ratio and store the smallest that meets the target with ``kb``.

    Nothing is stored where none does; what an earlier gate stored for the method stays then.

    Args:
      kb: opened with its model, for writing.
      questions: the probes; a line without documents is retrieved for.
      options: the method, the ratios, the target.
      progress: show how far it is, on stderr.

    Raises:
      RequestError: a bad line or ratio, a method that reuses nothing, a probe that finds no chunk
        or cannot be served; before anything is computed.
      KnowledgeBaseError: opened without a model, or for reading.
    """
    if kb.mode != "rw":
        raise KnowledgeBaseError(
            f"{kb.path} was opened for reading; open it with its model and mode 'rw' for a gate"
        )
    ask = Ask(
        template=options.template,
        k=options.k,
        where=options.where,
        max_new_tokens=options.answer_tokens,
    )
    settings = tried(options, ask, kb=kb)
    prepared = [prepared_questions(one, questions, options.compute_last) for one in settings]
    report = measure(settings, prepared, options, progress=progress)
    if report.ratio is not None:
        subject = gate_subject(method_named(options.method), settings[0].template)
        last = options.compute_last
        name = f"{report.method}, {last} computed" if last else report.method
        asked = {"subject": subject, "k": options.k, "where": options.where, "compute_last": last}
        # Of its own name: the method of that name computes no chunk of itself.
        kb.set_gate(name, report.to_dict() | asked | {"probes": questions.digest})
    return report


def tried(
    options: GateOptions, ask: Ask, *, kb: KnowledgeBase | None = None, model: Model | None = None
) -> list[Settings]:
    """What is asked with full attention, then by the method at every ratio, the smallest first.

    Raises RequestError for a method that reuses nothing, and a ratio that it has no use for.
    """
    method, ratios = method_named(options.method), options.ratios
    if ratios is None:
        ratios = (0.0,) if isinstance(method.selector, NoTokens) else RATIOS
    methods = (METHODS["full_attention"], *map(method.with_ratio, sorted(set(ratios))))
    return [resolve(dataclasses.replace(ask, method=one), kb=kb, model=model) for one in methods]


def measure(
    settings: abc.Sequence[Settings],
    prepared: abc.Sequence[abc.Sequence[ReadyQuestion]],
    options: GateOptions,
    *,
    progress: bool = False,
) -> GateReport:
    """What became of the questions that were ``tried``; arguments as of ``tallied``."""
    tallies = tallied(settings, prepared, options.batch_size, progress=progress)
    chunk_tokens = sum(sum(ready.prompt.lengths) for ready in prepared[-1])
    measured = tuple(
        tally.measured(one.method.recompute_ratio or 0.0, chunk_tokens, options.target)
        for one, tally in zip(settings[1:], tallies, strict=True)
    )
    return GateReport(
        method=settings[1].method.name,
        questions=len(prepared[0]),
        answer_tokens=sum(map(len, tallies[0].agree)),
        target=options.target,
        measured=measured,
        ratio=next((one.ratio for one in measured if one.meets), None),
    )


def tallied(
    settings: abc.Sequence[Settings],
    prepared: abc.Sequence[abc.Sequence[ReadyQuestion]],
    batch_size: int,
    *,
    name: str = "gate",
    heard: Callable[[], object] = lambda: None,
    progress: bool = False,
) -> "list[Tally]":
    """What each of all settings but the first did, shown the first's answers.

    Args:
      settings: that of full attention, then those that are compared with it.
      prepared: the same questions under each of them.
      batch_size: questions that are answered together.
      name: of the bar.
      heard: called when a batch was answered, or seen, under one of the settings.
      progress: draw the bar on stderr.
    """
    tallies = [Tally() for _ in settings[1:]]
    total = len(prepared[0]) * len(settings)
    with progress_bar(total, name, "question", shown=progress) as bar:
        for batch in itertools.batched(range(len(prepared[0])), batch_size):
            questions_of_batch = [prepared[0][i] for i in batch]
            most = settings[0].ask.max_new_tokens - 1  # without their end
            answers = [one.token_ids[:most] for one in answered(questions_of_batch, batch_size)]
            full, _ = forced_logits(settings[0], questions_of_batch, answers)
            bar.update(len(batch))
            for one, ready, tally in zip(settings[1:], prepared[1:], tallies, strict=True):
                questions_of_batch = [ready[i] for i in batch]
                tally.add(batch, full, *forced_logits(one, questions_of_batch, answers))
                heard()
                bar.update(len(batch))
    return tallies


def prepared_questions(
    settings: Settings, questions: QuestionFile, compute_last: int = 0
) -> list[ReadyQuestion]:
    """The questions; the last chunks of each are computed behind the others, as turns are.

    Raises RequestError for a bad line, and for a question that finds no chunk or cannot be served.
    """
    ready = []
    for question in questions.entries(Shard()):
        where = f"{questions.path}: question {question.id!r}"
        if isinstance(question, BadQuestion):
            raise RequestError(f"{where}: {question.reason}")
        try:
            one = prepare(settings, question.text, question.documents, SamplingParams())
        except RequestError as error:
            raise RequestError(f"{where}: {error}") from None
        if not one.prompt.chunks:
            raise RequestError(f"{where} finds no chunk and can test no reuse; leave it out")
        prompt = one.prompt
        count = len(prompt.chunks)
        last = range(max(0, count - compute_last), count)
        if last:
            prompt = prompt.with_turns({*prompt.turns, *last})
            one = dataclasses.replace(one, prompt=prompt)
        ready.append(one)
    return ready


def answered(
    ready: abc.Sequence[ReadyQuestion],
    batch_size: int,
    heard: Callable[[int], object] = lambda done: None,
) -> list[Result]:
    """The answers in the order of the questions; ``heard`` counts them as they come."""
    found: dict[int, Result] = {}
    for batch in serve(ready, batch_size):
        found |= batch
        heard(len(batch))
    return [found[i] for i in range(len(ready))]


def forced_logits(
    settings: Settings,
    questions: abc.Sequence[ReadyQuestion],
    answers: abc.Sequence[abc.Sequence[int]],
) -> tuple[list[HostArray], int]:
    """Logits of every token of given answers and of the one after, as decoding would have them.

    Args:
      answers: token ids of each, at most ``settings.ask.max_new_tokens`` - 1.

    Returns float32 [len(answer) + 1, V] for each request, and how many chunk tokens were
    recomputed for all of them.
    """
    logits: list[HostArray] = []
    recomputed = 0
    for question, answer in zip(questions, answers, strict=True):
        [one], count = forced_along(settings.model, question, [answer])
        logits.append(one)
        recomputed += count
    return logits, recomputed


def forced_along(
    model: Model, question: Request, answers: abc.Sequence[abc.Sequence[int]]
) -> tuple[list[HostArray], int]:
    """As ``forced_logits``: several answers to one question, which is prefilled once."""
    request = dataclasses.replace(
        question,
        method=dataclasses.replace(question.method, decode=Dense()),
        max_new_tokens=max(map(len, answers)) + 1,
        watched=True,
    )

    def look(runner: ModelRunner, state: Sequence, there: Prefilled) -> tuple[list[HostArray], int]:
        rest = (_feed(runner, state, there.table, np.asarray(it, np.int32)) for it in answers)
        logits = [np.concatenate((to_host(there.logits), one)) for one in rest]
        return logits, 0 if state.choice is None else len(state.choice.tokens)

    [found] = inspect_prompts(engine_of(model), [request], look)
    return found


def _feed(runner: ModelRunner, state: Sequence, table: PageTable, answer: HostArray) -> HostArray:
    """Logits float32 [T, V] after each token of an answer that follows a prefilled prompt."""
    model, count = runner.model, len(answer)
    if not count:
        return np.zeros((0, model.config.vocab_size), np.float32)
    num_slots, pad = table.slot_position.shape[1], bucket(count, 1) - count
    at = np.arange(count, dtype=np.int32)
    ids = np.pad(answer, (0, pad))
    positions = np.pad(state.next_position + at, (0, pad), constant_values=-1)
    slots = np.pad(state.next_slot + at, (0, pad), constant_values=num_slots)
    step = Step(*(model.put_batch(x[None].astype(np.int32), 1) for x in (ids, positions, slots)))
    return to_host(runner.cache.update(_forced, model.decoder(num_slots), table, step))[0, :count]


@functools.partial(jax.jit, donate_argnames=("pool",))
def _forced(
    pool: PagePool, decoder: Decoder, table: PageTable, step: Step
) -> tuple[PagePool, Array]:
    hidden, pool, _ = run_tokens(decoder, pool, table, step)
    return pool, unembed(decoder.params, decoder.config, hidden)


@dataclasses.dataclass
class Tally:
    """What one method did on the questions so far.

    Attributes:
      agree: of each question, bool of its tokens: is the next one full attention's?
      question: which one that is.
      kl: of each question, the sum over its tokens.
      recomputed: chunk tokens, of all questions.
    """

    agree: list[HostArray] = dataclasses.field(default_factory=list)
    question: list[int] = dataclasses.field(default_factory=list)
    kl: list[float] = dataclasses.field(default_factory=list)
    recomputed: int = 0

    def add(
        self,
        questions: abc.Sequence[int],
        full: abc.Sequence[HostArray],
        own: abc.Sequence[HostArray],
        recomputed: int,
    ) -> None:
        """Add questions with their logits under full attention and under the method."""
        for index, expected, found in zip(questions, full, own, strict=True):
            self.agree.append(expected.argmax(1) == found.argmax(1))
            self.question.append(index)
            self.kl.append(float(kl_divergence(expected, found).sum()))
        self.recomputed += recomputed

    def measured(self, ratio: float, chunk_tokens: int, target: Target) -> Measured:
        """What a gate says of it, of prompts with so many chunk tokens."""
        tokens = np.concatenate(self.agree)
        agreement = share(tokens, np.repeat(self.question, [len(agreed) for agreed in self.agree]))
        # The greedy answer is full attention's where every forced choice is.
        answers = share(np.array([agreed.all() for agreed in self.agree]), np.array(self.question))
        assert agreement is not None and answers is not None
        kl = sum(self.kl) / len(tokens)
        return Measured(
            ratio=ratio,
            recomputed=self.recomputed / chunk_tokens,
            agreement=agreement,
            kl=kl,
            answers=answers,
            meets=agreement.value >= target.agreement
            and kl <= target.max_kl
            and answers.value >= target.answers,
        )


def kl_divergence(expected: HostArray, found: HostArray) -> HostArray:
    """KL(softmax(expected) || softmax(found)), nats [T] of logits [T, V]; computed in float64."""
    p, q = (_log_softmax(x.astype(np.float64)) for x in (expected, found))
    return np.maximum((np.exp(p) * (p - q)).sum(1), 0.0)


def _log_softmax(x: HostArray) -> HostArray:
    x = x - x.max(1, keepdims=True)
    return x - np.log(np.exp(x).sum(1, keepdims=True))

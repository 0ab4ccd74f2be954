"""generate(): a question and retrieved or given chunks in, an answer and its account out."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from jaxrag.decode import DecodeRule
from jaxrag.engine.engine import Outcome, engine_of
from jaxrag.engine.request import DECODE_BLOCK, FinishReason
from jaxrag.engine.reuse import PartReuse, token_counts
from jaxrag.engine.sampling import SamplingParams
from jaxrag.errors import RequestError
from jaxrag.knowledge_base import KnowledgeBase
from jaxrag.methods import Method, Misses
from jaxrag.models.model import Model
from jaxrag.serve.output import Answer
from jaxrag.serve.questions import ReadyQuestion, Settings, Source, Text, is_ids, prepare, resolve
from jaxrag.text.prompts import PromptTemplate


@dataclasses.dataclass(frozen=True)
class Result:
    """An answer with its account.

    Attributes:
      timings: seconds: retrieve, load (storage and encoding to pool), prefill, ttft (all of them
        up to the first token on the host), per_token (mean of the others). Requests that ran as
        one batch share load and prefill.
      counts: chunk tokens: reused + recomputed + encoded; encoded were not in the store (whether
        they were recomputed after that or not, and encoded for it or computed in place).
      flops: to the first token, TurboRAG appendix C: prefill with what is recomputed, the
        selector's own passes, and encoding on the fly.
      reuse: of the prefix and of every chunk: what was reused, how, and why not.
      indexes: of a decode rule that searches some, of all requests of the batch, summed over layers
        and KV heads: keys indexed, those of them in indexes that were stored with their chunks, and
        indexes that were trained for the question; empty for other rules.
      notes: reuse that did not happen and why, a recompute ratio that nobody named, an index that
        scans all keys and why; empty when everything went as asked.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    method: str
    sources: list[Source]
    timings: dict[str, float]
    counts: dict[str, int]
    flops: int
    reuse: list[PartReuse]
    indexes: dict[str, int]
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain values with exactly these names, ready for JSON."""
        return dataclasses.asdict(self)


class Stream:
    """Iterates over the answer's text pieces; ``result`` is set once it is exhausted."""

    def __init__(self, pieces: Iterator[list[str] | list[Result]]) -> None:
        self._pieces = pieces
        self.result: Result | None = None

    def __iter__(self) -> Iterator[str]:
        for item in self._pieces:
            if isinstance(item[0], Result):
                self.result = item[0]
            elif item[0]:
                yield item[0]


def generate(
    question: Text | Sequence[Text],
    *,
    kb: KnowledgeBase | None = None,
    documents: Sequence[Text] | None = None,
    model: Model | None = None,
    method: str | Method = "turborag",
    recompute_ratio: float | None = None,
    misses: Misses | None = None,
    prefix_cache: bool | None = None,
    decode: str | DecodeRule | None = None,
    template: str | PromptTemplate | None = None,
    k: int = 5,
    where: Mapping[str, Any] | None = None,
    max_new_tokens: int = 64,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    stop: Sequence[str] = (),
    stream: bool = False,
    batch_size: int = 8,
) -> Any:
    """Answer questions from cached chunk KV.

    Args:
      question: text or token ids; a list of texts (or of id sequences) is a batch.
      kb: a knowledge base; its ``k`` best chunks are used, of documents whose metadata ``where``
        allows, such as {"year": {"$gte": 2020}}.
      documents: each one chunk, its KV kept in memory by the model's engine; with ``kb`` as well
        they are used instead of retrieval, and kept in its store.
      model: needed without ``kb``.
      method: a preset of methods.METHODS or a Method.
      recompute_ratio: share of the chunk tokens that are computed again, 0..1, for methods with a
        selector. None: for a method that is named, what the gate of the knowledge base found
        (`jaxrag kb gate`), else the method's own.
      misses: as in Method; the method's own when None.
      prefix_cache: as in Method; the method's own when None.
      decode: how generated tokens attend, a name of decode.DECODE_RULES or a DecodeRule; the
        method's own when None.
      template: a prompts.TEMPLATES name, TOML path or PromptTemplate; that of the knowledge base,
        else of the model, else of the method, when None.
      max_new_tokens: upper bound of the answer.
      sampling: greedy when None; for a list of questions one for all of them, seed included, or a
        list with one for each.
      stop: strings that end the answer and are not part of it.
      stream: return a Stream of text pieces (one question only).
      batch_size: requests that are prefilled and decoded together.

    Returns:
      A Result, a list of them for a list of questions, or a Stream.

    Raises:
      RequestError: an unknown method, contradictory arguments, or a prompt beyond the context or
        the cache; nothing is served then.
      TokenizerError: text for a model without a tokenizer.
    """
    if kb is None and documents is None:
        raise RequestError("generate needs kb= or documents=; pass one of them")
    if batch_size < 1:
        raise RequestError(f"batch_size={batch_size}: expected a positive integer")
    settings = resolve(
        kb=kb,
        model=model,
        method=method,
        recompute_ratio=recompute_ratio,
        misses=misses,
        prefix_cache=prefix_cache,
        decode=decode,
        template=template,
        k=k,
        max_new_tokens=max_new_tokens,
        stop=stop,
        where=where,
    )
    single = isinstance(question, str) or is_ids(question)
    if stream and not single:
        raise RequestError("stream=True takes one question, got a list; call generate for each")
    questions = [cast(Text, question)] if single else list(cast(Sequence[Text], question))
    samplings = _one_each(sampling, len(questions))
    ready = [
        prepare(settings, text, documents, own)
        for text, own in zip(questions, samplings, strict=True)
    ]
    if stream:
        return Stream(_run(settings, ready, block=1))
    results: dict[int, Result] = {}
    for batch in serve(settings, ready, batch_size):
        results |= batch
    ordered = [results[i] for i in range(len(ready))]
    return ordered[0] if single else ordered


def _one_each(
    sampling: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * count
    if len(sampling) != count:
        raise RequestError(
            f"sampling has {len(sampling)} entries for {count} question(s); give one for each, or "
            "a single SamplingParams for all"
        )
    return list(sampling)


def serve(
    settings: Settings, questions: Sequence[ReadyQuestion], batch_size: int
) -> Iterator[dict[int, Result]]:
    """Serve questions in batches: yields index into ``questions`` -> Result, a batch at a time.

    Requests of similar length run together, so that little of a batch is padding; a batch is
    smaller than ``batch_size`` where the cache holds no more at once.
    """
    requests = [question.request for question in questions]
    for batch in engine_of(settings.model).batches(requests, batch_size):
        *_, last = _run(settings, [questions[i] for i in batch], block=DECODE_BLOCK)
        yield dict(zip(batch, last, strict=True))  # type: ignore[arg-type]


def _run(
    settings: Settings, questions: Sequence[ReadyQuestion], block: int
) -> Iterator[list[str] | list[Result]]:
    """Serve one batch: yields the new text of every answer per step, and last the Results."""
    tokenizer = settings.model.tokenizer
    answers = [
        Answer(settings.stop, None if tokenizer is None else tokenizer.stream()) for _ in questions
    ]
    engine = engine_of(settings.model)
    batch = engine.run([question.request for question in questions], block)
    with contextlib.closing(iter(batch)) as steps:
        for rows in steps:
            shown = []
            for index, (answer, row) in enumerate(zip(answers, rows, strict=True)):
                shown.append(answer.push(row.new, row.finish_reason))
                if answer.finish_reason is not None:
                    batch.stop(index)
            yield shown
    yield [
        _result(settings, *parts) for parts in zip(questions, answers, batch.outcomes, strict=True)
    ]


def _result(
    settings: Settings, question: ReadyQuestion, answer: Answer, outcome: Outcome
) -> Result:
    assert answer.finish_reason is not None
    retrieve, load = question.retrieve_seconds, outcome.load_seconds
    return Result(
        text=answer.text,
        token_ids=answer.token_ids,
        finish_reason=answer.finish_reason,
        method=settings.method.name,
        sources=question.sources,
        timings={
            "retrieve": retrieve,
            "load": load,
            "prefill": outcome.prefill_seconds,
            "ttft": retrieve + load + outcome.prefill_seconds,
            "per_token": outcome.per_token,
        },
        counts=token_counts(outcome.reuse),
        flops=outcome.flops,
        reuse=outcome.reuse,
        indexes=outcome.indexes,
        notes=[*question.notes, *outcome.notes],
    )

"""generate(): a question and retrieved or given chunks in, an answer and its account out."""

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from jaxrag.decode import Account, DecodeRule
from jaxrag.engine.decoding import SamplingRows, decode, host_search, reserved
from jaxrag.engine.mapping import Mapped, map_request, unmap
from jaxrag.engine.prefill import prefill_observed
from jaxrag.engine.reuse import PartReuse, account, token_counts
from jaxrag.engine.sampling import Sampling
from jaxrag.errors import RequestError
from jaxrag.knowledge_base import KnowledgeBase
from jaxrag.methods import Method, Misses
from jaxrag.models.flops import turborag_flops
from jaxrag.models.model import Model
from jaxrag.serve.output import Answer, FinishReason
from jaxrag.serve.questions import (
    DECODE_BLOCK,
    Request,
    Settings,
    Source,
    Text,
    is_ids,
    pages_of,
    prepare,
    resolve,
)
from jaxrag.text.prompts import PromptTemplate

INDEX_COUNTS = ("keys", "stored", "trained")  # of decode.Account


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
    sampling: Sampling | Sequence[Sampling] | None = None,
    stop: Sequence[str] = (),
    stream: bool = False,
    batch_size: int = 8,
) -> Any:
    """Answer questions from cached chunk KV.

    Args:
      question: text or token ids; a list of texts (or of id sequences) is a batch.
      kb: a knowledge base; its ``k`` best chunks are used, of documents whose metadata ``where``
        allows, such as {"year": {"$gte": 2020}}.
      documents: each one chunk, its KV kept in memory by the model object; with ``kb`` as well they
        are used instead of retrieval, and kept in its store.
      model: needed without ``kb``. method: a preset of methods.METHODS or a Method.
      recompute_ratio: share of the chunk tokens that are computed again, 0..1, for methods with a
        selector. None: for a method that is named, what the gate of the knowledge base found
        (`jaxrag kb gate`), else the method's own.
      misses, prefix_cache: as in Method; the method's own when None.
      decode: how generated tokens attend, a name of decode.DECODE_RULES or a DecodeRule; the
        method's own when None.
      template: a prompts.TEMPLATES name, TOML path or PromptTemplate; that of the knowledge base,
        else of the model, else of the method, when None. max_new_tokens: upper bound of the answer.
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
    requests = [
        prepare(settings, text, documents, own)
        for text, own in zip(questions, samplings, strict=True)
    ]
    if stream:
        return Stream(_run(settings, requests, block=1))
    results: dict[int, Result] = {}
    for batch in serve(settings, requests, batch_size):
        results |= batch
    ordered = [results[i] for i in range(len(requests))]
    return ordered[0] if single else ordered


def _one_each(sampling: Sampling | Sequence[Sampling] | None, count: int) -> list[Sampling]:
    if sampling is None or isinstance(sampling, Sampling):
        return [sampling or Sampling()] * count
    if len(sampling) != count:
        raise RequestError(
            f"sampling has {len(sampling)} entries for {count} question(s); give one for each, or "
            "a single Sampling for all"
        )
    return list(sampling)


def serve(
    settings: Settings, requests: Sequence[Request], batch_size: int
) -> Iterator[dict[int, Result]]:
    """Serve requests in batches: yields index into ``requests`` -> Result, a batch at a time.

    Requests of similar length run together, so that little of a batch is padding; a batch is
    smaller than ``batch_size`` where the cache holds no more at once.
    """
    for batch in batches(settings, requests, batch_size):
        *_, last = _run(settings, [requests[i] for i in batch], block=DECODE_BLOCK)
        yield dict(zip(batch, last, strict=True))  # type: ignore[arg-type]


def batches(
    settings: Settings, requests: Sequence[Request], batch_size: int
) -> Iterator[list[int]]:
    """Indices of the requests that run together; all of them once, the shortest prompts first."""
    room = settings.model.cache.owners.num_pages
    waiting = sorted(range(len(requests)), key=lambda i: requests[i].prompt.num_tokens)
    while waiting:
        size = min(batch_size, len(waiting))
        while size > 1 and pages_of(settings, [requests[i] for i in waiting[:size]]) > room:
            size -= 1
        yield waiting[:size]
        waiting = waiting[size:]


def _run(
    settings: Settings, requests: Sequence[Request], block: int
) -> Iterator[list[str] | list[Result]]:
    """Serve one batch: yields the new text of every request per block, and last the Results."""
    model = settings.model
    start = time.perf_counter()
    mapped: list[Mapped] = []
    rule = settings.method.decode
    host = None if rule.searches is None else host_search(model)
    numbers = [] if host is None else [host.admit() for _ in requests]
    try:
        reserve = reserved(settings.max_new_tokens, block)
        for request in requests:
            prompt, indexing = request.prompt, settings.indexing
            mapped.append(
                map_request(model, settings.store, settings.method, prompt, reserve, indexing)
            )
        load_seconds = time.perf_counter() - start
        observe = rule.observe if reserve else None  # one token needs no rule
        logits, table, bank = prefill_observed(model, mapped, observe)
        rows = SamplingRows.of([r.sampling for r in requests], logits.shape[0])
        answers = [_new_answer(settings) for _ in requests]
        blocks = decode(model, mapped, table, logits, rows, block, rule, bank, reserve, numbers)
        first_at, decoded = 0.0, 0
        for ids in blocks:
            if not first_at:
                first_at = time.perf_counter()
            else:
                decoded += block
            shown = [
                "".join(answer.push(int(token)) for token in row)
                for answer, row in zip(answers, ids, strict=False)
            ]
            yield shown
            if all(answer.finish_reason for answer in answers):
                break
        end = time.perf_counter()
        searched = Account() if host is None else host.account_of(numbers)
    finally:
        if host is not None:
            host.release(numbers)
        for part in mapped:
            unmap(model, part)
        if model.cache.pool.k.is_deleted():  # interrupted while the pool was donated
            model.forget_cache()
    notes = [f"decode rule {rule.name!r}: {note}" for note in searched.notes]
    indexes = {} if host is None else {n: getattr(searched, n) for n in INDEX_COUNTS}
    prefill_seconds = first_at - start - load_seconds
    per_token = (end - first_at) / decoded if decoded else 0.0
    yield [
        _result(settings, *parts, load_seconds, prefill_seconds, per_token, notes, indexes)
        for parts in zip(requests, mapped, answers, strict=True)
    ]


def _new_answer(settings: Settings) -> Answer:
    tokenizer = settings.model.tokenizer
    eos = set(settings.model.config.eos_ids) | set(tokenizer.eos_ids if tokenizer else ())
    stream = None if tokenizer is None else tokenizer.stream()
    return Answer(settings.max_new_tokens, frozenset(eos), settings.stop, stream)


def _result(
    settings: Settings,
    request: Request,
    mapped: Mapped,
    answer: Answer,
    load_seconds: float,
    prefill_seconds: float,
    per_token: float,
    notes: Sequence[str],
    indexes: Mapping[str, int],
) -> Result:
    config = settings.model.config
    maintained = settings.kb.encoders if settings.kb and request.retrieved else None
    reuse = account(settings.method, mapped, maintained)
    flops = turborag_flops(config, len(mapped.ids), request.prompt.num_tokens)
    flops += 0 if mapped.choice is None else mapped.choice.flops
    for part in mapped.loaded:
        flops += sum(turborag_flops(config, *run) for run in part.runs)
    assert answer.finish_reason is not None
    return Result(
        text=answer.text,
        token_ids=answer.token_ids,
        finish_reason=answer.finish_reason,
        method=settings.method.name,
        sources=request.sources,
        timings={
            "retrieve": request.retrieve_seconds,
            "load": load_seconds,
            "prefill": prefill_seconds,
            "ttft": request.retrieve_seconds + load_seconds + prefill_seconds,
            "per_token": per_token,
        },
        counts=token_counts(reuse),
        flops=flops,
        reuse=reuse,
        indexes=dict(indexes),
        notes=[*request.notes, *(n for part in mapped.loaded for n in part.notes), *notes],
    )

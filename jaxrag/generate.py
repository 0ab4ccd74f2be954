"""generate(): a question and retrieved or given chunks in, an answer and its account out."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxrag.answer import Answer, FinishReason, SamplingRows, decode, reserved
from jaxrag.errors import RequestError
from jaxrag.flops import turborag_flops
from jaxrag.knowledge_base import KnowledgeBase
from jaxrag.methods import Method, method_named
from jaxrag.models.model import Model, as_token_ids
from jaxrag.prefill import Mapped, Prompt, check_length, map_request, prefill, unmap
from jaxrag.prompts import PromptTemplate, template_named
from jaxrag.sampling import Sampling
from jaxrag.store import KVStore
from jaxrag.types import HostArray

Text = str | Sequence[int] | HostArray  # text, or token ids where a model has no tokenizer

DECODE_BLOCK = 8  # tokens between two waits for the device when nobody watches


@dataclasses.dataclass(frozen=True)
class Source:
    """A chunk that stood in the prompt, in prompt order."""

    document_id: str
    chunk_index: int
    file: str | None
    score: float | None
    text: str


@dataclasses.dataclass(frozen=True)
class Result:
    """An answer with its account.

    Attributes:
      timings: seconds: retrieve, load (storage and encoding to pool), prefill, ttft (all of them
        up to the first token on the host), per_token (mean of the others). Requests that ran as
        one batch share load and prefill.
      counts: chunk tokens: reused + recomputed + encoded; encoded were not in the store.
      flops: prefill to the first token, TurboRAG appendix C, on-the-fly encoding included.
      notes: reuse that did not happen and why; empty when everything went as asked.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    method: str
    sources: list[Source]
    timings: dict[str, float]
    counts: dict[str, int]
    flops: int
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain values with exactly these names, ready for JSON."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """A chunk that was retrieved or given, before the template wraps it."""

    source: Source
    title: str
    ids: HostArray  # [T] int32


@dataclasses.dataclass
class _Request:
    prompt: Prompt
    sources: list[Source]
    sampling: Sampling
    retrieve_seconds: float
    notes: list[str]


@dataclasses.dataclass(frozen=True)
class _Options:
    model: Model
    store: KVStore
    method: Method
    max_new_tokens: int
    stop: tuple[str, ...]


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
    template: str | PromptTemplate | None = None,
    k: int = 5,
    max_new_tokens: int = 64,
    sampling: Sampling | None = None,
    stop: Sequence[str] = (),
    stream: bool = False,
    batch_size: int = 8,
) -> Any:
    """Answer questions from cached chunk KV.

    Args:
      question: text or token ids; a list of texts (or of id sequences) is a batch.
      kb: a knowledge base; its ``k`` best chunks are used. Or documents: each one chunk, its KV kept
        in memory by the model object; with ``kb`` as well they are used instead of retrieval.
      model: needed without ``kb``. method: a preset of methods.METHODS or a Method.
      template: a prompts.TEMPLATES name, TOML path or PromptTemplate; the knowledge base's own, or
        the method's, when None. max_new_tokens: upper bound of the answer.
      sampling: greedy when None. In a batch, every request uses the same seed.
      stop: strings that end the answer and are not part of it.
      stream: return a Stream of text pieces (one question only).
      batch_size: requests that are prefilled and decoded together.

    Returns:
      A Result, a list of them for a list of questions, or a Stream.

    Raises:
      RequestError: an unknown method, contradictory arguments, or a prompt beyond the context.
      TokenizerError: text for a model without a tokenizer.
    """
    options, chosen = _options(kb, documents, model, method, template, max_new_tokens, stop)
    single = isinstance(question, str) or _is_ids(question)
    if k < 1 or batch_size < 1:
        raise RequestError(f"k={k}, batch_size={batch_size}: expected positive integers")
    if stream and not single:
        raise RequestError("stream=True takes one question, got a list; call generate for each")
    questions: list[Text] = [question] if single else list(question)  # type: ignore[list-item]
    requests = [
        _prepare(q, kb, documents, options, chosen, k, sampling or Sampling()) for q in questions
    ]
    for request in requests:
        check_length(options.model, request.prompt, max_new_tokens)
    if stream:
        return Stream(_run(options, requests, block=1))
    results: dict[int, Result] = {}
    # Requests of similar length run together, so that little of a batch is padding.
    order = sorted(range(len(requests)), key=lambda i: requests[i].prompt.num_tokens)
    for start in range(0, len(order), batch_size):
        members = order[start : start + batch_size]
        *_, last = _run(options, [requests[i] for i in members], block=DECODE_BLOCK)
        results |= dict(zip(members, last, strict=True))  # type: ignore[arg-type]
    ordered = [results[i] for i in range(len(requests))]
    return ordered[0] if single else ordered


def _is_ids(x: Any) -> bool:
    """Is this one sequence of token ids, rather than several questions?"""
    if isinstance(x, np.ndarray):
        return x.ndim == 1
    return bool(x) and all(isinstance(i, int | np.integer) for i in x)


def _options(
    kb: KnowledgeBase | None,
    documents: Sequence[Text] | None,
    model: Model | None,
    method: str | Method,
    template: str | PromptTemplate | None,
    max_new_tokens: int,
    stop: Sequence[str],
) -> tuple[_Options, PromptTemplate]:
    method = method_named(method)
    if kb is None and documents is None:
        raise RequestError("generate needs kb= or documents=; pass one of them")
    if kb is not None and model is not None and kb.model is not model:
        raise RequestError("model= differs from the knowledge base's model; pass only kb=")
    model = model if kb is None else kb.model
    if model is None:
        raise RequestError("no model: pass model=, or open the knowledge base with one")
    if max_new_tokens < 1:
        raise RequestError(f"max_new_tokens={max_new_tokens}: expected a positive integer")
    if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
        raise RequestError(f"stop={stop!r}: expected a list of non-empty strings")
    if stop:
        model.text_tokenizer()
    method.check(model.config)
    chosen = template if template is not None else (kb.template if kb else method.template)
    if isinstance(chosen, str):
        chosen = template_named(chosen)
    store: KVStore = model.memory if kb is None else kb.store
    return _Options(model, store, method, max_new_tokens, tuple(stop)), chosen


def _prepare(
    question: Text,
    kb: KnowledgeBase | None,
    documents: Sequence[Text] | None,
    options: _Options,
    template: PromptTemplate,
    k: int,
    sampling: Sampling,
) -> _Request:
    """Retrieve or take the chunks, and turn every part into token ids."""
    model = options.model
    start = time.perf_counter()
    if documents is not None:
        found = [_given(i, document, model) for i, document in enumerate(documents)]
    else:
        found = _retrieve(question, kb, k)
        if template.chunk_order == "best_last":
            found = found[::-1]
    retrieve_seconds = time.perf_counter() - start
    notes = [] if found else ["no chunk was found for the question; it was asked without any"]
    if isinstance(question, str):
        tokenizer = model.text_tokenizer()
        if not question.strip():
            raise RequestError("the question is empty; ask something")
        prefix = template.prefix_ids(tokenizer)
        final = template.final_ids(tokenizer, question)
        chunks = tuple(template.chunk_ids(tokenizer, chunk.ids, chunk.title) for chunk in found)
    else:  # token ids stand for themselves: no template, as there may be no tokenizer
        prefix = np.zeros(0, np.int32)
        final = as_token_ids(question, model.config, "question")
        chunks = tuple(chunk.ids for chunk in found)
    sources = [chunk.source for chunk in found]
    return _Request(Prompt(prefix, chunks, final), sources, sampling, retrieve_seconds, notes)


def _retrieve(question: Text, kb: KnowledgeBase | None, k: int) -> list[_Chunk]:
    assert kb is not None  # _options refused neither documents nor a knowledge base
    if not isinstance(question, str):
        raise RequestError("retrieval needs the question as text; pass documents= with token ids")
    return [
        _Chunk(Source(h.document_id, h.chunk_index, h.file, h.score, h.text), h.title, h.ids)
        for h in kb.search(question, k)
    ]


def _given(index: int, document: Text, model: Model) -> _Chunk:
    """A document passed by the caller, as one chunk."""
    what = f"documents[{index}]"
    if isinstance(document, str):
        ids, text = model.text_tokenizer().encode(document), document
        if not document.strip():
            raise RequestError(f"{what} is empty; leave it out")
    else:
        ids, text = as_token_ids(document, model.config, what), ""
    return _Chunk(Source(what, 0, None, None, text), "", ids)


def _run(
    options: _Options, requests: Sequence[_Request], block: int
) -> Iterator[list[str] | list[Result]]:
    """Serve one batch: yields the new text of every request per block, and last the Results."""
    model = options.model
    start = time.perf_counter()
    mapped: list[Mapped] = []
    try:
        reserve = reserved(options.max_new_tokens, block)
        for request in requests:
            mapped.append(
                map_request(model, options.store, options.method, request.prompt, reserve)
            )
        load_seconds = time.perf_counter() - start
        logits, table = prefill(model, mapped)
        settings = SamplingRows.of([r.sampling for r in requests], logits.shape[0])
        answers = [_new_answer(options) for _ in requests]
        blocks = decode(model, mapped, table, logits, settings, block)
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
    finally:
        for part in mapped:
            unmap(model, part)
        if model.cache.pool.k.is_deleted():  # interrupted while the pool was donated
            model.forget_cache()
    prefill_seconds = first_at - start - load_seconds
    per_token = (end - first_at) / decoded if decoded else 0.0
    yield [
        _result(options, *parts, load_seconds, prefill_seconds, per_token)
        for parts in zip(requests, mapped, answers, strict=True)
    ]


def _new_answer(options: _Options) -> Answer:
    tokenizer = options.model.tokenizer
    eos = set(options.model.config.eos_ids) | set(tokenizer.eos_ids if tokenizer else ())
    stream = None if tokenizer is None else tokenizer.stream()
    return Answer(options.max_new_tokens, frozenset(eos), options.stop, stream)


def _result(
    options: _Options,
    request: _Request,
    mapped: Mapped,
    answer: Answer,
    load_seconds: float,
    prefill_seconds: float,
    per_token: float,
) -> Result:
    prompt, config = request.prompt, options.model.config
    chunk_tokens = sum(map(len, prompt.chunks))
    encoded = 0
    if options.method.encoder is not None and prompt.chunks:
        flags = mapped.loaded[-1].encoded
        encoded = sum(len(c) for c, was in zip(prompt.chunks, flags, strict=True) if was)
    recomputed = chunk_tokens if options.method.encoder is None else 0
    flops = turborag_flops(config, len(mapped.ids), prompt.num_tokens)
    for part in mapped.loaded:
        for resident, was in zip(part.residents, part.encoded, strict=True):
            flops += turborag_flops(config, resident.tokens, resident.tokens) if was else 0
    assert answer.finish_reason is not None
    return Result(
        text=answer.text,
        token_ids=answer.token_ids,
        finish_reason=answer.finish_reason,
        method=options.method.name,
        sources=request.sources,
        timings={
            "retrieve": request.retrieve_seconds,
            "load": load_seconds,
            "prefill": prefill_seconds,
            "ttft": request.retrieve_seconds + load_seconds + prefill_seconds,
            "per_token": per_token,
        },
        counts={
            "reused": chunk_tokens - recomputed - encoded,
            "recomputed": recomputed,
            "encoded": encoded,
        },
        flops=flops,
        notes=request.notes + [note for part in mapped.loaded for note in part.notes],
    )



"""generate(): a question and retrieved or given chunks in, an answer and its account out."""

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

from jaxrag.base.errors import RequestError
from jaxrag.base.shapes import bucket
from jaxrag.engine.sampling import SamplingParams
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.library.knowledge_base.search import SearchMode
from jaxrag.models.model import Model
from jaxrag.models.text.prompts import PromptTemplate
from jaxrag.reuse.decode import DecodeRule
from jaxrag.reuse.methods import Method, Misses
from jaxrag.serve.answers import AsyncStream, Result, Stream, answer, serve
from jaxrag.serve.door import (
    Conversation,
    EarlierTurns,
    Text,
    check_counts,
    check_documents,
    check_kinds,
    conversation_of,
    questions_of,
    samplings_of,
)
from jaxrag.serve.options import AnswerOptions, ReuseOptions, SearchOptions
from jaxrag.serve.questions import ReadyQuestion, Settings, Unanswerable, prepare, resolve

_ROWS = 8  # of the program that serves several questions


class Message(TypedDict):
    """One message of a conversation: of "system" (first, or not at all), "user" or "assistant"."""

    role: str
    content: Text


class Options(TypedDict, total=False):
    """What ``generate`` and ``agenerate`` take beside the question, for those who check types."""

    kb: KnowledgeBase | None
    documents: Sequence[Text] | None
    blocks: Sequence[Text]
    earlier_turns: EarlierTurns
    model: Model | None
    method: str | Method
    recompute_ratio: float | None
    misses: Misses | None
    prefix_cache: bool | None
    decode: str | DecodeRule | None
    template: str | PromptTemplate | None
    k: int
    where: Mapping[str, Any] | None
    search_mode: SearchMode | None
    min_score: float | None
    unanswerable: Unanswerable
    max_new_tokens: int
    stop: Sequence[str]


class GenerateOptions(Options, total=False):
    """Those of ``generate``."""

    sampling: SamplingParams | Sequence[SamplingParams] | None
    batch_size: int | None


class AgenerateOptions(Options, total=False):
    """Those of ``agenerate``."""

    sampling: SamplingParams | None
    batch_size: int


@overload
def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts, too
    question: Text, *, stream: Literal[False] = False, **options: Unpack[GenerateOptions]
) -> Result: ...
@overload
def generate(
    question: Text, *, stream: Literal[True], **options: Unpack[GenerateOptions]
) -> Stream: ...
@overload
def generate(
    question: Sequence[Text], *, stream: Literal[False] = False, **options: Unpack[GenerateOptions]
) -> list[Result]: ...
@overload
def generate(
    *,
    messages: Sequence[Message],
    stream: Literal[False] = False,
    **options: Unpack[GenerateOptions],
) -> Result: ...
@overload
def generate(
    *, messages: Sequence[Message], stream: Literal[True], **options: Unpack[GenerateOptions]
) -> Stream: ...
def generate(
    question: Text | Sequence[Text] | None = None,
    *,
    messages: Sequence[Message] | None = None,
    kb: KnowledgeBase | None = None,
    documents: Sequence[Text] | None = None,
    blocks: Sequence[Text] = (),
    earlier_turns: EarlierTurns = "exact",
    model: Model | None = None,
    method: str | Method = ReuseOptions.method,
    recompute_ratio: float | None = None,
    misses: Misses | None = None,
    prefix_cache: bool | None = None,
    decode: str | DecodeRule | None = None,
    template: str | PromptTemplate | None = None,
    k: int = SearchOptions.k,
    where: Mapping[str, Any] | None = None,
    search_mode: SearchMode | None = None,
    min_score: float | None = None,
    unanswerable: Unanswerable = "abstain",
    max_new_tokens: int = AnswerOptions.max_new_tokens,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    stop: Sequence[str] = (),
    stream: bool = False,
    batch_size: int | None = None,
) -> Any:
    """Answer questions from cached chunk KV.

    Args:
      question: text or token ids; a list of texts (or of id sequences) is a batch.
      messages: instead of a question a conversation, its last message the question; what was said
        stays in the pool, and is not computed again for the next one.
      kb: a knowledge base; its ``k`` best chunks are used, of documents whose metadata ``where``
        allows, such as {"year": {"$gte": 2020}}.
      documents: each one chunk, its KV kept in memory by the model's engine; with ``kb`` as well
        they are used instead of retrieval, and kept in its store.
      blocks: texts or token ids that stand as they are before all chunks, such as examples or
        functions, each with KV of its own that is kept as that of ``documents`` is
        (Block-Attention section 2.2).
      earlier_turns: how answered turns of ``messages`` are read: "exact", over all that precedes
        them; or "blocks", as chunks, each for itself, which is approximate.
      model: needed without ``kb``.
      method: a preset of methods.METHODS or a Method.
      recompute_ratio: share of the chunk tokens that are computed again, 0..1, for methods with a
        selector. None: for a method that is named, what the gate of the knowledge base found
        (`jaxrag kb gate`), else the method's own.
      misses: as in Method; the method's own when None.
      prefix_cache: as in Method; the method's own when None. With ``messages``, False leaves no
        turn in the pool and looks for none.
      decode: how generated tokens attend, a name of decode.DECODE_RULES or a DecodeRule; the
        method's own when None.
      template: a prompts.TEMPLATES name, TOML path or PromptTemplate; that of the knowledge base,
        else of the model, else of the method, when None.
      search_mode: "bm25", "vector" or "hybrid"; as of ``KnowledgeBase.search``.
      min_score: least score of a chunk; what it means depends on the search, see there.
      unanswerable: what to do where ``where`` or ``min_score`` leave no chunk: "abstain" does not
        ask the model and says so, with the finish_reason "abstained"; "ask" asks it without any.
      max_new_tokens: upper bound of the answer.
      sampling: greedy when None; for a list of questions one for all of them, seed included, or a
        list with one for each.
      stop: strings that end the answer and are not part of it.
      stream: return a Stream of text pieces (one question only).
      batch_size: rows of the program that decodes: so many requests, of this call and of others
        with as many, decode together. None: 1 for one question, 8 for a list.

    Returns:
      A Result, a list of them for a list of questions, or a Stream.

    Raises:
      RequestError: an unknown method, contradictory arguments, or a prompt beyond the context or
        the cache; nothing is served then.
      TokenizerError: text for a model without a tokenizer.
    """
    check_kinds(stream=stream)
    if batch_size is not None:
        check_counts(batch_size=batch_size)
    keeps = prefix_cache is not False
    questions, single = _asked(question, messages, earlier_turns, keeps)
    _check_given("generate", kb, documents, blocks, messages)
    samplings = samplings_of(sampling, len(questions))
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
        search_mode=search_mode,
        min_score=min_score,
        unanswerable=unanswerable,
    )
    if stream and not single:
        raise RequestError("stream=True takes one question, got a list; call generate for each")
    ready = [
        prepare(settings, text, documents, own, blocks)
        for text, own in zip(questions, samplings, strict=True)
    ]
    if stream:
        return Stream(settings, _in_rows(ready[0], batch_size or 1))
    rows = batch_size or (1 if single else min(_ROWS, bucket(len(ready), 1)))
    results: dict[int, Result] = {}
    for done in serve(settings, ready, rows):
        results |= done
    ordered = [results[i] for i in range(len(ready))]
    return ordered[0] if single else ordered


@overload
def agenerate(
    question: Text, *, stream: Literal[False] = False, **options: Unpack[AgenerateOptions]
) -> Coroutine[Any, Any, Result]: ...
@overload
def agenerate(
    question: Text, *, stream: Literal[True], **options: Unpack[AgenerateOptions]
) -> AsyncStream: ...
@overload
def agenerate(
    *,
    messages: Sequence[Message],
    stream: Literal[False] = False,
    **options: Unpack[AgenerateOptions],
) -> Coroutine[Any, Any, Result]: ...
@overload
def agenerate(
    *, messages: Sequence[Message], stream: Literal[True], **options: Unpack[AgenerateOptions]
) -> AsyncStream: ...
def agenerate(
    question: Text | None = None,
    *,
    messages: Sequence[Message] | None = None,
    kb: KnowledgeBase | None = None,
    documents: Sequence[Text] | None = None,
    blocks: Sequence[Text] = (),
    earlier_turns: EarlierTurns = "exact",
    model: Model | None = None,
    method: str | Method = ReuseOptions.method,
    recompute_ratio: float | None = None,
    misses: Misses | None = None,
    prefix_cache: bool | None = None,
    decode: str | DecodeRule | None = None,
    template: str | PromptTemplate | None = None,
    k: int = SearchOptions.k,
    where: Mapping[str, Any] | None = None,
    search_mode: SearchMode | None = None,
    min_score: float | None = None,
    unanswerable: Unanswerable = "abstain",
    max_new_tokens: int = AnswerOptions.max_new_tokens,
    sampling: SamplingParams | None = None,
    stop: Sequence[str] = (),
    stream: bool = False,
    batch_size: int = _ROWS,
) -> Any:
    """Answer one question beside others, in asyncio; arguments and errors as ``generate``.

    ``await agenerate(...)`` is a Result, ``async for piece in agenerate(..., stream=True)`` goes
    over its text. Retrieval runs on a thread; cancelling the task, or leaving the iteration, aborts
    the request. Tasks whose ``batch_size`` is equal decode together.
    """

    def prepared() -> tuple[Settings, ReadyQuestion]:
        check_counts(batch_size=batch_size)
        keeps = prefix_cache is not False
        asked, single = _asked(question, messages, earlier_turns, keeps)
        if not single:
            raise RequestError("agenerate takes one question, got a list; call it for each")
        _check_given("agenerate", kb, documents, blocks, messages)
        [own] = samplings_of(sampling, 1)
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
            search_mode=search_mode,
            min_score=min_score,
            unanswerable=unanswerable,
        )
        ready = prepare(settings, asked[0], documents, own, blocks)
        return settings, _in_rows(ready, batch_size)

    check_kinds(stream=stream)
    return AsyncStream(prepared) if stream else _answered(prepared)


def _asked(
    question: Any, messages: Any, earlier: Any, keeps: bool
) -> tuple[list[Text] | list[Conversation], bool]:
    """What is asked, and whether it is one thing. Raises RequestError."""
    if messages is None:
        if earlier != "exact":
            raise RequestError(f"earlier_turns={earlier!r} is about messages=; pass them with it")
        return questions_of(question)
    if question is not None:
        raise RequestError("a question and messages= were given; the question is the last message")
    return [conversation_of(messages, earlier, keeps=keeps)], True


def _check_given(caller: str, kb: Any, documents: Any, blocks: Any, messages: Any) -> None:
    """Refuse a question with nothing to answer from, and what is no list: RequestError."""
    check_documents(documents)
    check_documents(blocks, "blocks")
    if kb is None and documents is None and messages is None and not len(blocks):
        raise RequestError(f"{caller} needs kb= or documents=; pass one of them")


async def _answered(prepared: Callable[[], tuple[Settings, ReadyQuestion]]) -> Result:
    return await answer(*await asyncio.to_thread(prepared))


def _in_rows(ready: ReadyQuestion, rows: int) -> ReadyQuestion:
    """The question, to be decoded by a program of so many rows."""
    return dataclasses.replace(ready, request=dataclasses.replace(ready.request, rows=rows))

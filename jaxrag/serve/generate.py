"""generate(): a question and retrieved or given chunks in, an answer and its account out."""

import asyncio
import dataclasses
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack, get_type_hints, overload

from jaxrag.base.errors import RequestError
from jaxrag.base.shapes import bucket
from jaxrag.engine.sampling_params import SamplingParams
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.library.options import NeighboursFrom, SearchMode
from jaxrag.models.model import Model
from jaxrag.models.text.prompts import PromptTemplate
from jaxrag.reuse.decode import DecodeRule
from jaxrag.reuse.methods import Method
from jaxrag.reuse.names import Misses
from jaxrag.serve.answers import AsyncStream, Result, Stream, answer, serve
from jaxrag.serve.ask import (
    Ask,
    Cite,
    EarlierTurns,
    Plain,
    Unanswerable,
    check_count,
    check_flag,
    check_texts,
)
from jaxrag.serve.conversation import Conversation, Text, conversation_of, questions_of
from jaxrag.serve.questions import ReadyQuestion, prepare, resolve

_ROWS = 8  # of the program that serves several questions


class Message(TypedDict):
    """One message of a conversation: of "system" (first, or not at all), "user" or "assistant"."""

    role: str
    content: Text


class AskFields(TypedDict, total=False):
    """What ``generate`` and ``agenerate`` take beside the question: objects, rows, and ``Ask``."""

    kb: KnowledgeBase | None
    documents: Sequence[Text] | None
    neighbours: NeighboursFrom
    blocks: Sequence[Text]
    earlier_turns: EarlierTurns
    plain: Plain
    passage_rules: str
    model: Model | None
    method: str | Method | None
    recompute_ratio: float | None
    misses: Misses | None
    prefix_cache: bool | None
    decode: str | DecodeRule | None
    template: str | PromptTemplate | None
    k: int
    where: Mapping[str, Any] | None
    search_mode: SearchMode | None
    min_score: float | None
    groups: Sequence[str] | None
    unanswerable: Unanswerable
    max_new_tokens: int
    sampling: SamplingParams | Sequence[SamplingParams] | None
    stop: Sequence[str]
    cite: Cite
    batch_size: int | None


@overload
def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts, too
    question: Text, *, stream: Literal[False] = False, **options: Unpack[AskFields]
) -> Result: ...
@overload
def generate(question: Text, *, stream: Literal[True], **options: Unpack[AskFields]) -> Stream: ...
@overload
def generate(
    question: Sequence[Text], *, stream: Literal[False] = False, **options: Unpack[AskFields]
) -> list[Result]: ...
@overload
def generate(
    *,
    messages: Sequence[Message],
    stream: Literal[False] = False,
    **options: Unpack[AskFields],
) -> Result: ...
@overload
def generate(
    *, messages: Sequence[Message], stream: Literal[True], **options: Unpack[AskFields]
) -> Stream: ...
def generate(
    question: Text | Sequence[Text] | None = None,
    *,
    messages: Sequence[Message] | None = None,
    stream: bool = False,
    **options: Unpack[AskFields],
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
      neighbours: where those of ``documents`` and ``blocks`` come from, for methods that encode
        chunks behind their neighbours, such as fusionrag: "corpus", the most similar chunks of
        ``kb``, refused without one; "prompt", the prompt's other given chunks, which no ingest
        could know: an oracle, and a note says so.
      blocks: texts or token ids that are put as they are before all chunks, such as examples or
        functions, each with KV of its own that is kept as that of ``documents`` is
        (Block-Attention section 2.2).
      earlier_turns: how answered turns of ``messages`` are read: "exact", over all that precedes
        them; or "blocks", as chunks, each for itself, which is approximate.
      plain: "passages": of ``messages`` without ``kb``, ``documents`` and ``blocks``, texts that
        were pasted into them are read as blocks are; needs a model with a chat template.
      passage_rules: how these are found: a name of configs/passages, or a TOML file.
      model: needed without ``kb``.
      method: a preset of methods.METHODS or a Method. None: turborag for a model that was trained
        to read chunks apart, and for a knowledge base that keeps no other KV; else primed,
        fusionrag or cacheblend, the first that the knowledge base keeps KV for.
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
      groups: that the caller belongs to, as of ``KnowledgeBase.search``; None is not limited.
      unanswerable: what to do where no chunk is found: "abstain" does not ask the model and says
        so, with the finish_reason "abstained"; "ask" asks it without any.
      max_new_tokens: upper bound of the answer.
      sampling: greedy when None; for a list of questions one for all of them, seed included, or a
        list with one for each.
      stop: strings that end the answer and are not part of it.
      cite: "spans": ``Result.citations`` says which passages the answer is from, measured by where
        the model looked when it chose each token; the answer is read once more for it. "marks":
        its text has "[1]" behind such parts, too, and comes whole where it is streamed. Nothing is
        cited where the model looked everywhere.
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
    _check_names("generate", options)
    alone = "stream=True takes one question, got a list; call generate for each"
    rows = options.get("batch_size")
    ready, single = _ready(
        "generate", question, messages, stream, options, rows, alone if stream else None
    )
    if stream:
        return Stream(ready[0])
    rows = rows or (1 if single else min(_ROWS, bucket(len(ready), 1)))
    results: dict[int, Result] = {}
    for done in serve(ready, rows):
        results |= done
    ordered = [results[i] for i in range(len(ready))]
    return ordered[0] if single else ordered


@overload
def agenerate(
    question: Text, *, stream: Literal[False] = False, **options: Unpack[AskFields]
) -> Coroutine[Any, Any, Result]: ...
@overload
def agenerate(
    question: Text, *, stream: Literal[True], **options: Unpack[AskFields]
) -> AsyncStream: ...
@overload
def agenerate(
    *,
    messages: Sequence[Message],
    stream: Literal[False] = False,
    **options: Unpack[AskFields],
) -> Coroutine[Any, Any, Result]: ...
@overload
def agenerate(
    *, messages: Sequence[Message], stream: Literal[True], **options: Unpack[AskFields]
) -> AsyncStream: ...
def agenerate(
    question: Text | None = None,
    *,
    messages: Sequence[Message] | None = None,
    stream: bool = False,
    **options: Unpack[AskFields],
) -> Any:
    """Answer one question beside others, in asyncio; arguments and errors as ``generate``.

    ``await agenerate(...)`` is a Result, ``async for piece in agenerate(..., stream=True)`` goes
    over its text. Retrieval runs on a thread; cancelling the task, or leaving the iteration, aborts
    the request. Tasks whose ``batch_size`` is equal decode together.
    """
    _check_names("agenerate", options)
    check_flag("stream", stream)

    def prepared() -> ReadyQuestion:
        alone = "agenerate takes one question, got a list; call it for each"
        rows = options.get("batch_size", _ROWS)
        return _ready("agenerate", question, messages, stream, options, rows, alone)[0][0]

    return AsyncStream(prepared) if stream else _answered(prepared)


async def _answered(prepared: Callable[[], ReadyQuestion]) -> Result:
    return await answer(await asyncio.to_thread(prepared))


def _ready(
    caller: str,
    question: Any,
    messages: Any,
    stream: bool,
    options: AskFields,
    rows: int | None,
    alone: str | None,
) -> tuple[list[ReadyQuestion], bool]:
    """All questions, ready to be served, and whether it is one; ``alone`` refuses a list."""
    check_flag("stream", stream)
    if rows is not None:
        check_count("batch_size", rows)
    fields: dict[str, Any] = {**options}
    fields.pop("batch_size", None)
    kb, documents, model = (fields.pop(name, None) for name in ("kb", "documents", "model"))
    neighbours = fields.pop("neighbours", "corpus")
    ask = Ask(**fields)
    asked: list[Text] | list[Conversation]
    if messages is None:
        if ask.earlier_turns != "exact":
            raise RequestError(
                f"earlier_turns={ask.earlier_turns!r} is about messages=; pass them with it"
            )
        asked, single = questions_of(question)
    elif question is not None:
        raise RequestError("a question and messages= were given; the question is the last message")
    else:
        asked, single = [conversation_of(messages)], True
    if alone is not None and not single:
        raise RequestError(alone)
    check_texts("documents", documents)
    if kb is None and documents is None and messages is None and not len(ask.blocks):
        raise RequestError(f"{caller} needs kb= or documents=; pass one of them")
    samplings = ask.samplings(len(asked))
    settings = resolve(ask, kb=kb, model=model, neighbours=neighbours)
    pairs = zip(asked, samplings, strict=True)
    ready = (prepare(settings, text, documents, own) for text, own in pairs)
    return [dataclasses.replace(prepared, rows=rows or 1) for prepared in ready], single


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Ask)}
_DEFAULTS["neighbours"] = "corpus"
_KINDS = get_type_hints(AskFields)


def _check_names(caller: str, options: Mapping[str, Any]) -> None:
    """Refuse a keyword that is none, as Python does: TypeError."""
    for name in options:
        if name not in _KINDS:
            raise TypeError(f"{caller}() got an unexpected keyword argument {name!r}")


def _signature(function: Callable[..., Any], **others: Any) -> inspect.Signature:
    """What a function takes, each of ``AskFields`` by its name; ``others`` are its own defaults."""
    own = inspect.signature(function)
    defaults = _DEFAULTS | others
    named = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=kind
        )
        for name, kind in _KINDS.items()
    ]
    question, messages, stream, _ = own.parameters.values()
    *most, batch_size = named
    return own.replace(parameters=[question, messages, *most, stream, batch_size])


generate.__signature__ = _signature(generate)  # type: ignore[attr-defined]
agenerate.__signature__ = _signature(agenerate, batch_size=_ROWS)  # type: ignore[attr-defined]

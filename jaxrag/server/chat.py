"""POST /v1/chat/completions: a conversation over retrieved or given chunks."""

import asyncio
import functools
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxrag.knowledge_base import KnowledgeBase
from jaxrag.models.model import Model
from jaxrag.serve.answers import Result
from jaxrag.serve.door import Conversation, Text, conversation_of
from jaxrag.server.asking import Asking, Piece, account, make_ready, usage, whole
from jaxrag.server.fields import Body, Generation, generation_of, messages_of, read_body
from jaxrag.server.logprobs import chat_logprobs
from jaxrag.server.models import chosen
from jaxrag.server.sse import EventStream, event
from jaxrag.server.visit import Visit, unless_left

_HEADER = "x-knowledge-base"


async def chat_completions(request: Request) -> Response:
    """Answer the last message."""
    return await visited(request, _chat)


async def visited(request: Request, handle: Callable[[Visit, Body], Any]) -> Response:
    """Have a request to the model handled, and the server told how it ended."""
    visit = Visit(request)
    try:
        visit.knock()
        body = await read_body(request)
        visit.enter()
        response: Response = await unless_left(request, handle(visit, body))
    except BaseException as error:
        visit.end(error)
        raise
    if not isinstance(response, EventStream):
        visit.end()
    return response


async def _chat(visit: Visit, body: Body) -> Response:
    fields = generation_of(body)
    visit.stream = fields.stream
    keeps = fields.prefix_cache is not False
    talk = conversation_of(messages_of(body), body.text("earlier_turns") or "exact", keeps=keeps)
    base = _base(visit, fields)
    head = _head(visit, "chat.completion.chunk" if fields.stream else "chat.completion")
    asking = await opened(visit, fields, talk, base)
    try:
        if fields.stream:
            first = await _first(visit, asking)
            events = _events(visit, asking, fields, head, first)
            return EventStream(events, visit.end, asking.cut)
        result = await whole(asking)
        visit.saw_tokens()
        visit.results.append(result)
    except BaseException:
        asking.close()
        raise
    return JSONResponse(_whole(visit.state.model, head, asking, fields, result))


def _base(visit: Visit, fields: Generation) -> KnowledgeBase | None:
    """The knowledge base that a chat is about; without documents the default one."""
    assert visit.access is not None
    state = visit.state
    name = chosen(state, fields.model, fields.knowledge_base, visit.request.headers.get(_HEADER))
    if name is None and fields.documents is None:
        name = state.default_base(visit.access)
    visit.knowledge_base = name
    return None if name is None else state.knowledge_base(visit.access, name)


def _head(visit: Visit, kind: str) -> dict[str, Any]:
    at = "" if visit.knowledge_base is None else f"@{visit.knowledge_base}"
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": visit.state.name + at,
    }


async def opened(
    visit: Visit,
    fields: Generation,
    asked: Text | Conversation,
    base: KnowledgeBase | None,
) -> Asking:
    """Hand a prompt to the engine."""
    assert visit.access is not None and visit.ticket is not None
    state = visit.state
    seconds = min(fields.timeout or state.settings.max_seconds, state.settings.max_seconds)
    asking = Asking(state, state.settings.stream_events if fields.stream else None)
    try:
        await asking.ready(functools.partial(make_ready, state, visit.access, fields, asked, base))
        state.limits.known(visit.ticket, asking.prompt_tokens)
        await asking.begin(visit.arrived + seconds)
    except BaseException:
        asking.close()
        raise
    return asking


async def _first(visit: Visit, asking: Asking) -> Piece | Result | None:
    """The first news, or None where there are none for a while. Raises what it failed with."""
    try:
        async with asyncio.timeout(visit.state.settings.hold_seconds):
            return await asking.news()
    except TimeoutError:
        return None


async def _events(
    visit: Visit,
    asking: Asking,
    fields: Generation,
    head: dict[str, Any],
    first: Piece | Result | None,
) -> AsyncGenerator[bytes, None]:
    """Everything from the role to the account, as it comes."""
    try:
        yield event(head | _choice({"role": "assistant", "content": ""}))
        item = first
        while True:
            if item is None:
                item = await asking.news()
            if isinstance(item, Result):
                break
            visit.saw_tokens()
            logprobs = chat_logprobs(visit.state.model, item) if fields.logprobs else None
            if item.text or logprobs is not None:
                yield event(head | _choice({"content": item.text}, logprobs))
            item = None
        visit.results.append(item)
        told = {"jaxrag": account(item, fields.return_text)}
        last = head | _choice({}, finish=item.finish_reason)
        if not fields.include_usage:
            yield event(last | told)
            return
        yield event(last)
        spent = usage([(asking.prompt_tokens, item)])
        yield event(head | {"choices": [], "usage": spent} | told)
    finally:
        asking.close()


def _choice(
    delta: dict[str, Any], logprobs: Any = None, finish: str | None = None
) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
    return {"choices": [choice]}


def _whole(
    model: Model, head: dict[str, Any], asking: Asking, fields: Generation, result: Result
) -> dict[str, Any]:
    logprobs = None
    if fields.logprobs:
        piece = Piece(result.text, result.token_ids, asking.logprobs)
        logprobs = chat_logprobs(model, piece)
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": result.text, "refusal": None},
        "logprobs": logprobs,
        "finish_reason": result.finish_reason,
    }
    return head | {
        "choices": [choice],
        "usage": usage([(asking.prompt_tokens, result)]),
        "jaxrag": account(result, fields.return_text),
    }

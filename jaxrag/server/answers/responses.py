"""POST /v1/responses: text and messages in, text out, with a search of a vector store."""

import asyncio
import dataclasses
import functools
import reprlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, PlainValidator
from starlette.responses import Response

from jaxrag.engine.sampling_params import MOST_TOP
from jaxrag.serve.conversation import conversation_of
from jaxrag.server.answers.answering import model_endpoint, respond
from jaxrag.server.answers.calling import (
    Tools,
    answered,
    called,
    functions_of,
    input_items,
    refuse_knowledge,
    text_part,
    with_tools,
)
from jaxrag.server.answers.response_writer import (
    FileSearch,
    ResponseRequest,
    ResponseWriter,
)
from jaxrag.server.answers.stored import keeps_responses, kept_items, kept_response
from jaxrag.server.answers.visit import Visit
from jaxrag.server.attributes import Metadata
from jaxrag.server.errors import invalid
from jaxrag.server.fields import (
    MOST_TEXTS,
    Count,
    Fields,
    Generation,
    HitCount,
    Int,
    Templated,
    formatted,
    ignored,
    undone,
    unlike,
    wrong,
)
from jaxrag.server.search_filters import where_of
from jaxrag.server.state.entry import Call
from jaxrag.server.state.lists import page_of
from jaxrag.server.state.registry import ResponseRow

_Included = Literal["file_search_call.results", "message.output_text.logprobs"]
_RESULTS, _LOGPROBS = get_args(_Included)
_ECHOED = (
    "instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "previous_response_id",
    "store", "tool_choice", "top_logprobs",
)  # fmt: skip
_undone = functools.partial(undone, who="/v1/responses")


def _format(given: dict[str, Any]) -> dict[str, Any]:
    formatted(given, given, "a schema")
    return given


class _Text(Fields):
    """What ``text`` says of the structure of the answer."""

    verbosity: Literal["medium"] = "medium"
    format: Annotated[dict[str, Any], AfterValidator(_format)] = Field({"type": "text"})


def _one(given: Any) -> str:
    if not (isinstance(given, list) and len(given) == 1 and isinstance(given[0], str)):
        raise unlike("a list of one id; a prompt is made from one vector store")
    return given[0]


class _Ranking(Fields):
    score_threshold: float | None = None
    hybrid_search: None = None  # the weights of a vector store are its own


class _SearchTool(Fields):
    """The one tool that there is beside functions."""

    type: Literal["file_search"]
    vector_store_ids: Annotated[str, PlainValidator(_one)]
    max_num_results: HitCount | None = None
    ranking_options: _Ranking = _Ranking()
    filters: dict[str, Any] | None = None


class _ResponseFields(Tools, Templated):
    """Those that are not of a chat; the others are read as its."""

    previous_response_id: str | None = None
    include: Annotated[list[_Included], Field(max_length=16, fail_fast=True)] = Field([])
    instructions: str | None = None
    query: str | None = None
    input: Any = None
    text: _Text = _Text.read({})
    top_logprobs: Annotated[Int, Field(ge=0, le=MOST_TOP)] = 0
    max_output_tokens: Count | None = None
    metadata: Metadata = Field({})
    store: bool = True
    background: Annotated[Any, _undone(False)] = None
    conversation: Annotated[Any, _undone()] = None
    prompt: Annotated[Any, _undone()] = None
    reasoning: Annotated[
        Any, _undone({}, {"effort": "none"}, {"effort": None, "summary": None})
    ] = None
    truncation: Annotated[Any, _undone("disabled")] = None
    messages: Annotated[Any, _undone()] = None
    documents: Annotated[Any, _undone()] = None
    n: Annotated[Any, _undone(1)] = None
    logprobs: Annotated[Any, _undone()] = None


@model_endpoint("input")
async def responses(visit: Visit) -> Response:
    """Answer the last message of the input, behind those of a response before it."""
    access, state = visit.call.access, visit.state
    earlier = await visit.read(lambda body: _ResponseFields.read(body).previous_response_id)
    before = None
    if earlier is not None:
        if not keeps_responses(state, access):
            raise invalid(
                "previous_response_id: responses are kept by a server with --data DIR, for keys "
                "that may write and are limited to no groups; send the messages",
                "previous_response_id",
            )
        before = await asyncio.to_thread(kept_response, state, access, earlier)
    referred = await visit.read(_referred)
    kept, grounds = await asyncio.to_thread(kept_items, state, access, referred)
    asked = await visit.read(functools.partial(request_of, before=before, kept=kept))
    stores = asked.echo["store"] and keeps_responses(state, access)
    asked = dataclasses.replace(asked, echo={**asked.echo, "store": stores})
    if stores:
        await asyncio.to_thread(state.library.quota.check, access.tenant, len(visit.call.raw))
    named = visit.call.named_base()
    if asked.search is not None and named not in (None, asked.search.store):
        raise invalid(
            f"model names the knowledge base {named!r} and file_search {asked.search.store!r}; "
            "name one",
            "tools",
        )
    base = named if asked.search is None else asked.search.store
    fields, calling = asked.generation, asked.calling
    if base is None and calling is None and not asked.talk.has_tools:
        fields = fields.model_copy(update={"documents": ()})
    visit.knowledge_base = base
    if calling is not None:
        refuse_knowledge(fields, base)
    writer = ResponseWriter(visit, asked, [*(before.grounds if before else ()), *grounds])
    return await respond(visit, fields, [asked.talk], writer)


def get_response(call: Call) -> dict[str, Any]:
    """A response that is kept."""
    return dict(kept_response(call.state, call.access, call.path["response"]).body["response"])


def list_input_items(call: Call) -> dict[str, Any]:
    """What a response that is kept was made from: messages, calls and their results."""
    row = kept_response(call.state, call.access, call.path["response"])
    messages = row.body["messages"]
    if messages[-1]["role"] == "assistant":  # its own answer
        messages = messages[:-1]
    items = [item for place, message in enumerate(messages) for item in input_items(place, message)]
    return page_of(call, items, lambda item: str(item["id"]), dict)


def delete_response(call: Call) -> dict[str, Any]:
    """Forget a response; those that go on from it stay."""
    row = kept_response(call.state, call.access, call.path["response"])
    call.library.registry.remove_responses([row.id])
    return {"id": row.id, "object": "response", "deleted": True}


def _referred(given: Mapping[str, Any]) -> list[str]:
    """Ids of the items that the input refers to. Raises Problem 400."""
    items = given.get("input")
    names = list[str]()
    for place, item in enumerate(items[:MOST_TEXTS] if isinstance(items, list) else ()):
        if isinstance(item, dict) and item.get("type") == "item_reference":
            if not isinstance(item.get("id"), str):
                raise wrong(f"input[{place}].id", item.get("id"), "the id of an item")
            names.append(item["id"])
    return names


def request_of(
    given: Mapping[str, Any],
    before: ResponseRow | None = None,
    kept: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> ResponseRequest:
    """What a body asks for. Raises Problem 400, or RequestError for a bad sampling.

    ``kept``: the items that it refers to.
    """
    body = _ResponseFields.read(given)
    calling = functions_of(body)
    search, unread = (None, []) if calling else _search(body)
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    messages = [*(before.body["messages"] if before else ()), *_items(body.input, kept)]
    talk = body.framed(conversation_of([*system, *messages], body.query, wire=True), messages)
    if calling is not None:
        talk = talk.with_tools(calling.tools)
    unread += ignored(body.text, at="text")
    talk = dataclasses.replace(talk, notes=(*talk.notes, *unread))
    text_format, results = body.text.format, _RESULTS in body.include
    fields = Generation.read(
        {name: value for name, value in given.items() if name not in body.names()}
        | {
            "max_tokens": body.max_output_tokens,
            "response_format": {**text_format, "json_schema": text_format},
            "logprobs": _LOGPROBS in body.include or body.top_logprobs > 0,
            "top_logprobs": body.top_logprobs,
            "return_text": results,
        }
        | (dict(search.fields) if search else {})
    )
    if calling is not None:
        fields = with_tools(fields, calling)
    echo = {name: getattr(body, name) for name in _ECHOED} | {
        "reasoning": {"effort": None, "summary": None},
        "temperature": fields.temperature,
        "text": {"format": text_format},
        "tools": body.tools if search or calling else [],
        "top_p": fields.top_p,
        "truncation": "disabled",
    }
    return ResponseRequest(fields, messages, talk, search, echo, results, calling)


def _items(given: Any, kept: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of the input, calls and results; earlier searches and thoughts are none."""
    if isinstance(given, str) and given.strip():
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise wrong("input", given, "a text, or a list of messages")
    if len(given) > MOST_TEXTS:
        raise invalid(f"input has {len(given)} entries: expected at most {MOST_TEXTS}", "input")
    messages = list[dict[str, Any]]()
    for place, item in enumerate(given):
        if isinstance(item, dict) and item.get("type") == "item_reference":
            item = kept[item["id"]]
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind in ("file_search_call", "reasoning"):
            continue
        if kind == "function_call":
            if not (messages and "tool_calls" in messages[-1]):
                messages.append({"role": "assistant", "content": "", "tool_calls": []})
            messages[-1]["tool_calls"].append(called(item))
            continue
        if kind == "function_call_output":
            messages.append(answered(place, item))
            continue
        if kind != "message":
            raise invalid(
                f"input[{place}] is of the type {reprlib.repr(kind)}: expected a message", "input"
            )
        content = item.get("content")
        if isinstance(content, list):
            content = [text_part(f"input[{place}].content", part) for part in content]
        messages.append({"role": item.get("role"), "content": content})
    return messages


def _search(body: Tools) -> tuple[FileSearch | None, list[str]]:
    """The one tool that there is, None where none is to be used; and notes."""
    if not body.offered():
        return None, []
    if body.kinds != ["file_search"]:
        raise invalid(
            f"tools of the types {reprlib.repr(body.kinds)}: expected one, file_search; or pass "
            'tool_choice="none"',
            "tools",
        )
    if body.tool_choice not in ("auto", "required", {"type": "file_search"}):
        what = "none, auto, required, or the type file_search"
        raise wrong("tool_choice", body.tool_choice, what)
    tool = _SearchTool.read(body.tools[0], "tools[0]")
    fields = {
        "k": tool.max_num_results,
        "where": None if tool.filters is None else where_of(tool.filters),
        "min_score": tool.ranking_options.score_threshold or None,
    }
    return FileSearch(tool.vector_store_ids, fields), ignored(tool, at="tools[0]")

"""POST /v1/responses: text and messages in, text out, with a search of a vector store."""

import asyncio
import dataclasses
import functools
import reprlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args

from pydantic import Field
from starlette.responses import Response

from jaxrag.engine.sampling_params import MOST_TOP
from jaxrag.serve.conversation import conversation_of
from jaxrag.server.answers.answering import respond, visited
from jaxrag.server.answers.asking import make_ready
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
from jaxrag.server.answers.response_form import (
    FileSearch,
    ResponseForm,
    ResponseRequest,
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
    Int,
    Templated,
    refuse,
    wrong,
)
from jaxrag.server.state.entry import Call
from jaxrag.server.state.lists import page_of
from jaxrag.server.state.registry import ResponseRow
from jaxrag.server.where import where_of

_Included = Literal["file_search_call.results", "message.output_text.logprobs"]
_RESULTS, _LOGPROBS = get_args(_Included)
_NOT_DONE = {  # field: what it may be all the same
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "reasoning": ({}, {"effort": "none"}, {"effort": None, "summary": None}),
    "truncation": ("disabled",),
    "messages": (),
    "documents": (),
    "n": (1,),
    "logprobs": (),
}
_MOST_FOUND = 50  # passages of a search


class _Text(Fields):
    """What ``text`` says of the answer's form."""

    verbosity: Literal["medium"] = "medium"
    format: dict[str, Any] = Field({"type": "text"})


class _Ranking(Fields):
    score_threshold: float | None = None
    hybrid_search: Any = None


class _SearchTool(Fields):
    """The one tool that there is beside functions."""

    vector_store_ids: Annotated[list[str], Field(fail_fast=True)]
    max_num_results: Annotated[Count, Field(le=_MOST_FOUND)] | None = None
    ranking_options: _Ranking = _Ranking.read({})
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


@visited("input")
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
    form = ResponseForm(visit, asked, [*(before.grounds if before else ()), *grounds])
    make = functools.partial(make_ready, state, access, fields, asked.talk, base)
    return await respond(visit, fields, [make], form)


def _text_format(body: _ResponseFields) -> dict[str, Any]:
    """What ``text`` says of the answer's form. Raises Problem 400 for what it is not."""
    form = body.text.format
    if form.get("type") not in ("text", "json_object", "json_schema"):
        raise wrong("text.format", form, "a type: text, json_object or json_schema")
    if form["type"] == "json_schema" and not isinstance(form.get("schema"), dict):
        raise wrong("text.format", form, "a schema with the type json_schema")
    return form


def get_response(call: Call) -> dict[str, Any]:
    """A response that is kept."""
    return dict(kept_response(call.state, call.access, call.path["response"]).body["response"])


def list_input_items(call: Call) -> dict[str, Any]:
    """What a response that is kept was made from: messages, calls and their results."""
    row = kept_response(call.state, call.access, call.path["response"])
    messages = row.body["messages"]
    if messages[-1]["role"] == "assistant":  # its own answer
        messages = messages[:-1]
    items = [it for place, message in enumerate(messages) for it in input_items(place, message)]
    return page_of(call, items, lambda it: str(it["id"]), dict)


def delete_response(call: Call) -> dict[str, Any]:
    """Forget a response; those that go on from it stay."""
    row = kept_response(call.state, call.access, call.path["response"])
    call.library.registry.remove_responses([row.id])
    return {"id": row.id, "object": "response", "deleted": True}


def _referred(given: Mapping[str, Any]) -> list[str]:
    """Ids of the items that the input refers to. Raises Problem 400."""
    items = given.get("input")
    found = list[str]()
    for place, item in enumerate(items[:MOST_TEXTS] if isinstance(items, list) else ()):
        if isinstance(item, dict) and item.get("type") == "item_reference":
            if not isinstance(item.get("id"), str):
                raise wrong(f"input[{place}].id", item.get("id"), "the id of an item")
            found.append(item["id"])
    return found


def request_of(
    given: Mapping[str, Any],
    before: ResponseRow | None = None,
    kept: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> ResponseRequest:
    """What a body asks for. Raises Problem 400, or RequestError for a bad sampling.

    ``kept``: the items that it refers to.
    """
    body = _ResponseFields.read(given)
    for name, harmless in _NOT_DONE.items():
        if given.get(name) is not None:
            refuse(name, given[name], harmless, "/v1/responses")
    names = {*body.names(), *_NOT_DONE, "stream_options"}
    calling = functions_of(body)
    search = None if calling else _search(body)
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    messages = [*(before.body["messages"] if before else ()), *_items(body.input, kept)]
    talk = body.framed(conversation_of([*system, *messages], body.query, wire=True), messages)
    if calling is not None:
        talk = talk.with_tools(calling.tools)
    form, results = _text_format(body), _RESULTS in body.include
    fields = Generation.read(
        {name: value for name, value in given.items() if name not in names}
        | {
            "max_tokens": body.max_output_tokens,
            "response_format": {**form, "json_schema": form},
            "logprobs": _LOGPROBS in body.include or body.top_logprobs > 0,
            "top_logprobs": body.top_logprobs,
            "return_text": results,
        }
        | (dict(search.fields) if search else {})
    )
    if calling is not None:
        fields = with_tools(fields, calling)
    echo = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": None if before is None else before.id,
        "reasoning": {"effort": None, "summary": None},
        "store": body.store,
        "temperature": fields.temperature,
        "text": {"format": form},
        "tool_choice": body.tool_choice,
        "tools": body.tools if search or calling else [],
        "top_logprobs": body.top_logprobs,
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
    found = list[dict[str, Any]]()
    for place, item in enumerate(given):
        if isinstance(item, dict) and item.get("type") == "item_reference":
            item = kept[item["id"]]
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind in ("file_search_call", "reasoning"):
            continue
        if kind == "function_call":
            if not (found and "tool_calls" in found[-1]):
                found.append({"role": "assistant", "content": "", "tool_calls": []})
            found[-1]["tool_calls"].append(called(item))
            continue
        if kind == "function_call_output":
            found.append(answered(place, item))
            continue
        if kind != "message":
            raise invalid(
                f"input[{place}] is of the type {reprlib.repr(kind)}: expected a message", "input"
            )
        content = item.get("content")
        if isinstance(content, list):
            content = [text_part(f"input[{place}].content", part) for part in content]
        found.append({"role": item.get("role"), "content": content})
    return found


def _search(body: Tools) -> FileSearch | None:
    """The one tool that there is; None where none is to be used."""
    choice = body.tool_choice
    if choice == "none" or not body.tools:
        if choice not in ("none", "auto"):
            raise wrong("tool_choice", choice, "none or auto, as there are no tools")
        return None
    kinds = [it.get("type") if isinstance(it, dict) else None for it in body.tools]
    if kinds != ["file_search"]:
        raise invalid(
            f"tools of the types {reprlib.repr(kinds)}: expected one, file_search; or pass "
            'tool_choice="none"',
            "tools",
        )
    if choice not in ("auto", "required", {"type": "file_search"}):
        raise wrong("tool_choice", choice, "none, auto, required, or the type file_search")
    tool = _SearchTool.read(body.tools[0], "tools[0]")
    if len(tool.vector_store_ids) != 1:
        raise invalid(
            f"tools[0].vector_store_ids={reprlib.repr(tool.vector_store_ids)}: expected a list of "
            "one id; a prompt is made from one vector store",
            "tools",
        )
    if tool.ranking_options.hybrid_search is not None:
        raise invalid(
            "tools[0].ranking_options.hybrid_search: the weights of a vector store are its own; "
            "leave it out",
            "tools",
        )
    fields = {
        "k": tool.max_num_results,
        "where": None if tool.filters is None else where_of(tool.filters),
        "min_score": tool.ranking_options.score_threshold or None,
    }
    return FileSearch(tool.vector_store_ids[0], fields)

"""POST /v1/responses: text and messages in, text out, with a search of a vector store."""

import asyncio
import dataclasses
import functools
import reprlib
from typing import Any

from starlette.responses import Response

from jaxrag.serve.conversation import conversation_of
from jaxrag.server.answers.answering import respond, visited
from jaxrag.server.answers.asking import make_ready
from jaxrag.server.answers.calling import (
    answered,
    called,
    functions_of,
    input_items,
    refuse_knowledge,
    with_tools,
)
from jaxrag.server.answers.response_form import (
    CallingResponseForm,
    FileSearch,
    ResponseForm,
    ResponseRequest,
)
from jaxrag.server.answers.stored import keeps_responses, kept_response
from jaxrag.server.answers.visit import Visit
from jaxrag.server.attributes import attributes_of
from jaxrag.server.errors import invalid
from jaxrag.server.fields import MOST_TEXTS, Body, generation_of
from jaxrag.server.state.entry import Call
from jaxrag.server.state.lists import page_of
from jaxrag.server.state.registry import ResponseRow
from jaxrag.server.where import where_of

_RESULTS, _LOGPROBS = "file_search_call.results", "message.output_text.logprobs"
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
_PARTS = ("text", "input_text", "output_text")
_OURS = (
    *_NOT_DONE, "text", "input", "instructions", "include", "tools", "tool_choice",
    "parallel_tool_calls", "top_logprobs", "previous_response_id", "store", "metadata",
)  # fmt: skip


@visited("input")
async def responses(visit: Visit) -> Response:
    """Answer the last message of the input, behind those of a response before it."""
    access, state = visit.call.access, visit.state
    earlier = await visit.read(lambda body: body.text("previous_response_id"))
    before = None
    if earlier is not None:
        if not keeps_responses(state, access):
            raise invalid(
                "previous_response_id: responses are kept by a server with --data DIR, for keys "
                "that may write and are limited to no groups; send the messages",
                "previous_response_id",
            )
        before = await asyncio.to_thread(kept_response, state, access, earlier)
    asked = await visit.read(functools.partial(request_of, before=before))
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
        fields = dataclasses.replace(fields, documents=())
    visit.knowledge_base = base
    form = ResponseForm(visit, asked, before)
    if calling is not None:
        refuse_knowledge(fields, base)
        form = CallingResponseForm(visit, asked, calling, before)
    make = functools.partial(make_ready, state, access, fields, asked.talk, base)
    return await respond(visit, fields, [make], form)


def _text_format(body: Body) -> dict[str, Any]:
    """What ``text`` says of the answer's form. Raises Problem 400 for what it is not."""
    said = Body(body.table("text") or {})
    if said.values.get("verbosity", "medium") != "medium":
        raise invalid("text.verbosity: expected medium, or leave it out", "text")
    form = said.table("format") or {"type": "text"}
    if form.get("type") not in ("text", "json_object", "json_schema"):
        raise said.wrong("format", "a type: text, json_object or json_schema")
    if form["type"] == "json_schema" and not isinstance(form.get("schema"), dict):
        raise said.wrong("format", "a schema with the type json_schema")
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


def request_of(body: Body, before: ResponseRow | None = None) -> ResponseRequest:
    """What a body asks for. Raises Problem 400, or RequestError for a bad sampling."""
    for name, harmless in _NOT_DONE.items():
        if name in body and body.values[name] not in harmless:
            shown = reprlib.repr(body.values[name])
            raise invalid(f"{name}={shown}: /v1/responses does not do that; leave it out", name)
    include = body.texts("include", most=16)
    if unknown := [it for it in include if it not in (_RESULTS, _LOGPROBS)]:
        raise invalid(
            f"include={unknown[0][:80]!r}: expected some of {_RESULTS}, {_LOGPROBS}", "include"
        )
    calling = functions_of(body)
    search = None if calling else _search(body)
    instructions = body.text("instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    messages = [*(before.body["messages"] if before else ()), *_items(body)]
    talk = conversation_of([*system, *messages], body.text("query"), wire=True)
    if calling is not None:
        talk = dataclasses.replace(talk, tools=calling.tools)
    top = body.integer("top_logprobs", 0, 20) or 0
    ours = {name: value for name, value in body.values.items() if name not in _OURS}
    ours |= {"max_tokens": body.integer("max_output_tokens", 1), "stream_options": None}
    form = _text_format(body)
    ours |= {
        "response_format": form
        if form["type"] != "json_schema"
        else {
            "type": "json_schema",
            "json_schema": form,
        }
    }
    ours |= {"logprobs": _LOGPROBS in include or top > 0, "top_logprobs": top}
    fields = generation_of(Body(ours | ({} if search is None else dict(search.fields))))
    if calling is not None:
        fields = with_tools(fields, calling)
    echo = {
        "instructions": instructions,
        "max_output_tokens": ours["max_tokens"],
        "metadata": attributes_of(body, "metadata"),
        "parallel_tool_calls": body.flag("parallel_tool_calls", True),
        "previous_response_id": None if before is None else before.id,
        "reasoning": {"effort": None, "summary": None},
        "store": body.flag("store", True),
        "temperature": fields.said["sampling"].temperature,
        "text": {"format": form},
        "tool_choice": body.values.get("tool_choice", "auto"),
        "tools": body.values["tools"] if search or calling else [],
        "top_logprobs": top,
        "top_p": fields.said["sampling"].top_p,
        "truncation": "disabled",
    }
    generation = dataclasses.replace(fields, return_text=_RESULTS in include)
    return ResponseRequest(generation, messages, talk, search, echo, _RESULTS in include, calling)


def _items(body: Body) -> list[dict[str, Any]]:
    """The messages of the input, calls and results; earlier searches are no part of the talk."""
    given = body.values.get("input")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise body.wrong("input", "a text, or a list of messages")
    if len(given) > MOST_TEXTS:
        raise invalid(f"input has {len(given)} entries: expected at most {MOST_TEXTS}", "input")
    found: list[dict[str, Any]] = []
    for place, item in enumerate(given):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "file_search_call":
            continue
        if kind == "function_call":
            if not (found and "tool_calls" in found[-1]):
                found.append({"role": "assistant", "content": "", "tool_calls": []})
            found[-1]["tool_calls"].append(called(item))
            continue
        if kind == "function_call_output":
            found.append(answered(item))
            continue
        if kind != "message":
            raise invalid(
                f"input[{place}] is of the type {reprlib.repr(kind)}: expected a message", "input"
            )
        content = item.get("content")
        if isinstance(content, list):
            content = [_text_part(place, part) for part in content]
        found.append({"role": item.get("role"), "content": content})
    return found


def _text_part(place: int, part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _PARTS:
        raise invalid(
            f"input[{place}].content has a part of the type {reprlib.repr(kind)}: expected one of "
            f"{', '.join(_PARTS)}",
            "input",
        )
    return {"type": "text", "text": part.get("text")}


def _search(body: Body) -> FileSearch | None:
    """The one tool that there is; None where none is to be used."""
    tools, choice = body.values.get("tools", []), body.values.get("tool_choice", "auto")
    if not isinstance(tools, list):
        raise body.wrong("tools", "a list")
    if choice == "none" or not tools:
        if choice not in ("none", "auto"):
            raise body.wrong("tool_choice", "none or auto, as there are no tools")
        return None
    kinds = [it.get("type") if isinstance(it, dict) else None for it in tools]
    if kinds != ["file_search"]:
        raise invalid(
            f"tools of the types {reprlib.repr(kinds)}: expected one, file_search; or pass "
            'tool_choice="none"',
            "tools",
        )
    if choice not in ("auto", "required", {"type": "file_search"}):
        raise body.wrong("tool_choice", "none, auto, required, or the type file_search")
    tool = Body(tools[0])
    stores = tool.values.get("vector_store_ids")
    if not isinstance(stores, list) or len(stores) != 1 or not isinstance(stores[0], str):
        raise invalid(
            f"tools[0].vector_store_ids={reprlib.repr(stores)}: expected a list of one id; a "
            "prompt is made from one vector store",
            "tools",
        )
    ranking = Body(tool.table("ranking_options") or {})
    if "hybrid_search" in ranking:
        raise invalid(
            "tools[0].ranking_options.hybrid_search: the weights of a vector store are its own; "
            "leave it out",
            "tools",
        )
    filters = tool.table("filters")
    fields = {
        "k": tool.integer("max_num_results", 1, _MOST_FOUND),
        "where": None if filters is None else where_of(filters),
        "min_score": ranking.number("score_threshold") or None,
    }
    return FileSearch(stores[0], {name: it for name, it in fields.items() if it is not None})

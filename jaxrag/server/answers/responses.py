"""POST /v1/responses: text and messages in, text out, with a search of a vector store."""

import asyncio
import dataclasses
import functools
import reprlib
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from starlette.responses import Response

from jaxrag.serve.answers import Piece, Result
from jaxrag.serve.conversation import Conversation, Source, conversation_of
from jaxrag.server.answers.answering import respond, visited
from jaxrag.server.answers.asking import make_ready
from jaxrag.server.answers.forms import Form, logprobs_of
from jaxrag.server.answers.stored import keeps_responses, kept_response, store_id
from jaxrag.server.answers.visit import Visit
from jaxrag.server.attributes import attributes_of, file_id_of
from jaxrag.server.errors import invalid
from jaxrag.server.fields import MOST_TEXTS, Body, Generation, generation_of
from jaxrag.server.state.entry import Call
from jaxrag.server.state.registry import Ground, ResponseRow
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
    *_NOT_DONE, "text", "input", "instructions", "include", "tools", "tool_choice", "top_logprobs",
    "previous_response_id", "store", "metadata",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class FileSearch:
    """A tool that finds passages: where, and the tool as the client gave it.

    Attributes:
      store: id of a vector store, or name of a knowledge base.
      fields: what it says in the words of a chat.
    """

    store: str
    fields: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class ResponseRequest:
    """A request for a response.

    Attributes:
      generation: how it is answered, as that of a chat.
      messages: what is answered, without instructions.
      talk: the same with them.
      search: where passages are found; None: nowhere.
      echo: fields that the response repeats.
      results: the passages that were found are told.
    """

    generation: Generation
    messages: Sequence[Mapping[str, Any]]
    talk: Conversation
    search: FileSearch | None
    echo: Mapping[str, Any]
    results: bool


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
    fields = asked.generation
    if base is None:
        fields = dataclasses.replace(fields, documents=())
    visit.knowledge_base = base
    make = functools.partial(make_ready, state, access, fields, asked.talk, base)
    return await respond(visit, fields, [make], ResponseForm(visit, asked, before))


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
    search = _search(body)
    instructions = body.text("instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    messages = [*(before.body["messages"] if before else ()), *_items(body)]
    talk = conversation_of([*system, *messages], body.text("query"), wire=True)
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
    echo = {
        "instructions": instructions,
        "max_output_tokens": ours["max_tokens"],
        "metadata": attributes_of(body, "metadata"),
        "parallel_tool_calls": True,
        "previous_response_id": None if before is None else before.id,
        "reasoning": {"effort": None, "summary": None},
        "store": body.flag("store", True),
        "temperature": fields.said["sampling"].temperature,
        "text": {"format": form},
        "tool_choice": body.values.get("tool_choice", "auto"),
        "tools": [] if search is None else body.values["tools"],
        "top_logprobs": top,
        "top_p": fields.said["sampling"].top_p,
        "truncation": "disabled",
    }
    generation = dataclasses.replace(fields, return_text=_RESULTS in include)
    return ResponseRequest(generation, messages, talk, search, echo, _RESULTS in include)


def _items(body: Body) -> list[dict[str, Any]]:
    """The messages of the input; searches that earlier responses made are no part of the talk."""
    given = body.values.get("input")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise body.wrong("input", "a text, or a list of messages")
    if len(given) > MOST_TEXTS:
        raise invalid(f"input has {len(given)} entries: expected at most {MOST_TEXTS}", "input")
    found = []
    for place, item in enumerate(given):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "file_search_call":
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


class ResponseForm(Form):
    """A response's form: one message, behind the search if there is one.

    Events are numbered; the last one, as the answer without a stream, is the whole response.
    """

    def __init__(
        self, visit: Visit, asked: ResponseRequest, before: ResponseRow | None = None
    ) -> None:
        super().__init__(visit, "response", "resp", asked.generation)
        self._visit, self._asked, self._before = visit, asked, before
        self._id, self._message = (f"{it}_{uuid.uuid4().hex}" for it in ("resp", "msg"))
        self._call = f"fs_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._count = 0
        self._at: dict[str, Any] = {
            "output_index": int(asked.search is not None),
            "item_id": self._message,
        }
        self._whole: dict[str, Any] = {}

    def opening(self) -> Iterator[dict[str, Any]]:
        """The response begins, passages are found, and the message begins."""
        empty = self._response("in_progress", [])
        yield self._event("created", response=empty)
        yield self._event("in_progress", response=empty)
        if self._asked.search is not None:
            at = {"output_index": 0, "item_id": self._call}
            begun = self._searched("in_progress")
            yield self._event("output_item.added", output_index=0, item=begun)
            for what in ("in_progress", "searching", "completed"):
                yield self._event(f"file_search_call.{what}", **at)
            done = self._searched("completed", _best_first(self._visit))
            yield self._event("output_item.done", output_index=0, item=done)
        item = self._said("in_progress", [])
        yield self._event("output_item.added", output_index=self._at["output_index"], item=item)
        yield self._event("content_part.added", **self._at, content_index=0, part=_text("", [], []))

    def piece(self, place: int, piece: Piece) -> dict[str, Any] | None:
        """What is new of the text."""
        if not piece.text:
            return None
        told = {"delta": piece.text, "logprobs": self._tokens(piece)}
        return self._event("output_text.delta", **self._at, content_index=0, **told)

    async def settle(self, results: Sequence[Result], account: dict[str, Any]) -> None:
        """The response as a whole; it is kept, if it is to be."""
        logprobs = [one for it in self._visit.askings[0].pieces for one in self._tokens(it)]
        output = self._output(results[0], logprobs)
        self._whole = self._ended_response(results[0], output, account)
        if self._asked.echo["store"]:
            await asyncio.to_thread(self._keep, results[0])

    def _keep(self, result: Result) -> None:
        """Store it with the documents that it is made from, and none of their passages."""
        visit, before = self._visit, self._before
        output = [
            it | ({"results": None} if it["type"] == "file_search_call" else {})
            for it in self._whole["output"]
        ]
        shown = {name: it for name, it in self._whole.items() if name != "jaxrag"}
        answer = {"role": "assistant", "content": result.text}
        messages = [*self._asked.messages, *([answer] if result.text.strip() else [])]
        grounds = [] if before is None else list(before.grounds)
        if visit.knowledge_base is not None:
            documents = tuple(dict.fromkeys(it.document_id for it in result.sources))
            store = store_id(visit.state, visit.call.access, visit.knowledge_base)
            grounds.append(Ground(store, documents, *visit.askings[0].chunk_ids))
        body = {"response": shown | {"output": output}, "messages": messages}
        visit.state.library.registry.add_response(self._id, visit.call.access.tenant, body, grounds)

    def ended(
        self, place: int, result: Result, account: dict[str, Any] | None
    ) -> Iterator[dict[str, Any]]:
        """Citations, and everything once more as a whole."""
        output = self._whole["output"]
        part = output[-1]["content"][0]
        at = {**self._at, "content_index": 0}
        for index, one in enumerate(part["annotations"]):
            yield self._event(
                "output_text.annotation.added", **at, annotation_index=index, annotation=one
            )
        yield self._event("output_text.done", **at, text=result.text, logprobs=part["logprobs"])
        yield self._event("content_part.done", **at, part=part)
        index = self._at["output_index"]
        yield self._event("output_item.done", output_index=index, item=output[-1])
        yield self._event(self._whole["status"], response=self._whole)

    def whole(
        self,
        results: Sequence[Result],
        pieces: Sequence[list[Piece]],
        account: dict[str, Any],
    ) -> dict[str, Any]:
        """The response."""
        return self._whole

    def _event(self, kind: str, **said: Any) -> dict[str, Any]:
        number, self._count = self._count, self._count + 1
        return {"type": f"response.{kind}", "sequence_number": number, **said}

    def _tokens(self, piece: Piece) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if self.fields.logprobs:
            found = logprobs_of(self.model, piece)
            for one in found:
                for it in (one, *one["top_logprobs"]):
                    it["bytes"] = it["bytes"] or []
        return found

    def _output(self, result: Result, logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        found = sorted(result.sources, key=lambda it: it.number)
        status = "incomplete" if result.finish_reason == "length" else "completed"
        text = _text(result.text, _citations(found), logprobs)
        search = [] if self._asked.search is None else [self._searched("completed", found)]
        return [*search, self._said(status, [text])]

    def _ended_response(
        self, result: Result, output: list[dict[str, Any]], account: dict[str, Any]
    ) -> dict[str, Any]:
        used = account["usage"]
        usage = {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": used["prompt_tokens_details"],
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": used["total_tokens"],
        }
        cut = result.finish_reason == "length"
        response = self._response("incomplete" if cut else "completed", output)
        response["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        return response | {"usage": usage, "jaxrag": account["jaxrag"]}

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self._visit.named,
            "output": output,
            "usage": None,
            **self._asked.echo,
        }

    def _searched(self, status: str, found: Sequence[Source] | None = None) -> dict[str, Any]:
        told: list[dict[str, Any]] | None = None
        if self._asked.results and found is not None:
            told = [
                {
                    "file_id": file_id_of(it.document_id),
                    "filename": _filename(it),
                    "score": it.score,
                    "attributes": {},
                    "text": it.text,
                }
                for it in found
            ]
        question = self._asked.talk.query or self._asked.talk.questions[-1]
        return {
            "id": self._call,
            "type": "file_search_call",
            "status": status,
            "queries": [question],
            "results": told,
        }

    def _said(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._message,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }


def _best_first(visit: Visit) -> list[Source]:
    return sorted(visit.askings[0].sources, key=lambda it: it.number)


def _text(
    text: str, annotations: list[dict[str, Any]], logprobs: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "type": "output_text", "text": text, "annotations": annotations, "logprobs": logprobs
    }  # fmt: skip


def _filename(source: Source) -> str:
    return PurePath(source.file).name if source.file else source.document_id


def _citations(found: Sequence[Source]) -> list[dict[str, Any]]:
    """The files that the model was given passages of, the best first, each once."""
    names = {file_id_of(it.document_id): _filename(it) for it in reversed(found)}
    return [
        {"type": "file_citation", "file_id": file_id, "filename": names[file_id], "index": index}
        for index, file_id in enumerate(dict.fromkeys(file_id_of(it.document_id) for it in found))
    ]

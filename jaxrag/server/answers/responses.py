"""POST /v1/responses: text and messages in, text out, with a search of a vector store."""

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
from jaxrag.server.answers.chat import ChatForm
from jaxrag.server.answers.visit import Visit
from jaxrag.server.documents.vector_stores import MOST_FOUND, attributes_of, file_id_of
from jaxrag.server.documents.where import where_of
from jaxrag.server.errors import invalid
from jaxrag.server.fields import MOST_TEXTS, Body, Generation, generation_of

_RESULTS, _LOGPROBS = "file_search_call.results", "message.output_text.logprobs"
_NOT_DONE = {  # field: what it may be all the same
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "reasoning": ({}, {"effort": "none"}, {"effort": None, "summary": None}),
    "truncation": ("disabled",),
    "text": ({}, {"format": {"type": "text"}}),
    "previous_response_id": (),
    "messages": (),
    "documents": (),
    "n": (1,),
    "logprobs": (),
}
_PARTS = ("text", "input_text", "output_text")
_OURS = (*_NOT_DONE, "input", "instructions", "include", "tools", "tool_choice", "top_logprobs")


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
class Asked:
    """A request for a response.

    Attributes:
      generation: how it is answered, as that of a chat.
      talk: what is answered.
      search: where passages are found; None: nowhere.
      echo: fields that the response repeats.
      results: the passages that were found are told.
    """

    generation: Generation
    talk: Conversation
    search: FileSearch | None
    echo: Mapping[str, Any]
    results: bool


@visited("input")
async def responses(visit: Visit) -> Response:
    """Answer the last message of the input."""
    asked = await visit.read(asked_of)
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
    make = functools.partial(make_ready, visit.state, visit.call.access, fields, asked.talk, base)
    return await respond(visit, fields, [make], ResponseForm(visit, asked))


def asked_of(body: Body) -> Asked:
    """What a body asks for. Raises Problem 400, or RequestError for a bad sampling."""
    for name, harmless in _NOT_DONE.items():
        if name in body and body.values[name] not in harmless:
            shown = reprlib.repr(body.values[name])
            raise invalid(f"{name}={shown}: /v1/responses does not do that; leave it out", name)
    if body.values.get("store") is not None:
        body.flag("store")
    include = body.texts("include", most=16)
    if unknown := [it for it in include if it not in (_RESULTS, _LOGPROBS)]:
        raise invalid(
            f"include={unknown[0][:80]!r}: expected some of {_RESULTS}, {_LOGPROBS}", "include"
        )
    search = _search(body)
    instructions = body.text("instructions")
    messages = [{"role": "system", "content": instructions}] if instructions else []
    talk = conversation_of([*messages, *_items(body)], body.text("query"), wire=True)
    top = body.integer("top_logprobs", 0, 20) or 0
    ours = {name: value for name, value in body.values.items() if name not in _OURS}
    ours |= {"max_tokens": body.integer("max_output_tokens", 1), "stream_options": None}
    ours |= {"logprobs": _LOGPROBS in include or top > 0, "top_logprobs": top}
    fields = generation_of(Body(ours | ({} if search is None else dict(search.fields))))
    echo = {
        "instructions": instructions,
        "max_output_tokens": ours["max_tokens"],
        "metadata": attributes_of(body, "metadata"),
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": fields.said["sampling"].temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": body.values.get("tool_choice", "auto"),
        "tools": [] if search is None else body.values["tools"],
        "top_logprobs": top,
        "top_p": fields.said["sampling"].top_p,
        "truncation": "disabled",
    }
    generation = dataclasses.replace(fields, return_text=_RESULTS in include)
    return Asked(generation, talk, search, echo, _RESULTS in include)


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
        "k": tool.integer("max_num_results", 1, MOST_FOUND),
        "where": None if filters is None else where_of(filters),
        "min_score": ranking.number("score_threshold") or None,
    }
    return FileSearch(stores[0], {name: it for name, it in fields.items() if it is not None})


class ResponseForm(ChatForm):
    """A response's form: one message, behind the search if there is one.

    Events are numbered; the last one, as the answer without a stream, is the whole response.
    """

    def __init__(self, visit: Visit, asked: Asked) -> None:
        super().__init__(visit, asked.generation)
        self._visit, self._asked = visit, asked
        self._id, self._message = (f"{it}_{uuid.uuid4().hex}" for it in ("resp", "msg"))
        self._call = f"fs_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._count = 0
        self._at: dict[str, Any] = {
            "output_index": int(asked.search is not None),
            "item_id": self._message,
        }
        self._spoken: list[dict[str, Any]] = []

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
        logprobs = self._tokens(piece)
        self._spoken += logprobs
        if not piece.text:
            return None
        return self._event(
            "output_text.delta", **self._at, content_index=0, delta=piece.text, logprobs=logprobs
        )

    def ended(
        self, place: int, result: Result, account: dict[str, Any] | None
    ) -> Iterator[dict[str, Any]]:
        """Citations, and everything once more as a whole."""
        assert account is not None
        output = self._output(result, self._spoken)
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
        response = self._ended_response(result, output, account)
        yield self._event(response["status"], response=response)

    def whole(
        self,
        results: Sequence[Result],
        pieces: Sequence[list[Piece]],
        account: dict[str, Any],
    ) -> dict[str, Any]:
        """The response."""
        logprobs = [one for piece in pieces[0] for one in self._tokens(piece)]
        return self._ended_response(results[0], self._output(results[0], logprobs), account)

    def _event(self, kind: str, **said: Any) -> dict[str, Any]:
        number, self._count = self._count, self._count + 1
        return {"type": f"response.{kind}", "sequence_number": number, **said}

    def _tokens(self, piece: Piece) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if self.fields.logprobs:
            found = self.logprobs(0, piece)["content"]
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

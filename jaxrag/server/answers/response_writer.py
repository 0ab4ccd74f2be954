"""How responses are written: their items, their events, and what is kept of them."""

import asyncio
import dataclasses
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrag.serve.answers import Piece, Result
from jaxrag.serve.conversation import Conversation, Source
from jaxrag.server.answers.calling import Calling, CallReader, call_id, called
from jaxrag.server.answers.cited import filename, of_response
from jaxrag.server.answers.stored import store_id
from jaxrag.server.answers.visit import Visit
from jaxrag.server.answers.writers import AnswerWriter, logprobs_of
from jaxrag.server.attributes import file_id_of
from jaxrag.server.errors import Problem
from jaxrag.server.fields import Generation
from jaxrag.server.state.registry import Ground


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
      calling: functions that may be called.
    """

    generation: Generation
    messages: Sequence[Mapping[str, Any]]
    talk: Conversation
    search: FileSearch | None
    echo: Mapping[str, Any]
    results: bool
    calling: Calling | None = None


class ResponseWriter(AnswerWriter):
    """Writes a response: one message, behind the search if there is one, and calls of functions.

    Events are numbered; the last one, as the answer without a stream, is the whole response. Of an
    answer that may call, text that is no call is told as it comes; its message begins with the
    first text, as there may be none, and log-probabilities come with the end.

    Attributes:
      complete: the whole response, once it has ended.
    """

    def __init__(
        self, visit: Visit, asked: ResponseRequest, grounds: Sequence[Ground] = ()
    ) -> None:
        """``grounds``: of responses that it goes on from, or refers to.

        Raises RequestError for a model whose calls are not known.
        """
        super().__init__(visit, "response", "resp", asked.generation)
        self.reader = CallReader(visit.state.model, asked.calling)
        self._text, self._end = "", 0  # the answer, and how much of what it says was told
        self._open = False  # the message has begun
        self._asked, self._grounds = asked, grounds
        self._name = uuid.uuid4().hex  # in the ids of its items, by which they are found
        names = ("resp", "msg", "rs", "fs")
        ids = (f"{name}_{self._name}" for name in names)
        self._id, self._message, self._thinking, self._call = ids
        self._thought = ""  # that was told
        self._created = int(time.time())
        self._count = 0
        self._at: dict[str, Any] = {
            "output_index": int(asked.search is not None),
            "item_id": self._message,
        }
        self.complete: dict[str, Any] = {}

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
            done = self._searched("completed", _best_first(self.visit))
            yield self._event("output_item.done", output_index=0, item=done)
        if self._asked.calling is None and self.visit.askings[0].thinks is None:
            yield from self._opened()

    def _opened(self) -> Iterator[dict[str, Any]]:
        """The message begins, behind what is thought before it."""
        self._open = True
        yield from self._thought_first(self.sure(0, self._text, self.reader)[0])
        item = self.said("in_progress", [])
        yield self._event("output_item.added", output_index=self._at["output_index"], item=item)
        empty = said_text("", [], [])
        yield self._event("content_part.added", **self._at, content_index=0, part=empty)

    def _thought_first(self, thought: str) -> Iterator[dict[str, Any]]:
        """A thought as a whole, once."""
        if not thought or self._thought:
            return
        self._thought, index = thought, self._at["output_index"]
        at = {"output_index": index, "item_id": self._thinking, "content_index": 0}
        begun = self.thinking("", "in_progress") | {"content": []}
        yield self._event("output_item.added", output_index=index, item=begun)
        yield self._event("reasoning_text.delta", **at, delta=thought)
        yield self._event("reasoning_text.done", **at, text=thought)
        done = self.thinking(thought, "completed")
        yield self._event("output_item.done", output_index=index, item=done)
        self._at["output_index"] += 1

    def piece(self, place: int, piece: Piece) -> Iterator[dict[str, Any]]:
        """What is new of the text and surely no call."""
        self._text += piece.text
        tokens = self._tokens(piece) if self._asked.calling is None else []
        yield from self._more(self.sure(0, self._text, self.reader)[1], tokens)

    def _more(self, said: str, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[dict[str, Any]]:
        """What was not told of this."""
        new = said[self._end :]
        if not new:
            return
        if not self._open:
            yield from self._opened()
        self._end += len(new)
        fields = {"delta": new, "logprobs": list(logprobs)}
        yield self._event("output_text.delta", **self._at, content_index=0, **fields)

    async def settle(self, results: Sequence[Result], account: dict[str, Any]) -> None:
        """The response as a whole; it is kept, if it is to be."""
        logprobs = [token for it in self.visit.askings[0].pieces for token in self._tokens(it)]
        output = self.output(results[0], logprobs)
        self.complete = self._ended_response(results[0], output, account)
        if self._asked.echo["store"]:
            await asyncio.to_thread(self._keep, results[0])

    def _keep(self, result: Result) -> None:
        """Store it with the documents that it is made from, and none of their passages."""
        visit = self.visit
        output = [
            item | ({"results": None} if item["type"] == "file_search_call" else {})
            for item in self.complete["output"]
        ]
        shown = {name: item for name, item in self.complete.items() if name != "jaxrag"}
        answer = self.answer(result, output)
        messages = [*self._asked.messages, answer]
        grounds = list(self._grounds)
        if visit.knowledge_base is not None:
            documents = tuple(dict.fromkeys(source.document_id for source in result.sources))
            store = store_id(visit.state, visit.call.access, visit.knowledge_base)
            grounds.append(Ground(store, documents, *visit.askings[0].chunk_ids))
        body = {"response": shown | {"output": output}, "messages": messages}
        visit.state.library.registry.add_response(self._id, visit.call.access.tenant, body, grounds)

    def answer(self, result: Result, output: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What it said, as later prompts have it; ``output`` are its items."""
        calls = [called(item) for item in output if item["type"] == "function_call"]
        thought, result = self.spoken(0, result)
        message = {"role": "assistant", "content": self.reader.read(result.text)[0]}
        message |= {"reasoning_content": thought} if thought else {}
        return message | ({"tool_calls": calls} if calls else {})

    def ended(
        self, place: int, result: Result, account: dict[str, Any] | None
    ) -> Iterator[dict[str, Any]]:
        """What is left of the message, its citations, the calls, and everything as a whole."""
        for index, item in enumerate(self.complete["output"]):
            if item["type"] == "reasoning":
                yield from self._thought_first(item["content"][0]["text"])
            elif item["type"] == "message":
                yield from self._more(item["content"][0]["text"])
                if not self._open:
                    yield from self._opened()
                yield from self.closed(item)
            elif item["type"] == "function_call":
                at = {"output_index": index, "item_id": item["id"]}
                begun = item | {"arguments": "", "status": "in_progress"}
                yield self._event("output_item.added", output_index=index, item=begun)
                kind, arguments = "function_call_arguments", item["arguments"]
                yield self._event(f"{kind}.delta", **at, delta=arguments)
                yield self._event(f"{kind}.done", **at, name=item["name"], arguments=arguments)
                yield self._event("output_item.done", output_index=index, item=item)
        yield self._event(self.complete["status"], response=self.complete)

    def failed(self, problem: Problem) -> dict[str, Any]:
        """The error as an event of OpenAI's, and as its clients raise it."""
        body = problem.body()
        error = {name: body["error"][name] for name in ("code", "message", "param")}
        return self._event("error", **error, **body) | {"type": "error"}

    def closed(self, item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The message ends, with its citations."""
        part = item["content"][0]
        at = {**self._at, "content_index": 0}
        for index, annotation in enumerate(part["annotations"]):
            yield self._event(
                "output_text.annotation.added", **at, annotation_index=index, annotation=annotation
            )
        yield self._event("output_text.done", **at, text=part["text"], logprobs=part["logprobs"])
        yield self._event("content_part.done", **at, part=part)
        yield self._event("output_item.done", output_index=self._at["output_index"], item=item)

    def whole(
        self,
        results: Sequence[Result],
        pieces: Sequence[list[Piece]],
        account: dict[str, Any],
    ) -> dict[str, Any]:
        """The response."""
        return self.complete

    def _event(self, kind: str, **said: Any) -> dict[str, Any]:
        """The next event of a stream."""
        number, self._count = self._count, self._count + 1
        return {"type": f"response.{kind}", "sequence_number": number, **said}

    def _tokens(self, piece: Piece) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = []
        if self.fields.logprobs is not False:
            entries = logprobs_of(self.model, piece)
            for entry in entries:
                for logprob in (entry, *entry["top_logprobs"]):
                    logprob["bytes"] = logprob["bytes"] or []
        return entries

    def output(self, result: Result, logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The items of the response."""
        thought, result = self.spoken(0, result)
        text, calls = self.reader.read(result.text)
        status = "incomplete" if result.finish_reason == "length" else "completed"
        items = [
            {
                "id": f"fc_{self._name}_{place}",
                "type": "function_call",
                "call_id": call_id(),
                "name": call.name,
                "arguments": call.arguments,
                "status": status,
            }
            for place, call in enumerate(calls)
        ]
        if text or not (items or thought):
            cited = of_response(result, self.fields.cite not in (None, "no"))
            items.insert(0, self.said(status, [said_text(text, cited, logprobs)]))
        if thought:
            items.insert(0, self.thinking(thought, status if len(items) == 0 else "completed"))
        if self._asked.search is not None:
            sources = sorted(result.sources, key=lambda source: source.number)
            items.insert(0, self._searched("completed", sources))
        return items

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
            "model": self.visit.named,
            "output": output,
            "usage": None,
            **self._asked.echo,
        }

    def _searched(self, status: str, found: Sequence[Source] | None = None) -> dict[str, Any]:
        results: list[dict[str, Any]] | None = None
        if self._asked.results and found is not None:
            results = [
                {
                    "file_id": file_id_of(hit.document_id),
                    "filename": filename(hit),
                    "score": hit.score,
                    "attributes": {},
                    "text": hit.text,
                }
                for hit in found
            ]
        question = self._asked.talk.query or self._asked.talk.questions[-1]
        return {
            "id": self._call,
            "type": "file_search_call",
            "status": status,
            "queries": [question],
            "results": results,
        }

    def thinking(self, thought: str, status: str) -> dict[str, Any]:
        """What is thought before the answer."""
        content = [{"type": "reasoning_text", "text": thought}]
        item = {"id": self._thinking, "type": "reasoning", "summary": [], "content": content}
        return item | {"status": status}

    def said(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        """The message of the answer."""
        return {
            "id": self._message,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }


def _best_first(visit: Visit) -> list[Source]:
    return sorted(visit.askings[0].sources, key=lambda source: source.number)


def said_text(
    text: str, annotations: list[dict[str, Any]], logprobs: list[dict[str, Any]]
) -> dict[str, Any]:
    """A text in a message."""
    return {
        "type": "output_text", "text": text, "annotations": annotations, "logprobs": logprobs
    }  # fmt: skip

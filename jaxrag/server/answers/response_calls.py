"""Functions in responses: which may be called, calls and results in the input, and calls told."""

import json
import reprlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrag.serve.answers import Piece, Result
from jaxrag.serve.calls import ToolCall
from jaxrag.server.answers.response_form import ResponseForm, ResponseRequest, said_text
from jaxrag.server.answers.tools import Calling, CallReader, call_id, calling_of
from jaxrag.server.answers.visit import Visit
from jaxrag.server.errors import invalid
from jaxrag.server.fields import Body
from jaxrag.server.state.registry import ResponseRow


def functions_of(body: Body) -> Calling | None:
    """The functions that may be called; None where no tool is one. Raises Problem 400."""
    given = body.values.get("tools")
    kinds = [it.get("type") if isinstance(it, dict) else None for it in _listed(given)]
    if "function" not in kinds:
        return None
    if set(kinds) != {"function"}:
        raise invalid(
            f"tools of the types {reprlib.repr(kinds)}: expected functions alone, or file_search "
            "alone",
            "tools",
        )
    tools = [{"type": "function", "function": _without(it, "type")} for it in _listed(given)]
    choice = body.values.get("tool_choice")
    if isinstance(choice, dict):
        choice = {"type": choice.get("type"), "function": {"name": choice.get("name")}}
    several = body.values.get("parallel_tool_calls")
    return calling_of(Body({"tools": tools, "tool_choice": choice, "parallel_tool_calls": several}))


def called(item: Mapping[str, Any]) -> dict[str, Any]:
    """A call in the input, as a message of a chat has it."""
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def answered(item: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a call in the input, as a message."""
    output = item.get("output")
    content = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
    return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}


class CallingResponseForm(ResponseForm):
    """A response's form whose answer may call functions; a stream tells it when it is complete."""

    def __init__(
        self, visit: Visit, asked: ResponseRequest, calling: Calling, before: ResponseRow | None
    ) -> None:
        """Raises RequestError for a model whose calls are not known."""
        super().__init__(visit, asked, before)
        self._reader = CallReader(visit.state.model, calling)

    def opening(self) -> Iterator[dict[str, Any]]:
        """The response begins."""
        yield from self.begun()

    def piece(self, place: int, piece: Piece) -> dict[str, Any] | None:
        """Nothing, as it may be part of a call."""
        return None

    def output(self, result: Result, logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The message, if it says anything, and the calls."""
        said, calls = self._reader.read(result.text)
        status = "incomplete" if result.finish_reason == "length" else "completed"
        items = [_item(it, status) for it in calls]
        if said or not items:
            items.insert(0, self.said(status, [said_text(said, [], logprobs)]))
        return items

    def answer(self, result: Result, output: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What it said, as later prompts have it."""
        said, _ = self._reader.read(result.text)
        calls = [called(it) for it in output if it["type"] == "function_call"]
        message = {"role": "assistant", "content": said}
        return message | ({"tool_calls": calls} if calls else {})

    def ended(
        self, place: int, result: Result, account: dict[str, Any] | None
    ) -> Iterator[dict[str, Any]]:
        """Item by item, and everything once more as a whole."""
        for index, item in enumerate(self.complete["output"]):
            at = {"output_index": index, "item_id": item["id"]}
            empty: dict[str, Any] = (
                {"content": []} if item["type"] == "message" else {"arguments": ""}
            )
            begun = item | empty | {"status": "in_progress"}
            yield self.told("output_item.added", output_index=index, item=begun)
            if item["type"] == "message":
                [part] = item["content"]
                inside = {**at, "content_index": 0}
                yield self.told("content_part.added", **inside, part=said_text("", [], []))
                logprobs = part["logprobs"]
                text = {"delta": part["text"], "logprobs": logprobs}
                yield self.told("output_text.delta", **inside, **text)
                yield self.told("output_text.done", **inside, text=part["text"], logprobs=logprobs)
                yield self.told("content_part.done", **inside, part=part)
            else:
                kind, arguments = "function_call_arguments", item["arguments"]
                yield self.told(f"{kind}.delta", **at, delta=arguments)
                yield self.told(f"{kind}.done", **at, name=item["name"], arguments=arguments)
            yield self.told("output_item.done", output_index=index, item=item)
        yield self.told(self.complete["status"], response=self.complete)


def _item(call: ToolCall, status: str) -> dict[str, Any]:
    return {
        "id": f"fc_{uuid.uuid4().hex}",
        "type": "function_call",
        "call_id": call_id(),
        "name": call.name,
        "arguments": call.arguments,
        "status": status,
    }


def _listed(given: Any) -> list[Any]:
    return given if isinstance(given, list) else []


def _without(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key != name}

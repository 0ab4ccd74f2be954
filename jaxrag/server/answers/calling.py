"""Tools of a request: which may be called, and calls and results in what it brings."""

import dataclasses
import json
import reprlib
import uuid
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from jaxrag.base.guide import Guide
from jaxrag.models.model import Model
from jaxrag.serve.calls import ToolCall, begun_calls, calls_of, form_of, sure_text
from jaxrag.server.errors import invalid
from jaxrag.server.fields import Fields, Generation, wrong

MOST_TOOLS = 128
_SAYING = {"type", "properties", "required", "title", "description", "$schema"}
_PARTS = ("text", "input_text", "output_text", "refusal")


@dataclasses.dataclass(frozen=True)
class Calling:
    """Tools that may be called.

    Attributes:
      tools: as the client defines them.
      choice: "auto", "required", or the name of the one that is to be called.
      several: more than one call is wanted at a time.
    """

    tools: tuple[Mapping[str, Any], ...]
    choice: str
    several: bool

    @property
    def names(self) -> frozenset[str]:
        """Of the tools."""
        return frozenset(tool["function"]["name"] for tool in self.tools)

    @property
    def guide(self) -> Guide | None:
        """What the answer has to be where a call is wanted: its arguments, or a list of calls."""
        if self.choice == "auto":
            return None
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.tools}
        if self.choice != "required":
            return Guide("json_schema", json.dumps(schemas[self.choice]))
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": schema},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for name, schema in schemas.items()
        ]
        most = {} if self.several else {"maxItems": 1}
        calls_schema = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most}
        return Guide("json_schema", json.dumps(calls_schema))


class _Function(Fields):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    parameters: dict[str, Any] | None = None


class _Tool(Fields):
    type: Literal["function"]
    function: _Function


class Tools(Fields):
    """Tools that are offered, and which of them are to be called."""

    tools: Annotated[list[Any], Field(max_length=MOST_TOOLS)] = Field([])
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True

    @property
    def kinds(self) -> list[Any]:
        """Their types."""
        return [tool.get("type") if isinstance(tool, dict) else None for tool in self.tools]

    def offered(self) -> bool:
        """Whether any may be called. Raises Problem 400 where one has to be and there is none."""
        if not self.tools and self.tool_choice not in ("none", "auto"):
            raise wrong("tool_choice", self.tool_choice, "none or auto, as there are no tools")
        return bool(self.tools) and self.tool_choice != "none"

    def calling(self) -> Calling | None:
        """Those that may be called; None where none may. Raises Problem 400."""
        if not self.offered():
            return None
        choice = self.tool_choice
        tools = tuple(_tool(place, tool) for place, tool in enumerate(self.tools))
        names = [tool["function"]["name"] for tool in tools]
        if len(set(names)) < len(names):
            raise invalid("tools: two have one name", "tools")
        if isinstance(choice, dict):
            function = choice.get("function")
            named = function.get("name") if isinstance(function, dict) else None
            if named not in names:
                raise wrong("tool_choice", choice, "the name of one of the tools")
            choice = named
        elif choice not in ("auto", "required"):
            expected = "none, auto, required, or a function by its name"
            raise wrong("tool_choice", choice, expected)
        return Calling(tools, choice, self.parallel_tool_calls)


def with_tools(fields: Generation, calling: Calling) -> Generation:
    """The fields of an answer that calls what it has to. Raises Problem 400 beside a form."""
    if (guide := calling.guide) is None:
        return fields
    if fields.sampling.guide is not None or fields.ignore_eos:
        other = "ignore_eos" if fields.ignore_eos else "response_format"
        raise invalid(f"tool_choice={calling.choice!r} with {other}: leave one out", "tool_choice")
    return fields.guided(guide)


def refuse_knowledge(fields: Generation, base: str | None) -> None:
    """Problem 400 for tools beside what is put into a prompt of another form."""
    if base is not None or fields.documents or fields.blocks:
        raise invalid(
            "tools with a knowledge base, documents or blocks: name the model alone, and paste "
            "passages into a message, or give a tool that finds them",
            "tools",
        )


def _tool(place: int, given: Any) -> dict[str, Any]:
    """A definition of a function, with the schema of its arguments. Raises Problem 400."""
    tool = _Tool.read(given, f"tools[{place}]")
    parameters = tool.function.parameters or {"properties": {}}
    kind = parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise wrong(f"tools[{place}].function.parameters.type", kind, "object")
    parameters = {**parameters, "type": "object"}
    if parameters.get("properties") == {} and parameters.keys() <= _SAYING:
        parameters["additionalProperties"] = False
    return {"type": "function", "function": {**given["function"], "parameters": parameters}}


class CallReader:
    """Reads the calls in answers of one model; without tools all of an answer is text."""

    def __init__(self, model: Model, calling: Calling | None) -> None:
        """Raises RequestError for a model whose calls are not known."""
        self._calling = calling
        if calling is not None:
            self._form = form_of("".join(model.text_tokenizer().chat_templates.values()))

    def read(self, text: str) -> tuple[str, list[ToolCall]]:
        """What an answer says, and what it calls."""
        if self._calling is None:
            return text, []
        choice = self._calling.choice
        if choice == "auto":
            return calls_of(text, self._form, self._calling.names)
        if choice != "required":
            return "", [ToolCall(choice, text)]
        return "", begun_calls(text)

    def sure(self, text: str) -> int:
        """How many characters of the beginning of an answer are no call."""
        if self._calling is None:
            return len(text)
        if self._calling.choice != "auto":
            return 0
        return sure_text(text, self._form, self._calling.names)


def call_id() -> str:
    """A name for a call, by which its result comes back; Mistral's templates want nine signs."""
    return uuid.uuid4().hex[:9]


def shown_call(call: ToolCall) -> dict[str, Any]:
    """A call as a message of a chat has it."""
    return {
        "id": call_id(),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def functions_of(given: Tools) -> Calling | None:
    """The functions that may be called; None where no tool is one. Raises Problem 400."""
    kinds = given.kinds
    if "function" not in kinds:
        return None
    if any(kind != "function" for kind in kinds):
        raise invalid(
            f"tools of the types {reprlib.repr(kinds)}: expected functions alone, or file_search "
            "alone",
            "tools",
        )
    tools = [{"type": "function", "function": _without(tool, "type")} for tool in given.tools]
    choice = given.tool_choice
    if isinstance(choice, dict):
        choice = {"type": choice.get("type"), "function": {"name": choice.get("name")}}
    return given.model_copy(update={"tools": tools, "tool_choice": choice}).calling()


def called(item: Mapping[str, Any]) -> dict[str, Any]:
    """A call in the input, as a message of a chat has it."""
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def answered(place: int, item: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a call in the input, as a message. Raises Problem 400 for parts of no text."""
    output = item.get("output")
    if isinstance(output, list):
        output = [text_part(f"input[{place}].output", part) for part in output]
    elif not isinstance(output, str | None):
        output = json.dumps(output, ensure_ascii=False)
    return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}


def text_part(what: str, part: Any) -> dict[str, Any]:
    """A part of an item in the input, as a message has it. Raises Problem 400."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _PARTS:
        raise invalid(
            f"{what} has a part of the type {reprlib.repr(kind)}: expected one of "
            f"{', '.join(_PARTS)}",
            "input",
        )
    return {"type": "text", "text": part.get("refusal" if kind == "refusal" else "text")}


def input_items(place: int, message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A message as items of the input of a response, named by their place among all messages."""
    role, content = message["role"], message["content"]
    texts = [content] if isinstance(content, str) else [part["text"] for part in content or ()]
    done = {"status": "completed"}
    if role == "tool":
        name, output = message.get("tool_call_id") or "", "".join(texts)
        result = {"type": "function_call_output", "call_id": name, "output": output}
        yield {"id": f"fco_{place}", **result, **done}
        return
    if any(texts):
        kind = "output_text" if role == "assistant" else "input_text"
        more: dict[str, Any] = {}
        if role == "assistant":
            more = {"annotations": [], "logprobs": []}
        parts = [{"type": kind, "text": text, **more} for text in texts]
        yield {"id": f"msg_{place}", "type": "message", "role": role, "content": parts, **done}
    for at, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        arguments = function["arguments"]
        yield {
            "id": f"fc_{place}_{at}",
            "type": "function_call",
            "call_id": call["id"],
            "name": function["name"],
            "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
            **done,
        }


def _without(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key != name}

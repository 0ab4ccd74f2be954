"""Calls of tools in an answer, as the families of models write them.

    form      text
    hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of these
    llama     {"name": ..., "parameters": {...}}, alone or behind <|python_tag|>
    mistral   [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
    glm       <tool_call>name<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
    glm_4     name, a line break, {...}
    coder     <tool_call><function=name><parameter=a>1</parameter></function></tool_call>

Qwen 2.5 and 3 write the first, Qwen 3 Coder the last, Granite and Phi 4 Mistral's behind another
mark. What is no call of a tool that there is stays text.
"""

import dataclasses
import json
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from jaxrag.base.errors import RequestError

_OPENED, _CLOSED = "<tool_call>", "</tool_call>"
_FORMS = (  # the first whose sign is in a chat template
    ("<arg_key>", "glm"),
    ("<function=", "coder"),
    (_OPENED, "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call|>", "mistral"),
    ("<|observation|>", "glm_4"),
    ("<|python_tag|>", "llama"),
    ('"parameters":', "llama"),
)
_TAGGED = ("hermes", "glm", "coder")
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=(.*?)>\n?(.*?)\n?</parameter>", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=(.*?)>")
_MARKS = re.compile(r"\A\s*(\[TOOL_CALLS\]|<\|python_tag\|>|<\|tool_call\|>)|<\|/tool_call\|>\s*\Z")
_DECODER = json.JSONDecoder()
_BEGUN = re.compile(r'\{\s*"name"\s*:\s*"([^"]*)"\s*,\s*"arguments"\s*:\s*(.*)', re.DOTALL)


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call of a tool: its name, and its arguments as JSON."""

    name: str
    arguments: str


def form_of(template: str) -> str:
    """How a model with this chat template writes calls. RequestError where that is not known."""
    if not template:
        raise RequestError("tools need a model with a chat template; name them in a message")
    for sign, form in _FORMS:
        if sign in template:
            return form
    raise RequestError(
        "tools: the model's chat template writes calls in no form that is known (Hermes, Qwen, "
        "Llama 3, Mistral, Granite, GLM); name the tools in a message"
    )


def calls_of(text: str, form: str, names: Collection[str]) -> tuple[str, list[ToolCall]]:
    """What an answer says beside its calls, and these; the whole text where it calls nothing."""
    if form in _TAGGED:
        said, *parts = text.split(_OPENED)
        read = {"hermes": _hermes, "glm": _glm, "coder": _coder}[form]
        if not parts and text.lstrip().startswith("{"):  # the mark was a special token
            said, parts = "", [text]
        calls = [read(part.partition(_CLOSED)[0]) for part in parts]
    elif form == "glm_4":
        said, calls = "", [_named_line(text)]
    else:
        said, calls = "", list(_objects(text))
    if not calls or any(call is None or call.name not in names for call in calls):
        return text, []
    return said.rstrip(), [call for call in calls if call is not None]


def begun_calls(text: str) -> list[ToolCall]:
    """Of a list of calls, or the beginning of one: the last has the arguments that it came to."""
    calls = list[ToolCall]()
    rest = text.lstrip().removeprefix("[").lstrip()
    while rest:
        try:
            whole, end = _DECODER.raw_decode(rest)
        except ValueError:
            begun = _BEGUN.match(rest)
            return [*calls, ToolCall(begun[1], begun[2])] if begun else calls
        call = _call(whole)
        calls += [] if call is None else [call]
        rest = rest[end:].lstrip(" \n\t,]")
    return calls


def sure_text(text: str, form: str, names: Collection[str]) -> int:
    """How many characters of the beginning of an answer are no call, whatever follows."""
    if form in _TAGGED:
        at = text.find(_OPENED)
        if at < 0:
            last = text.rfind("<")
            at = last if last >= 0 and _OPENED.startswith(text[last:]) else len(text)
        return 0 if text.lstrip().startswith("{") else len(text[:at].rstrip())
    start = text.lstrip()
    if form == "glm_4":
        line, broken, rest = start.partition("\n")
        called = line.rstrip() in names if broken else any(name.startswith(line) for name in names)
        return 0 if called and rest[:1] in ("", "{") else len(text)
    return 0 if not start or start[0] in "{[<" else len(text)


def _call(value: Any) -> ToolCall | None:
    """Of an object with a name and arguments, under either of their names."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))


def _hermes(part: str) -> ToolCall | None:
    try:
        return _call(json.loads(part))
    except ValueError:
        return None


def _coder(part: str) -> ToolCall | None:
    named = _FUNCTION.match(part)
    return None if named is None else _with_arguments(named[1], _PARAMETER.findall(part))


def _glm(part: str) -> ToolCall | None:
    return _with_arguments(part.partition("<arg_key>")[0].strip(), _ARGUMENT.findall(part))


def _with_arguments(name: str, pairs: Iterable[tuple[str, str]]) -> ToolCall | None:
    arguments: dict[str, Any] = {}
    for key, value in pairs:
        try:
            arguments[key.strip()] = json.loads(value)
        except ValueError:
            arguments[key.strip()] = value
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False)) if name else None


def _named_line(text: str) -> ToolCall | None:
    name, _, arguments = text.strip().partition("\n")
    try:
        return _call({"name": name.strip(), "arguments": json.loads(arguments)})
    except ValueError:
        return None


def _objects(text: str) -> Iterator[ToolCall | None]:
    """Of a list of calls, or of calls one behind the other, and nothing else; else one None."""
    rest = _MARKS.sub("", text).strip()
    while rest:
        try:
            value, end = _DECODER.raw_decode(rest)
        except ValueError:
            yield None
            return
        yield from map(_call, value if isinstance(value, list) else [value])
        rest = rest[end:].lstrip(" \n\t;,")

"""Messages as clients send them back: whatever roles, gaps and cut calls a talk has come to."""

import hashlib
import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrag.base.errors import RequestError
from jaxrag.serve.ask import is_ids

Said = Mapping[str, Any]

FOLDED = (
    "the messages were not put as they were sent: later ones of the system are joined to the "
    "user's next, neighbours of one role are one, and calls whose arguments are no JSON object "
    "have none"
)
JOINT = "\n\n"  # between messages that are one
_NAMES = {"developer": "system", "function": "tool"}
_ROLES = ("system", "user", "assistant", "tool")
_CALL_NAME = re.compile("[a-zA-Z0-9]{9}")  # as Mistral's templates want it


def message_of(what: str, message: Any) -> dict[str, Any]:
    """A message of a client as a template takes it: role, content, calls, thoughts.

    No content is "", and so are the arguments of a call that have no JSON object; they stay text
    where they are some. Raises RequestError for another role, or a content that is no text.
    """
    if not isinstance(message, Mapping):
        raise RequestError(
            f"{what}={reprlib.repr(message)}: expected an object with role and content"
        )
    role, content = message.get("role"), message.get("content")
    role = _NAMES.get(role, role) if isinstance(role, str) else role
    if role not in _ROLES:
        raise RequestError(
            f"{what} has role={reprlib.repr(role)}: expected one of {', '.join(_ROLES)}"
        )
    if isinstance(content, list) and not is_ids(content):
        content = "".join(_part(f"{what}.content[{i}]", part) for i, part in enumerate(content))
    if content is None:
        content = message.get("refusal") or ""
    if not isinstance(content, str) and not is_ids(content):
        raise RequestError(
            f"{what} has content={reprlib.repr(content)}: expected a text, or a list of text parts"
        )
    said = {"role": role, "content": content}
    if role == "tool":
        said["tool_call_id"] = _call_name(message.get("tool_call_id"))
    if role != "assistant":
        return said
    old, calls = message.get("function_call"), message.get("tool_calls")
    if calls or old:
        said["tool_calls"] = _calls(what, calls or [{"function": old}])
    thought = message.get("reasoning_content")
    return said | ({"reasoning_content": thought} if thought and isinstance(thought, str) else {})


def _part(what: str, part: Any) -> str:
    """The text of a part of a message. Raises RequestError."""
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(kind) if kind in ("text", "refusal") else None
    if not isinstance(text, str):
        raise RequestError(
            f"{what} is of the type {reprlib.repr(kind)}: expected a part with type text, and its "
            "text"
        )
    return text


def _calls(what: str, calls: Any) -> list[dict[str, Any]]:
    """The calls of tools in a message, arguments as objects where they are some."""
    calls_of: list[dict[str, Any]] = []
    for call in calls if isinstance(calls, list) else [calls]:
        function: Any = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(
                f"{what}.tool_calls={reprlib.repr(calls)}: expected a list of objects with a "
                "function and its name"
            )
        named = {"name": function["name"], "arguments": _arguments(function.get("arguments"))}
        calls_of.append({"id": _call_name(call.get("id")), "type": "function", "function": named})
    return calls_of


def _arguments(given: Any) -> Any:
    """As OpenAI writes them they are JSON; templates take objects."""
    read = given
    if isinstance(given, str):
        try:
            read = json.loads(given or "null")
        except (ValueError, RecursionError):
            read = given if given.strip() else None
    if read is None or isinstance(read, dict):
        return read or {}
    return given if isinstance(given, str) else json.dumps(given)


def _call_name(given: Any) -> str:
    """The id of a call: another one for what no template takes, or that spells anything."""
    name = given if isinstance(given, str) else json.dumps(given)
    digest = hashlib.blake2b(name.encode(errors="replace"), digest_size=5)
    return name if _CALL_NAME.fullmatch(name) else digest.hexdigest()[:9]


def folded(messages: Sequence[Said]) -> list[tuple[dict[str, Any], list[int]]]:
    """The same for whoever takes the system once, first, and roles in turns; and where they stood.

    A message is ``FOLDED``, beside the places of those that it is made of. Raises RequestError
    where token ids would have to be joined.
    """
    rows: list[tuple[dict[str, Any], list[int]]] = []
    late = list[int]()

    def add(row: dict[str, Any], places: list[int]) -> None:
        alike = bool(rows) and rows[-1][0]["role"] == row["role"]
        if alike and rows[-1][0].keys() == row.keys() == {"role", "content"}:
            rows[-1][1].extend(places)
        else:
            rows.append((row, places))

    for place, message in enumerate(messages):
        if message["role"] == "system" and rows and rows[-1][0]["role"] != "system":
            late.append(place)
            continue
        row, places = dict(message), [place]
        if "tool_calls" in row:
            row["tool_calls"] = [_with_object(call) for call in row["tool_calls"]]
        if row["role"] == "user":
            places, late = [*late, place], []
        add(row, places)
    if late:
        add({"role": "user", "content": ""}, late)
    for row, places in rows:
        row["content"] = together(row["role"], places[-1], [messages[i]["content"] for i in places])
    return rows


def together(role: str, place: int, contents: Sequence[Any]) -> Any:
    """Contents of one role in a row as one. Raises RequestError for token ids among others."""
    if len(contents) == 1:
        return contents[0]
    if not all(isinstance(content, str) for content in contents):
        raise RequestError(f"messages[{place}]: two of the {role} in a row")
    return JOINT.join(contents)


def _with_object(call: Said) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"] if isinstance(function["arguments"], dict) else {}
    return {**call, "function": {**function, "arguments": arguments}}

"""A conversation as the model's chat template writes it, contents kept apart from the frame.

The template's own text may hold special tokens; contents never do, whatever is spelled in them.
"""

import contextlib
import dataclasses
import datetime
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxrag.base.errors import TokenizerError
from jaxrag.models.text.tokenizer import Tokenizer

_FIRST_MARK = 0xE000  # of the private-use area: 6,400 characters that no script has
_MARKS = 6400
_FIRST_HIDDEN = 0xF0000  # of another such area
_HIDDEN = re.compile("([\U000f0000-\U000ffffd])")
_KNOWN = ("role", "content", "tool_call_id")  # of a message: these spell no special token


def _answer_alone(content: str) -> str:
    return content.rpartition("</think>")[2].lstrip("\n")


# What templates do to a content: Llama 3 strips it, Qwen 3 leaves the thoughts of answers out.
_CHANGES: tuple[Callable[[str], str], ...] = (
    lambda content: content,
    str.strip,
    str.rstrip,
    str.lstrip,
    _answer_alone,
    lambda content: _answer_alone(content).strip(),
)


@dataclasses.dataclass(frozen=True)
class MessagePart:
    """A part of a rendered conversation.

    Attributes:
      text: the parts' texts together are what the template renders.
      message: whose content it is, as the template has it; None: the template's own text.
      spelled: it is a special token's, as tools, calls or thoughts spell it: ordinary text.
    """

    text: str
    message: int | None = None
    spelled: bool = False


@dataclasses.dataclass(frozen=True)
class Framing:
    """What a chat template is given beside messages.

    Attributes:
      tools: that may be called, as OpenAI's clients define them.
      values: variables of the template's own, such as enable_thinking.
      ending: "opened": an answer begins behind the messages; "closed": nothing follows them;
        "continued": the last message goes on.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ending: Literal["opened", "closed", "continued"] = "opened"


OPENED = Framing()


def framed(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], framing: Framing = OPENED
) -> list[MessagePart]:
    """The parts of a conversation, with the template's opening of the answer last.

    Tools, calls of them and thoughts in a message are part of the template's own text.

    It is rendered twice: with a mark in place of every content, which shows the frame, and as it
    is, which shows what the template does to contents.

    Raises TokenizerError for a tokenizer without a chat template, a template that refuses the
    messages, and one that does to a content what is not known here or leaves the tools out.
    """
    contents = [message["content"] for message in messages]
    if len(messages) > _MARKS or any(_has_mark(content) for content in contents):
        raise TokenizerError(
            "messages hold characters of the private-use area U+E000 to U+F8FF, or are more than "
            f"{_MARKS}; leave these out"
        )
    tools = _hidden(tokenizer, "tools", framing.tools)
    values = _hidden(tokenizer, "chat_template_kwargs", framing.values)
    messages = [
        {
            name: it if name in _KNOWN else _hidden(tokenizer, f"messages[{place}].{name}", it)
            for name, it in message.items()
        }
        for place, message in enumerate(messages)
    ]
    # One without content, as of a message that calls tools, is left so: templates look for that.
    marks = [chr(_FIRST_MARK + i) if content else "" for i, content in enumerate(contents)]
    marked = [{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)]
    now = datetime.datetime.combine(datetime.date.today(), datetime.time())
    frame, whole = (
        tokenizer.render_chat(
            said,
            add_generation_prompt=framing.ending == "opened",
            now=now,
            tools=tools,
            values=values,
        )
        for said in (marked, messages)
    )
    if "\\udb8" in frame:  # what is hidden, as an escape
        raise TokenizerError("the model's chat template escapes special tokens in tools or calls")
    if tools and not all(tool["function"]["name"] in frame for tool in tools):
        raise TokenizerError("the model's chat template writes no tools; name them in a message")
    between, rest = list[str](), frame
    for place, mark in enumerate(marks):
        if not mark:
            between.append("")
            continue
        before, found, rest = rest.partition(mark)
        if not found or mark in rest:
            raise _not_repeated(place)
        between.append(before)
    between.append(rest)
    parts = list(_parts(between, contents, whole))
    parts = parts[:-1] if framing.ending == "continued" else parts
    return [one for part in parts for one in _shown(part, tokenizer)]


def _parts(between: Sequence[str], contents: Sequence[str], whole: str) -> Iterator[MessagePart]:
    """The frame's texts with contents between them, changed as the template changes them."""
    following = [between[-1]]  # of every place the next text of the frame that is not empty
    for text in between[:0:-1]:
        following.append(text or following[-1])
    at = 0
    for place, content in enumerate(contents):
        before, behind = between[place], following[-1 - place]
        start = at + len(before)
        for change in _CHANGES:
            text = change(content)
            if whole.startswith(text + behind, start):
                break
        else:
            raise _not_repeated(place)
        yield MessagePart(before)
        yield MessagePart(text, place)
        at = start + len(text)
    if whole[at:] != between[-1]:
        raise _not_repeated(len(contents) - 1)
    yield MessagePart(between[-1])


def _hidden(tokenizer: Tokenizer, what: str, given: Any) -> Any:
    """The same with a character of its own for every special token that it spells."""
    if not given:
        return given
    text = json.dumps(given, ensure_ascii=False)
    if _spells_none(tokenizer, text):
        return given
    if not _HIDDEN.search(text):
        for place, token in enumerate(tokenizer.added_tokens):
            spelled = json.dumps(token, ensure_ascii=False)[1:-1]
            text = text.replace(spelled, chr(_FIRST_HIDDEN + place))
        with contextlib.suppress(ValueError):
            found = json.loads(text)
            if _spells_none(tokenizer, text):
                return found
    raise TokenizerError(f"{what} spell a special token of the model: leave it out")


def _spells_none(tokenizer: Tokenizer, text: str) -> bool:
    return np.array_equal(tokenizer.encode(text), tokenizer.encode(text, special=True))


def _shown(part: MessagePart, tokenizer: Tokenizer) -> Iterator[MessagePart]:
    """A part with what was hidden in it as parts of their own."""
    if part.message is not None:
        yield part
        return
    for number, text in enumerate(_HIDDEN.split(part.text)):
        if number % 2:
            token = list(tokenizer.added_tokens)[ord(text) - _FIRST_HIDDEN]
            yield MessagePart(token, spelled=True)
        elif text or number == 0:
            yield MessagePart(text)


def _has_mark(content: str) -> bool:
    return any(_FIRST_MARK <= ord(it) < _FIRST_MARK + _MARKS for it in content)


def _not_repeated(place: int) -> TokenizerError:
    return TokenizerError(
        f"the model's chat template does not repeat messages[{place}] once, in order; ask with a "
        "prompt template, such as --template plain"
    )

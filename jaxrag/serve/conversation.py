"""What is asked: a question, or the messages of a conversation, laid out as one prompt."""

import dataclasses
import itertools
import json
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrag.base.errors import ContextExceeded, RequestError
from jaxrag.base.types import HostArray
from jaxrag.engine.request import Prompt
from jaxrag.models.model import Model
from jaxrag.models.text.prompts import QuestionIds
from jaxrag.models.text.verbatim import OPENED, Framing
from jaxrag.serve.ask import EarlierTurns, is_ids, is_list
from jaxrag.serve.history import folded, message_of, together

Text = str | Sequence[int] | HostArray  # text, or token ids where a model has no tokenizer

_ROLES = ("system", "user", "assistant")
_CHARACTERS = 64  # that a position of a context may stand for; more where a token has more
_NOTHING = np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True)
class Passage:
    """A text that is given as one chunk, and where its giver has it from.

    Attributes:
      title: of its document, where the template shows one.
      document_id: what sources call it; None: by its place.
    """

    text: Text
    title: str = ""
    document_id: str | None = None


@dataclasses.dataclass(frozen=True)
class Conversation:
    """What was asked and answered, and what is asked now. ``conversation_of`` makes one.

    Attributes:
      questions: of the user, the last one without an answer.
      answers: of the assistant, one fewer.
      system: what is to be said before all of it; "" for nothing.
      keeps: turns may be looked for in the pool, and this one left there.
      query: what is retrieved for the last question, where that is not the question itself.
      messages: as they were given, roles and texts, and of some tool_calls, tool_call_id or
        reasoning_content; () where they are not all texts.
      prompt: the whole prompt as a text, which no template wraps; None: there is none such.
      framing: what the chat template is given beside them.
      notes: on what was sent and is no part of it.
    """

    questions: tuple[Text, ...]
    answers: tuple[Text, ...] = ()
    system: str = ""
    keeps: bool = False
    query: str | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    prompt: str | None = None
    framing: Framing = OPENED
    notes: tuple[str, ...] = ()

    def with_tools(self, tools: tuple[Mapping[str, Any], ...]) -> "Conversation":
        """The same with tools that may be called."""
        return dataclasses.replace(self, framing=dataclasses.replace(self.framing, tools=tools))

    @property
    def has_tools(self) -> bool:
        """Whether tools are called in it, or say something."""
        return any(entry["role"] == "tool" or "tool_calls" in entry for entry in self.messages)


def check_size(model: Model, parts: Iterable[Text]) -> None:
    """ContextExceeded for texts, or token ids, that are too long for a context; tokenises none."""
    texts, ids = list[int](), list[int]()
    for part in parts:
        (texts if isinstance(part, str) else ids).append(len(part))
    positions = model.config.max_positions
    longest = 0 if model.tokenizer is None else model.tokenizer.longest_token
    most = positions * max(_CHARACTERS, longest)
    counted = ((sum(ids), positions, "token ids"), (sum(texts), most, "characters"))
    for count, allowed, what in counted:
        if count > allowed:
            raise ContextExceeded(
                f"the prompt has {count} {what}: the model's context is {positions} tokens, for "
                f"which at most {allowed} are read; send less"
            )


def questions_of(question: Any) -> tuple[list[Text], bool]:
    """The questions, and whether it was a single one. Raises RequestError for what is none."""
    if isinstance(question, str) or is_ids(question):
        return [question], True
    if not is_list(question) or not all(isinstance(text, str) or is_ids(text) for text in question):
        raise RequestError(
            f"question={reprlib.repr(question)}: expected a text, token ids, or a list of these"
        )
    return list(question), False


def conversation_of(messages: Any, query: str | None = None, *, wire: bool = False) -> Conversation:
    """The conversation that messages of roles and contents are. Raises RequestError.

    Args:
      messages: objects with role and content: of the user and the assistant in turns, a message of
        the system before them if there is one.
      wire: they are what OpenAI's clients send, as ``message_of`` has it, in any order; where no
        template writes them, neighbours of one role are joined and missing questions are "".
    """
    if not is_list(messages) or not len(messages):
        raise RequestError(
            f"messages={reprlib.repr(messages)}: expected a list of objects with role and content, "
            "the last one of the user"
        )
    read = message_of if wire else _message
    given = [read(f"messages[{place}]", message) for place, message in enumerate(messages)]
    turns = _turns(given) if wire else [(entry["role"], entry["content"]) for entry in given]
    count, system = len(turns), ""
    if turns[0][0] == "system":
        first = turns.pop(0)[1]
        if not isinstance(first, str):
            raise RequestError("messages[0]: expected a text of the system")
        system = first
    if wire:
        leads = [("user", "")] * (not turns or turns[0][0] == "assistant")
        turns = [*leads, *turns]
        turns += [("user", "")] * (turns[-1][0] == "assistant")
    for place, (role, _) in enumerate(turns):
        turn = ("user", "assistant")[place % 2]
        if role != turn:
            raise RequestError(
                f"messages[{place + count - len(turns)}] is of the {role}: expected one of the "
                f"{turn}, as user and assistant take turns and a system message comes first"
            )
    if not len(turns) % 2:
        raise RequestError(
            "the last of messages is not of the user: expected what is to be answered now"
        )
    questions = tuple(content for _, content in turns[::2])
    if len({isinstance(question, str) for question in questions}) > 1 or (
        system and not isinstance(questions[0], str)
    ):
        raise RequestError("messages: expected all of system and user as text, or all as token ids")
    answers = tuple(content for _, content in turns[1::2])
    verbatim = tuple(given) if all(isinstance(entry["content"], str) for entry in given) else ()
    return Conversation(questions, answers, system, True, query, verbatim)


def _turns(given: Sequence[Mapping[str, Any]]) -> list[tuple[str, Text]]:
    """Roles and contents in turns; what a tool says is said to the model, as the user's words."""
    turns: list[tuple[str, int, list[Text]]] = []
    for message, places in folded(given):
        role = "user" if message["role"] == "tool" else message["role"]
        calls = message.get("tool_calls")
        content = message["content"] or (json.dumps(calls) if calls else "")
        if not turns or turns[-1][0] != role:
            turns.append((role, places[-1], []))
        turns[-1][2].append(content)
    return [(role, together(role, place, contents)) for role, place, contents in turns]


def _message(what: str, message: Any) -> dict[str, Any]:
    """Role and content of one. Raises RequestError."""
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        raise RequestError(
            f"{what}={reprlib.repr(message)}: expected an object with role and content"
        )
    role: Any = message.get("role")
    content: Any = message.get("content")
    if role not in _ROLES:
        raise RequestError(
            f"{what} has role={reprlib.repr(role)}: expected one of {', '.join(_ROLES)}"
        )
    if not (isinstance(content, str) and content.strip()) and not is_ids(content):
        raise RequestError(
            f"{what} has content={reprlib.repr(content)}: expected a text with words in it, or "
            "token ids"
        )
    return {"role": role, "content": content}


@dataclasses.dataclass(frozen=True)
class Source:
    """A chunk of the prompt, in prompt order.

    Attributes:
      number: by which it is cited: 1 is the best, wherever it stands in the prompt.
    """

    document_id: str
    chunk_index: int
    file: str | None
    score: float | None
    text: str
    page: int | None = None  # 1-based, of documents that have pages
    start: int = 0  # first character in the document's text
    end: int = 0  # one past the last character
    number: int = 0


@dataclasses.dataclass(frozen=True)
class FoundChunk:
    """A chunk that was retrieved or given, before the template wraps it.

    Attributes:
      source: what a result says of it.
      ids: [T] int32.
      chunk_id: in the knowledge base; None where it was given.
      behind: ids of the contents that it was encoded behind there.
      bare: no template is put around it.
    """

    source: Source
    title: str
    ids: HostArray
    chunk_id: int | None = None
    behind: tuple[str, ...] = ()
    bare: bool = False


def numbered(members: Sequence[FoundChunk], newest: Sequence[FoundChunk]) -> list[FoundChunk]:
    """The chunks of a prompt in its order, numbered best first, the newest question's before."""
    new = set(map(id, newest))
    best = sorted(members, key=lambda hit: (id(hit) not in new, hit.source.number))
    numbers = {id(hit): number for number, hit in enumerate(best, 1)}
    sources = (dataclasses.replace(member.source, number=numbers[id(member)]) for member in members)
    return [dataclasses.replace(hit, source=own) for hit, own in zip(members, sources, strict=True)]


def laid_out(
    asked: Sequence[QuestionIds],
    answers: Sequence[HostArray],
    found: Sequence[Sequence[FoundChunk]],
    wrap: Callable[[FoundChunk], HostArray],
    earlier: EarlierTurns,
    shown: Callable[[HostArray], str],
) -> tuple[Prompt, list[FoundChunk]]:
    """The prompt of the last question, and of its chunks those that are no turns, in order.

    A turn is all from the chunks of its question, or from the turn before it, to the token before
    the last of its answer: that one was never run when it was generated, so it goes with what
    follows. Chunks are in the turn in which they were found. Earlier turns as "blocks" are chunks
    themselves, each with the whole of its answer, and with what leads to chunks behind it.

    Args:
      answers: one fewer, int32 [T] each.
      found: the chunks of every question.
      wrap: gives a chunk the form that it has in a prompt.
      shown: the text of token ids.
    """
    chunks: list[HostArray] = []
    turns, members = list[int](), list[FoundChunk]()
    pending = _NOTHING  # since the last part

    for number, (ids, passages) in enumerate(zip(asked, found, strict=True)):
        before = ids.before if number else _NOTHING
        if passages and number:
            if earlier == "exact":
                turns.append(len(chunks))
                chunks.append(_joined(pending, before))
            else:
                chunks[-1] = _joined(chunks[-1], before)
            pending = before = _NOTHING
        chunks += map(wrap, passages)
        members += passages
        pending = _joined(pending, before, ids.final)
        if number == len(answers):
            break
        pending = _joined(pending, answers[number])
        if earlier == "exact":
            turns.append(len(chunks))
            chunks.append(pending[:-1])
            pending = pending[-1:]
        else:
            text = shown(pending)
            source = Source(f"turn {number}", 0, None, None, text, end=len(text))
            members.append(FoundChunk(source, "", pending, bare=True))
            chunks.append(pending)
            pending = _NOTHING
    shift = len(pending) - len(asked[-1].final)
    first, last = asked[-1].question
    span = shift + first, shift + last
    prompt = Prompt(asked[0].before, tuple(chunks), pending, question=span)
    return prompt.with_turns(turns), members


def _joined(*parts: HostArray) -> HostArray:
    return np.concatenate(parts).astype(np.int32)


def shown_prompt(model: Model, prompt: Prompt) -> list[dict[str, Any]]:
    """The parts of a prompt as the model reads them: name, tokens, and text with special tokens.

    Named as in ``Result.reuse``, and "final block" at last; text is "" without a tokenizer. Parts
    without a token are left out.
    """
    counts = {"chunk": itertools.count(), "turn": itertools.count()}
    places = set(prompt.places)
    kinds = ["chunk" if i in places else "turn" for i in range(len(prompt.chunks))]
    names = ["prefix", *(f"{kind} {next(counts[kind])}" for kind in kinds), "final block"]
    parts = zip(names, (prompt.prefix, *prompt.chunks, prompt.final), strict=True)
    tokenizer, size = model.tokenizer, model.config.vocab_size
    return [
        {
            "part": name,
            "tokens": len(ids),
            "text": tokenizer.decode(ids[ids < size], skip_special=False) if tokenizer else "",
        }
        for name, ids in parts
        if len(ids)
    ]

"""What callers of ``generate`` hand over, checked before anything is done with it."""

import dataclasses
import itertools
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from jaxrag.base.errors import RequestError
from jaxrag.base.tables import require_kind
from jaxrag.base.types import HostArray
from jaxrag.engine.sampling import SamplingParams
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.models.model import Model
from jaxrag.models.text.prompts import PromptTemplate
from jaxrag.reuse.methods import Method

Text = str | Sequence[int] | HostArray  # text, or token ids where a model has no tokenizer
EarlierTurns = Literal["exact", "blocks"]


@dataclasses.dataclass(frozen=True)
class Passage:
    """A text that is given as one chunk, and where its giver has it from.

    Attributes:
      text: or token ids.
      title: of its document, where the template shows one.
      document_id: what sources call it; None: by its place.
    """

    text: Text
    title: str = ""
    document_id: str | None = None


_ROLES = ("system", "user", "assistant")

_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "kb": ((KnowledgeBase,), "a KnowledgeBase, as KnowledgeBase.open(DIR, model=...) gives it"),
    "model": ((Model,), "a Model, as load_model(DIR) gives it"),
    "method": ((str, Method), "a preset's name, a .toml file or a Method"),
    "template": ((str, PromptTemplate), "a template's name, a .toml file or a PromptTemplate"),
    "recompute_ratio": ((int, float, np.number), "a number from 0 to 1"),
    "prefix_cache": ((bool,), "True or False"),
    "stream": ((bool,), "True or False"),
}


@dataclasses.dataclass(frozen=True)
class Conversation:
    """What was asked and answered, and what is asked now. Make one with ``conversation_of``.

    Attributes:
      questions: of the user, the last one without an answer.
      answers: of the assistant, one fewer.
      system: what is to be said before all of it; "" for nothing.
      earlier: how turns that were answered are read: "exact", over all that precedes them, or
        "blocks", as chunks, each for itself.
      keeps: turns are looked for in the pool, and this one is left there.
      query: what is retrieved for the last question, where that is not the question itself.
    """

    questions: tuple[Text, ...]
    answers: tuple[Text, ...] = ()
    system: str = ""
    earlier: EarlierTurns = "exact"
    keeps: bool = False
    query: str | None = None


def conversation_of(messages: Any, earlier: Any = "exact", *, keeps: bool) -> Conversation:
    """The conversation that messages of roles and contents are. Raises RequestError.

    Turns that are read as blocks are chunks, and none of them is kept.
    """
    if earlier not in get_args(EarlierTurns):
        raise RequestError(
            f"earlier_turns={reprlib.repr(earlier)}: expected one of "
            f"{', '.join(get_args(EarlierTurns))}"
        )
    if not _is_list(messages) or not len(messages):
        raise RequestError(
            f"messages={reprlib.repr(messages)}: expected a list of objects with role and content, "
            "the last one of the user"
        )
    said: list[tuple[str, Text]] = [_message(f"messages[{i}]", m) for i, m in enumerate(messages)]
    system = ""
    if said[0][0] == "system":
        content = said.pop(0)[1]
        if not isinstance(content, str):
            raise RequestError("messages[0]: expected a text of the system")
        system = content
    for place, (role, _) in enumerate(said):
        turn = ("user", "assistant")[place % 2]
        if role != turn:
            at = place + len(messages) - len(said)
            raise RequestError(
                f"messages[{at}] is of the {role}: expected one of the {turn}, as user and "
                "assistant take turns and a system message comes first"
            )
    if not len(said) % 2:
        raise RequestError(
            "the last of messages is not of the user: expected what is to be answered now"
        )
    questions = tuple(content for _, content in said[::2])
    if len({isinstance(question, str) for question in questions}) > 1 or (
        system and not isinstance(questions[0], str)
    ):
        raise RequestError("messages: expected all of system and user as text, or all as token ids")
    answers = tuple(content for _, content in said[1::2])
    return Conversation(questions, answers, system, earlier, keeps and earlier == "exact")


def _message(what: str, message: Any) -> tuple[str, Text]:
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        raise RequestError(
            f"{what}={reprlib.repr(message)}: expected an object with role and content"
        )
    role, content = message["role"], message["content"]
    if role not in _ROLES:
        raise RequestError(
            f"{what} has role={reprlib.repr(role)}: expected one of {', '.join(_ROLES)}"
        )
    if not (isinstance(content, str) and content.strip()) and not is_ids(content):
        raise RequestError(
            f"{what} has content={reprlib.repr(content)}: expected a text with words in it, or "
            "token ids"
        )
    return role, content


def check_kinds(**given: Any) -> None:
    """Refuse arguments of another kind than they must be; None passes. Raises RequestError."""
    for name, value in given.items():
        require_kind(name, value, *_KINDS[name])


def check_counts(**given: Any) -> None:
    """Refuse what is no positive integer: RequestError."""
    for name, value in given.items():
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if not whole or value < 1:
            raise RequestError(f"{name}={reprlib.repr(value)}: expected a positive integer")


def is_ids(x: Any) -> bool:
    """Is this one sequence of token ids, rather than several questions?"""
    if isinstance(x, np.ndarray):
        return x.ndim == 1
    return bool(_is_list(x)) and bool(x) and all(isinstance(i, int | np.integer) for i in x)


def questions_of(question: Any) -> tuple[list[Text], bool]:
    """The questions, and whether it was a single one. Raises RequestError for what is none."""
    if isinstance(question, str) or is_ids(question):
        return [question], True
    if not _is_list(question) or not all(isinstance(one, str) or is_ids(one) for one in question):
        raise RequestError(
            f"question={reprlib.repr(question)}: expected a text, token ids, or a list of these"
        )
    return list(question), False


def check_documents(documents: Any, name: str = "documents") -> None:
    """Refuse what is no list of texts or of token ids: RequestError. None passes."""
    if documents is None:
        return
    if isinstance(documents, str):
        raise RequestError(
            f"{name}={reprlib.repr(documents)} is one text: expected a list; write "
            f"{name}=[...], each entry is one chunk"
        )
    if not _is_list(documents):
        raise RequestError(f"{name}={reprlib.repr(documents)}: expected a list of texts")
    for i, document in enumerate(documents):
        if not isinstance(document, str) and not _is_list(document):
            raise RequestError(
                f"{name}[{i}]={reprlib.repr(document)}: expected a text or token ids"
            )


def samplings_of(sampling: Any, count: int) -> list[SamplingParams]:
    """One for each of so many questions, greedy for None. Raises RequestError."""
    if sampling is None or isinstance(sampling, SamplingParams):
        return list(itertools.repeat(sampling or SamplingParams(), count))
    if not _is_list(sampling) or not all(isinstance(one, SamplingParams) for one in sampling):
        raise RequestError(
            f"sampling={reprlib.repr(sampling)}: expected jaxrag.Sampling, such as "
            "jaxrag.Sampling(temperature=0.7), or a list with one for each question"
        )
    if len(sampling) != count:
        raise RequestError(
            f"sampling has {len(sampling)} entries for {count} question(s); give one for each, or "
            "a single SamplingParams for all"
        )
    return list(sampling)


def _is_list(x: Any) -> bool:
    array = isinstance(x, np.ndarray) and x.ndim > 0
    return array or (isinstance(x, Sequence) and not isinstance(x, str | bytes | Mapping))

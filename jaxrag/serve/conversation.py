"""A conversation as one prompt: what was said and the chunks of every question, in their order."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxrag.engine.request import Prompt
from jaxrag.serve.door import EarlierTurns
from jaxrag.text.prompts import QuestionIds
from jaxrag.types import HostArray

_NOTHING = np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True)
class Source:
    """A chunk that stood in the prompt, in prompt order."""

    document_id: str
    chunk_index: int
    file: str | None
    score: float | None
    text: str
    page: int | None = None  # 1-based, of documents that have pages
    start: int = 0  # first character in the document's text
    end: int = 0  # one past the last character


@dataclasses.dataclass(frozen=True)
class FoundChunk:
    """A chunk that was retrieved or given, before the template wraps it.

    Attributes:
      source: what a result says of it.
      title: of its document.
      ids: [T] int32.
      chunk_id: in the knowledge base; None where it was given.
      bare: no template is put around it.
    """

    source: Source
    title: str
    ids: HostArray
    chunk_id: int | None = None
    bare: bool = False


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
    follows. Chunks stand in the turn in which they were found. Earlier turns as "blocks" are chunks
    themselves, each with the whole of its answer.

    Args:
      asked: the questions.
      answers: one fewer, int32 [T] each.
      found: the chunks of every question.
      wrap: gives a chunk the form that it has in a prompt.
      earlier: what answered turns are.
      shown: the text of token ids.
    """
    chunks: list[HostArray] = []
    turns, members = list[int](), list[FoundChunk]()
    said = _NOTHING

    def close(ids: HostArray, number: int) -> None:
        if earlier == "exact":
            turns.append(len(chunks))
        else:
            text = shown(ids)
            source = Source(f"turn {number}", 0, None, None, text, end=len(text))
            members.append(FoundChunk(source, "", ids, bare=True))
        chunks.append(ids)

    for number, (one, here) in enumerate(zip(asked, found, strict=True)):
        said = np.concatenate((said, one.before)) if number else _NOTHING
        if here and len(said):
            close(said, number)
            said = _NOTHING
        chunks += map(wrap, here)
        members += here
        said = np.concatenate((said, one.final)).astype(np.int32)
        if number < len(answers):
            whole = np.concatenate((said, answers[number])).astype(np.int32)
            cut = len(whole) - (earlier == "exact")
            close(whole[:cut], number)
            said = whole[cut:]
    shift = len(said) - len(asked[-1].final)
    first, last = asked[-1].question
    span = shift + first, shift + last
    return Prompt(asked[0].before, tuple(chunks), said, question=span, turns=tuple(turns)), members

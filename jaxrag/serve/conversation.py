"""A conversation as one prompt: what was said and the chunks of every question, in their order."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxrag.base.types import HostArray
from jaxrag.engine.request import Prompt
from jaxrag.models.text.prompts import QuestionIds
from jaxrag.serve.door import EarlierTurns

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
    themselves, each with the whole of its answer, and with what leads to chunks behind it.

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
    said = _NOTHING  # since the last part

    for number, (one, here) in enumerate(zip(asked, found, strict=True)):
        before = one.before if number else _NOTHING
        if here and number:
            if earlier == "exact":
                turns.append(len(chunks))
                chunks.append(_joined(said, before))
            else:
                chunks[-1] = _joined(chunks[-1], before)
            said = before = _NOTHING
        chunks += map(wrap, here)
        members += here
        said = _joined(said, before, one.final)
        if number == len(answers):
            break
        said = _joined(said, answers[number])
        if earlier == "exact":
            turns.append(len(chunks))
            chunks.append(said[:-1])
            said = said[-1:]
        else:
            text = shown(said)
            source = Source(f"turn {number}", 0, None, None, text, end=len(text))
            members.append(FoundChunk(source, "", said, bare=True))
            chunks.append(said)
            said = _NOTHING
    shift = len(said) - len(asked[-1].final)
    first, last = asked[-1].question
    span = shift + first, shift + last
    return Prompt(asked[0].before, tuple(chunks), said, question=span, turns=tuple(turns)), members


def _joined(*parts: HostArray) -> HostArray:
    return np.concatenate(parts).astype(np.int32)

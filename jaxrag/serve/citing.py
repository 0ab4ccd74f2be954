"""Citations: which passage a part of an answer is from, by where the model looked."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from jaxrag.engine.attribution import Attribution
from jaxrag.models.text.tokenizer import Tokenizer

LEAST_VOTES = 0.5  # of a token's, for a passage that it is cited from
LEAST_LOOK = 0.5  # of its attention that some head gives that passage
_ENDS = ".!?\n\u3002\uff01\uff1f"  # of sentences: a citation goes over none


@dataclasses.dataclass(frozen=True)
class Citation:
    """A part of an answer, and the passage that the model looked at when it said it.

    Attributes:
      start: first character in the answer.
      end: one past the last.
      source: number of the passage among ``Result.sources``.
      votes: mean share of the votes that the passage got, LEAST_VOTES..1.
    """

    start: int
    end: int
    source: int
    votes: float


def citations_of(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    text: str,
    attribution: Attribution,
    numbers: Sequence[int],
) -> list[Citation]:
    """The citations of an answer, in order; none where the model looked everywhere.

    Each goes from the first token that was surely chosen for a passage to the end of its sentence,
    or to where the next citation begins.

    Args:
      text: of ``token_ids``, or the beginning of it.
      attribution: of at least as many tokens; columns of other chunks than the passages left out.
      numbers: of the passages, one for each column.
    """
    if not numbers:
        return []
    spans = list(_spans(tokenizer, token_ids))
    cited: list[tuple[int, int, int, list[float]]] = []  # start, end, column, votes
    for (start, end), votes, most in zip(spans, attribution.votes, attribution.most, strict=False):
        column = int(np.argmax(votes))
        sure = votes[column] >= LEAST_VOTES and most[column] >= LEAST_LOOK
        if not sure or not text[start:end].strip():
            continue
        if cited and cited[-1][2] == column and _sentence_end(text, cited[-1][0], start) == start:
            first, _, _, before = cited.pop()
            cited.append((first, end, column, [*before, float(votes[column])]))
        else:
            cited.append((start, end, column, [float(votes[column])]))
    limits = [*(start for start, *_ in cited[1:]), len(text)][: len(cited)]
    return [
        Citation(
            *_stripped(text, start, max(_sentence_end(text, end, limit), end)),
            numbers[column],
            round(float(np.mean(votes)), 4),
        )
        for (start, end, column, votes), limit in zip(cited, limits, strict=True)
    ]


def marked(text: str, citations: Sequence[Citation]) -> tuple[str, list[Citation]]:
    """The answer with "[number]" behind what each is for, and where they are in it then."""
    out, shown, last = "", list[Citation](), 0
    for citation in citations:
        out += text[last : citation.start]
        start = len(out)
        out += text[citation.start : citation.end]
        shown.append(dataclasses.replace(citation, start=start, end=len(out)))
        out += f" [{citation.source}]"
        last = citation.end
    return out + text[last:], shown


def _spans(tokenizer: Tokenizer, token_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where the text of each token is; what it completes counts as its own."""
    stream, at = tokenizer.stream(), 0
    for token_id in token_ids:
        length = len(stream.push(token_id))
        yield at, at + length
        at += length


def _sentence_end(text: str, start: int, limit: int) -> int:
    """Where a sentence ends between the two; ``limit`` where none does."""
    return next((at for at in range(start, limit) if text[at] in _ENDS), limit)


def _stripped(text: str, start: int, end: int) -> tuple[int, int]:
    text_between = text[start:end]
    start += len(text_between) - len(text_between.lstrip())
    return start, start + len(text_between.strip())

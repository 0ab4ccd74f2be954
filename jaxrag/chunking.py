"""Cutting a document into chunks: windows of tokens that never cut a character in two.

A document is tokenised once. A chunk's ids are a slice of that encoding and its text the characters
those tokens cover; joined text is never tokenised again.
"""

import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from jaxrag.errors import ConfigError, DocumentError
from jaxrag.tokenizer import Tokenizer
from jaxrag.types import HostArray


@dataclasses.dataclass(frozen=True)
class Chunking:
    """Windows of up to ``chunk_tokens`` tokens that share ``overlap`` tokens with the one before.

    Raises ConfigError unless ``0 <= overlap < chunk_tokens``.
    """

    chunk_tokens: int
    overlap: int

    def __post_init__(self) -> None:
        """Refuse sizes that cannot advance through a document."""
        if self.chunk_tokens < 1:
            raise ConfigError(f"chunk_tokens={self.chunk_tokens}: expected a positive integer")
        if not 0 <= self.overlap < self.chunk_tokens:
            raise ConfigError(
                f"overlap={self.overlap}: expected 0 to {self.chunk_tokens - 1} tokens, "
                f"less than chunk_tokens={self.chunk_tokens}"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Chunk:
    """One window of a document."""

    index: int  # its place among the document's chunks
    start: int  # first character in the document's text
    end: int  # one past the last character
    ids: HostArray  # [T] int32, a slice of the document's encoding
    text: str  # document.text[start:end]


def split(text: str, tokenizer: Tokenizer, chunking: Chunking) -> list[Chunk]:
    """Cut ``text`` into chunks that together cover every token.

    A window ends at the last character boundary within ``chunk_tokens``; it is longer only where a
    single run of tokens without a boundary is. Every chunk holds tokens that no earlier one holds.
    Raises DocumentError when the text encodes to no tokens.
    """
    ids, offsets = tokenizer.encode_with_offsets(text)
    if len(ids) == 0:
        raise DocumentError("the text encodes to no tokens; leave the document out")
    cuts, ends = _character_boundaries(offsets, len(text))
    chunks: list[Chunk] = []
    for first, last in _windows(cuts, chunking):
        start, end = ends[first], ends[last]
        window = np.ascontiguousarray(ids[first:last], dtype=np.int32)
        chunks.append(Chunk(len(chunks), start, end, window, text[start:end]))
    return chunks


def _character_boundaries(
    offsets: Sequence[tuple[int, int]], num_characters: int
) -> tuple[list[int], list[int]]:
    """Where tokens may be cut, and the character each cut stands at.

    Tokens of a byte-level vocabulary that share a character have overlapping offsets; a cut between
    tokens i-1 and i is allowed where token i starts no earlier than everything before it ended.
    Space that no token's offsets cover belongs to the token behind it. Returns the ascending cuts
    (0 and len(offsets) among them) and ``ends[cut]``.
    """
    cuts, ends, reached = [0], [0], 0
    for index, (start, end) in enumerate(offsets):
        if index and start >= reached:
            cuts.append(index)
        reached = max(reached, end)
        ends.append(reached)
    cuts.append(len(offsets))
    ends[-1] = num_characters
    return cuts, ends


def _windows(cuts: Sequence[int], chunking: Chunking) -> list[tuple[int, int]]:
    """Half-open token windows over ascending ``cuts``; each ends later than the one before."""
    windows: list[tuple[int, int]] = []
    start = end = 0
    while end < cuts[-1]:
        stop = cuts[bisect_right(cuts, start + chunking.chunk_tokens) - 1]
        if stop <= end:  # the next character does not fit behind the overlap
            start = end
            following = bisect_right(cuts, end)
            fits = bisect_right(cuts, end + chunking.chunk_tokens) - 1
            stop = cuts[max(following, fits)]
        windows.append((start, stop))
        end = stop
        start = cuts[bisect_left(cuts, end - chunking.overlap)]
    return windows

"""Cutting a document into chunks of tokens that never cut a character in two.

A document is tokenised once. A chunk's ids are a slice of that encoding and its text the characters
those tokens cover; joined text is never tokenised again. Windows of tokens may begin anywhere;
sentences and Markdown sections begin at the nearest token boundary.
"""

import array
import dataclasses
import itertools
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import get_args

import numpy as np

from jaxrag.base.errors import ConfigError, DocumentError, TokenizerError
from jaxrag.base.types import HostArray
from jaxrag.library.documents.stacks import STACKS, stack_blocks, stack_named
from jaxrag.library.options import ChunkBy
from jaxrag.models.text.passage_rules import passage_rules
from jaxrag.models.text.pieces import clause_starts, sentence_starts, within_word
from jaxrag.models.text.tokenizer import Tokenizer

_LINE_END = re.compile(r"\r\n?|\n")
_UNDER = " > "  # between the headings of a section's path


@dataclasses.dataclass(frozen=True)
class Chunking:
    """Chunks of up to ``chunk_tokens`` tokens.

    ``by`` says what a chunk is made of: "tokens", windows that share ``overlap`` tokens with the
    one before; "sentence", whole sentences that share as many whole sentences as fit into
    ``overlap`` tokens; "markdown", the same within every section under a heading. A sentence that
    is longer than a chunk is cut between words; a word or number that is longer, anywhere.
    "passages" and a stack of ``documents.stacks``, such as "langchain:1000:200", have the blocks
    that prompts with passages of the document have; both sizes say nothing then.

    Raises ConfigError unless ``0 <= overlap < chunk_tokens`` and ``by`` is one of these.
    """

    chunk_tokens: int
    overlap: int
    by: ChunkBy | str = "tokens"

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise ConfigError(f"chunk_tokens={self.chunk_tokens}: expected a positive integer")
        if not 0 <= self.overlap < self.chunk_tokens:
            raise ConfigError(
                f"overlap={self.overlap}: expected 0 to {self.chunk_tokens - 1} tokens, "
                f"less than chunk_tokens={self.chunk_tokens}"
            )
        if self.by not in get_args(ChunkBy):
            if self.by.split(":")[0] not in STACKS:
                raise ConfigError(
                    f"chunk by {self.by!r}: expected one of {', '.join(get_args(ChunkBy))}, or "
                    f"a stack: {', '.join(STACKS)}"
                )
            stack_named(self.by)

    @property
    def pasted(self) -> bool:
        """Whether its chunks are blocks of prompts that others write, tokenised alone."""
        return self.by == "passages" or self.by not in get_args(ChunkBy)


@dataclasses.dataclass(frozen=True, eq=False)
class Chunk:
    """One window of a document."""

    index: int  # its place among the document's chunks
    start: int  # first character in the document's text
    end: int  # one past the last character
    ids: HostArray  # [T] int32, a slice of the document's encoding
    text: str  # document.text[start:end]
    page: int | None = None  # 1-based page its text begins on, where there are pages
    section: str = ""  # the headings it is under, as "Title > Part"; "" outside of any


@dataclasses.dataclass(frozen=True)
class _Section:
    """Characters under one heading, and the headings above them."""

    start: int
    path: tuple[str, ...]


def split(
    text: str, tokenizer: Tokenizer, chunking: Chunking, pages: Sequence[int] = ()
) -> list[Chunk]:
    """Cut ``text`` into chunks that together cover every token.

    A window ends at the last character boundary within ``chunk_tokens``; it is longer only where a
    single run of tokens without a boundary is. Every chunk holds tokens that no earlier one holds.
    ``pages`` holds the first character of every page. Raises DocumentError when the text encodes to
    no tokens, or is too long for its tokenizer.
    """
    if chunking.pasted:
        return _pasted(text, tokenizer, chunking, pages)
    try:
        ids, offsets = tokenizer.encode_with_offsets(text)
    except TokenizerError as error:
        raise DocumentError(str(error)) from None
    if len(ids) == 0:
        raise DocumentError("the text encodes to no tokens; leave the document out")
    cuts, ends = _character_boundaries(offsets, len(text))
    sections = _sections(text) if chunking.by == "markdown" else [_Section(0, ())]
    edges = _boundaries(cuts, ends, [section.start for section in sections[1:]])
    chunks: list[Chunk] = []
    for section, (first_cut, last_cut) in zip(
        sections, itertools.pairwise((0, *edges, len(ids))), strict=True
    ):
        inside = _inside(cuts, (first_cut, last_cut))
        if len(inside) < 2:
            continue  # no token begins in this section
        if chunking.by == "tokens":
            windows = _windows(inside, chunking)
        else:
            windows = _pack(text, ends, inside, chunking)
        for first, last in windows:
            start, end = ends[first], ends[last]
            window = np.ascontiguousarray(ids[first:last], dtype=np.int32)
            piece = text[start:end]
            page = _page(pages, start + len(piece) - len(piece.lstrip()))
            chunks.append(
                Chunk(len(chunks), start, end, window, piece, page, _UNDER.join(section.path))
            )
    return chunks


def _pasted(
    text: str, tokenizer: Tokenizer, chunking: Chunking, pages: Sequence[int]
) -> list[Chunk]:
    """The blocks of prompts that this text is pasted into, each tokenised alone."""
    stack = None if chunking.by == "passages" else stack_named(chunking.by)
    spans = stack_blocks(text, stack, passage_rules("common"))
    if not spans:
        raise DocumentError(
            "no passage of the text is long enough to be read from KV; leave it out"
        )
    chunks = list[Chunk]()
    for start, end in spans:
        piece = text[start:end]
        try:
            ids = tokenizer.encode(piece)
        except TokenizerError as error:
            raise DocumentError(str(error)) from None
        chunks.append(Chunk(len(chunks), start, end, ids, piece, _page(pages, start)))
    return chunks


class Spans:
    """The tokens of a whole text, by the characters they stand for."""

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        self._ids, offsets = tokenizer.encode_with_offsets(text)
        self._cuts, self._ends = _character_boundaries(offsets, len(text))

    def between(self, start: int, end: int) -> list[HostArray]:
        """Every window of tokens that a chunk of these characters may hold, int32 [T] each.

        More than one where tokens at the edges stand for no character.
        """
        firsts, lasts = self._at(start), self._at(end)
        return [
            np.ascontiguousarray(self._ids[first:last], dtype=np.int32)
            for first in firsts
            for last in lasts
            if first < last
        ]

    def _at(self, character: int) -> Sequence[int]:
        key = self._ends.__getitem__
        first = bisect_left(self._cuts, character, key=key)
        return self._cuts[first : bisect_right(self._cuts, character, key=key)]


def _character_boundaries(
    offsets: HostArray, num_characters: int
) -> tuple[Sequence[int], Sequence[int]]:
    """Where tokens [T, 2] may be cut, and the character each cut stands at.

    Tokens of a byte-level vocabulary that share a character have overlapping offsets; a cut between
    tokens i-1 and i is allowed where token i starts no earlier than everything before it ended.
    Space that no token's offsets cover belongs to the token behind it. Returns the ascending cuts
    (0 and T among them) and ``ends[cut]``.
    """
    reached = np.maximum.accumulate(offsets[:, 1])
    inner = np.flatnonzero(offsets[1:, 0] >= reached[:-1]) + 1
    cuts = np.concatenate(([0], inner, [len(offsets)]))
    return _small_integers(cuts), _small_integers(np.r_[0, reached[:-1], num_characters])


def _small_integers(values: HostArray) -> Sequence[int]:
    """Of four bytes each, and Python's where they are taken out."""
    made = array.array("i")
    made.frombytes(values.astype(np.int32).tobytes())
    return made


def _windows(cuts: Sequence[int], chunking: Chunking) -> list[tuple[int, int]]:
    """Half-open token windows over ascending ``cuts``; each ends later than the one before."""
    windows: list[tuple[int, int]] = []
    start = end = cuts[0]
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


def _pack(
    text: str, ends: Sequence[int], cuts: Sequence[int], chunking: Chunking
) -> list[tuple[int, int]]:
    """Half-open token windows of whole sentences; each ends later than the one before."""
    most = chunking.chunk_tokens
    units: list[tuple[int, int]] = []
    for sentence in _parts(text, cuts, ends, sentence_starts):
        if sentence[1] - sentence[0] <= most:
            units.append(sentence)
            continue
        for clause in _parts(text, _inside(cuts, sentence), ends, clause_starts):
            inside = _inside(cuts, clause)
            if clause[1] - clause[0] > most:
                units += _windows(_between_words(text, ends, inside, most), chunking)
            else:
                units.append(clause)
    windows: list[tuple[int, int]] = []
    first = 0
    for index, (_, end) in enumerate(units):
        following = units[index + 1] if index + 1 < len(units) else None
        start = units[first][0]
        if following and following[1] - start <= chunking.chunk_tokens:
            continue
        windows.append((start, end))
        if following:
            first = index + 1
            while (  # take back the sentences that fit into the overlap, and before the next one
                units[first - 1][0] > start
                and end - units[first - 1][0] <= chunking.overlap
                and following[1] - units[first - 1][0] <= chunking.chunk_tokens
            ):
                first -= 1
    return windows


def _between_words(text: str, ends: Sequence[int], cuts: Sequence[int], most: int) -> Sequence[int]:
    """Those of ``cuts`` that stand in no word or number, and all in one of more than ``most``."""
    kept = [cuts[0]]
    start = 0
    for index in range(1, len(cuts)):
        if index + 1 < len(cuts) and within_word(text, ends[cuts[index]]):
            continue
        if cuts[index] - cuts[start] > most:
            kept += cuts[start + 1 : index]
        kept.append(cuts[index])
        start = index
    return kept


def _parts(
    text: str, cuts: Sequence[int], ends: Sequence[int], starts: Callable[[str], list[int]]
) -> list[tuple[int, int]]:
    """Half-open token windows of the parts that begin at ``starts`` of the text of ``cuts``."""
    first, last = ends[cuts[0]], ends[cuts[-1]]
    edges = _boundaries(cuts, ends, [first + at for at in starts(text[first:last])])
    return [(a, b) for a, b in itertools.pairwise((cuts[0], *edges, cuts[-1])) if a < b]


def _inside(cuts: Sequence[int], window: tuple[int, int]) -> Sequence[int]:
    """Those of ``cuts`` from the first to the last token of a window."""
    return cuts[bisect_left(cuts, window[0]) : bisect_right(cuts, window[1])]


def _boundaries(cuts: Sequence[int], ends: Sequence[int], starts: Sequence[int]) -> list[int]:
    """For each of the characters ``starts``, the last of ``cuts`` that stands at or before it."""
    return [cuts[bisect_right(cuts, start, key=ends.__getitem__) - 1] for start in starts]


def _page(pages: Sequence[int], character: int) -> int | None:
    return bisect_right(pages, character) if pages else None


def _sections(text: str) -> list[_Section]:
    """The sections of a CommonMark text; the first begins at character 0.

    A heading without text of its own joins the section that follows it.
    """
    from markdown_it import MarkdownIt  # only who cuts by headings waits for it

    lines = [0, *(match.end() for match in _LINE_END.finditer(text)), len(text)]
    tokens = MarkdownIt("commonmark").disable("inline").parse(text)
    sections = [_Section(0, ())]
    path: list[tuple[int, str]] = []
    body_begins = 0
    for token, inline in itertools.pairwise(tokens):
        if token.type != "heading_open" or token.level or token.map is None:
            continue
        level = int(token.tag[1:])
        start = lines[min(token.map[0], len(lines) - 1)]
        path = [above for above in path if above[0] < level]
        path.append((level, " ".join(inline.content.split())))
        section = _Section(start, tuple(title for _, title in path if title))
        if text[body_begins:start].strip():
            sections.append(section)
        else:
            sections[-1] = _Section(sections[-1].start, section.path)
        body_begins = lines[min(token.map[1], len(lines) - 1)]
    return sections

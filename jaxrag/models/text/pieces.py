"""Long texts in pieces, tokenised apart to the ids of the whole; and where sentences end.

A tokenizer takes some 300 bytes of memory a character. A text is cut before a space or line break
between two words, where two things hold: no token of the vocabulary holds that character behind a
letter or digit, so that none could span the cut, and the surroundings of the cut, encoded in two
parts, give the ids and offsets that they give as one. A tokenizer that adds a space to what it is
given, as Llama 2's does, gets pieces without the space that they begin with.
"""

import itertools
import re
import unicodedata
from collections.abc import Callable, Iterator

import numpy as np

from jaxrag.base.errors import TokenizerError
from jaxrag.base.types import HostArray

PIECE_CHARACTERS = 1 << 17  # of text that is encoded at once, where it may be cut
MAX_CHARACTERS = 1 << 21  # of text that is encoded at once, where it may not

_AROUND = 256  # characters on each side of a cut that are encoded to prove it
_NEAR = 1 << 12  # characters before the end of a full piece, where a cut is looked for first
_TRIES = 64  # places that are tried for one cut in one stretch of text
_BREAKS = (" ", "\n")

# Ids [T] int32 of a text, and the characters [T, 2] int32 that each covers, half open.
EncodedText = tuple[HostArray, HostArray]
Encode = Callable[[str], EncodedText]
_WIDE = "\u3002\uff01\uff1f\uff61"  # full stops and marks that no space follows
_CLOSERS = "\"'\u2019\u201d\u00bb)\\]}\u300d\u300f\uff09\u3011\u300b\u3009"
_OPENERS = "\"'\u2018\u201c(\\["
_ENDS = re.compile(
    rf"(?P<wide>[{_WIDE}][{_WIDE}\u2026]*+[{_CLOSERS}]*+)"
    rf"|(?P<narrow>(?<![.!?\u2026\u061f\u0964])[.!?\u2026\u061f\u0964]++[{_CLOSERS}]*+)(?=\s)"
    # An empty line, and a line that begins a heading, a list item, a table row or a fence.
    r"|(?P<block>\n(?=[^\S\n]*+(?:\n|#{1,6}[ \t]|[-*+\u2022][ \t]|\d{1,9}[.)][ \t]|\||```)))"
)
_CLAUSE = re.compile(r"\n+|[,;:](?=\s)|[\uff0c\uff1b\uff1a\u3001]")
# Han, kana and their marks, Thai, Lao, Burmese, Khmer.
_UNSPACED = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff"
    r"\uff01-\uff0f\uff1a-\uff1f\U00020000-\U0003ffff]"
)
_WORD = re.compile(rf"[^\s{_OPENERS}]*\Z")
_LOOK_BACK = 32  # characters in which the last word of a sentence is looked for


def breaks_between_words(tokens: list[str]) -> str:
    """Those of space and line break that no token holds behind a letter or digit.

    ``tokens`` is the vocabulary as text, U+FFFD for bytes that are none.
    """
    vocabulary = "\0".join(tokens)
    return "".join(it for it in _BREAKS if not re.search(rf"[\w\ufffd]{it}", vocabulary))


def encode_in_pieces(text: str, encode: Encode, breaks: str) -> EncodedText:
    """Ids and offsets of a text as ``encode`` would give them for the whole.

    Args:
      encode: gives those of a short text.
      breaks: before which of them a text may be cut; see ``breaks_between_words``.

    Raises TokenizerError, before anything long is encoded, for a text of which more than
    MAX_CHARACTERS would have to be encoded at once.
    """
    parts = [
        _shifted(encode(text[first:end]), first - dropped, dropped)
        for first, dropped, end in pieces_of(text, encode, breaks)
    ]
    return np.concatenate([ids for ids, _ in parts]), np.concatenate([at for _, at in parts])


def pieces_of(text: str, encode: Encode, breaks: str) -> list[tuple[int, int, int]]:
    """The pieces: of each the first character to encode, how many before it are left out, its end.

    As of ``encode_in_pieces``, which encodes them.
    """
    edges = [(0, 0), *_cuts(text, encode, breaks), (len(text), 0)]
    return [
        (start + dropped, dropped, end) for (start, dropped), (end, _) in itertools.pairwise(edges)
    ]


def _cuts(text: str, encode: Encode, breaks: str) -> Iterator[tuple[int, int]]:
    """Where pieces begin, and how many characters of each are left out as it is encoded."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        for place in _places(text, start, breaks):
            dropped = _proven(text, place, encode)
            if dropped is not None:
                yield place, dropped
                start = place
                break
        else:
            if len(text) - start <= MAX_CHARACTERS:
                return
            raise TokenizerError(
                f"the text holds more than {MAX_CHARACTERS} characters (from {start}) without a "
                "space or line break at which it could be cut to be tokenised; break its lines, "
                "or split the document"
            )


def _places(text: str, start: int, breaks: str) -> Iterator[int]:
    """Characters before which a piece might end, the best first: breaks between two words."""
    if not breaks:
        return
    between = re.compile(rf"(?<=[^\W_])[{breaks}](?=[^\W_])")
    full = start + PIECE_CHARACTERS
    for first, last in (
        (full - _NEAR, full),
        (start + _AROUND, full - _NEAR),
        (full, start + MAX_CHARACTERS),
    ):
        if not any(it in text[first : last + 1] for it in breaks):  # at once; with the lock, too
            continue
        found = itertools.islice(between.finditer(text, first, last + 1), _TRIES)
        yield from (match.start() for match in found)


def _proven(text: str, place: int, encode: Encode) -> int | None:
    """How many characters to leave out behind a cut; None where it would change what is encoded."""
    before, behind = text[max(0, place - _AROUND) : place], text[place : place + _AROUND]
    whole_ids, whole_at = encode(before + behind)
    left_ids, left_at = encode(before)
    for dropped in (0, 1):
        ids, at = _shifted(encode(behind[dropped:]), len(before), dropped)
        if np.array_equal(np.concatenate((left_ids, ids)), whole_ids) and np.array_equal(
            np.concatenate((left_at, at)), whole_at
        ):
            return dropped
    return None


def _shifted(encoded: EncodedText, start: int, dropped: int) -> EncodedText:
    """What was encoded of a piece, with its characters counted in the text."""
    ids, at = encoded
    moved = at + np.int32(start + dropped)
    if dropped and len(moved):
        moved[0, 0] = start
    return ids, moved


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ABBREVIATIONS = _words(
    "mr mrs ms dr prof sr jr st mt rev gen col sgt capt lt sen rep gov pres hon messrs mme mlle "
    "vs etc al eg ie cf ca approx viz resp esp incl inc ltd corp bros dept univ jan feb apr aug "
    "sept oct nov dec ave blvd bzw usw z.b d.h e.g i.e a.m p.m ph.d"
)
_BEFORE_NUMBER = _words("no nos art fig figs eq eqs sec ch chap vol vols p pp ed para")
_INITIALS = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]")  # "J" and "U.S", the last full stop cut off
_LIST_NUMBER = re.compile(r"(?:\A|\n)[^\S\n]*\d{1,9}\Z")


def sentence_starts(text: str) -> list[int]:
    """The first character of every sentence but the first, ascending.

    A full stop ends a sentence before white space, but not behind a known abbreviation, an initial
    or the number of a list, nor where the next word is in lower case. An empty line and a line that
    begins a heading, a list item, a table row or a fence end one anyway.
    """
    starts: list[int] = []
    size = len(text.rstrip())
    search_from = _skip_space(text, 0)
    while (match := _ENDS.search(text, search_from)) is not None:
        start = _skip_space(text, match.end())
        if start >= size:
            break
        search_from = match.end()
        if match.lastgroup == "narrow" and _goes_on(text, match.start(), match.end(), start):
            continue
        starts.append(start)
        search_from = start
    return starts


def clause_starts(text: str) -> list[int]:
    """The first character behind every line end, comma, colon and semicolon, ascending."""
    starts = (_skip_space(text, match.end()) for match in _CLAUSE.finditer(text))
    return [start for start in starts if start < len(text)]


def within_word(text: str, at: int) -> bool:
    """Whether a cut before the character ``at`` would part a word or a number.

    What no space parts is one, but for scripts that put none between words, as Chinese: they may
    be cut before any letter.
    """
    if not 0 < at < len(text):
        return False
    before, behind = text[at - 1], text[at]
    if before.isspace() or behind.isspace():
        return False
    unspaced = _UNSPACED.fullmatch(before) or _UNSPACED.fullmatch(behind)
    return not (unspaced and behind.isalnum() and unicodedata.category(before) not in ("Ps", "Pi"))


def _goes_on(text: str, mark: int, end: int, start: int) -> bool:
    """Whether the sentence goes on behind the narrow end mark at ``mark``."""
    if text[end:start].count("\n") > 1:
        return False
    following = text[start]
    if following.islower():
        return True
    if text[mark:end] != ".":
        return False
    before = text[max(0, mark - _LOOK_BACK) : mark]
    found = _WORD.search(before)
    word = found.group().lower() if found else ""
    return bool(
        word in _ABBREVIATIONS
        or (word in _BEFORE_NUMBER and following.isdigit())
        or _INITIALS.fullmatch(word)
        or _LIST_NUMBER.search(before)
    )


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at

"""Where the sentences of a text end, in English and its relatives and in Chinese and Japanese."""

import re

_WIDE = "\u3002\uff01\uff1f\uff61"  # full stops and marks that no space follows
_CLOSERS = "\"'\u2019\u201d\u00bb)\\]}\u300d\u300f\uff09\u3011\u300b\u3009"
_OPENERS = "\"'\u2018\u201c(\\["
_ENDS = re.compile(
    rf"(?P<wide>[{_WIDE}][{_WIDE}\u2026]*+[{_CLOSERS}]*+)"
    rf"|(?P<narrow>(?<![.!?\u2026\u061f\u0964])[.!?\u2026\u061f\u0964]++[{_CLOSERS}]*+)(?=\s)"
    # An empty line, and a line that begins a heading, a list item, a table row or a fence.
    r"|(?P<block>\n(?=[^\S\n]*+(?:\n|#{1,6}[ \t]|[-*+\u2022][ \t]|\d{1,9}[.)][ \t]|\||```)))"
)
_WORD = re.compile(rf"[^\s{_OPENERS}]*\Z")
_LOOK_BACK = 32  # characters in which the last word of a sentence is looked for


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

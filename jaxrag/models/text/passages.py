r"""Where passages lie in a text that somebody pasted them into.

What is cut is a function of the text and the rules, never of what is stored: the same text is cut
the same way cold and warm, and stored KV decides time alone.

    Use these.\n<source id="1">Otters eat fish ...</source>\n<source id="2">Bees ...</source>\nWhy?
    `------------------------'~~~~~~~~~~~~~~~~~~~~'--------------------------'~~~~~~~~'----------'
             computed                 block               computed             block    computed
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator

from jaxrag.models.text.anchors import anchors
from jaxrag.models.text.delimiters import (
    MOST_DELIMITERS,
    Span,
    before_closing,
    gaps,
    named_delimiters,
    part,
    repeated_delimiters,
    with_lines_above,
)
from jaxrag.models.text.passage_rules import PassageRules, closer

MOST_CHARACTERS = 2 << 20  # of a prompt that is cut; a context of half a million tokens
MOST_LINES = 100_000  # of it
_EMPTY_LINES = re.compile(r"\n[ \t]*\n\s*")
_ENDS = r".!?:;\u2026\u3002\uff01\uff1f\uff1b\"')\]\u201d\u2019\u300d"  # of sentences
_SENTENCE_ENDS = ".!?:;\u2026\u3002\uff01\uff1f\uff1b\"')]\u201d\u2019\u300d"
_BREAKS = re.compile(  # of a line, where a passage may end
    r"\n(?:"
    # behind a sentence, before another or an item of a list
    rf"(?:(?<=[{_ENDS}]\n)|(?<=[{_ENDS}][ \t]\n))(?=[ \t]*(?:[-*] |\d+\. |[^\W\d_a-z]))"
    r"|(?<=[.!?:]\n)(?=[^\W\d_])"  # behind one, before what is in the middle of another
    r"|(?=#{1,6} )|(?=```\w)|(?<=\n```\n)(?!\n)"  # headings and fences
    r"|(?<=\|\n)(?=[^|\s])|(?<=[^|\s]\n)(?=\|)"  # edges of tables
    r"|(?=[^\n]{160})(?<=[^\n]{160}\n))"  # between two long lines
)
_RULED = re.compile(r"\n[ \t]*([^\w\s|`#])\1{2,}[ \t]*(?=\n)")  # a line of one sign
_PROSE = re.compile(r"[\"'(\u201c\u2018]?[^\W_]")  # how a line of it begins
_LONG = 1500  # characters without an empty line: more than one passage
_WIDE = 50  # characters of a line that shows how wide its text is wrapped
_ANNOUNCED = re.compile(r"(?:(?:#{1,6} [^\n]{1,80}\n\s*)?[^\n]{1,80}:[ \t]*\n\s*){1,3}")


@dataclasses.dataclass(frozen=True)
class TextPiece:
    """A part of a text: characters from ``start`` to before ``end``, read as a block or not."""

    start: int
    end: int
    block: bool


def cut(text: str, rules: PassageRules) -> list[TextPiece]:
    """The pieces of a text, in order; together they are all of it.

    A text beyond ``MOST_CHARACTERS``, ``MOST_LINES`` or ``MOST_DELIMITERS`` is one piece and no
    block.
    """
    if len(text) > MOST_CHARACTERS or text.count("\n") > MOST_LINES:
        return list(_pieces((), len(text)))
    certain, delimiters = named_delimiters(text, rules.certain), named_delimiters(text, rules.walls)
    known = sorted({*itertools.chain(*certain.values(), *delimiters.values())})
    if len(known) > MOST_DELIMITERS:
        return list(_pieces((), len(text)))
    known = with_lines_above(text, known, rules)
    closed = any(part(text, known, spans, rules, 1) for spans in certain.values())
    parted = closed or any(part(text, known, spans, rules, 2) for spans in delimiters.values())
    if not parted:
        more = repeated_delimiters(text, rules)
        parted = bool(more)
        known = sorted({*known, *more})
    spaces = list(gaps(known, len(text)))
    if not closed and spaces:
        if spaces[0][0] == 0 and known[:1] != [(0, 0)]:  # no name opens the first passage
            spaces[0] = _without_head(text, spaces[0])
        if spaces[-1][1] == len(text):
            if known:
                spaces[-1] = before_closing(text, known[0][0], spaces[-1])
            spaces[-1] = _without_tail(text, spaces[-1], rules)
    if not parted:
        spaces = [it for gap in spaces for it in _between_breaks(text, gap)]
        rules = closer(rules)
    blocks = (span for gap in spaces for span in _stripped_blocks(text, gap, rules))
    return list(_pieces(blocks, len(text)))


def passage_blocks(text: str, rules: PassageRules, parted: bool) -> list[Span]:
    """The blocks of one passage, as ``cut`` finds them in a prompt that holds it among others.

    Args:
      text: the passage alone.
      rules: those of ``cut``.
      parted: delimiters part the passages of that prompt, and not empty lines.
    """
    certain, delimiters = named_delimiters(text, rules.certain), named_delimiters(text, rules.walls)
    known = sorted({*itertools.chain(*certain.values(), *delimiters.values())})
    spaces: Iterable[Span] = gaps(known, len(text))
    if not parted:
        spaces = (it for gap in spaces for it in _between_breaks(text, gap))
        rules = closer(rules)
    return [span for gap in spaces for span in _stripped_blocks(text, gap, rules)]


def _without_head(text: str, gap: Span) -> Span:
    """The first gap behind its first empty or ruled line, and lines that announce what follows.

    Where none is near, passages begin the text. Delimiters that part passages open no first one.
    """
    reach = gap[0], min(gap[1], gap[0] + _LONG)
    lines = (_EMPTY_LINES.search(text, *reach), _RULED.search(text, *reach))
    ends = [line.end() for line in lines if line is not None]
    if not ends:
        return gap
    announced = _ANNOUNCED.match(text, min(ends), gap[1])
    return announced.end() if announced else min(ends), gap[1]


def _without_tail(text: str, gap: Span, rules: PassageRules) -> Span:
    """The last gap up to its last line break, where few bytes follow: words after all passages.

    Delimiters that only open passages leave these with the last of them. A line that goes on with
    its sentence, or has no letters, is the passage's own.
    """
    start, end = gap
    at = text.rfind("\n", start, start + len(text[start:end].rstrip()))
    tail = text[at:end].strip()
    if at < 0 or len(tail.encode()) >= rules.least:
        return gap
    goes_on = tail[:1].islower() and not text[start:at].endswith("\n")
    if goes_on or not any(it.isalpha() for it in tail):
        return gap
    return start, at


def _between_breaks(text: str, gap: Span) -> Iterator[Span]:
    """What lies between empty lines, and between lines where a passage may end."""
    inside = text[gap[0] : gap[1]]
    for first, last in gaps(_breaks(inside), len(inside)):
        yield gap[0] + first, gap[0] + last


def _breaks(text: str) -> list[Span]:
    """Empty lines, but those below a heading, and breaks of lines; in order."""
    found_empty = [match.span() for match in _EMPTY_LINES.finditer(text)]
    breaks = [
        (start, end)
        for start, end in found_empty
        if not text.startswith("#", text.rfind("\n", 0, start) + 1)
    ]
    breaks += [match.span() for match in _BREAKS.finditer(text)]
    breaks += [match.span() for match in _RULED.finditer(text)]
    for start, end in gaps(sorted(found_empty), len(text)):
        if end - start > _LONG:
            breaks += ((start + first, start + last) for first, last in _torn(text[start:end]))
    return sorted(breaks)


def _torn(text: str) -> Iterator[Span]:
    """Breaks around lines that wrapped text would not have: another's end, or its beginning.

    Such a line ends no sentence, and the next word would have had room in it.
    """
    lines = text.split("\n")
    at = 0
    for number, line in enumerate(lines):
        start, at = at, at + len(line) + 1
        if line.startswith("#") and "".join(lines[number + 1 : number + 2])[:1].islower():
            yield at - 1, at
        if number + 1 == len(lines) or not (
            line and _PROSE.match(line) and _PROSE.match(lines[number + 1])
        ):
            continue
        before, after = lines[number - 1] if number else "", lines[number + 1]
        width = max(len(before) if _PROSE.match(before) else 0, len(after))
        if width < _WIDE or line.rstrip()[-1:] in _SENTENCE_ENDS:
            continue
        if len(line.rstrip()) + 1 + len(after.split(None, 1)[0]) <= width:
            if number:
                yield start - 1, start
            yield at - 1, at


def _stripped_blocks(text: str, gap: Span, rules: PassageRules) -> Iterator[Span]:
    """The blocks of a gap, without white space at their edges."""
    inner = text[gap[0] : gap[1]]
    body = inner.strip()
    size = len(body.encode())
    if size < rules.least:
        return
    start = gap[0] + inner.index(body)
    if size <= rules.whole:
        yield start, start + len(body)
    elif breaks := _breaks(body):
        for first, last in gaps(breaks, len(body)):
            yield from _stripped_blocks(text, (start + first, start + last), rules)
    else:
        edges = (0, *anchors(body, rules), len(body))
        for first, last in itertools.pairwise(edges):
            piece = body[first:last]
            inside = piece.strip()
            if len(inside.encode()) >= rules.least:
                at = start + first + piece.index(inside)
                yield at, at + len(inside)


def _pieces(blocks: Iterable[Span], length: int) -> Iterator[TextPiece]:
    """Blocks, with what is computed around them."""
    at = 0
    for start, end in blocks:
        if start > at:
            yield TextPiece(at, start, block=False)
        yield TextPiece(start, end, block=True)
        at = end
    if length > at:
        yield TextPiece(at, length, block=False)

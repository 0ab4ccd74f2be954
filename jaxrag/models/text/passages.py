r"""Where passages lie in a text that somebody pasted them into.

What is cut is a function of the text and the rules, never of what is stored: the same text is cut
the same way cold and warm, and stored KV decides time alone.

    Use these.\n<source id="1">Otters eat fish ...</source>\n<source id="2">Bees ...</source>\nWhy?
    `------------------------'~~~~~~~~~~~~~~~~~~~~'--------------------------'~~~~~~~~'----------'
             computed                 block               computed             block    computed
"""

import bisect
import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from jaxrag.base.errors import ConfigError
from jaxrag.base.installed import config_names, config_path
from jaxrag.base.tables import build, read_toml
from jaxrag.base.types import HostArray

Span = tuple[int, int]  # characters: the first, and one past the last

_FLAGS = re.MULTILINE | re.IGNORECASE
_WINDOW = 20  # bytes that an anchor is chosen by
MOST_CHARACTERS = 4 << 20  # of a text that is cut; a context of a million tokens
MOST_WALLS = 20_000
_NUMBERED = re.compile(  # `[1] `, `Passage A:`, `(1) `, `1. `, `<d1>`, `### 2`
    r"^[ \t]{0,8}(?P<open>[^\w\s]{0,3})[ \t]?(?P<word>[^\W\d_]{0,20})[ \t#:\[(-]{0,3}"
    r"(?P<number>\d{1,4}|[A-Z](?![^\W_]))[ \t]?(?P<close>[^\w\s]{1,3})[ \t]*",
    re.MULTILINE,
)
_TAG = re.compile(r"<(?P<end>/?)(?P<name>[A-Za-z][\w.-]{0,30}?)\d{0,4}(?:[ \t][^<>\n]{0,300})?/?>")
_EMPTY_LINES = re.compile(r"\n[ \t]*\n\s*")
_LONG_LINES = re.compile(r"(?<=[^\n]{100})\n(?=[^\n]{100})")
_WORD_ENDS = np.isin(np.arange(256), list(b" \t\r\n"))


@dataclasses.dataclass(frozen=True)
class TextPiece:
    """A part of a text: characters from ``start`` to before ``end``, read as a block or not."""

    start: int
    end: int
    block: bool


@dataclasses.dataclass(frozen=True)
class PassageRules:
    """How passages are found; read from a TOML file as configs/passages/common.toml.

    Attributes:
      certain: regular expressions by name of what stands around passages; one is enough.
      walls: the same, of which one kind has to open two passages.
      least: bytes of the smallest block.
      whole: bytes of the largest that is not cut by its own text.
      reach: bytes to each side in which such a cut is the best place.
      apart: characters between two walls that the text repeats.
      worth: tokens of all blocks of a prompt together, below which none is read as one.
    """

    certain: Mapping[str, str]
    walls: Mapping[str, str]
    least: int
    whole: int
    reach: int
    apart: int
    worth: int

    def __post_init__(self) -> None:
        """Refuse patterns that are none, and sizes that cut nothing: ConfigError."""
        for name, pattern in (*self.certain.items(), *self.walls.items()):
            try:
                re.compile(pattern, _FLAGS)
            except re.error as error:
                raise ConfigError(f"wall {name!r}: {pattern!r} is no pattern: {error}") from None
        if not (0 < self.least <= self.reach <= self.whole and min(self.apart, self.worth) > 0):
            raise ConfigError(
                f"least={self.least}, reach={self.reach}, whole={self.whole}, apart={self.apart}, "
                f"worth={self.worth}: expected positive numbers, the first three in rising order"
            )


def passage_rules(name: str) -> PassageRules:
    """Rules of configs/passages by name, or of a TOML file by path. Raises ConfigError."""
    path = config_path(name, "passages")
    if path is None:
        names = ", ".join(config_names("passages"))
        raise ConfigError(f"passage rules {name!r}: expected one of {names} or a .toml file")
    return build(PassageRules, read_toml(path), name)


def cut(text: str, rules: PassageRules) -> list[TextPiece]:
    """The pieces of a text, in order; together they are all of it.

    A text beyond ``MOST_CHARACTERS`` or ``MOST_WALLS`` is one piece and no block.
    """
    if len(text) > MOST_CHARACTERS:
        return list(_pieces((), len(text)))
    certain, walls = _matches(text, rules.certain), _matches(text, rules.walls)
    known = sorted({*itertools.chain(*certain.values(), *walls.values())})
    if len(known) > MOST_WALLS:
        return list(_pieces((), len(text)))
    closed = any(_opened(text, known, spans, rules) for spans in certain.values())
    if not closed and not any(_opened(text, known, it, rules) > 1 for it in walls.values()):
        more = _repeated(text, rules)
        closed = not more
        known = sorted({*known, *(more or _breaks(text))})
    gaps = list(_gaps(known, len(text)))
    if gaps and not closed:
        gaps[0] = _without_head(text, gaps[0])
        gaps[-1] = _without_tail(text, gaps[-1], rules)
    blocks = (span for gap in gaps for span in _stripped_blocks(text, gap, rules))
    return list(_pieces(blocks, len(text)))


def _without_head(text: str, gap: Span) -> Span:
    """The first gap behind its first empty line: walls that part passages open no first one."""
    found = _EMPTY_LINES.search(text, *gap)
    return gap if found is None else (found.end(), gap[1])


def _without_tail(text: str, gap: Span, rules: PassageRules) -> Span:
    """The last gap up to its last line break, where few bytes follow: words after all passages.

    Walls that only open passages leave these with the last of them.
    """
    start, end = gap
    at = text.rfind("\n", start, start + len(text[start:end].rstrip()))
    if at < 0 or len(text[at:end].strip().encode()) >= rules.least:
        return gap
    return start, at


def _matches(text: str, patterns: Mapping[str, str]) -> dict[str, list[Span]]:
    """The walls of each kind; the groups of a match are not in them."""
    found: dict[str, list[Span]] = {}
    for name, pattern in patterns.items():
        spans = found[name] = []
        matches = re.finditer(pattern, text, _FLAGS)
        for match in itertools.islice(matches, MOST_WALLS + 1):
            start = match.start()
            for group in range(1, match.re.groups + 1):
                if match.start(group) >= 0:
                    spans.append((start, match.start(group)))
                    start = match.end(group)
            spans.append((start, match.end()))
    return found


def _opened(text: str, walls: Sequence[Span], own: Iterable[Span], rules: PassageRules) -> int:
    """How many of ``own`` are right before a passage, up to the next of all walls."""
    starts = [start for start, _ in walls]
    count = 0
    for _, end in own:
        after = bisect.bisect_left(starts, end)
        until = starts[after] if after < len(starts) else len(text)
        count += len(text[end:until].strip().encode()) >= rules.least
    return count


def _repeated(text: str, rules: PassageRules) -> set[Span]:
    """Labels that count up and tags that come again, far enough apart to hold a passage."""
    labels: dict[tuple[str, str, str], list[tuple[int, Span]]] = {}
    for match in itertools.islice(_NUMBERED.finditer(text), MOST_WALLS):
        number = match["number"]
        order = int(number) if number.isdigit() else ord(number)
        kind = match["open"], match["word"].lower(), match["close"]
        labels.setdefault(kind, []).append((order, match.span()))
    found: set[Span] = set()
    for counted in labels.values():
        for (low, first), (high, second) in itertools.pairwise(counted):
            if high == low + 1 and second[0] - first[1] >= rules.apart:
                found |= {first, second}
    tags: dict[str, list[Span]] = {}
    ends: dict[str, list[Span]] = {}
    for match in itertools.islice(_TAG.finditer(text), MOST_WALLS):
        (ends if match["end"] else tags).setdefault(match["name"], []).append(match.span())
    for name, spans in tags.items():
        pairs = itertools.pairwise(spans)
        if any(second[0] - first[1] >= rules.apart for first, second in pairs):
            found.update(spans, ends.get(name, ()))
    return found


def _breaks(text: str) -> Iterator[Span]:
    """Empty lines, and the breaks between two long lines."""
    for pattern in (_EMPTY_LINES, _LONG_LINES):
        yield from (match.span() for match in pattern.finditer(text))


def _gaps(walls: Iterable[Span], length: int) -> Iterator[Span]:
    """What lies between walls, which may overlap."""
    at = 0
    for start, end in walls:
        if start > at:
            yield at, start
        at = max(at, end)
    if length > at:
        yield at, length


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
    elif breaks := sorted(_breaks(body)):
        for first, last in _gaps(breaks, len(body)):
            yield from _stripped_blocks(text, (start + first, start + last), rules)
    else:
        anchors = (0, *_anchors(body, rules), len(body))
        for first, last in itertools.pairwise(anchors):
            part = body[first:last]
            inside = part.strip()
            if len(inside.encode()) >= rules.least:
                at = start + first + part.index(inside)
                yield at, at + len(inside)


def _anchors(body: str, rules: PassageRules) -> list[int]:
    """Characters where a long text is cut: where words begin, and best of all within reach.

    Best is the least hash of the next bytes, so that texts that overlap are cut alike there.
    """
    data = np.frombuffer(body.encode(), np.uint8)
    hashes = np.zeros(len(data), np.uint64)
    padded = np.concatenate((data, np.zeros(_WINDOW, np.uint8))).astype(np.uint64)
    with np.errstate(over="ignore"):
        for offset in range(_WINDOW):
            hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + padded[offset : offset + len(data)]
        hashes ^= hashes >> np.uint64(29)
        hashes *= np.uint64(0xBF58476D1CE4E5B9)
    begins = np.zeros(len(data), bool)  # of words; in scripts without spaces of characters
    begins[1:] = (_WORD_ENDS[data[:-1]] & ~_WORD_ENDS[data[1:]]) | (data[1:] >= 0xE0)
    hashes[~begins] = np.iinfo(np.uint64).max
    least, width = _sliding_least(hashes, rules.reach), rules.reach + 1
    chosen = np.flatnonzero(begins & (hashes == least))
    chosen = chosen[
        np.diff(chosen, prepend=-width) >= width
    ]  # where text repeats itself, the first
    chosen = chosen[(chosen >= rules.least) & (chosen <= len(data) - rules.least)]
    is_character = (data & 0xC0) != 0x80
    return [int(at) for at in (np.cumsum(is_character)[chosen] - 1)]


def _sliding_least(values: HostArray, reach: int) -> HostArray:
    """The least of the values up to ``reach`` to each side of every place: [N] of the same kind."""
    width = 2 * reach + 1
    top = np.iinfo(values.dtype).max
    total = -(-(len(values) + 2 * reach) // width) * width
    padded = np.full(total, top, values.dtype)
    padded[reach : reach + len(values)] = values
    rows = padded.reshape(-1, width)
    ahead = np.minimum.accumulate(rows, axis=1).ravel()
    behind = np.minimum.accumulate(rows[:, ::-1], axis=1)[:, ::-1].ravel()
    first = np.arange(len(values))
    return np.minimum(behind[first], ahead[first + width - 1])


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

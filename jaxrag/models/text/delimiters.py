"""What parts passages: delimiters that rules name, and those that a text itself repeats."""

import bisect
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jaxrag.models.text.passage_rules import FLAGS, PassageRules

Span = tuple[int, int]  # characters: the first, and one past the last

MOST_DELIMITERS = 20_000
_NUMBERED = re.compile(  # `[1] `, `Passage A:`, `(1) `, `1. `, `<d1>`, `### 2`
    r"^[ \t]{0,8}(?P<open>[^\w\s]{0,3})[ \t]?(?P<word>[^\W\d_]{0,20})[ \t#:\[(-]{0,3}"
    r"(?P<number>\d{1,4}|[A-Z](?![^\W_]))[ \t]?(?P<close>[^\w\s]{1,3})[ \t]*",
    re.MULTILINE,
)
_LABEL = re.compile(  # `Excerpt: `, `# File: `, `**Text**: `
    r"^[ \t#*>-]{0,8}(?P<words>[^\W\d_][\w ]{0,24})(?:\*\*)?:(?:\*\*)?[ \t]*", re.MULTILINE
)
_TAG = re.compile(r"<(?P<end>/?)(?P<name>[A-Za-z][\w.-]{0,30}?)\d{0,4}(?:[ \t][^<>\n]{0,300})?/?>")
_BEHIND = re.compile(  # what ends lines: `(taken from a.md, page 3)`
    r"[(\[](?P<words>[^\W\d_]+[ \t]\w+)[^()\[\]\n]{0,200}[)\]][ \t]*$", re.MULTILINE
)
_BRACKETED = re.compile(  # a line of brackets: `[[ a.md | part 3 ]]`, `<<< 3 >>>`
    r"^[ \t]*(?P<words>[\[({<]{2,4})[^\n]{1,200}[\])}>]{2,4}:?[ \t]*$", re.MULTILINE
)
_SIGNS = re.compile(  # a line of one sign, with words: `==== a.md, relevance 90 %:`
    r"^[ \t]*(?P<words>([=*~+>-])\2{2,})[ \t]*[^\s\2][^\n]{0,200}$", re.MULTILINE
)
_FILE = re.compile(  # `a.md: `, `[docs/a.pdf#page=3]: `
    r"^[ \t]{0,8}[\[(<\"*-]{0,3}[^\s:|]{1,120}\.(?P<words>[A-Za-z][A-Za-z0-9]{0,4})"
    r"(?:[#?][^\s:]{0,60})?[\])>\"*]{0,3}:[ \t]+",
    re.MULTILINE,
)
_WITHIN = re.compile(r"(?<=\S)[ \t](?P<words>[|~=#]{1,5}|([*+_-])\2{2,4})[ \t](?=\S)")  # ` | `
_TO_COLON = re.compile(r"[^\n:=]{1,60}[:=]")
_NUMBER = re.compile(r"\b(?=[0-9a-f-]*\d)[0-9a-f-]+\b", re.IGNORECASE)  # and hexadecimal ids
_LARGEST = 0.8  # of the bytes that delimiters open: more in one, and others are left together
_OPENED = 0.4  # of all bytes, that delimiters have to open
_LINES_ABOVE = 4  # that may belong to a delimiter
_LONGEST_LINE = 400  # characters of such a line
_MOST_STARTS = 8  # labels of a kind that counting may begin with
_AT_ONCE = 1 << 18  # characters that a pattern runs over while other threads wait


def named_delimiters(text: str, patterns: Mapping[str, str]) -> dict[str, list[Span]]:
    """The delimiters of each kind, without the groups of a match, but for one named ``number``.

    Where such numbers do not count, a delimiter with words behind it on its line is the name of
    what
    follows: there the delimiter is empty, and stands before it.
    """
    by_kind: dict[str, list[Span]] = {}
    for name, pattern in patterns.items():
        kind = re.compile(pattern, FLAGS)
        matches = list(_scan(kind, text))
        if "number" in kind.groupindex:
            by_kind[name] = _numbered(text, matches)
            continue
        spans = by_kind[name] = []
        for match in matches:
            start = match.start()
            for group in range(1, match.re.groups + 1):
                if match.start(group) >= 0:
                    spans.append((start, match.start(group)))
                    start = match.end(group)
            spans.append((start, match.end()))
    return by_kind


def _numbered(text: str, matches: Sequence[re.Match[str]]) -> list[Span]:
    """Delimiters with numbers: where those of equal words are all from 0 or 1 on, they count."""
    numbers: dict[str, set[int]] = {}
    for it in matches:
        numbers.setdefault(_words(it), set()).add(int(it["number"]))
    counts = {
        words: max(its) - min(its) + 1 == len(its) and min(its) < 2
        for words, its in numbers.items()
    }
    return [
        match.span()
        if counts[_words(match)] or text[match.end() : match.end() + 1] in ("", "\n")
        else (match.start(), match.start())
        for match in matches
    ]


def _words(match: re.Match[str]) -> str:
    """What a delimiter has in front of its number."""
    return match.string[match.start() : match.start("number")].strip().lower()


def _scan(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """Matches, as many as delimiters may be; a very long text by runs of whole lines."""
    return itertools.islice(_matches(pattern, text), MOST_DELIMITERS + 1)


def _matches(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    at = 0
    while at < len(text):
        end = min(at + _AT_ONCE, len(text))
        if end < len(text):
            end = text.find("\n", end, end + _AT_ONCE) + 1 or end
        yield from pattern.finditer(text, at, end)
        at = end


def part(
    text: str, delimiters: Sequence[Span], own: Iterable[Span], rules: PassageRules, least: int
) -> bool:
    """Whether ``own`` part the passages of the text: they open ``least``, and leave no large rest.

    What stands in one passage or around all of them opens one or two, and leaves others together.

    Args:
      delimiters: all, in order.
      own: those in question.
      rules: sizes.
      least: passages that they open.
    """
    starts = [start for start, _ in delimiters]
    opened = list[int]()
    for start, end in own:
        after = bisect.bisect_left(starts, end + (start == end))  # one that is empty opens itself
        size = _size(text, (end, starts[after] if after < len(starts) else len(text)))
        if size >= rules.least:
            opened.append(size)
    if len(opened) < least:
        return False
    sizes = [_size(text, gap) for gap in gaps(delimiters, len(text))]
    together = max(sizes) > _LARGEST * sum(opened)
    if together if len(opened) > 1 else max(sizes) > rules.whole:
        return False
    return sum(opened) >= _OPENED * sum(sizes)


def _size(text: str, span: Span) -> int:
    return len(text[span[0] : span[1]].strip().encode())


def gaps(delimiters: Iterable[Span], length: int) -> Iterator[Span]:
    """What lies between delimiters, which may overlap."""
    at = 0
    for start, end in delimiters:
        if start > at:
            yield at, start
        at = max(at, end)
    if length > at:
        yield at, length


def with_lines_above(text: str, delimiters: Sequence[Span], rules: PassageRules) -> list[Span]:
    """The delimiters, and the lines right above those that open passages, where these are alike.

    So a name that no rule knows belongs to the delimiter: `Source ID [17]:` above `Text: `.
    """
    grown = list(delimiters)
    for _ in range(_LINES_ABOVE):
        runs = [run for run in _runs(text, grown) if _size(text, (run[1], run[2])) >= rules.least]
        lines = [_line_above(text, start) for start, _, _ in runs]
        shapes = [_shape(text[start:end]) for start, end in lines]
        alike = {it for it, count in Counter(shapes).items() if it and 2 * count > len(shapes) > 2}
        more = {line for line, shape in zip(lines, shapes, strict=True) if shape in alike}
        if not more:
            break
        grown = sorted({*grown, *more})
    return grown


def _runs(text: str, delimiters: Sequence[Span]) -> Iterator[tuple[int, int, int]]:
    """Delimiters with only white space between them: first character, end, start of the next."""
    now: Span | None = None
    for start, end in delimiters:
        if now is not None and (start <= now[1] or text[now[1] : start].isspace()):
            now = now[0], max(now[1], end)
            continue
        if now is not None:
            yield *now, start
        now = start, end
    if now is not None:
        yield *now, len(text)


def _line_above(text: str, at: int) -> Span:
    """The last line with words in it before the line of ``at``; empty where there is none."""
    first = max(0, at - _LONGEST_LINE)
    before = text[first:at].rstrip()
    end = first + len(before)
    if "\n" not in text[end:at]:
        return at, at
    return first + before.rfind("\n") + 1, end


def _shape(line: str) -> str:
    """What lines of one kind share: what stands before a colon, with all numbers alike."""
    found = _TO_COLON.match(line)
    return _NUMBER.sub("0", found[0].strip().lower()) if found else ""


def repeated_delimiters(text: str, rules: PassageRules) -> set[Span]:
    """What the text repeats in front of its passages or behind them, where it parts three or more.

    Labels that count up, labels that come again, tags, and brackets at the ends of lines; each far
    enough apart to hold a passage.
    """
    words = (_LABEL, _BRACKETED, _SIGNS, _FILE, _BEHIND, _WITHIN)
    kinds = itertools.chain(
        _counted(text, rules.apart),
        _tags(text, rules.apart),
        *((spans for spans in _by_words(it, text) if _distant(spans, rules.apart)) for it in words),
    )
    found = set[Span]()
    for spans in kinds:
        if part(text, sorted(spans), spans, rules, 3):
            found.update(spans)
    return found


def before_closing(text: str, head: int, gap: Span) -> Span:
    """The last gap up to a line of brackets like one of the first ``head`` characters.

    `[[ ## context ## ]]` stands above all passages, and `[[ ## question ## ]]` behind them.
    """
    opened = {match["words"] for match in _BRACKETED.finditer(text, 0, head)}
    ends = (it.start() for it in _BRACKETED.finditer(text, *gap) if it["words"] in opened)
    return gap[0], next(ends, gap[1])


def _counted(text: str, apart: int) -> Iterator[set[Span]]:
    """Labels of one kind that count up from 0, 1 or A."""
    labels: dict[tuple[str, str, str], list[tuple[int, Span]]] = {}
    for match in _scan(_NUMBERED, text):
        number = match["number"]
        order = int(number) if number.isdigit() else ord(number) - ord("A") + 1
        kind = match["open"], match["word"].lower(), match["close"]
        labels.setdefault(kind, []).append((order, match.span()))
    for counted in labels.values():
        starts = [place for place, (number, _) in enumerate(counted) if number < 2]
        chains = [_chain(counted[place:], apart) for place in starts[:_MOST_STARTS]]
        if longest := max(chains, key=len, default=[]):
            yield set(longest)


def _chain(labels: Sequence[tuple[int, Span]], apart: int) -> list[Span]:
    """Labels that count up from the first; those between are of passages."""
    (number, span), *others = labels
    chain = [span]
    for other, its in others:
        if other == number + 1 and its[0] - chain[-1][1] >= apart:
            number = other
            chain.append(its)
    return chain


def _tags(text: str, apart: int) -> Iterator[list[Span]]:
    """Tags of one name, and those that end it."""
    tags: dict[str, list[Span]] = {}
    ends: dict[str, list[Span]] = {}
    for match in _scan(_TAG, text):
        (ends if match["end"] else tags).setdefault(match["name"], []).append(match.span())
    for name, spans in tags.items():
        if any(second[0] - first[1] >= apart for first, second in itertools.pairwise(spans)):
            yield [*spans, *ends.get(name, ())]


def _by_words(pattern: re.Pattern[str], text: str) -> Iterable[list[Span]]:
    found: dict[str, list[Span]] = {}
    for match in _scan(pattern, text):
        found.setdefault(match["words"].lower(), []).append(match.span())
    return found.values()


def _distant(spans: Sequence[Span], apart: int) -> bool:
    return all(second[0] - first[1] >= apart for first, second in itertools.pairwise(spans))

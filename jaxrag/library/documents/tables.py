"""Tables as lines of ``column: value``, named only where the table has a header.

A row is a mapping of columns to cells. A cell that is merged over several places is one object that
stands at each of them. Names are given where the file marks a header, or where the cells say it: a
name too few costs a word, a name too many makes a statement that nobody made.
"""

import collections
import dataclasses
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxrag.library.documents.blocks import Block, names, row

Row = Mapping[int, "TableCell"]
TableLine = dict[int, "TableCell"]  # of cells that are filled

_SAMPLE = 500  # rows of a table whose cells say what its columns hold
_MOST_HEADERS = 3  # rows
_LONGEST_NAME = 80  # characters
_SPARSE = 32  # columns to a cell: in such a row places say nothing
_LONG = 8  # rows: more of them than forms have
_NONE = names("- -- \u2013 \u2014 . ? / n.a. n/a na nan none null nil tbd tba #n/a unknown x")
_DATE = re.compile(r"\d{4}-\d\d?-\d\d?(?:[T ].*)?|\d\d?[./]\d\d?[./]\d{2,4}|\d\d?:\d\d(?::\d\d)?")
_NUMBER = re.compile(
    r"[-+(~<>\u2264\u2265\u2212]?\s?(?:[A-Z]{0,2}[€$£¥₹]|[A-Z]{3}\s)?\s?-?"
    r"\d[\d.,'\u00a0\u202f ]*(?:[eE][-+]?\d+)?\D{0,5}"
)
_YEAR = re.compile(r"(?:19|20)\d\d")
# What the lines of a form begin with, and the rows of a table seldom.
_OF_FORMS = re.compile(
    r"(?:.*:|.*\b(?:date|by|on|to|from|no\.?|nr\.?|number|id|name|client|customer|company|vendor|"
    r"author|owner|manager|contact|address|phone|tel|e-?mail|version|status|currency|subject|"
    r"project|department|reference|invoice|order|year|month|period|title|due|rate|datum|kunde)\b.*)",
    re.I,
)
# What columns are often called.
_OF_TABLES = re.compile(
    r"(?:[\w.-]+ )?(?:name|title|type|kind|category|class|group|status|state|date|day|month|year|"
    r"time|from|to|start|end|city|town|country|region|place|location|street|address|room|station|port|"
    r"server|host|role|job|department|team|owner|manager|author|keeper|contact|customer|client|"
    r"supplier|company|product|item|article|service|model|version|brand|part|material|colou?r|size|"
    r"unit|price|cost|amount|value|rate|number|no\.?|id|code|key|phone|e-?mail|language|subject|"
    r"term|word|meaning|definition|description|comment|note|remark|reason|question|answer|task|step|"
    r"action|result|test|input|output|parameter|setting|option|default|field|feature|risk|impact|"
    r"source|target|level|mon(?:day)?|tue(?:sday)?|wed(?:nesday)?|thu(?:rsday)?|fri(?:day)?|"
    r"sat(?:urday)?|sun(?:day)?|jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|"
    r"aug(?:ust)?|sep(?:tember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?|"
    r"spring|summer|autumn|winter|[qh][1-4]|"
    r"stadt|ort|land|straße|abteilung|rolle|datum|tag|monat|jahr|zeit|preis|betrag|wert|menge|"
    r"nr\.?|nummer|artikel|produkt|kunde|beschreibung|bemerkung)(?:e?s)?(?: \(.{1,20}\))?",
    re.I,
)
_UNITS = names(
    "m km cm mm m² m2 m³ m3 ha kg g mg t l ml s ms min h d % ‰ € $ £ eur usd gbp chf k€ t€ m€ pcs "
    "n °c °f k v a w kw mw gw kwh mwh gwh hz db pa bar years year days"
)
_OF_SUMS = re.compile(r"(?:sub|grand )?(?:totals?|sums?|averages?|mean|summe|gesamt)\b.*", re.I)


class TableCell(NamedTuple):
    """What stands in one cell."""

    text: str  # on one line
    kind: str  # "text", or what all values of a column may be: "number", "percent", "date", "code"
    strong: bool = False  # set off as names are, as in bold


def cell(text: str, strong: bool = False) -> TableCell:
    """A cell of which nothing is known but its text."""
    if _DATE.fullmatch(text):
        kind = "date"
    elif _NUMBER.fullmatch(text):
        kind = "percent" if text.endswith("%") else "number"
    else:
        kind = "code" if any(map(str.isdigit, text)) else "text"
    return TableCell(text, kind, strong)


def is_year(text: str) -> bool:
    """Whether a text is a number that may well name a column."""
    return _YEAR.fullmatch(text) is not None


def sheet_blocks(rows: Sequence[tuple[int, Row]]) -> Iterator[Block]:
    """The tables of a sheet, apart where empty rows or columns part them.

    Args:
      rows: with their numbers, ascending; those without a filled cell may be missing.
    """
    before: dict[tuple[int, int], _Table] = {}
    for number, part in enumerate(_parts([(n, some) for n, it in rows if (some := _filled(it))])):
        columns = [column for it in part for column in it]
        place = min(columns), max(columns)
        table = _Table.of(part)
        for (least, most), above in reversed(before.items()):
            if least <= place[0] and place[1] <= most and (goes_on := above.going_on(table)):
                table, place = goes_on, (least, most)
                break
        before.pop(place, None)
        before[place] = table
        for kind, text in table.blocks():
            yield ("rows" if kind and number % 2 else kind), text  # apart from those above


def table_blocks(rows: Iterable[Row], headers: int | None = None) -> Iterator[Block]:
    """One table.

    Args:
      headers: how many rows the file marks as its header; None: it does not say.
    """
    if found := [filled for it in rows if (filled := _filled(it))]:
        yield from _Table.of(found, headers).blocks()


def _filled(line: Row) -> TableLine:
    return {column: it for column, it in line.items() if it.text}


def _parts(rows: Sequence[tuple[int, TableLine]]) -> Iterator[list[TableLine]]:
    """Rows that follow each other, of columns that belong together."""
    start = 0
    for at in range(1, len(rows) + 1):
        if at < len(rows) and rows[at][0] == rows[at - 1][0] + 1:
            continue
        band = rows[start:at]
        start = at
        edges = _edges([it for _, it in band])
        if not edges:
            yield [it for _, it in band]
            continue
        for low, high in zip([0, *edges], [*edges, 1 << 30], strict=True):
            some = [(n, {c: it for c, it in line.items() if low <= c < high}) for n, line in band]
            yield from _parts([(n, line) for n, line in some if line])


def _edges(rows: Sequence[TableLine]) -> list[int]:
    """Columns behind empty ones at which another table begins: it has two columns and its keys."""
    columns = sorted({column for line in rows for column in line})
    edges: list[int] = []
    start = 0
    for at in range(1, len(columns)):
        if columns[at] == columns[at - 1] + 1:
            continue
        keys = [line[columns[at]].kind for line in rows[1:] if columns[at] in line]
        two = at - start > 1 and columns[at + 1 : at + 2] == [columns[at] + 1]
        if two and keys and set(keys) <= {"text", "code"}:
            edges.append(columns[at])
            start = at
    return edges


@dataclasses.dataclass(frozen=True)
class _Table:
    """Rows of cells under the names of their columns.

    Attributes:
      names: of columns; none where there is no header.
      header: texts of the last row that says them; a row below that repeats them is not shown.
      titles: rows above the header.
      continues: the names were shown with rows above.
    """

    columns: Sequence[int]
    names: Mapping[int, str]
    header: Sequence[str]
    titles: Sequence[TableLine]
    rows: Sequence[TableLine]
    continues: bool = False

    @classmethod
    def of(cls, rows: Sequence[TableLine], marked: int | None = None) -> "_Table":
        """A table of all rows, of which so many are marked as a header."""
        columns = sorted({column for line in rows for column in line})
        titles = 0
        while titles < len(rows) - 1 and not marked and _is_one(rows[titles]):
            titles += 1
        rest = rows[titles:]
        names, used = _names(rest, len(columns), marked)
        header = [it.text for it in rest[used - 1].values()] if used else []
        return cls(columns, names, header, rows[:titles], rest[used:])

    def going_on(self, below: "_Table") -> "_Table | None":
        """The table below under the names of this one, where it has none and rows like these."""
        if below.names or below.titles:
            return None
        table = self
        if not self.names and len(self.rows) == 1 < len(self.rows[0]):  # a header alone
            table = _Table.of([*self.rows, *below.rows])
        elif not self.names or not self._is_like(below.rows):
            return None
        if not table.names:
            return None
        return dataclasses.replace(table, titles=(), rows=below.rows, continues=True)

    def _is_like(self, rows: Sequence[TableLine]) -> bool:
        kinds, first = _kinds(self.rows), min(self.names)
        keys = [line[first] for line in rows if first in line]
        cells = [(column, value) for line in rows for column, value in line.items()]
        if not any(value.kind not in ("text", "code") for _, value in cells) or not all(
            value.kind in kinds.get(column, {value.kind}) or value.text.lower() in _NONE
            for column, value in cells
        ):
            return False
        if all(key.kind == "number" for key in keys) or _OF_SUMS.match(keys[0].text):
            return True
        return max(map(len, rows)) > 2 and not any(_OF_FORMS.fullmatch(key.text) for key in keys)

    def blocks(self) -> Iterator[Block]:
        """The lines of this table, and of those that begin within it."""
        table: _Table | None = self
        while table is not None:
            table = yield from table._until_another()

    def _until_another(self) -> Generator[Block, None, "_Table | None"]:
        """The lines up to where names begin anew; the table from there on."""
        for line in self.titles:
            yield row(self._texts(line))
        if self.names and not self.continues:
            yield row(self.names.values())
        names = self.names
        typed = _typed(self.rows) if names else {}
        notes = _notes_begin(self.rows, typed)
        first = min(names, default=0)
        for at, line in enumerate(self.rows):
            headline = _is_one(line) and (len(line) > 1 or first in line)
            if names and at < notes and _begins_another(line, typed, names):
                if len(typed) > 1:
                    return _Table.of(self.rows[at:])
                names = {}
            if not names or at >= notes or headline:
                yield row(self._texts(line))
            elif [text.text for text in line.values()] != self.header:
                named = ((names.get(column, ""), line[column].text) for column in sorted(line))
                yield "row", " | ".join(f"{name}: {text}" if name else text for name, text in named)
            below = self.rows[at + 1] if headline and at + 1 < len(self.rows) else {}
            anew = len(below) > 1 and 2 * _common(below) > len(below)
            if anew and [text.text for text in below.values()] != self.header:
                another = _Table.of(self.rows[at + 1 :])
                if another.names:
                    return another
        return None

    def _texts(self, line: TableLine) -> list[str]:
        """Each cell once, wherever it is merged to; the places of empty ones before others."""
        last, written = max(line), set[int]()
        texts = []
        sparse = len(self.columns) > _SPARSE * len(line)
        for column in sorted(line) if sparse else self.columns:
            value = line.get(column)
            if column <= last:
                texts.append("" if value is None or id(value) in written else value.text)
                written.add(id(value))
        while texts[-1:] == [""]:
            texts.pop()
        return texts


def _is_one(line: TableLine) -> bool:
    """Whether a row is one cell of words, which may say something of the rows below."""
    cells = {id(it): it for it in line.values()}
    return len(cells) == 1 and next(iter(cells.values())).kind in ("text", "code")


def _names(rows: Sequence[TableLine], width: int, marked: int | None) -> tuple[dict[int, str], int]:
    """The names of the columns, and how many rows say them; ({}, 0) where none does."""
    count = marked if marked is not None else _header_rows(rows)
    count = min(count, len(rows) - 1)
    head, body = rows[:count], rows[count:]
    if not head or width < 2:
        return {}, 0
    names: dict[int, list[str]] = collections.defaultdict(list)
    for line in head:
        fills = line is not head[-1] and not _has_wide(line)  # a name above several, not merged
        above = ""
        for column in sorted({*line, *(head[-1] if fills else ())}):
            above = line[column].text if column in line else above if fills else ""
            if above and above not in names[column][-1:]:
                names[column].append(above)
    titles = {column: " ".join(texts) for column, texts in sorted(names.items()) if texts}
    if marked:
        return titles, count
    distinct = len(set(titles.values())) == len(titles) > 1
    short = all(len(name) <= _LONGEST_NAME for name in titles.values())
    if distinct and short and _is_header(head, _first_part(body), width):
        return titles, count
    return {}, 0


def _first_part(body: Sequence[TableLine]) -> Sequence[TableLine]:
    """The rows up to a headline behind the first of them."""
    several = False
    for at, line in enumerate(body[:_SAMPLE]):
        if several and _is_one(line):
            return body[:at]
        several = several or not _is_one(line)
    return body


def _has_wide(line: TableLine) -> bool:
    return len({id(it) for it in line.values()}) < len(line)


def _header_rows(rows: Sequence[TableLine]) -> int:
    count = 1
    while count < min(_MOST_HEADERS, len(rows) - 1):
        line, below = rows[count - 1], rows[count]
        texts = [it.text for it in below.values()]
        parted = set(line) < set(below) and len(set(texts)) < len(texts)  # as Q1, Q2, Q1, Q2
        units = [text for text in texts if text.strip("()[] ").lower() in _UNITS]
        several = _has_wide(line) or parted or 2 * len(units) > len(texts)
        if not several or not all(map(_may_name, below.values())):
            break
        count += 1
    return count


def _may_name(it: TableCell) -> bool:
    return it.kind in ("text", "code") or is_year(it.text)


def _kinds(rows: Sequence[TableLine]) -> dict[int, set[str]]:
    """What each column holds, but for what stands for no value."""
    kinds: dict[int, set[str]] = collections.defaultdict(set)
    for line in rows[:_SAMPLE]:
        for column, it in line.items():
            if it.text.lower() not in _NONE:
                kinds[column].add(it.kind)
    return kinds


def _is_header(head: Sequence[TableLine], body: Sequence[TableLine], width: int) -> bool:
    last = {column: it for line in head for column, it in line.items()}
    cells = [it for line in head for it in line.values()]
    if not all(map(_may_name, cells)):
        return False
    if all(it.strong for it in cells):
        return not all(it.strong for it in body[0].values())
    typed = _typed(body)
    body = body[: _notes_begin(body, typed)]
    kinds = {c: {typed.get(c, it) for it in below_kinds} for c, below_kinds in _kinds(body).items()}
    years = [column for column, it in last.items() if is_year(it.text)]
    for column, it in last.items():
        if column in years:
            if all(is_year(line[column].text) for line in body if column in line):
                return False
        elif it.kind != "text" and it.kind in kinds.get(column, ()):
            return False
    below_kinds = [kinds.get(column, set()) for column in last if column not in years]
    alike = any(len(it) == 1 and it != {"text"} for it in below_kinds)
    mixed = any(len(it - {"code"}) > 1 for it in below_kinds)
    common = _common(last)
    first = min(last)
    forms = sum(bool(_OF_FORMS.fullmatch(it[first].text)) for it in body[:_LONG] if first in it)
    if width == 2:
        if forms or mixed:
            return False
        return common == 2 or len(body) >= _LONG or (common > 0 if years else alike)
    if 2 * common >= len(last) > 1:
        return True
    again = any(line.get(column) == it for column, it in last.items() for line in body[:_SAMPLE])
    valued = bool(years) or any(it - {"text", "code"} for it in below_kinds)
    is_form = 2 * forms >= len(body[:_LONG])
    return (valued or (not again and len(body) >= _LONG)) and len(last) > 1 and not is_form


def _common(line: TableLine) -> int:
    """How many cells are what columns are often called."""
    return sum(_OF_TABLES.fullmatch(it.text) is not None for it in line.values())


def _typed(rows: Sequence[TableLine]) -> dict[int, str]:
    """The columns of which two thirds of the cells are of one kind that is not text."""
    counts: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for line in rows[:_SAMPLE]:
        for column, it in line.items():
            if it.text.lower() not in _NONE:
                counts[column][it.kind] += 1
    most = {column: found.most_common(1)[0] for column, found in counts.items() if found}
    return {
        column: kind
        for column, (kind, count) in most.items()
        if kind not in ("text", "code") and 3 * count >= 2 * counts[column].total()
    }


def _notes_begin(rows: Sequence[TableLine], typed: Mapping[int, str]) -> int:
    """Where the rows end that are of the table, and sentences about it begin."""
    end = len(rows)
    while end and any(_is_sentence(it) for c, it in rows[end - 1].items() if c in typed):
        end -= 1
    return end


def _is_sentence(it: TableCell) -> bool:
    return it.kind in ("text", "code") and len(it.text.split()) > 2


def _begins_another(line: TableLine, typed: Mapping[int, str], names: Mapping[int, str]) -> bool:
    """Whether a row may name the columns anew: words where the columns hold values."""
    there = [(names.get(column, ""), line[column]) for column in typed if column in line]
    if len(line) < 2 or not there or len(there) < len(typed):
        return False
    return all(map(_may_name, line.values())) and all(
        it.text.lower() not in _NONE and (it.text[:1].isupper() or not name[:1].isupper())
        for name, it in there
    )

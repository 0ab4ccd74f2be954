"""Reader of .docx: the text that its pages show, in the order of the document."""

import functools
import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

from jaxrag.library.documents.blocks import Block, heading, item, joined, one_spaced
from jaxrag.library.documents.document import BadDocument, Document
from jaxrag.library.documents.files import File, decode, parsing, parts, read_bytes, repacked
from jaxrag.library.documents.html import declared_encoding, html_text
from jaxrag.library.documents.marks import (
    EQUATION,
    LOWERED,
    RAISED,
    STRUCK,
    counted,
    equation,
    marked,
)
from jaxrag.library.documents.symbols import symbol
from jaxrag.library.documents.tables import TableCell, TableLine, cell, table_blocks

_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_R = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}"
_TEXT, _PARAGRAPH, _RUN, _TABLE = (f"{_W}{name}" for name in ("t", "p", "r", "tbl"))
_BREAKS = {f"{_W}tab": " ", f"{_W}br": "\n", f"{_W}cr": "\n", f"{_W}noBreakHyphen": "-"}
_WRAPPERS = frozenset(
    f"{_W}{name}" for name in ("sdt", "sdtContent", "customXml", "ins", "moveTo", "smartTag")
)
# Where text was moved from, what only other programs read, and how a reading is written above.
_NOT_SHOWN = frozenset(
    ("{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback",
     *(f"{_W}{name}" for name in ("moveFrom", "del", "pPr", "rPr", "rt", "instrText")))
)  # fmt: skip
_PICTURE = "{http://schemas.openxmlformats.org/drawingml/2006/picture}pic"
_OFF = ("0", "false", "off", "none")
_LEVELS = 9  # of lists
_MOST_COLUMNS = 256
_HEADERS = 5  # rows of a table that may say its names, and the first below
_MOST_BASES = 16  # styles that a style is based on
_CHUNKS = (".xml", ".rels", ".html", ".htm", ".xhtml", ".txt")
_RELATION = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/numbering"


def read_docx(stream: BinaryIO, file: File) -> Iterator[Document | BadDocument]:
    """One document: the body with text boxes and tracked insertions, headings as "# " lines.

    Numbers of lists and headings are written as they are shown, equations on one line, raised and
    lowered text as in 10^6 and H_2O. Tables become rows of cells between bars, or of "name: value"
    below a header. Headers, footers, notes, comments, hidden text and pictures are left out.
    Refused: a file that unpacks to more than the bounds of ``archive``.
    """
    data = read_bytes(stream)
    with parsing("DOCX"):
        title, body = _Reader(repacked(parts(data, "DOCX", _CHUNKS)), file).read()
    yield file.document(body, title)


def _value(element: Any, *path: str) -> str | None:
    """The value of an element below, "" where it has none; None where there is no such element."""
    found = element.find(_path(path))
    return None if found is None else found.get(f"{_W}val", "")


@functools.cache
def _path(names: tuple[str, ...]) -> str:
    return "/".join(f"{_W}{name}" for name in names)


def _is_on(element: Any, *path: str) -> bool | None:
    value = _value(element, *path)
    return None if value is None else value not in _OFF


def _count(element: Any, *path: str, default: int = 0) -> int:
    """The number of an element below; the default where there is none."""
    value = _value(element, *path) or ""
    return int(value) if value.isdecimal() else default


class _Style(NamedTuple):
    """What a paragraph or a run has by its style; None is what neither it nor its bases say."""

    name: str
    level: int  # of a heading; 0 for any other
    number: str | None  # of its list
    depth: str | None  # in that list
    hidden: bool | None
    mark: str | None


class _Styles:
    """The styles of a document, and what each takes from those that it is based on."""

    def __init__(self, root: Any) -> None:
        self._by_id: dict[str, Any] = {}
        self._found: dict[str | None, _Style] = {}
        self._default: str | None = None
        for style in root.iterchildren(f"{_W}style"):
            name = style.get(f"{_W}styleId") or ""
            self._by_id.setdefault(name, style)
            by_default = style.get(f"{_W}default") in ("1", "true", "on")
            if by_default and style.get(f"{_W}type") == "paragraph":
                self._default = name

    def of(self, name: str | None) -> _Style:
        """A style by its id; the default one of paragraphs for None and one that is not there.

        Runs without a style have that of ''.
        """
        if name not in self._found:
            chain: list[Any] = []
            at = self._default if name is None or (name and name not in self._by_id) else name
            while at in self._by_id and len(chain) < _MOST_BASES:
                chain.append(self._by_id[at])
                at = _value(chain[-1], "basedOn")
            names = [_value(style, "name") or "" for style in chain]
            self._found[name] = _Style(
                next(iter(names), ""),
                next(filter(None, map(_heading_level, names)), 0),
                _first(_value(style, "pPr", "numPr", "numId") for style in chain),
                _first(_value(style, "pPr", "numPr", "ilvl") for style in chain),
                _first(_is_on(style, "rPr", "vanish") for style in chain),
                _first(map(_mark, chain)),
            )
        return self._found[name]


class _Lists:
    """The numbers of automatic lists, counted in the order of the document."""

    def __init__(self, root: Any | None) -> None:
        self._levels: dict[str, dict[int, Any]] = {}
        self._lists: dict[str, tuple[str, Any]] = {}
        self._counts: dict[str, list[int | None]] = {}
        self._begun: set[str] = set()
        linked: dict[str, str] = {}
        of_style: dict[str, str] = {}
        for element in () if root is None else root.iterchildren(f"{_W}abstractNum"):
            name = element.get(f"{_W}abstractNumId")
            levels = element.iterchildren(f"{_W}lvl")
            self._levels[name] = {int(lvl.get(f"{_W}ilvl", 0)): lvl for lvl in levels}
            if style := _value(element, "numStyleLink"):
                linked[name] = style
            if style := _value(element, "styleLink"):
                of_style[style] = name
        for element in () if root is None else root.iterchildren(f"{_W}num"):
            name = _value(element, "abstractNumId") or ""
            name = of_style.get(linked.get(name, ""), name)
            self._lists[element.get(f"{_W}numId")] = name, element

    def next(self, number: str, level: int) -> str | None:
        """The label of the next paragraph of a list: "-" for a bullet; None if it has none."""
        if number not in self._lists or not 0 <= level < _LEVELS:
            return None
        name, own = self._lists[number]
        levels = dict(self._levels.get(name, {}))
        starts: dict[int, int] = {}
        for override in own.iterchildren(f"{_W}lvlOverride"):
            at = int(override.get(f"{_W}ilvl", 0))
            for replaced in override.iterchildren(f"{_W}lvl"):
                levels[at] = replaced
            if _value(override, "startOverride"):
                starts[at] = _count(override, "startOverride", default=1)
        if level not in levels:
            return None
        counts = self._counts.setdefault(name, [None] * _LEVELS)
        if number not in self._begun:
            self._begun.add(number)
            for at in starts:
                counts[at] = None
        for at in range(level + 1):
            before = counts[at]
            if before is None:
                counts[at] = starts.get(at, _count(levels.get(at, own), "start", default=1))
            elif at == level:
                counts[at] = before + 1
        counts[level + 1 :] = [None] * (_LEVELS - level - 1)
        return self._label(levels, level, counts)

    def _label(self, levels: Mapping[int, Any], level: int, counts: list[int | None]) -> str:
        form = _value(levels[level], "numFmt") or "decimal"
        text = _value(levels[level], "lvlText") or ""
        if form == "bullet":
            return "-"
        if form == "none":
            return text
        legal = _is_on(levels[level], "isLgl")
        for at in range(level + 1):
            shown = form if at == level else _value(levels.get(at, levels[level]), "numFmt") or ""
            text = text.replace(f"%{at + 1}", counted(counts[at] or 0, "" if legal else shown))
        return one_spaced(text)


class _Reader:
    """One document, and where its counting stands."""

    def __init__(self, data: bytes, file: File) -> None:
        import docx  # only who reads DOCX waits for it

        self._document = docx.Document(io.BytesIO(data))
        self._file = file
        self._styles = _Styles(self._document.styles.element)
        relations = self._document.part.rels.values()
        found = [relation.target_part for relation in relations if relation.reltype == _RELATION]
        self._lists = _Lists(found[0].element if found else None)

    def read(self) -> tuple[str, str]:
        """The title and the text."""
        body = self._document.element.body
        pictures = sum(1 for _ in body.iter(_PICTURE))
        self._file.left_out.add("pictures", count=pictures)
        blocks = list(self._blocks(body))
        titled = (text.lstrip("# ") for _, text in blocks if text.startswith("#"))
        properties = self._document.core_properties
        return one_spaced(properties.title or "") or next(titled, ""), joined(blocks)

    def _blocks(self, parent: Any) -> Iterator[Block]:
        tables = 0
        for node in _children(parent):
            if node.tag == _TABLE:
                tables += 1
                for kind, text in self._table(node):
                    yield ("rows" if kind and tables % 2 else kind), text
            elif node.tag == _PARAGRAPH:
                yield self._paragraph(node)
            else:
                yield "", self._embedded(node)

    def _embedded(self, node: Any) -> str:
        """The text of a document in another format that is shown in this place."""
        part = self._document.part.related_parts.get(node.get(f"{_R}id"))
        kind = "" if part is None else part.content_type.partition(";")[0]
        data = b"" if part is None else part.blob
        text = ""
        if kind in ("text/html", "application/xhtml+xml"):
            text = html_text(decode(data, declared_encoding(data)), self._file.left_out)[1]
        elif kind == "text/plain":
            text = decode(data).strip()
        self._file.left_out.add("embedded documents", count=not text)
        return text

    def _paragraph(self, node: Any) -> Block:
        style = self._styles.of(_value(node, "pPr", "pStyle"))
        text = self._text(node, style.hidden or False)
        label = self._label(node, style)
        if not text:
            return "", ""
        if style.level:
            return heading(style.level, text if label in (None, "-") else f"{label} {text}")
        if label not in (None, "-", ""):
            return "item", f"{label} {text}"
        return item(text) if label == "-" or style.name.startswith("List") else ("", text)

    def _label(self, node: Any, style: _Style) -> str | None:
        """The number before a paragraph; what is empty or deleted has none of its own."""
        own = node.find(f"{_W}pPr")
        number, level = style.number, style.depth
        if own is not None:
            number = _first((_value(own, "numPr", "numId"), number))
            level = _first((_value(own, "numPr", "ilvl"), level))
            if any(_value(own, "rPr", name) is not None for name in ("del", "moveFrom")):
                return None
        if not number:
            return None
        return self._lists.next(number, int(level) if level and level.isdecimal() else 0)

    def _text(self, paragraph: Any, hidden: bool) -> str:
        """The text of a paragraph; that of a text box stands on lines of its own."""
        from lxml import etree

        runs: list[tuple[str, str]] = []
        events = etree.iterwalk(paragraph, events=("start", "end"))
        mark = ""
        for event, node in events:
            tag = node.tag
            if event == "end":
                if tag == _PARAGRAPH and node is not paragraph:
                    runs.append(("\n", ""))
            elif tag in _NOT_SHOWN:
                events.skip_subtree()
            elif tag == _RUN:
                mark, gone = self._form(node, hidden)
                if gone:
                    holds_text = any(it.text for it in node.iterchildren(_TEXT))
                    self._file.left_out.add("hidden passages", count=holds_text)
                    events.skip_subtree()
            elif tag == _TEXT:
                runs.append((self._letters(node), mark))
            elif tag == f"{_W}sym":
                runs.append((self._sign(node.get(f"{_W}font"), node.get(f"{_W}char")), mark))
            elif tag == f"{_W}checkBox":
                state = _first((_is_on(node, "checked"), _is_on(node, "default")))
                runs.append(("☒ " if state else "☐ ", ""))
            elif tag == EQUATION:
                runs.append((equation(node), ""))
                events.skip_subtree()
            elif tag == _PARAGRAPH and node is not paragraph:
                runs.append(("\n", ""))
            elif tag in _BREAKS and node.getparent().tag == _RUN:
                runs.append((_BREAKS[tag], mark))
        lines = (" ".join(line.split()) for line in marked(runs).split("\n"))
        return "\n".join(line for line in lines if line)

    def _form(self, run: Any, hidden: bool) -> tuple[str, bool]:
        """The mark of a run, and whether it is hidden, by itself or by its style."""
        if run.find(f"{_W}rPr") is None:
            return "", hidden
        style = self._styles.of(_value(run, "rPr", "rStyle") or "")
        gone = _first((_is_on(run, "rPr", "vanish"), style.hidden, hidden))
        return _first((_mark(run), style.mark)) or "", bool(gone)

    def _letters(self, node: Any) -> str:
        """The text of a run; that in a font of signs stands in places of its own."""
        text = node.text or ""
        if not any("\uf000" <= it < "\uf100" for it in text):
            return text
        fonts = node.getparent().find(f"{_W}rPr/{_W}rFonts")
        font = "" if fonts is None else fonts.get(f"{_W}ascii") or ""
        return "".join(
            self._sign(font, f"{ord(it):x}") if "\uf000" <= it < "\uf100" else it for it in text
        )

    def _sign(self, font: str | None, char: str | None) -> str:
        try:
            sign = symbol(font or "", int(char or "", 16))
        except ValueError:
            sign = ""
        self._file.left_out.add("symbols", count=not sign)
        return sign

    def _table(self, table: Any) -> Iterator[Block]:
        """The rows of a table; cells that are merged stand in each place that they take."""
        lines: list[list[tuple[int, TableCell]]] = []
        above: TableLine = {}
        headers = 0
        for line in _children(table, f"{_W}tr"):
            if any(_value(line, "trPr", name) is not None for name in ("del", "moveFrom")):
                continue
            if _is_on(line, "trPr", "hidden"):
                self._file.left_out.add("hidden rows")
                continue
            headers += _is_on(line, "trPr", "tblHeader") is not None and headers == len(lines)
            at = _count(line, "trPr", "gridBefore")
            cells: list[tuple[int, TableCell]] = []
            for node in _children(line, f"{_W}tc"):
                merged = _value(node, "tcPr", "vMerge")
                held = above.get(at) if merged in ("", "continue") else None
                held = held or cell(self._in_cell(node), len(lines) < _HEADERS and _is_strong(node))
                for place in range(max(1, _count(node, "tcPr", "gridSpan", default=1))):
                    above[at + place] = held
                    if at + place >= _MOST_COLUMNS:
                        break
                    cells.append((at + place, held))
                at = cells[-1][0] + 1 if cells else at
            lines.append(cells)
        yield from table_blocks((dict(row) for row in lines), headers or None)

    def _in_cell(self, node: Any) -> str:
        """On one line. What tables in tables hold is split into words once only, as text."""
        words = []
        for kind, text in self._blocks(node):
            text = text.removeprefix("- ") if kind == "item" else text.lstrip("# ")
            words.append(text.replace("\n", " ").replace("  ", " "))
        return " ".join(filter(None, words)).strip()


def _children(parent: Any, *tags: str) -> Iterator[Any]:
    """Paragraphs, tables and embedded documents below a body or cell, or what else is asked for.

    Those inside content controls are there too.
    """
    for node in parent.iterchildren():
        if node.tag in (tags or (_PARAGRAPH, _TABLE, f"{_W}altChunk")):
            yield node
        elif node.tag in _WRAPPERS:
            yield from _children(node, *tags)


def _first[T](values: Iterable[T | None]) -> T | None:
    return next((it for it in values if it is not None), None)


def _mark(element: Any) -> str | None:
    """How a run or a style raises, lowers or strikes text out; None where it does not say."""
    place = _value(element, "rPr", "vertAlign")
    height = _value(element, "rPr", "position")
    if place is not None or height:
        if place == "subscript" or (height or "").startswith("-"):
            return LOWERED
        return RAISED if place == "superscript" or (height or "0") != "0" else ""
    struck = _is_on(element, "rPr", "strike") or _is_on(element, "rPr", "dstrike")
    return STRUCK if struck else None


def _is_strong(cell_node: Any) -> bool:
    """Whether all runs of a cell are in bold."""
    runs = [run for run in cell_node.iter(_RUN) if run.find(_TEXT) is not None]
    return bool(runs) and all(_is_on(run, "rPr", "b") for run in runs)


def _heading_level(style: str) -> int:
    """1 to 6 for the styles "Title" and "heading 1" and so on, 0 for any other."""
    first, _, number = style.rpartition(" ")
    if style == "Title":
        return 1
    return min(int(number), 6) if first.lower() == "heading" and number in set("123456789") else 0

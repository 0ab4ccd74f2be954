"""Reader of .html: the text of pages as a person sees it.

Headings, lists and code become Markdown lines, and tables lines of ``column: value``.
"""

import collections
import itertools
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from jaxrag.base.errors import DocumentError
from jaxrag.library.documents.blocks import (
    Block,
    code,
    heading,
    joined,
    names,
    one_spaced,
    row,
)
from jaxrag.library.documents.document import BadDocument, Document
from jaxrag.library.documents.files import (
    File,
    decode_kept,
    is_encoding,
    marked_encoding,
    parsing,
    read_bytes,
    require_few_tags,
    require_short,
)
from jaxrag.library.documents.left_out import LeftOut
from jaxrag.library.documents.marks import LOWERED, RAISED, STRUCK, counted, marked
from jaxrag.library.documents.metadata import typed
from jaxrag.library.documents.tables import TableCell, cell, table_blocks

_DROPPED = names(
    "script style noscript nav iframe object datalist head canvas audio video rt rp defs "
    "annotation annotation-xml mjx-math"
)
_BLOCKS = names(
    "address article aside blockquote body caption center dd details dialog div dl dt fieldset "
    "figcaption figure footer form header hr html legend li main ol p pre section summary "
    "table tbody template tfoot thead tr ul"
)
_HEADINGS = {f"h{level}": level for level in range(1, 7)}
_CELLS = frozenset(("td", "th"))
_MARKS = {"sup": RAISED, "sub": LOWERED, "del": STRUCK, "s": STRUCK, "strike": STRUCK}
# Between the parts of formulas: what precedes the second part, and the third.
_FORMULAS = {
    "mfrac": "/", "msup": "^", "msub": "_", "msubsup": "_^", "mover": "^", "munder": "_",
    "munderover": "_^",
}  # fmt: skip
_COUNTED = {"a": "lowerLetter", "A": "upperLetter", "i": "lowerRoman", "I": "upperRoman"}
_LANGUAGE = re.compile(r"\b(?:language|lang|source)-(\w+)|^(?:code )?(?!code )(\w+) literal-block")
_UNSEEN = re.compile(r"(?i)(?:display\s*:\s*none|visibility\s*:\s*hidden)")
_OPENED = {"dialog": "open", "template": "shadowrootmode"}  # are seen where they have it
_HOLDS_FOOTERS = ("article", "blockquote", "figure", "main")
_BUTTONS_SEEN = names("accordion tab")  # of a class or role; and those in headings and the like
_UNTYPED = names("hidden submit button reset image password file")  # inputs whose value is no text
_MOST_COLUMNS = 100  # that one cell may span
_LONG_CELL = 2_000  # characters: a table with such cells and no header is a means of layout
_CELL_NODES = 200  # so is one with as many elements in a cell
_MOST = 0.75  # of the visible text: an article that is the page
_MOST_LEFT = 0.1  # of it, before it is said
_SPACE = re.compile(r"[ \t\n\r\f\v\u00a0]+")
_DECLARED = re.compile(rb"""<meta[^>]{0,500}?charset\s*=\s*["']?\s*([A-Za-z0-9_:.-]{1,40})""", re.I)
_XML_DECLARED = re.compile(rb"""^\s*<\?xml[^>]{0,100}?encoding\s*=\s*["']([A-Za-z0-9_.-]{1,40})""")
_META = 64  # names that a page may give
_META_CHARACTERS = 2_000  # of a name or value; what is longer is left out
_META_OF_DISPLAY = names(
    "viewport theme-color color-scheme referrer robots googlebot format-detection generator "
    "handheldfriendly mobileoptimized apple-mobile-web-app-capable csrf-token csrf-param"
)
_DECLARED_WITHIN = 4096  # bytes


def read_html(stream: BinaryIO, file: File) -> Iterator[Document | BadDocument]:
    """One document: the main text of a page, titled by its <title>.

    Metadata are what ``<meta name=... content=...>`` say, under names in lower case, and the
    ``lang`` of the page; names about how a page is shown are left out.
    Scripts, styles, menus, the page's footer and what is hidden are left out; where it marks its
    <main> parts, or a single <article> that holds most of its text, so is everything around them,
    and ``left_out`` says how much is kept. Forms show their values, pictures their alternative
    text. The encoding is that of a byte order mark, UTF-8 if it fits, the option or the page's own.
    """
    data = read_bytes(stream)
    require_few_tags(data)
    text = decode_kept(data, file.left_out, file.options.encoding or declared_encoding(data))
    if not text.strip():
        raise DocumentError("the file is empty; leave it out")
    with parsing("HTML"):
        root = _parsed(text)
        title, body = text_of(root, file.left_out)
        metadata = {} if root is None else _metadata_of(root)
    empty = "holds no text outside of scripts and menus; leave the file out"
    yield file.document(body, title, metadata, empty=empty)


def declared_encoding(data: bytes) -> str | None:
    """The encoding that a page names for itself, if there is such an encoding."""
    if marked_encoding(data):
        return None
    head = data[:_DECLARED_WITHIN]
    found = _DECLARED.search(head) or _XML_DECLARED.search(head)
    if found is None:
        return None
    name = found.group(1).decode("ascii").lower()
    return name if is_encoding(name) else None


def html_text(page: str, left_out: LeftOut) -> tuple[str, str]:
    """Title and main text of a page; the text is '' when there is none.

    Raises DocumentError for a page nested more than 2048 deep, of which the parser drops the rest.
    """
    return text_of(_parsed(page), left_out)


def _parsed(page: str) -> Any:
    from lxml import etree, html  # only who reads HTML waits for it

    parser = html.HTMLParser(
        encoding="utf-8", remove_comments=True, remove_pis=True, huge_tree=True
    )
    page = page.replace("\0", "\ufffd")
    root = etree.fromstring(page.encode("utf-8", "replace"), parser)
    if any(entry.type_name == "ERR_RESOURCE_LIMIT" for entry in parser.error_log):
        raise DocumentError("is nested too deeply to be read to its end; flatten the page")
    return root


def _metadata_of(root: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    if lang := (root.get("lang") or "").strip():
        metadata["lang"] = lang[:_META_CHARACTERS]
    for element in root.iter("meta"):
        name = (element.get("name") or "").strip().lower()
        content = _SPACE.sub(" ", element.get("content") or "").strip()
        if not name or not content or name in _META_OF_DISPLAY or len(metadata) >= _META:
            continue
        if name not in metadata and max(len(name), len(content)) <= _META_CHARACTERS:
            metadata[name] = typed(content)
    return metadata


def text_of(root: Any, left_out: LeftOut) -> tuple[str, str]:
    """Title and main text of a parsed page, whose tags are in no namespace."""
    if root is None:
        return "", ""
    titles = [element for element in root.iter("title") if element.getparent().tag == "head"]
    title = one_spaced("".join(titles[0].itertext())) if titles else ""
    text = _Writer(root).text(left_out)
    if not title and text.startswith("# "):
        title = text[2:].partition("\n")[0].strip()
    return title, text


class _Writer:
    """Turns a page into blocks: items and rows one a line, all else apart by empty lines."""

    def __init__(self, root: Any) -> None:
        self._blocks: list[tuple[Block, str]] = []  # each with the part it is in
        self._runs: list[tuple[str, str]] = []  # of the block under way: text, and its mark
        self._level = 0  # of the heading under way
        self._label = ""  # of the item under way
        self._in = collections.Counter[str]()  # tags that are open
        self._articles = 0
        self._lists: list[Iterator[str]] = []  # the labels of the items to come
        self._cells: list[_Placed] = []  # of the row under way
        self._hanging: dict[int, _Placed] = {}  # by column: a cell of rows above
        self._table: Any = None  # of data, that is open
        self._lines: list[list[TableCell]] = []  # of it
        self._headers = 0  # how many of them are marked as its header
        self._row: Any = None
        self._rows = "row"  # the kind of its block, another one in each table
        self._size = 0
        self._language = ""  # of code
        self._raised = 0  # where in it raised text begins
        self._note = False  # whether that is the mark of a footnote
        self._shown = set(" ".join(root.xpath("//@aria-controls")).split())  # by a click
        self._write(root)

    def text(self, left_out: LeftOut) -> str:
        """The text of the main parts, or of the whole page."""
        sizes = collections.Counter[str]()
        for (_, text), part in self._blocks:
            sizes[part] += len(text)
        article = self._articles == 1 and sizes["article"] >= _MOST * sizes.total()
        shown_parts = ("main",) if sizes["main"] else ("article",) if article else ("", "article")
        lost = sum(size for part, size in sizes.items() if part not in shown_parts)
        if lost > _MOST_LEFT * sizes.total():
            share = f"{100 - 100 * lost / sizes.total():.0f} % kept"
            left_out.add("characters of its visible text", share, lost)
        return joined(block for block, part in self._blocks if part in shown_parts)

    def _write(self, root: Any) -> None:
        from lxml import etree

        events = etree.iterwalk(root, events=("start", "end"))
        skipped = None
        for event, node in events:
            tag = node.tag if isinstance(node.tag, str) else ""
            if event == "start" and self._is_left_out(tag, node):
                events.skip_subtree()
                skipped = node
            elif event == "start":
                self._open(tag, node)
                self._add(node.text)
            else:
                if node is not skipped:
                    self._close(tag, node)
                self._add(None if node is root else node.tail)
        self._flush()

    def _is_left_out(self, tag: str, node: Any) -> bool:
        """Whether nothing below is to be read: it is not seen, or said here in other words."""
        if tag in _DROPPED or not tag:
            return bool(tag)
        role, named = node.get("role") or "", node.get("class") or ""
        hidden = node.get("hidden", "until-found") != "until-found" or "katex-html" in named
        if hidden or _UNSEEN.search(node.get("style") or ""):
            return role != "tabpanel" and node.get("id") not in self._shown
        if tag == "svg":
            texts = node.iter("text", "foreignobject", "foreignObject")
            self._say("\n".join(one_spaced("".join(name.itertext())) for name in texts))
        elif tag == "select":
            options = list(node.iter("option"))
            chosen = [option for option in options if option.get("selected") is not None]
            chosen = chosen or options[: node.get("multiple") is None]
            self._say(", ".join(one_spaced("".join(name.itertext())) for name in chosen))
        elif tag == "button":
            expands = node.get("aria-expanded") is not None or node.get("aria-controls") is not None
            inside = any(self._in[name] for name in (*_HEADINGS, "summary", "dt"))
            return not (expands or inside or any(name in role + named for name in _BUTTONS_SEEN))
        elif tag == "footer":
            return not any(self._in[name] for name in _HOLDS_FOOTERS)
        else:
            return tag in _OPENED and node.get(_OPENED[tag]) is None
        return True

    def _say(self, text: str) -> None:
        """Words that stand apart from those around them."""
        self._runs.append((f" {text} " if text.strip() else "", ""))

    def _open(self, tag: str, node: Any) -> None:
        block = tag in _BLOCKS or tag in _HEADINGS or tag in _CELLS
        if block:
            self._flush()
        self._articles += tag == "article" and not self._in["article"]
        self._in["main part"] += _is_main(tag, node)
        self._in[tag] += 1
        if tag == "img":
            self._say(one_spaced(node.get("alt") or ""))
        elif tag == "input":
            kind = (node.get("type") or "text").lower()
            if kind in ("checkbox", "radio"):
                self._say("[ ]" if node.get("checked") is None else "[x]")
            elif kind not in _UNTYPED:
                self._say(one_spaced(node.get("value") or ""))
        elif tag == "br":
            self._runs.append((" " if self._row is not None else "\n", ""))
        elif tag in ("pre", "code") and (found := _LANGUAGE.search(node.get("class") or "")):
            self._language = found[1] or found[2]
        elif tag == "sup":
            self._raised, self._note = len(self._runs), _is_note(node)
        elif tag == "button" or (block and self._row is not None):
            self._runs.append((" ", ""))
        elif block:
            self._begin(tag, node)
        self._formula(node)

    def _begin(self, tag: str, node: Any) -> None:
        """A block that is in no row of data."""
        if tag == "table" and self._table is None and _is_data(node):
            self._table = node
            self._hanging.clear()
            self._rows = "rows" if self._rows == "row" else "row"
        elif tag == "pre":
            self._language = ""
        elif tag == "tr" and (self._table is not None or _is_plain(node)):
            self._row = node
        elif tag in _HEADINGS:
            self._level = _HEADINGS[tag]
        elif tag in ("ol", "ul"):
            first = node.get("start") or ""
            self._lists.append(_labels(node, first) if tag == "ol" else itertools.repeat("- "))
        elif tag == "li":
            if node.get("value") and node.getparent().tag == "ol":
                self._lists[-1] = _labels(node.getparent(), node.get("value"))
            self._label = next(self._lists[-1]) if self._lists else "- "

    def _formula(self, node: Any) -> None:
        """What stands in front of a part of a formula."""
        parent = node.getparent()
        signs = _FORMULAS.get(parent.tag if parent is not None else "", "")
        if node.tag == "mfrac" and self._runs and self._runs[-1][0][-1:].isdigit():
            self._runs.append((" ", ""))  # 1 1/2
        if signs:
            before = node.getprevious()
            at = 0 if before is None else 1 if before.getprevious() is None else 2
            sign = signs[at - 1] if 0 < at <= len(signs) else ""
            self._runs.append((sign + "(" * (len(node) > 1), ""))
        elif node.tag == "msqrt":
            self._runs.append(("sqrt(", ""))

    def _close(self, tag: str, node: Any) -> None:
        parent = node.getparent()
        bracketed = parent is not None and parent.tag in _FORMULAS and len(node) > 1
        if bracketed or tag == "msqrt":
            self._runs.append((")", ""))
        if tag == "sup":
            mark = "".join(text for text, _ in self._runs[self._raised :]).strip()
            if mark and (self._note or mark[0] == "["):
                self._runs[self._raised :] = [(f" [{mark.strip(' []()')}]", "")]
        if node is self._row:
            self._end_row(node)
        elif self._row is not None:
            if tag in _CELLS and node.getparent() is self._row:
                wide = _span(node, "colspan", _MOST_COLUMNS)
                high = 1 if self._table is None else _span(node, "rowspan", 1 << 16)
                self._cells.append(_Placed(cell(self._taken(), tag == "th"), wide, high))
            elif tag in _BLOCKS or tag in _HEADINGS or tag in _CELLS:
                self._runs.append((" ", ""))
        elif tag in _BLOCKS or tag in _HEADINGS or tag in _CELLS:
            self._flush()
            if node is self._table:
                self._end_table()
            if tag in ("ol", "ul") and self._lists:
                self._lists.pop()
            self._label = "" if tag == "li" else self._label
            self._level = 0
        self._in[tag] -= 1
        self._in["main part"] -= _is_main(tag, node)

    def _add(self, text: str | None) -> None:
        if not text:
            return
        mark = next((sign for tag, sign in _MARKS.items() if self._in[tag]), "")
        text = text if self._in["pre"] else _SPACE.sub(" ", text)
        if mark == LOWERED and self._runs and self._runs[-1][0][-1:] in ("/", "\u2044"):
            mark = ""  # <sup>1</sup>/<sub>2</sub>
        elif text[:1] in ("/", "\u2044") and self._runs and self._runs[-1][1] == RAISED:
            before = self._runs[-2][0] if len(self._runs) > 1 else ""
            self._runs[-1] = " " * before[-1:].isdigit() + self._runs[-1][0], ""
        self._runs.append((text, mark))

    def _taken(self) -> str:
        """The text under way, on one line; then there is none."""
        text = one_spaced(marked(self._runs))
        self._runs.clear()
        return text

    def _end_row(self, node: Any) -> None:
        stray = self._taken()
        title = len(self._cells) == 1 and not self._lines
        if self._table is None or title:
            self._put(row(it.cell.text for it in self._cells))
        elif self._cells:
            inner = node.getparent().tag == "thead" or all(it.cell.strong for it in self._cells)
            self._headers += inner and self._headers == len(self._lines)
            self._lines.append(_placed(self._cells, self._hanging))
        self._put(("", stray))
        self._cells.clear()
        self._row = None

    def _end_table(self) -> None:
        lines = (dict(enumerate(line)) for line in self._lines)
        for kind, text in table_blocks(lines, self._headers):
            self._put((kind and self._rows, text))
        self._lines.clear()
        self._table, self._headers = None, 0

    def _flush(self) -> None:
        """End the block under way."""
        if self._row is not None:
            return
        if self._in["pre"]:
            self._put(code("".join(text for text, _ in self._runs), self._language))
            self._runs.clear()
            return
        lines = [one_spaced(line) for line in marked(self._runs).split("\n")]
        self._runs.clear()
        text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
        if text:
            plain = ("item" if self._label else "", self._label + text)
            self._put(heading(self._level, text) if self._level else plain)
            self._level, self._label = 0, ""

    def _put(self, block: Block) -> None:
        self._size += len(block[1])
        require_short(self._size)
        part = "main" if self._in["main part"] else "article" if self._in["article"] else ""
        if block[1]:
            self._blocks.append((block, part))


class _Placed(NamedTuple):
    """A cell, and how many columns and rows it takes."""

    cell: TableCell
    wide: int
    high: int


def _placed(cells: list[_Placed], hanging: dict[int, _Placed]) -> list[TableCell]:
    """The cells of a row by column, with those that hang into it from rows above."""
    line: list[TableCell] = []
    waiting = [placed for placed in cells for _ in range(placed.wide)][::-1]
    while waiting or any(column >= len(line) for column in hanging):
        hangs = len(line) in hanging
        placed = hanging.pop(len(line)) if hangs else waiting.pop() if waiting else _NOTHING
        if placed.high > 1:
            hanging[len(line)] = placed._replace(high=placed.high - 1)
        line.append(placed.cell)
    return line


_NOTHING = _Placed(cell(""), 1, 1)


def _is_data(table: Any) -> bool:
    """Whether a table is one of short cells in rows and columns, and no means of layout."""
    if table.get("role") in ("presentation", "none"):
        return False
    widest = count = 0
    named = False
    for line in table.iter("tr"):
        cells = [td for td in line if td.tag in _CELLS]
        named = named or any(td.tag == "th" for td in cells)
        widest, count = max(widest, len(cells)), count + 1
        for td in cells:
            nodes = list(itertools.islice(td.iter(), _CELL_NODES))
            length = sum(len(node.text or "") + len(node.tail or "") for node in nodes)
            if not named and (length > _LONG_CELL or len(nodes) == _CELL_NODES):
                return False
    return widest > 1 and (named or count > 1)


def _is_plain(line: Any) -> bool:
    """Whether a row that is in no table of data is one line of text."""
    structure = _BLOCKS | _HEADINGS.keys() | {"br"}
    return not any(node.tag in structure for node in line.iterdescendants())


def _span(cell: Any, name: str, most: int) -> int:
    number = (cell.get(name) or "1").strip()
    return max(1, min(int(number), most)) if number.isdecimal() and len(number) < 9 else 1


def _labels(node: Any, first: str) -> Iterator[str]:
    """What stands before the items of an <ol> from the first one on, as it is shown."""
    step = 1 if node.get("reversed") is None else -1
    begin = 1 if step == 1 else len(node.findall("li"))
    if re.fullmatch(r"-?[0-9]{1,9}", first.strip()):
        begin = int(first)
    form = _COUNTED.get(node.get("type") or "", "decimal")
    return (f"{counted(number, form)}. " for number in itertools.count(begin, step))


def _is_main(tag: str, node: Any) -> bool:
    return tag == "main" or (node.get("role") == "main" and tag in _BLOCKS)


def _is_note(node: Any) -> bool:
    """Whether what is raised is a link, as marks of footnotes are, and no exponent in one."""
    parent = node.getparent()
    if node.find("a") is not None or parent.tag != "a":
        return node.find("a") is not None
    return len(parent) == 1 and not ((parent.text or "") + (node.tail or "")).strip()

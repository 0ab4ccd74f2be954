"""Reader of .docx: paragraphs, headings, lists and tables in document order."""

import io
from collections.abc import Iterator
from typing import Any, BinaryIO

from jaxrag.base.errors import DocumentError
from jaxrag.library.documents.archive import parts, repacked
from jaxrag.library.documents.blocks import Block, heading, item, joined, one_spaced
from jaxrag.library.documents.document import BadDocument, Document
from jaxrag.library.documents.files import File, parsing, read_bytes

_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_TEXT, _PARAGRAPH, _RUN, _TABLE = (f"{_W}{name}" for name in ("t", "p", "r", "tbl"))
_FALLBACK = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"
_BREAKS = {f"{_W}tab": " ", f"{_W}br": "\n", f"{_W}cr": "\n", f"{_W}noBreakHyphen": "-"}
_WRAPPERS = frozenset(
    f"{_W}{name}" for name in ("sdt", "sdtContent", "customXml", "ins", "smartTag")
)


def read_docx(stream: BinaryIO, file: File) -> Iterator[Document | BadDocument]:
    """One document: the body with text boxes and tracked insertions, headings as "# " lines.

    Tables become rows of cells between bars. Headers, footers, notes and comments are left out.
    Refused: a file that unpacks to more than the bounds of ``archive``.
    """
    data = read_bytes(stream)
    with parsing("DOCX"):
        title, body = _text(repacked(parts(data, "DOCX")))
    if not body:
        raise DocumentError("holds no text; leave the file out")
    yield Document(file.name, body, title or file.path.stem, file.reported)


def _text(data: bytes) -> tuple[str, str]:
    import docx  # only who reads DOCX waits for it

    document = docx.Document(io.BytesIO(data))
    styles = _style_names(document.styles.element)
    blocks: list[Block] = []
    first = ""
    for kind, node in _blocks(document.element.body):
        if kind == "table":
            blocks += [("row", row) for row in _rows(node)]
            continue
        text = _paragraph_text(node)
        if not text:
            continue
        named = node.find(f"./{_W}pPr/{_W}pStyle")
        name = styles.get(None if named is None else named.get(f"{_W}val"), styles[None])
        level = 1 if name == "Title" else _heading_level(name)
        if level:
            first = first or one_spaced(text)
            blocks.append(heading(level, text))
        elif name.startswith("List") or node.find(f"./{_W}pPr/{_W}numPr") is not None:
            blocks.append(item(text))
        else:
            blocks.append(("", text))
    return one_spaced(document.core_properties.title or "") or first, joined(blocks)


def _style_names(styles: Any) -> dict[str | None, str]:
    """Names of the styles of paragraphs by id; under None that of a paragraph that names none."""
    names: dict[str | None, str] = {None: ""}
    for style in styles.iterchildren(f"{_W}style"):
        if style.get(f"{_W}type") == "paragraph":
            named = style.find(f"./{_W}name")
            name = "" if named is None else named.get(f"{_W}val") or ""
            names.setdefault(style.get(f"{_W}styleId") or "", name)
            if style.get(f"{_W}default") in ("1", "true", "on"):
                names[None] = name
    return names


def _blocks(parent: Any) -> Iterator[tuple[str, Any]]:
    """The paragraphs and tables below a body or cell, those inside content controls too."""
    for node in parent.iterchildren():
        tag = node.tag
        if tag == _PARAGRAPH:
            yield "paragraph", node
        elif tag == _TABLE:
            yield "table", node
        elif tag in _WRAPPERS:
            yield from _blocks(node)


def _rows(table: Any) -> Iterator[str]:
    """Each row's cells between bars; a table inside a cell is part of the cell."""
    for row in table.iterchildren(f"{_W}tr"):
        cells = [_cell_text(cell) for cell in _cells(row)]
        if any(cells):
            yield " | ".join(cells)


def _cells(row: Any) -> Iterator[Any]:
    for node in row.iterchildren():
        if node.tag == f"{_W}tc":
            yield node
        elif node.tag in _WRAPPERS:
            yield from _cells(node)


def _cell_text(cell: Any) -> str:
    """On one line. What tables inside of tables hold is split into words once only, as text."""
    parts: list[str] = []
    for kind, node in _blocks(cell):
        if kind == "table":
            parts += (row.replace("  ", " ") for row in _rows(node))  # where a cell is empty
        else:
            parts.append(_paragraph_text(node).replace("\n", " "))
    return " ".join(filter(None, parts)).strip()


def _paragraph_text(paragraph: Any) -> str:
    """The text of a paragraph; that of a text box stands on lines of its own."""
    parts: list[str] = []
    skipped = {
        node for fallback in paragraph.iter(_FALLBACK) for node in fallback.iterdescendants()
    }
    for node in paragraph.iterdescendants(_TEXT, _PARAGRAPH, *_BREAKS):
        if node in skipped:
            continue
        tag = node.tag
        if tag == _TEXT:
            parts.append(node.text or "")
        elif tag == _PARAGRAPH:
            parts.append("\n")
        elif node.getparent().tag == _RUN:
            parts.append(_BREAKS[tag])
    lines = (" ".join(line.split()) for line in "".join(parts).split("\n"))
    return "\n".join(line for line in lines if line)


def _heading_level(style: str) -> int:
    """1 to 6 for the styles "Heading 1" and so on, 0 for any other."""
    name, _, number = style.rpartition(" ")
    return min(int(number), 6) if name.lower() == "heading" and number in set("123456789") else 0

"""Reader of .docx: paragraphs, headings, lists and tables in document order."""

import io
import zipfile
from collections.abc import Iterator
from typing import Any, BinaryIO

from jaxrag.documents.document import BadDocument, Document
from jaxrag.documents.files import File, one_line, read_bytes
from jaxrag.errors import DocumentError

MAX_PART_BYTES = 64 << 20  # of one XML part once it is unpacked
MAX_UNPACKED_BYTES = 512 << 20  # of everything in the file

_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_FALLBACK = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"
_BREAKS = {f"{_W}tab": " ", f"{_W}br": "\n", f"{_W}cr": "\n", f"{_W}noBreakHyphen": "-"}
_WRAPPERS = frozenset(
    f"{_W}{name}" for name in ("sdt", "sdtContent", "customXml", "ins", "smartTag")
)


def read_docx(stream: BinaryIO, file: File) -> Iterator[Document | BadDocument]:
    """One document: the body with text boxes and tracked insertions, headings as "# " lines.

    Tables become rows of cells between bars. Headers, footers, notes and comments are left out.
    Refused: a file that unpacks to more than the bounds of this module.
    """
    data = read_bytes(stream)
    try:
        _check_sizes(data)
        title, body = _text(data)
    except DocumentError:
        raise
    except Exception as error:  # whatever the parser may raise
        raise DocumentError(f"cannot be parsed as DOCX ({one_line(error)}); save it anew") from None
    if not body:
        raise DocumentError("holds no text; leave the file out")
    yield Document(file.name, body, title or file.path.stem, file.absolute)


def _check_sizes(data: bytes) -> None:
    """Refuse what the directory of the archive says is too large; reading never exceeds that."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
    if sum(entry.file_size for entry in entries) > MAX_UNPACKED_BYTES:
        raise DocumentError(f"unpacks to more than {MAX_UNPACKED_BYTES >> 20} MiB; split it")
    for entry in entries:
        if entry.file_size > MAX_PART_BYTES and entry.filename.endswith((".xml", ".rels")):
            raise DocumentError(
                f"{entry.filename} unpacks to more than {MAX_PART_BYTES >> 20} MiB; split the file"
            )


def _text(data: bytes) -> tuple[str, str]:
    import docx  # only who reads DOCX waits for it
    from docx.text.paragraph import Paragraph

    document = docx.Document(io.BytesIO(data))
    blocks: list[tuple[str, str]] = []  # (kind, text)
    heading = ""
    for kind, node in _blocks(document.element.body):
        if kind == "table":
            blocks += [("row", row) for row in _rows(node)]
            continue
        text = _paragraph_text(node)
        if not text:
            continue
        style = Paragraph(node, document).style
        name = (style.name or "") if style is not None else ""
        level = 1 if name == "Title" else _heading_level(name)
        if level:
            text = " ".join(text.split())
            heading = heading or text
            blocks.append(("", "#" * level + " " + text))
        elif name.startswith("List") or node.find(f"./{_W}pPr/{_W}numPr") is not None:
            blocks.append(("item", "- " + text))
        else:
            blocks.append(("", text))
    body = ""
    before = None
    for kind, text in blocks:
        apart = "\n" if kind and kind == before else "\n\n"
        body += (apart if body else "") + text
        before = kind
    title = " ".join((document.core_properties.title or "").split())
    return title or heading, body


def _blocks(parent: Any) -> Iterator[tuple[str, Any]]:
    """The paragraphs and tables below a body or cell, those inside content controls too."""
    for node in parent.iterchildren():
        if node.tag == f"{_W}p":
            yield "paragraph", node
        elif node.tag == f"{_W}tbl":
            yield "table", node
        elif node.tag in _WRAPPERS:
            yield from _blocks(node)


def _rows(table: Any) -> Iterator[str]:
    """Each row's cells between bars; a table inside a cell is part of the cell."""
    for row in table.iterchildren(f"{_W}tr"):
        cells = [" ".join(_cell_text(cell).split()) for cell in _cells(row)]
        if any(cells):
            yield " | ".join(cells)


def _cells(row: Any) -> Iterator[Any]:
    for node in row.iterchildren():
        if node.tag == f"{_W}tc":
            yield node
        elif node.tag in _WRAPPERS:
            yield from _cells(node)


def _cell_text(cell: Any) -> str:
    parts = []
    for kind, node in _blocks(cell):
        parts += list(_rows(node)) if kind == "table" else [_paragraph_text(node)]
    return "\n".join(parts)


def _paragraph_text(paragraph: Any) -> str:
    """The text of a paragraph; that of a text box stands on lines of its own."""
    parts: list[str] = []
    skipped = {
        node for fallback in paragraph.iter(_FALLBACK) for node in fallback.iterdescendants()
    }
    for node in paragraph.iterdescendants():
        if node in skipped:
            continue
        if node.tag == f"{_W}t":
            parts.append(node.text or "")
        elif node.tag == f"{_W}p":
            parts.append("\n")
        elif node.tag in _BREAKS and node.getparent().tag == f"{_W}r":
            parts.append(_BREAKS[node.tag])
    lines = (" ".join(line.split()) for line in "".join(parts).split("\n"))
    return "\n".join(line for line in lines if line)


def _heading_level(style: str) -> int:
    """1 to 6 for the styles "Heading 1" and so on, 0 for any other."""
    name, _, number = style.rpartition(" ")
    return min(int(number), 6) if name.lower() == "heading" and number in set("123456789") else 0

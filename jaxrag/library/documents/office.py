"""Readers of office files and .pdf; .docx, .pptx and .xlsx are unpacked within bounds."""

import collections
import io
import itertools
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from jaxrag.base.errors import DocumentError
from jaxrag.library.documents.blocks import (
    Block,
    first_title,
    heading,
    item,
    joined,
    one_spaced,
    row,
)
from jaxrag.library.documents.document import BadDocument, Document
from jaxrag.library.documents.files import (
    BETWEEN_PAGES,
    File,
    join_pages,
    one_line,
    parsing,
    parts,
    read_bytes,
    repacked,
    require_short,
)

_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_TEXT, _PARAGRAPH, _RUN, _TABLE = (f"{_W}{name}" for name in ("t", "p", "r", "tbl"))
_FALLBACK = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"
_BREAKS = {f"{_W}tab": " ", f"{_W}br": "\n", f"{_W}cr": "\n", f"{_W}noBreakHyphen": "-"}
_WRAPPERS = frozenset(
    f"{_W}{name}" for name in ("sdt", "sdtContent", "customXml", "ins", "smartTag")
)
# What holds text or a meaning that is in no paragraph's text.
_WITHOUT_TEXT = {
    "{http://schemas.openxmlformats.org/officeDocument/2006/math}oMath": "equations",
    f"{_W}sym": "symbols",
    f"{_W}altChunk": "embedded documents",
    "{http://schemas.openxmlformats.org/drawingml/2006/picture}pic": "pictures",
}
_DRAWN = {
    "{http://schemas.openxmlformats.org/presentationml/2006/main}pic": "pictures",
    "{http://schemas.openxmlformats.org/drawingml/2006/chart}chart": "charts",
    "{http://schemas.openxmlformats.org/drawingml/2006/diagram}relIds": "diagrams",
    "{http://schemas.microsoft.com/office/drawing/2010/main}m": "equations",
}
_FULL_LINE = 0.9  # of the longest line of its page


def read_docx(stream: BinaryIO, file: File) -> Iterator[Document | BadDocument]:
    """One document: the body with text boxes and tracked insertions, headings as "# " lines.

    Tables become rows of cells between bars. Headers, footers, notes and comments are left out.
    Refused: a file that unpacks to more than the bounds of ``archive``.
    """
    data = read_bytes(stream)
    with parsing("DOCX"):
        title, body = _docx_text(repacked(parts(data, "DOCX")), file)
    yield file.document(body, title)


def _docx_text(data: bytes, file: File) -> tuple[str, str]:
    import docx  # only who reads DOCX waits for it

    document = docx.Document(io.BytesIO(data))
    for tag, what in _WITHOUT_TEXT.items():
        file.left_out.add(what, count=sum(1 for _ in document.element.body.iter(tag)))
    styles = _style_names(document.styles.element)
    blocks: list[Block] = []
    first = ""
    for kind, node in _docx_blocks(document.element.body):
        if kind == "table":
            blocks += [("row", cells) for cells in _docx_rows(node)]
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


def _docx_blocks(parent: Any) -> Iterator[tuple[str, Any]]:
    """The paragraphs and tables below a body or cell, those inside content controls too."""
    for node in parent.iterchildren():
        tag = node.tag
        if tag == _PARAGRAPH:
            yield "paragraph", node
        elif tag == _TABLE:
            yield "table", node
        elif tag in _WRAPPERS:
            yield from _docx_blocks(node)


def _docx_rows(table: Any) -> Iterator[str]:
    """Each row's cells between bars; a table inside a cell is part of the cell."""
    for line in table.iterchildren(f"{_W}tr"):
        cells = [_cell_text(cell) for cell in _cells(line)]
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
    words: list[str] = []
    for kind, node in _docx_blocks(cell):
        if kind == "table":
            words += (line.replace("  ", " ") for line in _docx_rows(node))  # where a cell is empty
        else:
            words.append(_paragraph_text(node).replace("\n", " "))
    return " ".join(filter(None, words)).strip()


def _paragraph_text(paragraph: Any) -> str:
    """The text of a paragraph; that of a text box stands on lines of its own."""
    pieces: list[str] = []
    skipped = {
        node for fallback in paragraph.iter(_FALLBACK) for node in fallback.iterdescendants()
    }
    for node in paragraph.iterdescendants(_TEXT, _PARAGRAPH, *_BREAKS):
        if node in skipped:
            continue
        tag = node.tag
        if tag == _TEXT:
            pieces.append(node.text or "")
        elif tag == _PARAGRAPH:
            pieces.append("\n")
        elif node.getparent().tag == _RUN:
            pieces.append(_BREAKS[tag])
    lines = (" ".join(line.split()) for line in "".join(pieces).split("\n"))
    return "\n".join(line for line in lines if line)


def _heading_level(style: str) -> int:
    """1 to 6 for the styles "Heading 1" and so on, 0 for any other."""
    name, _, number = style.rpartition(" ")
    return min(int(number), 6) if name.lower() == "heading" and number in set("123456789") else 0


def read_pptx(stream: BinaryIO, file: File) -> Iterator[Document | BadDocument]:
    """One document whose pages are the slides, each under its title as a "# " line.

    Titled by the first of these, as the title that a presentation says it has is often its
    program's.

    In the order of the file: what stands in placeholders as items of a list, text boxes as
    paragraphs, tables as rows of cells between bars, groups as what they hold, and behind all of
    it the speaker's notes. Hidden slides are empty pages. Footers, numbers of slides, charts,
    diagrams and pictures are left out. Refused: a file beyond the bounds of ``archive``, and more
    than MAX_TEXT_CHARACTERS.
    """
    data = read_bytes(stream)
    with parsing("PPTX"):
        title, texts = _pptx_text(repacked(parts(data, "PPTX")), file)
    body, pages = join_pages(texts)
    yield file.document(body, title, pages=pages)


def _pptx_text(data: bytes, file: File) -> tuple[str, list[str]]:
    """The title, and the text of every slide."""
    import pptx  # only who reads PPTX waits for it

    presentation = pptx.Presentation(io.BytesIO(data))
    title = ""
    texts: list[str] = []
    size = 0
    for number, slide in enumerate(presentation.slides, 1):
        hidden = slide.element.get("show") in ("0", "false")
        blocks = [] if hidden else list(_slide(slide))
        for node in () if hidden else slide.element.iter(*_DRAWN):
            file.left_out.add(_DRAWN[node.tag], number)
        file.left_out.add("hidden slides", number, hidden)
        title = title or first_title(blocks)
        texts.append(joined(blocks))
        size += len(texts[-1])
        require_short(size)
    return title or one_spaced(presentation.core_properties.title or ""), texts


def _slide(slide: Any) -> Iterator[Block]:
    named = slide.shapes.title
    if named is not None and named.has_text_frame:
        yield heading(1, one_spaced(named.text_frame.text))
    yield from _shapes(slide.shapes, None if named is None else named.shape_id)
    if slide.has_notes_slide:
        frame = slide.notes_slide.notes_text_frame
        for _, text in () if frame is None else _paragraphs(frame):
            yield "", f"Notes: {text}"


def _shapes(shapes: Iterable[Any], title: int | None) -> Iterator[Block]:
    from pptx.enum.shapes import MSO_SHAPE_TYPE, PP_PLACEHOLDER

    around = (PP_PLACEHOLDER.DATE, PP_PLACEHOLDER.FOOTER, PP_PLACEHOLDER.SLIDE_NUMBER)
    for shape in shapes:
        if shape.shape_type == MSO_SHAPE_TYPE.GROUP:
            yield from _shapes(shape.shapes, None)
        elif getattr(shape, "has_table", False):
            for cells in shape.table.rows:
                yield row(one_spaced(cell.text_frame.text) for cell in cells.cells)
        elif shape.has_text_frame and shape.shape_id != title:
            if not shape.is_placeholder:
                yield from _paragraphs(shape.text_frame)
            elif shape.placeholder_format.type not in around:
                found = list(_paragraphs(shape.text_frame))
                yield from (item(text) for _, text in found) if len(found) > 1 else found


def _paragraphs(frame: Any) -> Iterator[Block]:
    for paragraph in frame.paragraphs:
        if text := one_spaced(paragraph.text):
            yield "", text


def read_pdf(stream: BinaryIO, file: File) -> Iterator[Document | BadDocument]:
    """One document with its pages. A page that cannot be read is reported, the others are kept.

    Refused: a file that needs a password, one without a text layer (a scan), one of more than
    MAX_TEXT_CHARACTERS. The parser bounds what a compressed stream may grow to.
    """
    data = read_bytes(stream)
    with parsing("PDF"):
        reader = _open(data)
        num_pages = len(reader.pages)
    texts: list[str] = []
    pictured: list[int] = []
    size = bad = 0
    for number in range(num_pages):
        try:
            text = _clean(reader.pages[number].extract_text())
            pictured += [number] if _has_picture(reader.pages[number]) else []
        except MemoryError:
            raise
        except Exception as error:
            yield file.bad(f"the page cannot be parsed ({one_line(error)})", f", page {number + 1}")
            text = ""
            bad += 1
        texts.append(text)
        size += len(text) + len(BETWEEN_PAGES)
        require_short(size)
    times = collections.Counter(texts)
    for number in pictured:
        if not texts[number]:
            file.left_out.add("pages with pictures and no text", number + 1)
        elif times[texts[number]] > 1:
            what = "pages with pictures and only a text that other pages have"
            file.left_out.add(what, number + 1)
    body, pages = join_pages(texts)
    if body or not bad or bad < num_pages:
        empty = f"no text layer on its {num_pages} pages; run text recognition (OCR) on it first"
        yield file.document(body, _title(reader), pages=pages, empty=empty)


def _has_picture(page: Any) -> bool:
    try:
        drawn = page["/Resources"]["/XObject"].values()
        return any(it.get_object().get("/Subtype") == "/Image" for it in drawn)
    except (KeyError, AttributeError, TypeError):  # none, or not as the format has it
        return False


def _open(data: bytes) -> Any:
    import pypdf  # only who reads PDF waits for it

    reader = pypdf.PdfReader(io.BytesIO(data), strict=False)
    if reader.is_encrypted:
        try:
            opened = bool(reader.decrypt(""))  # files that only restrict printing open so
        except Exception:
            opened = False
        if not opened:
            raise DocumentError("is encrypted; save a copy of it without a password")
    return reader


def _title(reader: Any) -> str:
    try:
        title = reader.metadata.title if reader.metadata else None
    except Exception:
        return ""
    found = " ".join(_clean(title).split()) if isinstance(title, str) else ""
    return "" if found.lower() == "untitled" else found  # what programs write for none


def _clean(text: str) -> str:
    """Text as a broken font map may leave it, without NULs and halves of surrogate pairs.

    Scripts without spaces wrap inside of words: there a line that fills its width goes on with the
    next one.
    """
    whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    lines = [line.rstrip() for line in whole.replace("\0", "").splitlines()]
    full = _FULL_LINE * max(map(len, lines), default=0)
    out = ""
    for line, following in itertools.zip_longest(lines, lines[1:], fillvalue=""):
        wraps = len(line) >= full and _is_wide(line[-1:]) and _is_wide(following[:1])
        out += line if wraps else line + "\n"
    return out.strip()


def _is_wide(character: str) -> bool:
    """Whether it belongs to a script of wide characters, such as Chinese; not for ''."""
    return character != "" and unicodedata.east_asian_width(character) == "W"

"""Reader of .pptx: what the slides of a presentation show."""

import io
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from jaxrag.library.documents.blocks import (
    Block,
    first_title,
    heading,
    item,
    joined,
    one_spaced,
)
from jaxrag.library.documents.document import BadDocument, Document
from jaxrag.library.documents.files import (
    File,
    join_pages,
    parsing,
    parts,
    read_bytes,
    repacked,
    require_short,
)
from jaxrag.library.documents.marks import (
    EQUATION,
    LOWERED,
    RAISED,
    STRUCK,
    counted,
    equation,
    marked,
)
from jaxrag.library.documents.tables import TableLine, cell, table_blocks

_A = "{http://schemas.openxmlformats.org/drawingml/2006/main}"
_CHOSEN = "{http://schemas.openxmlformats.org/markup-compatibility/2006}"
_DRAWN = {
    "{http://schemas.openxmlformats.org/presentationml/2006/main}pic": "pictures",
    "{http://schemas.openxmlformats.org/drawingml/2006/chart}chart": "charts",
    "{http://schemas.microsoft.com/office/drawing/2014/chartex}chart": "charts",
    "{http://schemas.openxmlformats.org/drawingml/2006/diagram}relIds": "diagrams",
}
_FORMS = {"alphaLc": "lowerLetter", "alphaUc": "upperLetter", "romanLc": "lowerRoman",
          "romanUc": "upperRoman"}  # fmt: skip


def read_pptx(stream: BinaryIO, file: File) -> Iterator[Document | BadDocument]:
    """One document whose pages are the slides, each under its title as a "# " line.

    Titled by the first of these, as the title that a presentation says it has is often its
    program's.

    In the order of the file: what stands in placeholders as items of a list, text boxes as
    paragraphs, tables as rows of cells between bars, or of "name: value" below a header, groups as
    what they hold, and behind all of it the speaker's notes. Hidden slides are empty pages. Hidden
    shapes, footers, numbers of slides, charts, diagrams and pictures are left out. Refused: a file
    beyond the bounds of ``archive``, and more than MAX_TEXT_CHARACTERS.
    """
    data = read_bytes(stream)
    with parsing("PPTX"):
        title, texts = _text(repacked(parts(data, "PPTX")), file)
    body, pages = join_pages(texts)
    yield file.document(body, title, pages=pages)


def _text(data: bytes, file: File) -> tuple[str, list[str]]:
    """The title, and the text of every slide."""
    import pptx  # only who reads PPTX waits for it

    presentation = pptx.Presentation(io.BytesIO(data))
    title = ""
    texts: list[str] = []
    size = 0
    for number, slide in enumerate(presentation.slides, 1):
        hidden = slide.element.get("show") in ("0", "false")
        if not hidden:
            _choose(slide.element)
            file.left_out.add("hidden shapes", number, _drop_hidden(slide.element))
        blocks = [] if hidden else list(_slide(slide))
        for node in () if hidden else slide.element.iter(*_DRAWN):
            file.left_out.add(_DRAWN[node.tag], number)
        file.left_out.add("hidden slides", number, hidden)
        title = title or first_title(blocks)
        texts.append(joined(blocks))
        size += len(texts[-1])
        require_short(size)
    return title or one_spaced(presentation.core_properties.title or ""), texts


def _choose(slide: Any) -> None:
    """Put what newer programs show in the place of the choice between it and a picture of it."""
    for node in list(slide.iter(f"{_CHOSEN}AlternateContent")):
        chosen = node.find(f"{_CHOSEN}Choice")
        for child in list(() if chosen is None else chosen):
            node.addprevious(child)
        node.getparent().remove(node)


def _drop_hidden(slide: Any) -> int:
    """Take shapes away that are hidden, and count those with text."""
    count = 0
    for properties in [it for it in slide.iter("{*}cNvPr") if it.get("hidden") in ("1", "true")]:
        shape = properties.getparent().getparent()
        if shape.getparent() is not None:
            count += any(it.text for it in shape.iter(f"{_A}t"))
            shape.getparent().remove(shape)
    return count


def _slide(slide: Any) -> Iterator[Block]:
    named = slide.shapes.title
    if named is not None and named.has_text_frame:
        yield heading(1, " ".join(text for _, text in _paragraphs(named.text_frame)))
    yield from _shapes(slide.shapes, None if named is None else named.shape_id)
    if slide.has_notes_slide:
        frame = slide.notes_slide.notes_text_frame
        for _, text in () if frame is None else _paragraphs(frame):
            yield "", f"Notes: {text}"


def _shapes(shapes: Iterable[Any], title: int | None) -> Iterator[Block]:
    from pptx.enum.shapes import PP_PLACEHOLDER

    around = (PP_PLACEHOLDER.DATE, PP_PLACEHOLDER.FOOTER, PP_PLACEHOLDER.SLIDE_NUMBER)
    for shape in shapes:
        if hasattr(shape, "shapes"):  # a group
            yield from _shapes(shape.shapes, None)
        elif getattr(shape, "has_table", False):
            yield from _table(shape.table)
        elif shape.has_text_frame and shape.shape_id != title:
            if not shape.is_placeholder:
                yield from _paragraphs(shape.text_frame)
            elif shape.placeholder_format.type not in around:
                found = list(_paragraphs(shape.text_frame))
                several = len(found) > 1
                yield from (item(text) if several and not kind else (kind, text)
                            for kind, text in found)  # fmt: skip


def _table(table: Any) -> Iterator[Block]:
    """The rows of a table; cells that are merged stand in each place that they take."""
    rows: list[TableLine] = []
    for line in table.rows:
        cells: TableLine = {}
        for at, it in enumerate(line.cells):
            place = it._tc
            if place.get("vMerge") in ("1", "true") and rows and at in rows[-1]:
                cells[at] = rows[-1][at]
            elif place.get("hMerge") in ("1", "true") and at - 1 in cells:
                cells[at] = cells[at - 1]
            else:
                texts = (text for _, text in _paragraphs(it.text_frame))
                cells[at] = cell(one_spaced(" ".join(texts)), table.first_row and not rows)
        rows.append(cells)
    yield from table_blocks(rows)


def _paragraphs(frame: Any) -> Iterator[Block]:
    """The paragraphs that hold text; those with a number of a list are items."""
    counts: dict[tuple[str, str], int] = {}
    for paragraph in frame.paragraphs:
        element = paragraph._p
        text = one_spaced(marked(_runs(element)))
        if not text:
            continue
        level = element.find(f"{_A}pPr")
        number = None if level is None else level.find(f"{_A}buAutoNum")
        place = "0" if level is None else level.get("lvl", "0")
        counts = {key: count for key, count in counts.items() if key[0] <= place}
        if number is None:
            counts = {key: count for key, count in counts.items() if key[0] < place}
            yield "", text
            continue
        form = number.get("type", "arabicPeriod")
        start = int(number.get("startAt", "")) if number.get("startAt", "").isdecimal() else 1
        counts[place, form] = counts.get((place, form), start - 1) + 1
        shape = next((it for name, it in _FORMS.items() if form.startswith(name)), "")
        shown = counted(counts[place, form], shape)
        both, after = form.endswith("ParenBoth"), "." if form.endswith("Period") else ""
        after = ")" if "Paren" in form else after
        yield "item", f"{'(' if both else ''}{shown}{after} {text}"


def _runs(paragraph: Any) -> Iterator[tuple[str, str]]:
    from lxml import etree

    events = etree.iterwalk(paragraph, events=("start",))
    for _, node in events:
        if node.tag == EQUATION:
            yield equation(node), ""
            events.skip_subtree()
        elif node.tag == f"{_A}br":
            yield " ", ""
        elif node.tag == f"{_A}t":
            form = node.getparent().find(f"{_A}rPr")
            place = "0" if form is None else form.get("baseline", "0").rstrip("%0") or "0"
            struck = form is not None and form.get("strike", "noStrike") != "noStrike"
            mark = "" if place == "0" else LOWERED if place.startswith("-") else RAISED
            yield node.text or "", mark or (STRUCK if struck else "")

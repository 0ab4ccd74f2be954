"""Reader of .pptx: the slides of a presentation, each a page with its title, text and notes."""

import io
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from jaxrag.base.errors import DocumentError
from jaxrag.library.documents.archive import parts, repacked
from jaxrag.library.documents.blocks import Block, heading, item, joined, one_spaced, row
from jaxrag.library.documents.document import BadDocument, Document
from jaxrag.library.documents.files import (
    MAX_TEXT_CHARACTERS,
    File,
    join_pages,
    parsing,
    read_bytes,
)


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
        title, texts = _text(repacked(parts(data, "PPTX")))
    if not any(texts):
        raise DocumentError("holds no text; leave the file out")
    body, pages = join_pages(texts)
    yield Document(file.name, body, title or file.path.stem, file.reported, {}, pages)


def _text(data: bytes) -> tuple[str, list[str]]:
    """The title, and the text of every slide."""
    import pptx  # only who reads PPTX waits for it

    presentation = pptx.Presentation(io.BytesIO(data))
    title = ""
    texts: list[str] = []
    left = MAX_TEXT_CHARACTERS
    for slide in presentation.slides:
        hidden = slide.element.get("show") in ("0", "false")
        blocks = [] if hidden else list(_slide(slide))
        title = title or next((text[2:] for _, text in blocks if text.startswith("# ")), "")
        texts.append(joined(blocks))
        left -= len(texts[-1])
        if left < 0:
            raise DocumentError(
                f"holds more than {MAX_TEXT_CHARACTERS >> 20} Mi characters; split it"
            )
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

"""Reader of .xlsx: the sheets of a workbook, row by row, each cell under its column's name."""

import datetime
import io
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from jaxrag.base.errors import DocumentError
from jaxrag.library.documents.archive import parts, repacked
from jaxrag.library.documents.blocks import Block, heading, joined, one_spaced, row
from jaxrag.library.documents.document import BadDocument, Document
from jaxrag.library.documents.files import MAX_TEXT_CHARACTERS, File, parsing, read_bytes

_MAX_ROWS = 1 << 20  # of a sheet, as the format has it
_STREAMED = ("xl/worksheets/", "xl/sharedStrings.xml")
_DIGITS = 15  # of a number, as spreadsheets keep them
_ESCAPED = re.compile(r"_x000[dD]_")  # a carriage return in XML


def read_xlsx(stream: BinaryIO, file: File) -> Iterator[Document | BadDocument]:
    """One document: each sheet under its name, a row of cells a line, between bars.

    The first row of two or more cells names the columns where all of its cells are text and no two
    the same; every cell below is then "name: value", so that a row says by itself what it means.
    Formulas count with the value that was saved with them; a number is written with its 15 digits,
    or as the percentage it is shown as, dates in ISO form. Hidden sheets, charts, notes and macros
    are left out. Refused: a file beyond the bounds of ``archive``, and more than
    MAX_TEXT_CHARACTERS.
    """
    data = read_bytes(stream)
    with parsing("XLSX"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library, about styles and extensions
        title, body = _text(repacked(parts(data, "XLSX", streamed=_STREAMED)))
    if not body:
        raise DocumentError(
            "holds no text in visible sheets; leave the file out, or save it by a spreadsheet "
            "program, which computes its formulas"
        )
    yield Document(file.name, body, title or file.path.stem, file.reported)


def _text(data: bytes) -> tuple[str, str]:
    import openpyxl  # only who reads XLSX waits for it

    book = openpyxl.load_workbook(
        io.BytesIO(data), read_only=True, data_only=True, keep_links=False
    )
    if not book.worksheets:
        raise DocumentError(
            "has no sheet that can be read, as a workbook of the strict form; save it as .xlsx of "
            "the common form"
        )
    blocks: list[Block] = []
    left = MAX_TEXT_CHARACTERS
    for sheet in book.worksheets:
        if sheet.sheet_state != "visible":
            continue
        sheet.reset_dimensions()  # are what the file says, and not what it holds
        title = heading(1, sheet.title)
        for block in _rows(sheet.iter_rows(max_row=_MAX_ROWS)):
            left -= len(block[1])
            if left < 0:
                raise DocumentError(
                    f"holds more than {MAX_TEXT_CHARACTERS >> 20} Mi characters; split it"
                )
            blocks += [title, block] if title else [block]
            title = ("", "")
    return one_spaced(book.properties.title or ""), joined(blocks)


def _rows(cells: Iterator[Sequence[Any]]) -> Iterator[Block]:
    names: list[str] | None = None
    for found in cells:
        texts = [_shown(cell) for cell in found]
        filled = [text for text in texts if text]
        if not filled:
            continue
        if names is None and len(filled) > 1:
            named = all(isinstance(cell.value, str | None) for cell in found)
            names = texts if named and len(set(filled)) == len(filled) else []
            yield row(filled)
        elif names:
            named_cells = zip(names + [""] * (len(texts) - len(names)), texts, strict=False)
            yield row(f"{name}: {text}" if name else text for name, text in named_cells if text)
        else:
            yield row(filled)


def _shown(cell: Any) -> str:
    """A cell as text, on one line."""
    value = cell.value
    if value is None:
        return ""
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, int | float):
        if _is_percentage(cell):
            return f"{100 * value:.{_DIGITS}g}%"
        return str(value) if isinstance(value, int) else f"{value:.{_DIGITS}g}"
    if isinstance(value, datetime.datetime):
        midnight = value.time() == datetime.time.min
        return value.date().isoformat() if midnight else value.isoformat(" ")
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return one_spaced(_ESCAPED.sub(" ", str(value)))


def _is_percentage(cell: Any) -> bool:
    try:
        return "%" in (cell.number_format or "")
    except (IndexError, TypeError):  # a style that the file lacks
        return False

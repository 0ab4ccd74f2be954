"""Reader of .xlsx: the tables of visible sheets, as they are shown."""

import io
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from jaxrag.base.errors import DocumentError
from jaxrag.library.documents import number_formats
from jaxrag.library.documents.blocks import Block, heading, joined, one_spaced
from jaxrag.library.documents.document import BadDocument, Document
from jaxrag.library.documents.files import (
    File,
    parsing,
    parts,
    read_bytes,
    repacked,
    require_short,
)
from jaxrag.library.documents.marks import LOWERED, RAISED, STRUCK, marked
from jaxrag.library.documents.tables import Row, TableCell, TableLine, cell, sheet_blocks

_MAX_ROWS = 1 << 20  # of a sheet, as the format has it
_STREAMED = ("xl/worksheets/", "xl/sharedStrings.xml")
_RETURN = "_x000D_"  # a carriage return in XML
_RAISED = {"superscript": RAISED, "subscript": LOWERED}

Cells = dict[int, TableLine]  # by row and column


def read_xlsx(stream: BinaryIO, file: File) -> Iterator[Document | BadDocument]:
    """One document: each sheet under its name, its tables apart, a row of cells a line.

    Where a table has a header, every cell below is "name: value", so that a row says by itself
    what it means. A cell merged over several rows or columns stands in each. Values are written as
    their number formats show them, formulas by the value that was saved with them. Hidden sheets,
    rows and columns, charts, notes and macros are left out. Refused: a file beyond the bounds of
    ``archive``, and more than MAX_TEXT_CHARACTERS.
    """
    data = read_bytes(stream)
    with parsing("XLSX"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library, about styles and extensions
        title, body = _text(repacked(parts(data, "XLSX", streamed=_STREAMED)), file)
    empty = (
        "holds no text in visible sheets; leave the file out, or save it by a spreadsheet "
        "program, which computes its formulas"
    )
    yield file.document(body, title, empty=empty)


def _text(data: bytes, file: File) -> tuple[str, str]:
    import openpyxl  # only who reads XLSX waits for it

    book = openpyxl.load_workbook(
        io.BytesIO(data), read_only=True, data_only=True, keep_links=False, rich_text=True
    )
    if not book.worksheets:
        raise DocumentError(
            "has no sheet that can be read, as a workbook of the strict form; save it as .xlsx of "
            "the common form"
        )
    blocks: list[Block] = []
    size = 0
    visible = [sheet for sheet in book.worksheets if sheet.sheet_state == "visible"]
    for sheet in book.worksheets:
        if sheet not in visible:
            file.left_out.add("hidden sheets", sheet.title)
            continue
        title = heading(1, sheet.title)
        place = f"{sheet.title}!" if len(visible) > 1 else ""
        for block in sheet_blocks(_Sheet(sheet, file, place).rows()):
            size += len(block[1])
            require_short(size)
            blocks += [title, block] if title else [block]
            title = ("", "")
    return one_spaced(book.properties.title or ""), joined(blocks)


class _Sheet:
    """One sheet, from its part of the archive."""

    def __init__(self, sheet: Any, file: File, place: str) -> None:
        self._sheet, self._file, self._place = sheet, file, place
        self._book = sheet.parent
        self._styles: dict[int, tuple[str, bool]] = {}

    def rows(self) -> Sequence[tuple[int, Row]]:
        """The rows that are shown, by their numbers; places that are merged hold one cell."""
        from openpyxl.worksheet._reader import FORMULA_TAG, WorkSheetParser

        uncomputed: list[tuple[int, int]] = []

        class Parser(WorkSheetParser):
            def parse_cell(self, element: Any) -> dict[str, Any]:
                parsed: dict[str, Any] = super().parse_cell(element)
                computed = parsed["value"] is not None or element.get("t") == "str"
                if not computed and element.find(FORMULA_TAG) is not None:
                    uncomputed.append((parsed["row"], parsed["column"]))
                return parsed

        cells: Cells = {}
        with self._sheet._get_source() as source:
            parser = Parser(source, self._sheet._shared_strings, data_only=True, rich_text=True)
            for number, found in parser.parse():
                if number > _MAX_ROWS:
                    break
                read = {raw["column"]: self._cell(raw) for raw in found if raw["value"] is not None}
                if some := {column: raw for column, raw in read.items() if raw.text}:
                    cells.setdefault(number, {}).update(some)
        _merge(cells, parser.merged_cells)
        for line in self._headers(parser):
            found = cells.get(line, {})
            strong = {id(raw): raw._replace(strong=True) for raw in found.values()}
            cells[line] = {column: strong[id(raw)] for column, raw in found.items()}
        return self._shown(cells, parser, uncomputed)

    def _shown(
        self, cells: Cells, parser: Any, uncomputed: list[tuple[int, int]]
    ) -> Sequence[tuple[int, Row]]:
        rows = {int(n) for n, it in parser.row_dimensions.items() if _is_hidden(it, "ht")}
        spans = [
            (int(dimension["min"]), int(dimension.get("max", dimension["min"])))
            for dimension in parser.column_dimensions.values()
            if _is_hidden(dimension, "width")
        ]
        filled = {column for line in cells.values() for column in line}
        columns = {c for c in filled if any(low <= c <= high for low, high in spans)}
        for number in sorted(rows & cells.keys()):
            self._file.left_out.add("hidden rows", self._where(number))
        for column in sorted(columns):
            self._file.left_out.add("hidden columns", self._where("", column))
        for line, column in uncomputed:
            hidden = line in rows or any(low <= column <= high for low, high in spans)
            if not hidden:
                where = self._where(line, column)
                self._file.left_out.add("formulas without a value", where)
        if not rows and not spans:
            return sorted(cells.items())
        left = [(n, {c: it for c, it in line.items() if c not in columns})
                for n, line in sorted(cells.items()) if n not in rows]  # fmt: skip
        # Rows and columns between which nothing is seen stand beside each other.
        gone = sorted(rows), sorted(column for low, high in spans for column in (low, high + 1))
        return [
            (n - bisect_left(gone[0], n), {_without(c, gone[1]): it for c, it in line.items()})
            for n, line in left
        ]

    def _where(self, row: int | str, column: int | None = None) -> str:
        from openpyxl.utils import get_column_letter

        return f"{self._place}{get_column_letter(column) if column else ''}{row}"

    def _headers(self, parser: Any) -> Iterator[int]:
        """Rows that the file marks as headers: of tables, and of what can be filtered."""
        from openpyxl.packaging.relationship import get_dependents, get_rels_path
        from openpyxl.utils.cell import range_boundaries
        from openpyxl.xml.functions import fromstring

        references = [getattr(getattr(parser, "auto_filter", None), "ref", None)]
        archive, rels = self._book._archive, get_rels_path(self._sheet._worksheet_path)
        for relation in get_dependents(archive, rels) if rels in archive.namelist() else ():
            if relation.Type.endswith("/table") and relation.target in archive.namelist():
                table = fromstring(archive.read(relation.target))
                if table.get("headerRowCount") != "0":
                    references.append(table.get("ref"))
        for reference in filter(None, references):
            yield range_boundaries(reference)[1]

    def _cell(self, parsed: Mapping[str, Any]) -> TableCell:
        code, strong = self._style(parsed["style_id"])
        value = parsed["value"]
        if isinstance(value, bool):
            return TableCell("TRUE" if value else "FALSE", "bool", strong)
        if isinstance(value, int | float):
            text, kind = number_formats.shown(value, code, self._book.epoch.year == 1904)
            if not text:
                where = self._where(parsed["row"], parsed["column"])
                self._file.left_out.add("values hidden by the format", where)
            return TableCell(text, kind, strong)
        if isinstance(value, list):  # text of several fonts
            value = marked(_run(it) for it in value)
        text = one_spaced(str(value).replace(_RETURN, " ").replace(_RETURN.lower(), " "))
        if "@" in code:
            text = number_formats.of_text(text, code)
        return cell(text, strong)

    def _style(self, number: int) -> tuple[str, bool]:
        """The number format of a style, and whether it is in bold."""
        from openpyxl.styles.numbers import BUILTIN_FORMATS, BUILTIN_FORMATS_MAX_SIZE

        if number not in self._styles:
            try:
                style = self._book._cell_styles[number]
                own = style.numFmtId - BUILTIN_FORMATS_MAX_SIZE
                code = (
                    self._book._number_formats[own]
                    if own >= 0
                    else BUILTIN_FORMATS.get(style.numFmtId, "General")
                )
                self._styles[number] = code, bool(self._book._fonts[style.fontId].b)
            except (IndexError, TypeError):  # a style that the file lacks
                self._styles[number] = "General", False
        return self._styles[number]


def _run(it: Any) -> tuple[str, str]:
    font = getattr(it, "font", None)
    mark = _RAISED.get(getattr(font, "vertAlign", None) or "", "")
    return str(it), mark or (STRUCK if getattr(font, "strike", None) else "")


def _merge(cells: Cells, merged: Any) -> None:
    """Fill merged places with the cell of the first, in rows and columns that hold something."""
    numbers = sorted(cells)
    columns = sorted({column for line in cells.values() for column in line})
    for it in getattr(merged, "mergeCell", ()):
        low, first, high, last = it.bounds
        value = cells.get(first, {}).get(low)
        if value is None:
            continue
        for number in numbers[bisect_left(numbers, first) : bisect_right(numbers, last)]:
            for column in columns[bisect_left(columns, low) : bisect_right(columns, high)]:
                cells[number].setdefault(column, value)


def _is_hidden(dimension: Mapping[str, str], size: str) -> bool:
    return dimension.get("hidden") in ("1", "true") or dimension.get(size) in ("0", "0.0")


def _without(column: int, spans: list[int]) -> int:
    """A column's number where hidden ones before it do not count."""
    gone = sum(min(high, column) - low for low, high in zip(spans[::2], spans[1::2], strict=True)
               if low < column)  # fmt: skip
    return column - gone

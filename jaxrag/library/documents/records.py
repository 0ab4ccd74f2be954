"""Readers of files that hold many documents: .jsonl, .json, .csv and .tsv."""

import codecs
import contextlib
import csv
import dataclasses
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from jaxrag.base.errors import DocumentError
from jaxrag.library.documents.document import BadDocument, Document, document_from_mapping
from jaxrag.library.documents.files import (
    MAX_CELLS,
    MAX_LINE_BYTES,
    File,
    decode,
    marked_encoding,
    parse_json,
    read_bytes,
)
from jaxrag.library.documents.metadata import Column

_TEXT_COLUMNS = ("text", "content", "body")
_UNDECODED = {chr(0xDC00 + byte) for byte in range(0x80, 0x100)}  # of surrogateescape


def read_json_lines(stream: BinaryIO, file: File) -> Iterator[Document | BadDocument]:
    """One JSON object a line; its id is ``name/"id"``, or else ``name:line``."""
    encoding = file.options.encoding
    start = stream.read(4)
    stream.seek(0)
    if marked_encoding(start) == "utf-16" or (encoding and "\n".encode(encoding) != b"\n"):
        yield file.bad("is not in lines of UTF-8, as JSON lines are, but UTF-16; convert the file")
        return
    empty = True
    number = 0
    while raw := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(raw) > MAX_LINE_BYTES:
            yield file.bad(f"the line is larger than {MAX_LINE_BYTES >> 20} MiB", f":{number}")
            _skip_line(stream)
        elif raw.strip() and raw != codecs.BOM_UTF8:
            where = f":{number}"
            try:
                value = parse_json(decode(raw, encoding), "one object per line")
                yield _record(value, file, where)
            except DocumentError as error:
                yield file.bad(error, where)
        else:
            continue
        empty = False
    if empty:
        yield file.bad("holds no JSON lines; leave the file out")


def read_json(stream: BinaryIO, file: File) -> Iterator[Document | BadDocument]:
    """One object, a list of them, or ``{"documents": [...]}``; ids ``name/"id"``, ``name[0]``."""
    text_field = file.options.text_field or "text"
    value = parse_json(decode(read_bytes(stream), file.options.encoding), "objects with a text")
    if isinstance(value, dict) and "documents" in value and text_field not in value:
        value = value["documents"]
        if not isinstance(value, list):
            raise DocumentError('"documents" is not a list; expected one of objects with a text')
    if not isinstance(value, list):
        yield _record(value, file, "")
        return
    if not value:
        yield file.bad("holds no documents; leave the file out")
    for index, item in enumerate(value):
        where = f"[{index}]"
        try:
            yield _record(item, file, where)
        except DocumentError as error:
            yield file.bad(error, where)


def read_table(stream: BinaryIO, file: File) -> Iterator[Document | BadDocument]:
    """One document a row of .csv or .tsv, under a first row of column names.

    Columns ``id`` and ``title`` are what they say, one holds the text, the others are metadata. A
    column whose cells all spell integers, numbers or true and false has that type, and an empty
    cell of it is no value; any other is text, so that 007 stays what it is. A .csv whose names are
    separated by semicolons is read with them. A row's id is ``name/id``, or ``name:line``
    where there is no id column.
    """
    start = stream.read(4)
    stream.seek(0)
    encoding = marked_encoding(start) or file.options.encoding or "utf-8"
    # A byte that cannot be decoded must cost its own row only, so it is escaped and found again.
    text = io.TextIOWrapper(stream, encoding, errors="surrogateescape", newline="")
    columns: dict[str, Column] = {}
    try:
        with contextlib.suppress(UnicodeError):  # said where the rows are read
            for found in _rows(text, file):
                if isinstance(found, _Row) and len(found.cells) == len(found.names):
                    for name, cell in zip(found.names, found.cells, strict=True):
                        columns.setdefault(name, Column()).see(cell)
        text.seek(0)
        yield from _documents(_rows(text, file), columns, file, encoding)
    except UnicodeError:
        yield file.bad(f"is not {encoding.upper()} to its end; the rest is left out")
    finally:
        text.detach()


@dataclasses.dataclass(frozen=True)
class _Row:
    """One row of a table, under the names of its columns."""

    names: Sequence[str]
    cells: Sequence[str]
    text_column: str
    where: str


def _documents(
    rows: Iterator[_Row | BadDocument], columns: Mapping[str, Column], file: File, encoding: str
) -> Iterator[Document | BadDocument]:
    for found in rows:
        if isinstance(found, BadDocument):
            yield found
            continue
        try:
            yield _document(found, columns, file, encoding)
        except DocumentError as error:
            yield file.bad(error, found.where)
        except (KeyError, ValueError):  # not of the columns' types, which were found just before
            yield file.bad("changed while the file was read; add it again", found.where)


def _rows(text: io.TextIOWrapper, file: File) -> Iterator[_Row | BadDocument]:
    first = text.readline(MAX_LINE_BYTES)
    text.seek(0)
    semicolons = file.suffix == ".csv" and ";" in first and "," not in first
    delimiter = "\t" if file.suffix == ".tsv" else ";" if semicolons else ","
    lines = _Lines(text, delimiter)
    # Of the whole process, and raised only: Python's own limit is 128 KiB.
    csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_BYTES))
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    names: list[str] | None = None
    text_column = ""
    found = False
    while True:
        where = f":{rows.line_num + 1}"
        lines.begin_row()
        try:
            row = next(rows, None)
        except csv.Error as error:
            yield file.bad(f"not a row ({error})", where)
            if names is None:
                yield file.bad("the rest of the file is left out; repair its first row")
                return
            continue
        except _TooLarge as error:
            yield file.bad(error, where)
            yield file.bad("the rest of the file is left out; use JSON lines for long texts")
            return
        if row is None:
            break
        if not any(row):
            continue
        if names is None:
            names, text_column = _columns(row, file.options.text_field)
            continue
        found = True
        yield _Row(names, row, text_column, where)
    if not found:
        yield file.bad("holds no rows under its column names; leave the file out")


class _TooLarge(DocumentError):
    """A row, often one whose quotation mark is not closed, that would fill the memory."""


class _Lines:
    """The lines of a table, as long as a row of them stays within bounds."""

    def __init__(self, text: io.TextIOWrapper, delimiter: str) -> None:
        self._text, self._delimiter = text, delimiter
        self._characters = self._cells = 0

    def begin_row(self) -> None:
        self._characters = self._cells = 0

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        line = self._text.readline(MAX_LINE_BYTES + 1)
        if not line:
            raise StopIteration
        self._characters += len(line)
        self._cells += line.count(self._delimiter)
        if self._characters > MAX_LINE_BYTES or self._cells > MAX_CELLS:
            raise _TooLarge(
                f"the row holds more than {MAX_LINE_BYTES >> 20} Mi characters or "
                f"{MAX_CELLS >> 10} Ki cells; close its quotation mark"
            )
        return line


def _columns(names: Sequence[str], wanted: str | None) -> tuple[list[str], str]:
    """The column names, and which of them holds the text."""
    stripped = [name.strip() for name in names]
    if len(set(stripped)) < len(stripped):
        raise DocumentError(f"two columns have one name ({', '.join(stripped)[:200]}); rename one")
    accepted = _TEXT_COLUMNS if wanted is None else (wanted,)
    text_column = next((name for name in accepted if name in stripped), None)
    if text_column is None:
        raise DocumentError(
            f"no column is named {' or '.join(accepted)} (columns: {', '.join(stripped)[:200]}); "
            "name the one that holds the text"
        )
    return stripped, text_column


def _document(row: _Row, columns: Mapping[str, Column], file: File, coded: str) -> Document:
    names, cells, text_column = row.names, row.cells, row.text_column
    if len(cells) != len(names):
        raise DocumentError(f"the row has {len(cells)} cells; expected {len(names)}, one a column")
    if not _UNDECODED.isdisjoint("".join(cells)):
        raise DocumentError(f"a byte is not {coded.upper()}; name the encoding of the file")
    values: dict[str, Any] = dict(zip(names, cells, strict=True))
    values[text_column] = values[text_column].replace("\r\n", "\n").replace("\r", "\n")
    for name in values.keys() - {text_column, "id", "title"}:
        values[name] = columns[name].value(values[name])
    values = {name: value for name, value in values.items() if value is not None}
    found = document_from_mapping(values, file.name + row.where, file.reported, text_column)
    return _named(found, values, file)


def _record(value: Any, file: File, where: str) -> Document:
    text_field = file.options.text_field or "text"
    if not isinstance(value, dict):
        raise DocumentError(f'holds a {type(value).__name__}; expected {{"{text_field}": "..."}}')
    found = document_from_mapping(value, file.name + where, file.reported, text_field)
    return _named(found, value, file)


def _named(document: Document, values: Mapping[str, Any], file: File) -> Document:
    """With the name of its file before an id that was given: every export numbers from 1."""
    if "id" not in values:
        return document
    return dataclasses.replace(document, id=f"{file.name}/{document.id}")


def _skip_line(stream: BinaryIO) -> None:
    while (rest := stream.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
        pass

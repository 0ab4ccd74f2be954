"""Reader of .csv and .tsv: one document a row, in the form that the file is found to have."""

import codecs
import collections
import contextlib
import csv
import dataclasses
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from jaxrag.base.errors import DocumentError
from jaxrag.base.groups import FIELD
from jaxrag.library.documents.blocks import one_spaced
from jaxrag.library.documents.document import BadDocument, Document, document_from_mapping
from jaxrag.library.documents.files import MAX_CELLS, MAX_LINE_BYTES, File, marked_encoding
from jaxrag.library.documents.left_out import LeftOut
from jaxrag.library.documents.metadata import Column
from jaxrag.library.documents.tables import cell, is_year

_TEXT_COLUMNS = ("text", "content", "body")
_DELIMITERS = ",;\t|"
_UNDECODED = re.compile("[\udc80-\udcff]")  # of surrogateescape
_BLOCK = 1 << 20  # bytes that are looked at together
_NUMBERED = re.compile(r"column \d+")  # names of columns that have none
_CONTROL = re.compile(r"[\0-\x08\x0e-\x1f]")
_SAMPLE_LINES = 50
_SAMPLE_CHARACTERS = 1 << 16  # of a line
_FEW = 1_000  # bytes of a file for one that is not decoded
_WIDE = ("utf-32-le", "utf-32-be", "utf-16-le", "utf-16-be")
_SURE = 4  # characters that are UTF-8 by no accident
# What text of western Europe in one byte a character seldom holds.
_NOT_WESTERN = re.compile(
    rb"[\x80-\xff]{3,}|[A-Za-z\xc0-\xff][\xa1-\xbf\xd7\xf7][A-Za-z\xc0-\xff]|[\x81\x8d\x8f\x90\x9d]"
)


def read_table(stream: BinaryIO, file: File) -> Iterator[Document | BadDocument]:
    """One document a row, of which each says by itself what it means.

    The first row names the columns, unless it holds values as those below do. The text is that of
    a column called text, content or body, if there is one, and behind it, or alone, every other
    column as "name: value". Columns ``id`` and ``title`` are what they say; all but these are
    metadata. A column whose cells all spell integers, numbers or true and false has that type, and
    an empty cell of it is no value; any other is text, so that 007 stays what it is.

    Separators (comma, semicolon, tab, bar, or as a first line "sep=;" says), lines of comment at
    the beginning and encodings are found out; what was read otherwise than as the file or the
    options say, the first document's ``left_out`` names. A byte that cannot be decoded is a
    replacement character. A row's id is ``name/id``, or ``name:line`` where there is no id column.
    """
    # Of the whole process, and raised only: Python's own limit is 128 KiB.
    csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_BYTES))
    encoding = _encoding(stream, file)
    # A byte that cannot be decoded is escaped and found again.
    text = io.TextIOWrapper(stream, encoding, errors="surrogateescape", newline="")
    columns: dict[str, Column] = {}
    try:
        form = _form(text, file)
        with contextlib.suppress(UnicodeError):  # said where the rows are read
            for row in _rows(text, file, form):
                if isinstance(row, _Row) and len(row.cells) == len(row.names):
                    for name, it in zip(row.names, row.cells, strict=True):
                        columns.setdefault(name, Column()).see(it)
        yield from _documents(_rows(text, file, form), columns, file)
    except UnicodeError:
        yield file.bad(f"is not {encoding.upper()} to its end; the rest is left out")
    finally:
        text.detach()


def _encoding(stream: BinaryIO, file: File) -> str:
    """That of a byte order mark; UTF-8 where the bytes fit; the one that was named; a likely one.

    Raises DocumentError where none can be told.
    """
    stream.seek(0)
    start = stream.read(_BLOCK)
    named = file.options.encoding
    wide = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}.get(start[:4])
    if mark := wide or marked_encoding(start):
        return mark
    # Half of the bytes of Latin letters are NUL; those of others are seldom ASCII.
    many = 4 * max(start.count(0), sum(it > 0x7F for it in start))
    for name in _WIDE if 0 in start and many > len(start) else ():
        with contextlib.suppress(UnicodeError):
            text = start[: len(start) // 4 * 4].decode(name)
            if "\n" in text and not _CONTROL.search(text):
                file.left_out.add(f"characters read as {name.upper()}", count=len(text))
                return name
    size, bad, wide_characters, odd = _scanned(stream)
    utf8 = not bad or bad <= wide_characters
    if named is not None:
        sure = _SURE if len("\u4e00".encode(named, "ignore")) > 1 else 1
        if bad or wide_characters < sure or codecs.lookup(named).name == "utf-8":
            return named
        file.left_out.add(f"characters read as UTF-8 and not {named}", count=wide_characters)
    elif not utf8 and 20 * odd <= bad:
        file.left_out.add("characters read as CP1252, as they are not UTF-8", count=bad)
        return "cp1252"
    elif not utf8 and bad * _FEW > size:
        raise DocumentError(f"{bad} bytes are not UTF-8; name the encoding of the file")
    return "utf-8"


def _scanned(stream: BinaryIO) -> tuple[int, int, int, int]:
    """Bytes, those that are not UTF-8, characters of several bytes, and what is not western."""
    size = bad = wide = odd = 0
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    stream.seek(0)
    while block := stream.read(_BLOCK):
        size += len(block)
        if not (text := decoder.decode(block)).isascii():
            escaped = len(_UNDECODED.findall(text))
            bad += escaped
            wide += sum(it > "\x7f" for it in text) - escaped
            odd += len(_NOT_WESTERN.findall(block))
    stream.seek(0)
    return size, bad, wide, odd


@dataclasses.dataclass(frozen=True)
class _Form:
    """How a table is written.

    Attributes:
      delimiter: between cells.
      skipped: lines before the first row.
      titles: rows before the one that names the columns.
      named: whether there is one.
    """

    delimiter: str
    skipped: int
    titles: int
    named: bool


def _form(text: io.TextIOWrapper, file: File) -> _Form:
    text.seek(0)
    lines = list[str]()
    comments, last, said = 0, "", None
    with contextlib.suppress(UnicodeError):  # said where the rows are read
        while len(lines) < _SAMPLE_LINES and (line := text.readline(_SAMPLE_CHARACTERS)):
            first = not (lines or comments or said)
            if first and (said := re.fullmatch(r"sep=(.)\s*", line, re.I)):
                continue
            if lines or not line.startswith("#"):
                lines.append(line)
            else:
                comments, last = comments + 1, line
    delimiter = said[1] if said else _delimiter(lines, file)
    rows = _sample(lines, delimiter)
    if comments and not (rows and _is_header(rows[0], rows[1:], file)):
        named = _sample([last], delimiter)
        if rows and named and 1 < len(named[0]) == len(rows[0]):  # "#name,value" names the columns
            comments, rows = comments - 1, [*named, *rows]
    file.left_out.add("comment lines", count=comments)
    usual = collections.Counter(map(len, rows)).most_common(1)[0][0] if rows else 0
    titles = 0
    while titles < len(rows) - 1 and usual > 1 and sum(map(bool, rows[titles])) < 2:
        if _text_column(rows[titles], file.options.text_field):
            break
        titles += 1
    header = bool(rows) and _is_header(rows[titles], rows[titles + 1 :], file)
    return _Form(delimiter, (said is not None) + comments, titles, header)


def _sample(lines: Sequence[str], delimiter: str) -> list[list[str]]:
    """Rows that hold something; none where they are not written so."""
    try:
        return [row for row in csv.reader(lines, delimiter=delimiter) if any(row)]
    except csv.Error:
        return []


def _delimiter(lines: Sequence[str], file: File) -> str:
    """The one that parts most lines into as many cells as the first."""
    usual = "\t" if file.suffix == ".tsv" else ","
    if _text_column([line.strip() for line in lines[:1]], file.options.text_field):
        return usual
    best, most = usual, 0.0
    for delimiter in sorted(_DELIMITERS, key=lambda delimiter: delimiter != usual):
        counts = [len(row) for row in _sample(lines, delimiter)] or [1]
        count = collections.Counter(counts).most_common(1)[0][0]
        share = (counts.count(count) + (counts[0] == count)) / (len(counts) + 1)
        if count > 1 and share > most:
            best, most = delimiter, share
    return best


def _is_header(first: Sequence[str], below: Sequence[Sequence[str]], file: File) -> bool:
    """Whether the cells of a row are names and not values as those below."""
    if _text_column([value.strip() for value in first], file.options.text_field):
        return True
    for at, name in enumerate(map(cell, map(str.strip, first))):
        column = [cell(row[at].strip()) for row in below if at < len(row) and row[at].strip()]
        if is_year(name.text):
            is_value = bool(column) and all(is_year(value.text) for value in column)
        elif name.kind == "code":
            is_value = bool(column) and all(value.kind == "code" for value in column)
        else:
            is_value = bool(name.text) and name.kind != "text"
        if is_value:
            return False
    return True


def _text_column(names: Sequence[str], column: str | None) -> str | None:
    """The column that holds the text, by its name in any capitals; None where there is none."""
    for name in _TEXT_COLUMNS if column is None else (column,):
        for found in (name, *(it for it in names if it.casefold() == name.casefold())):
            if found in names:
                return found
    return None


@dataclasses.dataclass(frozen=True)
class _Row:
    """One row of a table, under the names of its columns, if they have names."""

    names: Sequence[str]
    cells: Sequence[str]
    text_column: str | None
    where: str
    named: bool


def _rows(text: io.TextIOWrapper, file: File, form: _Form) -> Iterator[_Row | BadDocument]:
    text.seek(0)
    for _ in range(form.skipped):
        text.readline(MAX_LINE_BYTES)
    lines = _Lines(text, form.delimiter)
    rows = csv.reader(lines, delimiter=form.delimiter, strict=True)
    names: list[str] | None = None
    text_column: str | None = None
    titles = form.titles
    found = False
    while True:
        where = f":{form.skipped + rows.line_num + 1}"
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
        if titles:
            titles -= 1
            yield _Row([""] * len(row), row, None, where, False)
            continue
        if names is None:
            names, text_column = _columns(row, file.options.text_field, form.named)
            if form.named:
                continue
        while len(row) > len(names) and not row[-1]:
            row.pop()
        row = [form.delimiter.join(row)] if len(names) == 1 else row  # not parted, but prose
        found = True
        yield _Row(names, row, text_column, where, form.named)
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


def _columns(first: Sequence[str], column: str | None, named: bool) -> tuple[list[str], str | None]:
    """The column names, each another, and which of them holds the text.

    Columns without names are numbered, so that their cells are apart in the metadata.
    """
    given = [one_spaced(name) for name in first] if named else []
    given[:1] = [name.removeprefix("#").lstrip() for name in given[:1]]
    text_column = _text_column(given, column)
    if (column is not None and text_column is None) or given.count(text_column or "") > 1:
        listed = ", ".join(given)[:200]
        if text_column is None:
            raise DocumentError(
                f"no column is named {column} (columns: {listed}); name the one that holds the text"
            )
        raise DocumentError(f"two columns have one name ({listed}); rename one")
    names: list[str] = []
    for at in range(len(first)):
        name = given[at] if named and given[at] else f"column {at + 1}"
        names.append(f"{name} {at + 1}" if name in names else name)
    return names, text_column


def _documents(
    rows: Iterator[_Row | BadDocument], columns: Mapping[str, Column], file: File
) -> Iterator[Document | BadDocument]:
    left_out = file.left_out  # of the file, which the first document says
    for row in rows:
        if isinstance(row, BadDocument):
            yield row
            continue
        try:
            yield _document(row, columns, file, left_out)
            left_out = LeftOut()
        except DocumentError as error:
            yield file.bad(error, row.where)
        except (KeyError, ValueError):  # not of the columns' types, which were found just before
            yield file.bad("changed while the file was read; add it again", row.where)


def _document(row: _Row, columns: Mapping[str, Column], file: File, left_out: LeftOut) -> Document:
    names, text_column = row.names, row.text_column
    if len(row.cells) != len(names):
        raise DocumentError(
            f"the row has {len(row.cells)} cells; expected {len(names)}, one a column"
        )
    whole = [_UNDECODED.subn("\ufffd", it) for it in row.cells]
    cells = [it for it, _ in whole]
    own = {text_column, FIELD} | ({"id", "title"} if text_column else set())
    shown = [
        f"{name}: {one_spaced(it)}" if row.named and not _NUMBERED.match(name) else one_spaced(it)
        for name, it in zip(names, cells, strict=True)
        if name not in own and it.strip()
    ]
    values: dict[str, Any] = dict(zip(names, cells, strict=True)) if row.named else {}
    text = values.pop(text_column).strip("\r\n") if text_column else ""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    for name in values.keys() - {"id", "title"}:
        values[name] = columns[name].value(values[name])
    values = {name: value for name, value in values.items() if value is not None}
    field = text_column or "text"
    values[field] = "\n\n".join(it for it in (text, " | ".join(shown)) if it.strip())
    document = document_from_mapping(values, file.name + row.where, file.reported, field)
    if "id" in values:  # with the name of its file before it: every export numbers from 1
        document = dataclasses.replace(document, id=f"{file.name}/{document.id}")
    left_out.add("bytes that cannot be decoded", count=sum(count for _, count in whole))
    return dataclasses.replace(document, metadata={**document.metadata, **left_out.metadata()})

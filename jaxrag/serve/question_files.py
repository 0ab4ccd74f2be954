"""Files of questions: JSON lines or CSV, one reader for batches, gates and evaluations.

A line is ``{"question": str, "id"?: str | int, "documents"?: [str, ...]}``, ``documents`` being the
texts to answer from; what else it holds, such as ``answers`` and ``sources``, is kept for those who
score answers. A line without an id has its line number (from 1). A CSV file names its columns in
its first line, and parts the entries of ``answers`` and ``sources`` by ``|``.
"""

import csv
import dataclasses
import hashlib
import io
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from jaxrag.base.errors import RequestError
from jaxrag.library.documents import Shard

Id = str | int

_LISTS = ("answers", "sources")  # columns of a CSV file that are lists


@dataclasses.dataclass(frozen=True)
class FileQuestion:
    """One line: a question, and the documents to answer it from (None = retrieve them).

    Attributes:
      id: of the line, or its number.
      line: its number, from 1; in a CSV file that of its last line of text.
      record: all that the line holds.
    """

    id: Id
    text: str
    documents: tuple[str, ...] | None
    line: int = dataclasses.field(default=0, compare=False)
    record: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)


@dataclasses.dataclass(frozen=True)
class BadQuestion:
    """A line or question that is not answered, and why."""

    id: Id
    reason: str
    line: int = dataclasses.field(default=0, compare=False)


@dataclasses.dataclass(frozen=True)
class QuestionFile:
    """A question file whose ids were found to be unique. Make one with ``open``."""

    path: Path
    digest: str  # of the bytes

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Read the file once.

        Raises RequestError: not readable, no lines, an id twice, or a CSV file without a column
        "question".
        """
        file = cls(Path(path), "")
        lines: dict[str, int] = {}
        for question in file._questions():
            name = str(question.id)
            first = lines.setdefault(name, question.line)
            if first != question.line:
                raise RequestError(
                    f"{path}:{question.line}: id {name!r} is that of line {first} already (a line "
                    "without an id has its line number); make the ids unique"
                )
        if not lines:
            raise RequestError(f"{path}: holds no questions; expected one JSON object per line")
        digest = hashlib.blake2b(digest_size=16)
        for _, raw in file._lines():
            digest.update(raw)
        return cls(Path(path), digest.hexdigest())

    def entries(self, shard: Shard) -> Iterator[FileQuestion | BadQuestion]:
        """The questions of a shard, in order; blank lines are left out."""
        return (question for question in self._questions() if shard.holds_line(question.line - 1))

    def _questions(self) -> Iterator[FileQuestion | BadQuestion]:
        if self.path.suffix.lower() == ".csv":
            yield from self._rows()
            return
        for number, raw in self._lines():
            if raw.strip():
                yield _of_json(number, raw)

    def _rows(self) -> Iterator[FileQuestion | BadQuestion]:
        try:
            text = b"".join(raw for _, raw in self._lines()).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise RequestError(f"{self.path}: not UTF-8 ({error}); save it as UTF-8") from None
        rows = csv.reader(io.StringIO(text, newline=""), strict=True)
        try:
            columns = [name.strip() for name in next(rows, [])]
            if "question" not in columns:
                raise RequestError(
                    f"{self.path}:1: no column 'question' among {', '.join(columns) or 'none'}; "
                    "name the columns in the first line, such as question,answers,sources"
                )
            for row in rows:
                if any(cell.strip() for cell in row):
                    yield _of_row(rows.line_num, columns, row)
        except csv.Error as error:
            raise RequestError(
                f"{self.path}:{rows.line_num}: not CSV ({error}); quote cells with commas, quotes "
                'or line ends, and write a quote in them as ""'
            ) from None

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        try:
            with self.path.open("rb") as file:
                yield from enumerate(file, 1)
        except OSError as error:
            raise RequestError(
                f"{self.path}: cannot be read ({error.strerror}); name a file of JSON lines, or a "
                ".csv file"
            ) from None


def _of_json(number: int, raw: bytes) -> FileQuestion | BadQuestion:
    try:
        record = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        reason = f"not a line of JSON in UTF-8 ({error})"
        return BadQuestion(f"line {number}", reason, number)
    if not isinstance(record, dict):
        reason = f'holds a {type(record).__name__}; expected {{"question": "..."}}'
        return BadQuestion(f"line {number}", reason, number)
    return _of_record(number, record)


def _of_row(number: int, columns: list[str], row: list[str]) -> FileQuestion | BadQuestion:
    if len(row) != len(columns):
        reason = f"{len(row)} cells under {len(columns)} columns; quote cells with commas in them"
        return BadQuestion(f"line {number}", reason, number)
    cells = {name: cell.strip() for name, cell in zip(columns, row, strict=True) if cell.strip()}
    return _of_record(number, {"question": None} | {
        name: [part.strip() for part in cell.split("|")] if name in _LISTS else cell
        for name, cell in cells.items()
    })  # fmt: skip


def _of_record(number: int, record: Mapping[str, Any]) -> FileQuestion | BadQuestion:
    name = record.get("id", number)
    if not _is_id(name):
        reason = f"id {name!r:.60}: expected a text or an integer"
        return BadQuestion(f"line {number}", reason, number)
    text, documents = record.get("question"), record.get("documents")
    if not isinstance(text, str):
        return BadQuestion(name, f'"question" is {text!r:.60}; expected a text', number)
    if documents is not None and not is_texts(documents):
        reason = f'"documents" is {documents!r:.60}; expected a list of texts'
        return BadQuestion(name, reason, number)
    own = None if documents is None else tuple(documents)
    return FileQuestion(name, text, own, number, record)


def is_texts(value: Any) -> bool:
    """Is it a list of texts?"""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_id(name: Any) -> bool:
    if isinstance(name, str):
        return bool(name) and not any("\ud800" <= c <= "\udfff" for c in name)
    return isinstance(name, int) and not isinstance(name, bool)

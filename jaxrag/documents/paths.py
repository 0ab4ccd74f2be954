"""Files and folders, read document by document."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from jaxrag.documents.document import BadDocument, Document
from jaxrag.documents.docx import read_docx
from jaxrag.documents.files import File, Reader, ReadOptions
from jaxrag.documents.html import read_html
from jaxrag.documents.pdf import read_pdf
from jaxrag.documents.records import read_json, read_json_lines, read_table
from jaxrag.documents.text import read_text
from jaxrag.errors import DocumentError

_READERS: dict[str, Reader] = {
    ".txt": read_text,
    ".md": read_text,
    ".jsonl": read_json_lines,
    ".json": read_json,
    ".csv": read_table,
    ".tsv": read_table,
    ".html": read_html,
    ".htm": read_html,
    ".pdf": read_pdf,
    ".docx": read_docx,
}
_RECORDS = {".jsonl", ".json", ".csv", ".tsv"}  # of many documents, each with an id of its own

Wanted = Callable[[str], bool]


class DocumentFiles:
    """The documents of files and folders; every iteration reads them anew.

    Attributes:
      paths: what was named.
      options: how to read it.
      wanted: which documents, by id; files of one document that is not wanted are not opened.
    """

    def __init__(
        self, paths: Iterable[Path], options: ReadOptions, wanted: Wanted | None = None
    ) -> None:
        """Use ``read_paths``, which checks the paths."""
        self.paths = tuple(paths)
        self.options = options
        self.wanted = wanted
        self._done = 0  # bytes of the files that the iteration under way has left behind
        self._current: BinaryIO | None = None

    def __iter__(self) -> Iterator[Document | BadDocument]:
        """Read: documents, and BadDocuments in the place of those that cannot be read."""
        self._done = 0
        for found in _files(self.paths):
            yield from self._read(found)

    def only(self, wanted: Wanted) -> "DocumentFiles":
        """The same files, reduced to the documents whose id is wanted."""
        return DocumentFiles(self.paths, self.options, wanted)

    def total_bytes(self) -> int:
        """Size of all files, from their directory entries."""
        return sum(_size(found.path) for found in _files(self.paths))

    def read_bytes(self) -> int:
        """How much of it the iteration under way has passed."""
        current = self._current
        return self._done + (current.tell() if current is not None and not current.closed else 0)

    def _read(self, found: "_Found") -> Iterator[Document | BadDocument]:
        file = File(found.path, found.name, self.options)
        reader = _READERS.get(file.suffix)
        many = file.suffix in _RECORDS and not found.refused
        if self._wants(file.name) or many:
            if found.refused:
                yield file.bad(found.refused)
            elif reader is None:
                kinds = ", ".join(_READERS)
                yield file.bad(f"file type {file.suffix!r} is not one of {kinds}; convert it")
            else:
                documents = self._open(file, reader)
                yield from filter(self._belongs(file), documents) if many else documents
        self._done += _size(found.path)

    def _open(self, file: File, reader: Reader) -> Iterator[Document | BadDocument]:
        try:
            with open(file.path, "rb") as stream:
                self._current = stream
                yield from reader(stream, file)
        except DocumentError as error:
            yield file.bad(error)
        except OSError as error:
            yield file.bad(f"cannot be read ({error.strerror or error})")
        finally:
            self._current = None

    def _wants(self, name: str) -> bool:
        return self.wanted is None or self.wanted(name)

    def _belongs(self, file: File) -> Callable[[Document | BadDocument], bool]:
        """Whether a record is wanted; a bad one goes by the name it would have had."""
        before = BadDocument(str(file.path), "").source

        def belongs(found: Document | BadDocument) -> bool:
            if isinstance(found, Document):
                return self._wants(found.id)
            return self._wants(file.name + found.source.removeprefix(before))

        return belongs


@dataclasses.dataclass(frozen=True)
class _Found:
    """A file, or an entry of a folder that cannot be one."""

    path: Path
    name: str  # relative to the folder that was named
    refused: str = ""  # why it cannot be read


def read_paths(
    paths: Iterable[str | Path], *, encoding: str | None = None, text_field: str | None = None
) -> DocumentFiles:
    """Read files and folders (recursively, sorted, hidden entries left out), document by document.

    ``.txt``, ``.md``, ``.html``, ``.pdf`` and ``.docx`` hold one document each; ``.jsonl``,
    ``.json``, ``.csv`` and ``.tsv`` one an object or row. A document's id is its path relative to
    the folder that was named (its file name where a file was named), for an object or row its
    ``id`` or else the path with the line or index. Whatever cannot be read comes as a BadDocument
    in its place.

    Args:
      paths: files and folders.
      encoding: of text files; see ReadOptions.
      text_field: of records; see ReadOptions.

    Raises DocumentError at once for a path that does not exist and for an unknown encoding.
    """
    if isinstance(paths, str | Path):
        raise DocumentError(f"{str(paths)!r} is one path; expected a list of paths")
    options = ReadOptions(encoding, text_field)
    named = [Path(path) for path in paths]
    for path in named:
        if not os.path.exists(path):
            raise DocumentError(f"{path}: no such file or folder")
    return DocumentFiles(named, options)


def read_open(
    stream: BinaryIO, filename: str, name: str, options: ReadOptions | None = None
) -> Iterator[Document | BadDocument]:
    """The documents of an open file that has another name than where it lies.

    Args:
      stream: its bytes, from the first.
      filename: says what kind of file it is and titles its document.
      name: what its document is called, as ``read_paths`` calls it by its path.
      options: how to read it.

    Whatever cannot be read comes as a BadDocument. ``Document.file`` names no file.
    """
    file = File(Path(filename), name, options or ReadOptions())
    reader = _READERS.get(file.suffix)
    if reader is None:
        yield file.bad(f"file type {file.suffix!r} is not one of {', '.join(_READERS)}; convert it")
        return
    try:
        for found in reader(stream, file):
            if isinstance(found, Document):
                found = dataclasses.replace(found, file=None)
            yield found
    except DocumentError as error:
        yield file.bad(error)
    except OSError as error:
        yield file.bad(f"cannot be read ({error.strerror or error})")


def _files(named: Iterable[Path]) -> Iterator[_Found]:
    for path in named:
        if os.path.isdir(path):
            yield from _walk(path)
        else:
            yield _Found(path, path.name, "" if path.is_file() else "is not a regular file")


def _walk(folder: Path) -> Iterator[_Found]:
    """The files under a folder, in sorted order; links to folders are reported, not followed."""
    waiting = [folder]
    while waiting:
        entry = waiting.pop()
        name = entry.relative_to(folder).as_posix()
        if entry != folder and os.path.islink(entry) and os.path.isdir(entry):
            yield _Found(entry, name, "is a link to a folder; name that folder instead")
        elif os.path.isdir(entry):
            try:
                inside = [child for child in entry.iterdir() if not child.name.startswith(".")]
            except OSError as error:
                yield _Found(entry, name, f"cannot be listed ({error.strerror})")
            else:
                waiting += sorted(inside, reverse=True)
        else:
            yield _Found(entry, name, "" if os.path.isfile(entry) else "is not a regular file")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0

"""Files and folders, read document by document."""

import dataclasses
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from jaxrag.base.errors import DocumentError
from jaxrag.library.documents.document import BadDocument, Document
from jaxrag.library.documents.files import File, ReadOptions
from jaxrag.library.documents.parser import ParseLimits, Parser, ParserFailed
from jaxrag.library.documents.readers import (
    is_of_records,
    is_parsed_apart,
    is_without_text,
    read_open,
)

WantedId = Callable[[str], bool]


class DocumentFiles:
    """The documents of files and folders; every iteration reads them anew.

    Attributes:
      limits: of the process that parses what needs one.
      wanted: which documents, by id; files of one document that is not wanted are not opened.
      missing_ok: a path that is not there holds nothing.
      passed: files of folders that the last iteration passed over, as they hold no text (pictures).
      whole: resolved paths of the files that the last iteration read without a BadDocument.
    """

    def __init__(
        self,
        paths: Iterable[Path],
        options: ReadOptions,
        limits: ParseLimits,
        wanted: WantedId | None = None,
        missing_ok: bool = False,
    ) -> None:
        """Use ``read_paths``, which checks the paths."""
        self.paths = tuple(paths)
        self.options = options
        self.limits = limits
        self.wanted = wanted
        self.missing_ok = missing_ok
        self.passed = 0
        self.whole: set[str] = set()
        self._done = 0  # bytes of the files that the iteration under way has left behind
        self._current: BinaryIO | None = None

    def __iter__(self) -> Iterator[Document | BadDocument]:
        """Read: documents, and BadDocuments in the place of those that cannot be read."""
        with Parser(self.limits) as parser:
            yield from self.read_with(parser)

    def read_with(self, parser: Parser) -> Iterator[Document | BadDocument]:
        """Read once, with a parsing process of the caller's, which may have read others before."""
        self._done = 0
        self.passed = 0
        self.whole.clear()
        for found in self._files():
            yield from self._read(found, parser)

    def only(self, wanted: WantedId) -> "DocumentFiles":
        """The same files, reduced to the documents whose id is wanted."""
        return DocumentFiles(self.paths, self.options, self.limits, wanted, self.missing_ok)

    def total_bytes(self) -> int:
        """Size of all files, from their directory entries."""
        return sum(_size(found.path) for found in self._files() if not found.refused)

    def read_bytes(self) -> int:
        """How much of it the iteration under way has passed."""
        current = self._current
        return self._done + (current.tell() if current is not None and not current.closed else 0)

    def _files(self) -> Iterator["_Found"]:
        there = (it for it in self.paths if not self.missing_ok or os.path.lexists(it))
        return _files(there, self.options.follow_links)

    def _read(self, entry: "_Found", parser: Parser) -> Iterator[Document | BadDocument]:
        file = File(entry.path, entry.name, self.options)
        if entry.inside and not entry.refused and is_without_text(entry.name):
            self.passed += self._wants(entry.name)
            self._done += _size(entry.path)
            return
        many = is_of_records(file.path.name) and not entry.refused
        if self._wants(file.name) or many:
            if entry.refused:
                yield file.bad(entry.refused)
            else:
                documents = self._open(file, parser)
                belongs = self._belongs(file) if many else lambda document: True
                whole = True
                for document in documents:
                    whole = whole and isinstance(document, Document)
                    if belongs(document):
                        yield document
                if whole:
                    self.whole.add(str(file.path.resolve()))
        self._done += 0 if entry.refused else _size(entry.path)

    def _open(self, file: File, parser: Parser) -> Iterator[Document | BadDocument]:
        shown, reported = str(file.path), str(file.path.resolve())
        try:
            if is_parsed_apart(shown):
                for parsed in parser.parse(file.path, shown, file.name, self.options, reported):
                    yield parsed if isinstance(parsed, BadDocument) else parsed.document
            else:
                with open(file.path, "rb") as stream:
                    self._current = stream
                    yield from read_open(stream, file.path, file.name, self.options, reported)
        except ParserFailed as error:
            yield file.bad(f"{error}, or raise {error.limit}" if error.limit else error)
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

        def belongs(document: Document | BadDocument) -> bool:
            if isinstance(document, Document):
                return self._wants(document.id)
            return self._wants(file.name + document.source.removeprefix(before))

        return belongs


@dataclasses.dataclass(frozen=True)
class _Found:
    """A file, or an entry of a folder that cannot be one."""

    path: Path
    name: str  # relative to the folder that was named
    refused: str = ""  # why it cannot be read
    inside: bool = False  # of a folder that was named, and not named itself


def read_paths(
    paths: Iterable[str | Path],
    *,
    encoding: str | None = None,
    text_field: str | None = None,
    follow_links: bool = False,
    parse_seconds: float = ParseLimits.seconds,
    parse_bytes: int = ParseLimits.nbytes,
    missing_ok: bool = False,
) -> DocumentFiles:
    """Read files and folders (recursively, sorted, hidden entries left out), document by document.

    ``.txt``, ``.text``, ``.log``, ``.md``, ``.markdown``, ``.mdx``, ``.rst``, ``.org``, ``.html``,
    ``.pdf``, ``.epub``, ``.docx``, ``.pptx``, ``.xlsx``, ``.ipynb`` and ``.eml`` hold one document
    each; ``.jsonl``, ``.json``, ``.csv`` and ``.tsv`` one an object or row. Pictures, sound,
    archives and programs in a folder are passed
    over. A document's id is its path relative to the folder that was named (its file name where a
    file was named), for an object or row its ``id`` or else the path with the line or index.
    Whatever cannot be read comes as a BadDocument in its place.

    Args:
      encoding: of text files; see ReadOptions.
      follow_links: also read what links inside a folder name outside of it, and the folders that
        links in it name, each folder once; else these are reported.
      parse_seconds: that a file may take to parse.
      parse_bytes: of memory that it may take. All but plain text, Markdown, .jsonl, .csv and .tsv
        are parsed in a process of their own, so that a file which comes to a limit, or crashes its
        parser, is left out alone.
      missing_ok: take a path that does not exist for an empty folder.

    Raises DocumentError at once for what is no list of paths, for a path that does not exist, for
    an unknown encoding and for limits that no file keeps.
    """
    if isinstance(paths, str | Path):
        raise DocumentError(f"{str(paths)!r} is one path; expected a list of paths")
    if not isinstance(paths, Iterable):
        raise DocumentError(f"paths={paths!r}: expected a list of files and folders")
    paths = list(paths)
    for index, path in enumerate(paths):
        if not isinstance(path, str | Path):
            raise DocumentError(
                f"paths[{index}]={reprlib.repr(path)}: expected a text or a pathlib.Path"
            )
    options = ReadOptions(encoding, text_field, follow_links)
    limits = ParseLimits(parse_seconds, parse_bytes)
    named = [Path(path) for path in paths]
    for path in named:
        if not missing_ok and not os.path.exists(path):
            raise DocumentError(f"{path}: no such file or folder")
    return DocumentFiles(named, options, limits, missing_ok=missing_ok)


def _files(named: Iterable[Path], follow_links: bool) -> Iterator[_Found]:
    for path in named:
        if os.path.isdir(path):
            yield from _walk(path, follow_links)
        else:
            yield _Found(path, path.name, "" if path.is_file() else "is not a regular file")


def _walk(folder: Path, follow_links: bool) -> Iterator[_Found]:
    """The files under a folder, in sorted order; links as ``read_paths`` says."""
    root = os.path.realpath(folder)
    followed = {root}  # folders, which links may name again, in a loop too
    waiting = [folder]
    while waiting:
        entry = waiting.pop()
        name = entry.relative_to(folder).as_posix()
        linked = entry != folder and os.path.islink(entry)
        if os.path.isdir(entry):
            if linked and not follow_links:
                yield _Found(entry, name, "is a link to a folder; name that folder instead")
                continue
            if follow_links and entry != folder:
                real = os.path.realpath(entry)
                if real in followed:
                    yield _Found(entry, name, "is a folder that was read under another name")
                    continue
                followed.add(real)
            try:
                inside = [child for child in entry.iterdir() if not child.name.startswith(".")]
            except OSError as error:
                yield _Found(entry, name, f"cannot be listed ({error.strerror})")
            else:
                waiting += sorted(inside, reverse=True)
        elif not os.path.isfile(entry):
            yield _Found(entry, name, "is not a regular file")
        elif linked and not follow_links and not _is_below(os.path.realpath(entry), root):
            yield _Found(
                entry, name, "is a link out of its folder; name the file, or pass --follow-links"
            )
        else:
            yield _Found(entry, name, inside=True)


def _is_below(path: str, folder: str) -> bool:
    return os.path.commonpath((path, folder)) == folder


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0

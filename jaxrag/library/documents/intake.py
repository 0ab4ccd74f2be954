"""Everything that a knowledge base accepts as documents, one after another, or a part of it."""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any

import xxhash

from jaxrag.base.errors import ConfigError, DocumentError
from jaxrag.library.documents.document import BadDocument, Document, document_from_mapping, text_id
from jaxrag.library.documents.left_out import left_out_of
from jaxrag.library.documents.parser import ParseLimits, Parser
from jaxrag.library.documents.paths import DocumentFiles, read_paths

DocumentSource = Document | BadDocument | str | Path | Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Shard:
    """Part ``index`` of ``count`` of documents or questions.

    Processes that each take another part of the same share the work without talking. Raises
    ConfigError unless 0 <= index < count.
    """

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ConfigError(f"shard {str(self)!r}: expected i/n with 0 <= i < n, such as 0/8")

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """From "i/n"."""
        match = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
        if match is None:
            raise ConfigError(f"shard {text!r}: expected i/n with 0 <= i < n, such as 0/8")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def holds(self, name: str) -> bool:
        """Whether the document of that id belongs to this part: by hash, equal ids to one part."""
        if self.count == 1:
            return True
        digest = xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogateescape"))
        return digest % self.count == self.index

    def holds_line(self, index: int) -> bool:
        """Whether the line of that index, from 0, belongs to this part: in turn."""
        return index % self.count == self.index


class Intake:
    """One pass over given documents: read, dealt to a shard, each id once.

    Holds the ids it has seen, never the documents.

    Attributes:
      characters: length of the texts that have been read so far.
      seen: ids of the documents that were read so far.
      part: of the documents that are taken in.
      paths: the files and folders that were given to be read, so far.
      passed: files of folders that hold no text by their nature, so far.
      left_out: what readers left out of documents, a line for each kind, so far.
    """

    def __init__(
        self,
        given: Iterable[DocumentSource],
        shard: Shard,
    ) -> None:
        """Refuse with DocumentError what is one document and not a list of them."""
        one = isinstance(given, str | bytes | Path | Document | Mapping)
        if one or not isinstance(given, Iterable):
            raise DocumentError(
                f"documents is {'one' if one else 'a'} {type(given).__name__}; expected a list: of "
                "Document, of text, or of pathlib.Path to read"
            )
        self._given = given.only(shard.holds) if isinstance(given, DocumentFiles) else given
        self.part = shard
        self.characters = 0
        self.seen: set[str] = set()
        self.paths: list[Path] = []
        self.passed = 0
        self.left_out: list[str] = []
        self._whole: set[str] = set()
        self._refused: set[str] = set()  # files with a document that another file had
        self._index = 0
        self._files: DocumentFiles | None = None
        self._total_bytes: int | None = None

    def __iter__(self) -> Iterator[Document | BadDocument]:
        """The documents of the shard; an id that came before comes as a BadDocument."""
        for document in self._found():
            if isinstance(document, Document):
                if document.id in self.seen:
                    self._refused.add(document.file or "")
                    yield BadDocument(
                        document.file or document.id,
                        f"id {document.id!r} was given before in this run; give one of the two "
                        "another name or id",
                    )
                    continue
                self.seen.add(document.id)
                self.characters += len(document.text)
                self.left_out += [f"{document.id}: {it}" for it in left_out_of(document.metadata)]
            yield document

    @property
    def whole(self) -> set[str]:
        """Resolved paths of the files that were taken in whole; of one part of several, none."""
        return set() if self.part.count > 1 else self._whole - self._refused

    def fraction(self) -> float | None:
        """How much has been read, 0 to 1: of the bytes of files, of the items of a list.

        None where that is not known.
        """
        if isinstance(self._given, DocumentFiles):
            return self._bytes_fraction(self._given)
        if isinstance(self._given, Sized) and len(self._given):
            inside = self._bytes_fraction(self._files) if self._files is not None else 0.0
            return min(1.0, (self._index + inside) / len(self._given))
        return None

    def _bytes_fraction(self, files: DocumentFiles) -> float:
        if self._total_bytes is None:
            self._total_bytes = files.total_bytes()
        return min(1.0, files.read_bytes() / max(self._total_bytes, 1))

    def _found(self) -> Iterator[Document | BadDocument]:
        if isinstance(self._given, DocumentFiles):
            self.paths += self._given.paths
            yield from self._given
            self._whole |= self._given.whole
            self.passed += self._given.passed
            return
        with Parser(ParseLimits()) as parser:
            yield from self._listed(self._given, parser)

    def _listed(
        self, given: Iterable[DocumentSource], parser: Parser
    ) -> Iterator[Document | BadDocument]:
        for index, item in enumerate(given):
            self._index = index
            where = f"documents[{index}]"
            if not isinstance(item, Document | BadDocument | str | Path | Mapping):
                raise DocumentError(
                    f"{where} is a {type(item).__name__}; expected a Document, a text, a "
                    'pathlib.Path or a mapping with a "text"'
                )
            try:
                if isinstance(item, Path):
                    self._files = read_paths([item]).only(self.part.holds)
                    self._total_bytes = None
                    self.paths += self._files.paths
                    yield from self._files.read_with(parser)
                    self._whole |= self._files.whole
                    self.passed += self._files.passed
                    self._files = None
                else:
                    document = _document(item)
                    name = document.id if isinstance(document, Document) else document.source
                    if self.part.holds(name):
                        yield document
            except DocumentError as error:
                if self.part.holds(where):
                    yield BadDocument(where, str(error))
            self._index = index + 1


def _document(item: Document | BadDocument | str | Mapping[str, Any]) -> Document | BadDocument:
    if isinstance(item, Document | BadDocument):
        return item
    if isinstance(item, str):
        return Document(text_id(item), item)
    return document_from_mapping(item)

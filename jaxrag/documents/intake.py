"""Everything that a knowledge base accepts as documents, one after another."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any

import xxhash

from jaxrag.documents.document import BadDocument, Document, document_from_mapping, text_id
from jaxrag.documents.paths import DocumentFiles, read_paths
from jaxrag.errors import DocumentError

Source = Document | BadDocument | str | Path | Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Shard:
    """Part ``index`` of ``count``: the documents whose id falls to it by hash.

    Processes that each take another part of the same documents share them without talking, and
    equal ids meet in one process. Raises DocumentError unless 0 <= index < count.
    """

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        """Refuse a part that does not exist."""
        if not 0 <= self.index < self.count:
            raise DocumentError(
                f"shard {self.index}/{self.count}: expected I/N with I from 0 to N - 1"
            )

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """From "I/N"."""
        index, slash, count = text.partition("/")
        if not (slash and index.isascii() and index.isdigit() and count.isdigit()):
            raise DocumentError(f"shard {text!r}: expected I/N, such as 0/4")
        return cls(int(index), int(count))

    def holds(self, name: str) -> bool:
        """Whether the document of that id belongs to this part."""
        if self.count == 1:
            return True
        digest = xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogateescape"))
        return digest % self.count == self.index


class Intake:
    """One pass over given documents: read, dealt to a shard, each id once.

    Holds the ids it has seen, never the documents. ``characters`` is the length of the texts that
    have been read so far.
    """

    def __init__(self, given: Iterable[Source], shard: Shard) -> None:
        """Refuse with DocumentError what is one document and not a list of them."""
        one = isinstance(given, str | bytes | Path | Document | Mapping)
        if one or not isinstance(given, Iterable):
            raise DocumentError(
                f"documents is {'one' if one else 'a'} {type(given).__name__}; expected a list: of "
                "Document, of text, or of pathlib.Path to read"
            )
        self._given = given.only(shard.holds) if isinstance(given, DocumentFiles) else given
        self._shard = shard
        self.characters = 0
        self._seen: set[str] = set()
        self._index = 0
        self._files: DocumentFiles | None = None
        self._total_bytes: int | None = None

    def __iter__(self) -> Iterator[Document | BadDocument]:
        """The documents of the shard; an id that came before comes as a BadDocument."""
        for found in self._found():
            if isinstance(found, Document):
                if found.id in self._seen:
                    yield BadDocument(
                        found.file or found.id,
                        f"id {found.id!r} was given before in this run; give one of the two "
                        "another name or id",
                    )
                    continue
                self._seen.add(found.id)
                self.characters += len(found.text)
            yield found

    def fraction(self) -> float | None:
        """How much has been read, 0 to 1: of the bytes of files, of the items of a list.

        None where nobody knows how much there is.
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
            yield from self._given
            return
        for index, item in enumerate(self._given):
            self._index = index
            where = f"documents[{index}]"
            if not isinstance(item, Document | BadDocument | str | Path | Mapping):
                raise DocumentError(
                    f"{where} is a {type(item).__name__}; expected a Document, a text, a "
                    'pathlib.Path or a mapping with a "text"'
                )
            try:
                if isinstance(item, Path):
                    self._files = read_paths([item]).only(self._shard.holds)
                    self._total_bytes = None
                    yield from self._files
                    self._files = None
                else:
                    found = _document(item)
                    name = found.id if isinstance(found, Document) else found.source
                    if self._shard.holds(name):
                        yield found
            except DocumentError as error:
                if self._shard.holds(where):
                    yield BadDocument(where, str(error))
            self._index = index + 1


def _document(item: Document | BadDocument | str | Mapping[str, Any]) -> Document | BadDocument:
    if isinstance(item, Document | BadDocument):
        return item
    if isinstance(item, str):
        return Document(text_id(item), item)
    return document_from_mapping(item)

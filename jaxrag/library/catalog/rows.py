"""What goes into the catalog and what comes out of it."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from jaxrag.base.groups import readers_of
from jaxrag.base.types import HostArray
from jaxrag.library.documents import Document
from jaxrag.library.documents.chunking import Chunk
from jaxrag.library.documents.document import begun


@dataclasses.dataclass(frozen=True, slots=True)
class DocumentEntry:
    """One row of the documents table."""

    id: str
    title: str
    file: str | None
    metadata: Mapping[str, Any]
    digest: str  # of text, title and metadata
    num_chunks: int
    num_tokens: int  # of all its chunks, overlap counted twice
    added: str  # UTC, ISO 8601

    @classmethod
    def of_row(cls, row: Sequence[Any]) -> Self:
        """The document of a row of the table, whose columns have these names in this order."""
        name, title, file, metadata, digest, chunks, tokens, added, *_ = row
        read = _decode(metadata)[0]
        return cls(name, title, file, read, digest, chunks, tokens, added)


_decode = json.JSONDecoder().raw_decode  # half the time of ``json.loads``


@dataclasses.dataclass(frozen=True, eq=False)
class Hit:
    """A chunk found for a question; a higher score is better."""

    chunk_id: int
    document_id: str
    chunk_index: int
    title: str
    file: str | None
    page: int | None  # 1-based, of documents that have pages
    start: int  # first character in the document's text
    end: int  # one past the last character
    section: str  # heading path, "" without one
    metadata: Mapping[str, Any]  # the document's
    score: float
    text: str
    # [T] int32, the text's tokens without the prompt template's markers
    ids: HostArray = dataclasses.field(repr=False)

    def __repr__(self) -> str:
        """Where it is, its score and how it begins, on one line."""
        page = "" if self.page is None else f", page {self.page}"
        return (
            f"<Hit {self.document_id!r} #{self.chunk_index}{page}, score {self.score:.4g}: "
            f"{begun(self.text)!r}>"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class NewDocument:
    """A document as it is committed: its chunks, their ids, and their keys in the store."""

    document: Document
    digest: str
    chunks: Sequence[Chunk]
    keys: Mapping[str, Sequence[str]]  # encoder -> one store key per chunk
    content_ids: Sequence[str]  # per chunk, of its tokens as they stand in the prompt
    chunk_ids: Sequence[int]  # per chunk, from ``Catalog.reserve``


class KeyedChunk(NamedTuple):
    """A chunk that has a store key, and the encoder that makes it."""

    document_id: str
    number: int  # of the chunk in its document
    encoder: str
    chunk_id: int


@dataclasses.dataclass(frozen=True, eq=False)
class ChunkTokens:
    """The tokens of a chunk, and what they are called in keys."""

    content_id: str
    title: str  # of its document
    ids: HostArray  # [T] int32, without the prompt template's markers
    readers: frozenset[str] | None = None  # groups of its document; None: everybody


class DocumentRow(NamedTuple):
    """The columns of the table documents."""

    id: str
    title: str
    file: str | None
    metadata: str  # JSON
    digest: str
    num_chunks: int
    num_tokens: int
    added: str


class ChunkRow(NamedTuple):
    """The columns of the table chunks."""

    id: int
    document_id: str
    number: int
    start: int
    end: int
    page: int | None
    section: str
    content_id: str
    text: str
    ids: bytes

    def chunk(self) -> Chunk:
        """As the documents room made it."""
        return Chunk(
            self.number, self.start, self.end, from_blob(self.ids), self.text, self.page,
            self.section,
        )  # fmt: skip

    def tokens(self, document: DocumentRow) -> ChunkTokens:
        """Its tokens and what they are called."""
        readers = readers_of(json.loads(document.metadata))
        return ChunkTokens(self.content_id, document.title, from_blob(self.ids), readers)

    def hit(self, document: DocumentRow, score: float) -> Hit:
        """The chunk as it was found."""
        return Hit(
            chunk_id=self.id,
            document_id=self.document_id,
            chunk_index=self.number,
            title=document.title,
            file=document.file,
            page=self.page,
            start=self.start,
            end=self.end,
            section=self.section,
            metadata=json.loads(document.metadata),
            score=float(score),
            text=self.text,
            ids=from_blob(self.ids),
        )


def from_blob(blob: bytes) -> HostArray:
    """Token ids, int32, from the form in which the chunks table holds them."""
    return np.frombuffer(blob, dtype="<i4").astype(np.int32)

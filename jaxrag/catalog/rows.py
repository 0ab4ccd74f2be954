"""What goes into the catalog and what comes out of it."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrag.documents import Document
from jaxrag.documents.chunking import Chunk
from jaxrag.types import Connection, HostArray


@dataclasses.dataclass(frozen=True)
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


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """A document as it is committed: its chunks, their ids, and their keys in the store."""

    document: Document
    digest: str
    chunks: Sequence[Chunk]
    keys: Mapping[str, Sequence[str]]  # encoder -> one store key per chunk
    content_ids: Sequence[str]  # per chunk, of its tokens as they stand in the prompt
    chunk_ids: Sequence[int]  # per chunk, from ``Catalog.reserve``


@dataclasses.dataclass(frozen=True, eq=False)
class KeyedChunk:
    """What is needed to encode the chunk of a store key again."""

    chunk_id: int
    encoder: str
    title: str  # of its document
    ids: HostArray  # [T] int32, without the prompt template's markers


@dataclasses.dataclass(frozen=True, eq=False)
class ChunkTokens:
    """The tokens of a chunk, and what they are called in keys."""

    content_id: str
    title: str  # of its document
    ids: HostArray  # [T] int32, without the prompt template's markers


def read_hits(connection: Connection, found: Sequence[tuple[int, float]]) -> list[Hit]:
    """The chunks of (id, score) pairs, in the same order; ids of no chunk are left out."""
    rows = connection.execute(
        "SELECT chunks.id, document_id, number, title, file, page, first_char, last_char, section, "
        "metadata, text, ids FROM chunks JOIN documents ON documents.id = document_id "
        "WHERE chunks.id IN (SELECT value FROM json_each(?))",
        (json.dumps([int(chunk_id) for chunk_id, _ in found]),),
    )
    by_id = {row[0]: row[1:] for row in rows}
    hits = []
    for chunk_id, score in found:
        if chunk_id not in by_id:
            continue
        document_id, number, title, file, page, start, end, section, metadata, text, ids = by_id[
            chunk_id
        ]
        hits.append(
            Hit(
                chunk_id=chunk_id,
                document_id=document_id,
                chunk_index=number,
                title=title,
                file=file,
                page=page,
                start=start,
                end=end,
                section=section,
                metadata=json.loads(metadata),
                score=float(score),
                text=text,
                ids=from_blob(ids),
            )
        )
    return hits


def from_blob(blob: bytes) -> HostArray:
    """Token ids, int32, from the form in which the chunks table holds them."""
    return np.frombuffer(blob, dtype="<i4").astype(np.int32)

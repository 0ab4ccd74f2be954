"""Which chunks are exported, how they are bundled into files, and what describes them."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrag.base.config import ModelConfig, config_to_dict
from jaxrag.base.errors import ChunkCorrupt, ChunkMissing, KnowledgeBaseError, StoreError
from jaxrag.base.rotary import attention_factor
from jaxrag.base.types import HostArray
from jaxrag.kv.store import KVStore, Record, content_id
from jaxrag.library.catalog import Catalog, DocumentEntry, Hit
from jaxrag.library.documents.chunking import Chunk
from jaxrag.library.retrieve.filters import Filter
from jaxrag.models.text.prompts import PromptTemplate
from jaxrag.models.text.tokenizer import Tokenizer

PROMPT = "prompt"  # name of the file that holds a whole prompt


@dataclasses.dataclass(frozen=True, eq=False)
class ExportedChunk:
    """One stored chunk of an export."""

    key: str
    token_ids: HostArray | None  # [T] int32, as they stand in the prompt; None: not known
    content_id: str | None = None  # of these ids, where the record shall be held against it


@dataclasses.dataclass(frozen=True, eq=False)
class Bundle:
    """Chunks that become one file, one behind the other along the token axis.

    A chunk exported alone is a bundle of one; a prompt is one of its prefix and its chunks.
    """

    name: str  # of the file, without its suffix
    pieces: tuple[ExportedChunk, ...]
    question: str | None = None
    final_ids: HostArray | None = None  # [T] int32, the final block: what to feed after the cache

    @property
    def keys(self) -> list[str]:
        """The keys of its chunks, in order; a chunk may stand in a prompt twice."""
        return [piece.key for piece in self.pieces]


@dataclasses.dataclass(frozen=True)
class KeyPlacement:
    """Whether exported keys are rotated, and how.

    ``first_position`` is the position of each file's first token; the others follow it. None leaves
    K as the store holds it, before RoPE.
    """

    config: ModelConfig
    first_position: int | None

    def __post_init__(self) -> None:
        first = self.first_position
        if first is not None and not 0 <= first < self.config.max_positions:
            raise StoreError(
                f"first_position={first}: expected 0 to {self.config.max_positions - 1}, the "
                "model's positions"
            )

    def describe(self) -> dict[str, Any]:
        """JSON-able: whether RoPE is applied, from which position on, and every constant of it."""
        rotated, values = self.first_position is not None, config_to_dict(self.config)
        return {
            "applied": rotated,
            "first_position": self.first_position,
            "attention_factor": attention_factor(self.config.rope),
            "attention_factor_applied": rotated,
            **values["rope"],
            **{name: values[name] for name in ("more_ropes", "rope_layers") if name in values},
        }

    def check(self, tokens: int, what: str) -> None:
        """Raise StoreError when that many tokens reach behind the model's last position."""
        first, last = self.first_position, self.config.max_positions
        if first is not None and first + tokens > last:
            raise StoreError(
                f"{what}: {tokens} tokens from position {first} on do not fit the model's {last} "
                "positions; start lower or take fewer chunks"
            )


def find_records(store: KVStore, bundle: Bundle) -> list[Record]:
    """The commit record of each piece.

    Raises ChunkMissing or ChunkCorrupt when a chunk is not committed or its record is damaged, and
    ChunkCorrupt when it does not hold the tokens that its piece names.
    """
    records = []
    for piece, record in zip(bundle.pieces, store.head(bundle.keys), strict=True):
        if record is None:
            raise ChunkMissing(f"chunk {piece.key}: not in the store; ingest its document again")
        if piece.token_ids is not None and len(piece.token_ids) != record.tokens:
            raise ChunkCorrupt(
                f"chunk {piece.key}: holds {record.tokens} tokens, expected {len(piece.token_ids)}"
            )
        if piece.content_id not in (None, record.content_id):
            raise ChunkCorrupt(
                f"chunk {piece.key}: holds the content {record.content_id}, expected "
                f"{piece.content_id}"
            )
        records.append(record)
    return records


def describe(bundle: Bundle, records: Sequence[Record]) -> dict[str, Any]:
    """JSON-able: the token ids of a file and, per chunk, its key, its place and its origin."""
    chunks = []
    first = 0
    for record in records:
        chunks.append(
            {
                "key": record.key,
                "first_token": first,
                "tokens": record.tokens,
                "encoder": record.encoder,
                "content_id": record.content_id,
                "context_id": record.context_id,
                "xxh3": list(record.xxh3),
            }
        )
        first += record.tokens
    known = [piece.token_ids for piece in bundle.pieces if piece.token_ids is not None]
    complete = len(known) == len(bundle.pieces)
    fields: dict[str, Any] = {
        "tokens": first,
        "token_ids": np.concatenate(known).tolist() if complete else None,
        "chunks": chunks,
    }
    if bundle.question is not None:
        fields["question"] = bundle.question
    if bundle.final_ids is not None:
        fields["final_ids"] = bundle.final_ids.tolist()
    return fields


def read(store: KVStore, bundle: Bundle) -> HostArray:
    """The verified KV of a bundle, [L, 2, T, K, H] in the store's dtype, K before RoPE.

    Raises ChunkMissing, ChunkCorrupt.
    """
    kv = store.get_many(bundle.keys)
    if len(kv.offsets) == len(bundle.pieces):
        return kv.kv
    spans = [kv.offsets[key] for key in bundle.keys]  # a chunk is here more than once
    return np.concatenate([kv.kv[:, :, at : at + size] for at, size in spans], axis=2)


@dataclasses.dataclass(frozen=True, eq=False)
class ExportSelection:
    """Chunks in the order they were asked for, and the documents they come from."""

    pieces: tuple[ExportedChunk, ...]
    documents: tuple[Mapping[str, Any], ...]  # JSON-able, for the manifest

    def separate(self) -> list[Bundle]:
        """One bundle a chunk, named by its key; chunks of equal text share one."""
        return [Bundle(key, (piece,)) for key, piece in {p.key: p for p in self.pieces}.items()]


@dataclasses.dataclass(frozen=True)
class ChunkSelector:
    """Looks chunks up in a catalog under one encoder variant.

    Attributes:
      tokenizer: of the model that encoded them.
      prefix: the template's prefix, which is stored as a chunk of its own; None where it is empty.
    """

    catalog: Catalog
    template: PromptTemplate
    tokenizer: Tokenizer
    encoder: str
    prefix: ExportedChunk | None

    def documents(self, document_ids: Iterable[str] | None) -> ExportSelection:
        """Every chunk of these documents, or of all.

        Raises KnowledgeBaseError for an unknown document, or one without KV of this encoder.
        """
        if document_ids is None:
            return self.matching(None)
        entries = [self._document(name) for name in dict.fromkeys(document_ids)]
        return self._select((entry, self.catalog.chunks(entry.id)) for entry in entries)

    def matching(self, where: Filter | None) -> ExportSelection:
        """Every chunk of the documents whose metadata matches; see ``documents``."""
        entries = self.catalog.documents(where)
        return self._select((entry, self.catalog.chunks(entry.id)) for entry in entries)

    def hits(self, hits: Sequence[Hit]) -> ExportSelection:
        """The chunks of a search, in the order in which the template puts them into a prompt."""
        ordered = self.template.arrange(hits)
        chosen = []
        for hit in ordered:
            chunks = self.catalog.chunks(hit.document_id)
            chosen.append((self._document(hit.document_id), [chunks[hit.chunk_index]]))
        return self._select(chosen)

    def keys(self, keys: Iterable[str]) -> ExportSelection:
        """Chunks by their keys in the store, of whatever encoder.

        A key that no chunk of the catalog has is exported without token ids, as its chunk is known
        to the store alone.
        """
        pieces = {key: ExportedChunk(key, None) for key in keys}
        documents: list[Mapping[str, Any]] = []
        for entry in self.catalog.documents():
            for encoder, names in self.catalog.keys(entry.id).items():
                wanted = [number for number, key in enumerate(names) if key in pieces]
                if wanted:
                    chunks = self.catalog.chunks(entry.id)
                    selector = dataclasses.replace(self, encoder=encoder)
                    part = selector._select([(entry, [chunks[number] for number in wanted])])
                    pieces |= {piece.key: piece for piece in part.pieces}
                    documents += part.documents
        return ExportSelection(tuple(pieces.values()), tuple(documents))

    def joined(self, selection: ExportSelection, question: str | None) -> Bundle:
        """The selected chunks behind the template's prefix, as they stand in one prompt.

        With a question, the final block's token ids go with them.
        """
        pieces = selection.pieces if self.prefix is None else (self.prefix, *selection.pieces)
        if not pieces:
            raise KnowledgeBaseError(
                "no chunk was found and the template has no prefix: there is nothing to join"
            )
        final = None if question is None else self.template.final_ids(self.tokenizer, question)
        return Bundle(PROMPT, pieces, question, final)

    def _select(self, chosen: Iterable[tuple[DocumentEntry, Sequence[Chunk]]]) -> ExportSelection:
        pieces: list[ExportedChunk] = []
        documents: dict[str, dict[str, Any]] = {}
        for entry, chunks in chosen:
            keys = self.catalog.keys(entry.id).get(self.encoder)
            if keys is None:
                raise KnowledgeBaseError(
                    f"document {entry.id!r} has no {self.encoder!r} chunks; name an encoder that "
                    "it was ingested with, or ingest it again with this one"
                )
            described = documents.setdefault(entry.id, _describe(entry))["chunks"]
            for chunk in chunks:
                key = keys[chunk.index]
                ids = self.template.chunk_ids(self.tokenizer, chunk.ids, entry.title)
                pieces.append(ExportedChunk(key, ids, content_id(self.tokenizer.digest, ids)))
                described.append(
                    {
                        "index": chunk.index,
                        "key": key,
                        "start": chunk.start,
                        "end": chunk.end,
                        "page": chunk.page,
                    }
                )
        return ExportSelection(tuple(pieces), tuple(documents.values()))

    def _document(self, document_id: str) -> DocumentEntry:
        entry = self.catalog.document(document_id)
        if entry is None:
            raise KnowledgeBaseError(
                f"no document {document_id!r}; `jaxrag kb list` names those there are"
            )
        return entry


def _describe(entry: DocumentEntry) -> dict[str, Any]:
    return {
        "id": entry.id,
        "title": entry.title,
        "file": entry.file,
        "metadata": dict(entry.metadata),
        "chunks": [],
    }

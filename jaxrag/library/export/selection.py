"""Which chunks of a knowledge base are exported, and how they are bundled into files."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxrag.base.errors import KnowledgeBaseError
from jaxrag.kv.store import content_id
from jaxrag.library.catalog import Catalog, DocumentEntry, Hit
from jaxrag.library.documents.chunking import Chunk
from jaxrag.library.export.bundle import Bundle, Piece
from jaxrag.library.retrieve.filters import Filter
from jaxrag.models.text.prompts import PromptTemplate
from jaxrag.models.text.tokenizer import Tokenizer

PROMPT = "prompt"  # name of the file that holds a whole prompt


@dataclasses.dataclass(frozen=True, eq=False)
class Selection:
    """Chunks in the order they were asked for, and the documents they come from."""

    pieces: tuple[Piece, ...]
    documents: tuple[Mapping[str, Any], ...]  # JSON-able, for the manifest

    def separate(self) -> list[Bundle]:
        """One bundle a chunk, named by its key; chunks of equal text share one."""
        return [Bundle(key, (piece,)) for key, piece in {p.key: p for p in self.pieces}.items()]


@dataclasses.dataclass(frozen=True)
class Selector:
    """Looks chunks up in a catalog under one encoder variant.

    Attributes:
      catalog: of the knowledge base.
      template: wraps the chunks.
      tokenizer: of the model that encoded them.
      encoder: the variant.
      prefix: the template's prefix, which is stored as a chunk of its own; None where it is empty.
    """

    catalog: Catalog
    template: PromptTemplate
    tokenizer: Tokenizer
    encoder: str
    prefix: Piece | None

    def documents(self, document_ids: Iterable[str] | None) -> Selection:
        """Every chunk of these documents, or of all.

        Raises KnowledgeBaseError for an unknown document, or one without KV of this encoder.
        """
        if document_ids is None:
            return self.matching(None)
        entries = [self._document(name) for name in dict.fromkeys(document_ids)]
        return self._select((entry, self.catalog.chunks(entry.id)) for entry in entries)

    def matching(self, where: Filter | None) -> Selection:
        """Every chunk of the documents whose metadata matches; see ``documents``."""
        entries = self.catalog.documents(where)
        return self._select((entry, self.catalog.chunks(entry.id)) for entry in entries)

    def hits(self, hits: Sequence[Hit]) -> Selection:
        """The chunks of a search, in the order in which the template puts them into a prompt."""
        ordered = self.template.arrange(hits)
        chosen = []
        for hit in ordered:
            chunks = self.catalog.chunks(hit.document_id)
            chosen.append((self._document(hit.document_id), [chunks[hit.chunk_index]]))
        return self._select(chosen)

    def keys(self, keys: Iterable[str]) -> Selection:
        """Chunks by their keys in the store, of whatever encoder.

        A key that no chunk of the catalog has is exported without token ids, as its chunk is known
        to the store alone.
        """
        pieces = {key: Piece(key, None) for key in keys}
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
        return Selection(tuple(pieces.values()), tuple(documents))

    def joined(self, selection: Selection, question: str | None) -> Bundle:
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

    def _select(self, chosen: Iterable[tuple[DocumentEntry, Sequence[Chunk]]]) -> Selection:
        pieces: list[Piece] = []
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
                pieces.append(Piece(key, ids, content_id(self.tokenizer.digest, ids)))
                described.append(
                    {
                        "index": chunk.index,
                        "key": key,
                        "start": chunk.start,
                        "end": chunk.end,
                        "page": chunk.page,
                    }
                )
        return Selection(tuple(pieces), tuple(documents.values()))

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

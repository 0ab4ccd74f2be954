"""What the rows of a document should be, from its text, its tokens and the names of its KV.

A row that is not as it was written is believed again only where something else proves it: its own
digest, once one column was made anew from another, or the digest of the whole document, which is
taken of title, text and metadata. What nothing proves is lost: the document is to be added again.
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxrag.base.errors import JaxragError
from jaxrag.base.types import HostArray
from jaxrag.kv.store import chunk_key, content_id, context_id
from jaxrag.library.catalog.audit import (
    CHUNK,
    DOCUMENT,
    KEY,
    Examined,
    Fault,
    KeyRow,
    Raw,
    StoredDocument,
)
from jaxrag.library.catalog.digests import CHUNKS, DOCUMENTS
from jaxrag.library.catalog.rows import ChunkRow, DocumentRow, from_blob
from jaxrag.library.documents import Document
from jaxrag.library.documents.chunking import Spans
from jaxrag.library.knowledge_base.prepare import document_digest
from jaxrag.models.text.prompts import PromptTemplate
from jaxrag.models.text.tokenizer import Tokenizer
from jaxrag.reuse.encode import ENCODERS, Primer, encoder_named, primer_id, seen_prefix


@dataclasses.dataclass(frozen=True)
class Names:
    """How the chunks of one knowledge base are named."""

    fingerprint: str
    template: PromptTemplate
    tokenizer: Tokenizer
    primer: Primer | None = None

    @functools.cached_property
    def prefix(self) -> HostArray:
        """Token ids of the template's prefix, int32 [P]."""
        return self.template.prefix_ids(self.tokenizer)

    @functools.cached_property
    def primer_tokens(self) -> HostArray | None:
        """What the primer is, as ``Primer.tokens``; None without one."""
        return None if self.primer is None else self.primer.tokens(self.template, self.tokenizer)

    def content(self, ids: HostArray, title: str) -> str:
        """The content id of a chunk of these tokens, int32 [T]."""
        wrapped = self.template.chunk_ids(self.tokenizer, ids, title)
        return content_id(self.tokenizer.digest, wrapped)

    def key(self, encoder: str, content: str, neighbours: Sequence[str]) -> str:
        """The key of a chunk's KV behind neighbours, which are content ids."""
        chosen = encoder_named(encoder)
        primer = primer_id(chosen, self.tokenizer.digest, self.primer_tokens)
        context = context_id(encoder, seen_prefix(chosen, self.prefix), neighbours, primer)
        return chunk_key(self.fingerprint, content, context)


def examine(names: Names | None, stored: StoredDocument) -> Examined:
    """What is wrong with a document's rows, and what mends them.

    Without ``names`` rows are held against their digests and each other only.
    """
    document = _Document(names, stored)
    faults = tuple(document.faults())
    if not faults:
        return Examined()
    mended = None
    if names is not None:
        try:
            mended = document.mended(names)
        except (ValueError, TypeError, OverflowError, RecursionError, JaxragError):
            mended = None  # a column holds what no program writes there
    if mended is None:
        return Examined(faults, lost=True)
    return dataclasses.replace(mended, faults=faults)


class _Document:
    """One document's rows, and what can be made of them."""

    def __init__(self, names: Names | None, stored: StoredDocument) -> None:
        self.names = names
        self.stored = stored

    def faults(self) -> Iterator[Fault]:
        """What is not as it should be."""
        name, document = self.stored.id, self.stored.document
        if (
            document is None
            or not document.whole
            or not self._is_complete(document.row)
            or (self._is_whole and self._is_well(lambda: self._digest(document.row)) is False)
        ):
            yield Fault(DOCUMENT, name)
        for chunk in self.stored.chunks:
            if not chunk.whole or not self._is_well(lambda chunk=chunk: self._agrees(chunk.row)):
                yield Fault(CHUNK, f"{name} #{chunk.row.number}")
        contents = {chunk.row.id: chunk.row.content_id for chunk in self.stored.chunks}
        numbers = {chunk.row.id: chunk.row.number for chunk in self.stored.chunks}
        for key in self.stored.keys:
            row = key.row
            whole = key.whole and self._is_well(
                lambda row=row: self._expected(row, contents[row.chunk_id]) == row.key
            )
            if not whole:
                yield Fault(KEY, f"{name} #{numbers[row.chunk_id]}, {row.encoder}")

    def mended(self, names: Names) -> Examined | None:
        """The rows that are to be written; None where what is there cannot be trusted."""
        if self.stored.document is None:
            return None
        proven = self._digest(self.stored.document.row) is True
        document = self._mended_document(self.stored.document, proven)
        if document is None or not self._is_complete(document):
            return None
        chunks = []
        for chunk in self.stored.chunks:
            mended = self._mended_chunk(names, chunk, document.title, proven)
            if mended is None:
                return None
            chunks.append(mended)
        written = [
            row
            for row, before in zip(chunks, self.stored.chunks, strict=True)
            if row != before.row or not before.whole
        ]
        if written:  # what they hold has to prove the rest as well
            document = document._replace(num_tokens=sum(len(from_blob(row.ids)) for row in chunks))
        changed = document != self.stored.document.row or not self.stored.document.whole
        keys, dropped = self._mended_keys({row.id: row.content_id for row in chunks})
        return Examined(
            document=document if changed else None,
            chunks=tuple(written),
            keys=tuple(keys),
            dropped=tuple(dropped),
        )

    # The document

    @functools.cached_property
    def _text(self) -> str | None:
        """The whole text, where the chunks have one and agree about it."""
        text = ""
        for chunk in self.stored.chunks:
            row = chunk.row
            if row.start > len(text) or row.end - row.start != len(row.text):
                return None
            text = text[: row.start] + row.text + text[row.end :]
        for chunk in self.stored.chunks:
            if text[chunk.row.start : chunk.row.end] != chunk.row.text:
                return None
        return text

    def _digest(self, row: DocumentRow, change: bool = False) -> Any:
        """Whether the document's digest is that of its rows; None where these do not tell.

        With ``change`` the digest that it should have instead.
        """
        if self._text is None or any(chunk.row.page is not None for chunk in self.stored.chunks):
            return None  # where the pages begin is not remembered
        document = Document(row.id, self._text, row.title, row.file, json.loads(row.metadata))
        digest = document_digest(document)
        return digest if change else digest == row.digest

    def _is_complete(self, row: DocumentRow) -> bool:
        """Whether these are the chunks that the document's row tells of."""
        numbers = [chunk.row.number for chunk in self.stored.chunks]
        return numbers == list(range(row.num_chunks))

    def _mended_document(self, raw: Raw[DocumentRow], proven: bool) -> DocumentRow | None:
        row = raw.row
        if raw.whole and self._digest(row) is not False:
            return row
        counted = row._replace(
            num_chunks=len(self.stored.chunks),
            num_tokens=sum(len(from_blob(chunk.row.ids)) for chunk in self.stored.chunks),
        )
        again = self._digest(row, change=True)
        candidates = [counted, row if again is None else row._replace(digest=again)]
        for candidate in candidates:
            if DOCUMENTS.digest(candidate) == raw.digest:
                return candidate
        if raw.whole and all(chunk.whole for chunk in self.stored.chunks):
            return candidates[1]
        return counted if proven and (row.file is None or Path(row.file).exists()) else None

    # Chunks

    def _agrees(self, row: ChunkRow) -> bool:
        """Whether content id, tokens and text of a chunk agree."""
        if self.names is None or self.stored.document is None:
            return True
        ids = from_blob(row.ids)
        if self.names.content(ids, self.stored.document.row.title) != row.content_id:
            return False
        if not self._is_whole or self._spans is None:  # a text next to it may be wrong
            return True
        windows = self._windows(row)
        return any(window.tobytes() == ids.tobytes() for window in windows)

    @property
    def _is_whole(self) -> bool:
        return all(chunk.whole for chunk in self.stored.chunks)

    @functools.cached_property
    def _spans(self) -> Spans | None:
        """The tokens of the whole text, where it is known."""
        if self.names is None or self._text is None:
            return None
        return Spans(self._text, self.names.tokenizer)

    def _windows(self, row: ChunkRow) -> list[HostArray]:
        """Ids that a chunk of these characters may have: a part of the whole text's, or its own."""
        if self.names is None or self._text is None or self._spans is None:
            return []
        alone = self.names.tokenizer.encode(self._text[row.start : row.end])
        return [*self._spans.between(row.start, row.end), alone]

    def _mended_chunk(
        self, names: Names, raw: Raw[ChunkRow], title: str, proven: bool
    ) -> ChunkRow | None:
        row = raw.row
        if raw.whole and self._agrees(row):
            return row
        windows = self._windows(row)
        of_text = [row._replace(ids=window.astype("<i4").tobytes()) for window in windows]
        as_it_is = [row] if len(row.ids) % 4 == 0 and row.ids else []
        candidates = [*as_it_is, *of_text]
        candidates += [
            candidate._replace(text=names.tokenizer.decode(from_blob(candidate.ids), False))
            for candidate in as_it_is
        ]
        named = [
            candidate._replace(content_id=names.content(from_blob(candidate.ids), title))
            for candidate in candidates
        ]
        for candidate in itertools.chain(candidates, named):
            if CHUNKS.digest(candidate) == raw.digest and candidate in named:
                return candidate
        # The document's digest proves the text, and the text the tokens; nothing the section.
        if not raw.whole and (row.section or not proven):
            return None
        tokens = {candidate.ids for candidate in of_text}
        if row.ids in tokens:
            return next(candidate for candidate in named if candidate.ids == row.ids)
        return named[len(as_it_is)] if proven and len(tokens) == 1 else None

    # Keys

    def _expected(self, row: KeyRow, content: str) -> str | None:
        """The key that a chunk's KV should have."""
        if self.names is None:
            return row.key
        if row.encoder not in ENCODERS:
            return None
        if row.content_ids and not encoder_named(row.encoder).sees_neighbours:
            return None
        return self.names.key(row.encoder, content, row.content_ids)

    def _mended_keys(self, contents: dict[int, str]) -> tuple[list[KeyRow], list[tuple[int, str]]]:
        """Keys to be written, and those to be removed: what they are of is not known."""
        written, dropped = [], []
        for raw in self.stored.keys:
            row = raw.row
            expected = self._is_well(lambda row=row: self._expected(row, contents[row.chunk_id]))
            if raw.whole and row.key == expected:
                continue
            sees = row.encoder in ENCODERS and encoder_named(row.encoder).sees_neighbours
            if not isinstance(expected, str) or (sees and row.key != expected):
                dropped.append((row.chunk_id, row.encoder))
            else:
                written.append(dataclasses.replace(row, key=expected))
        return written, dropped

    @staticmethod
    def _is_well(what: Any) -> Any:
        """What a check gives; False where a column holds what no program writes there."""
        try:
            return what()
        except (ValueError, TypeError, OverflowError, RecursionError, JaxragError):
            return False

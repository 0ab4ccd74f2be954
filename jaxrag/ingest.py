"""From documents to a knowledge base: cut, look up, encode what is missing, store, commit.

Work goes in batches of documents. Of each, the KV is made durable first and the catalog committed
last, so a run that is killed leaves whole documents, and the KV it had already stored is found, not
encoded again, when the same documents are added once more.
"""

import collections
import dataclasses
import functools
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jaxrag.catalog import Catalog, Entry
from jaxrag.chunking import Chunking, split
from jaxrag.documents import BadDocument, Document, document_from_mapping, read_paths, text_id
from jaxrag.encode import chunk_key, encode_chunks, provenance
from jaxrag.errors import DocumentError
from jaxrag.models.model import Model
from jaxrag.prompts import PromptTemplate
from jaxrag.store import ChunkStore
from jaxrag.tokenizer import Tokenizer
from jaxrag.types import HostArray

BATCH_TOKENS = 1 << 16  # of one catalog commit

Source = Document | BadDocument | str | Path | Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class AddReport:
    """What became of the documents that were given.

    A chunk counts once for every encoder, so ``encoded + reused == chunks * len(encoders)``.
    """

    documents: int  # in the knowledge base now, of those given
    replaced: int  # of these: stood there with another content or file
    unchanged: int  # of these: stood there as they are
    chunks: int
    tokens: int  # of these chunks, the template's markers included
    encoded: int  # chunks whose KV was computed
    reused: int  # chunks whose KV was stored already, or the same as another's
    encoded_tokens: int
    skipped: tuple[BadDocument, ...]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Encoded tokens per second of the whole run."""
        return self.encoded_tokens / self.seconds


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """A document that is ready to be encoded."""

    entry: Entry
    token_ids: tuple[HostArray, ...]  # per chunk [T] int32, as it stands in the prompt
    unchanged: bool  # the catalog holds it as it is
    replaces: bool  # the catalog holds something else under its id
    commit: bool  # whether the catalog must change

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for ids in self.token_ids)


@dataclasses.dataclass(frozen=True)
class Ingest:
    """How the documents of one knowledge base are cut, encoded and kept."""

    model: Model
    template: PromptTemplate
    chunking: Chunking
    encoders: tuple[str, ...]
    store: ChunkStore
    catalog: Catalog

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        return self.model.text_tokenizer()

    @functools.cached_property
    def _prefix(self) -> HostArray:
        return self.template.prefix_ids(self._tokenizer)

    def run(self, documents: Iterable[Source], progress: bool) -> AddReport:
        """Add documents; ``progress`` draws a bar on stderr where that is a terminal.

        Raises TokenizerError before any work when the model takes no text, and DocumentError for
        an argument that is no list of documents. Single bad documents are skipped and reported.
        """
        start = time.perf_counter()
        _ = self._tokenizer
        accepted, skipped = _accept(documents)
        if accepted:
            self._keep_prefix()
        characters = sum(len(document.text) for document in accepted)
        count: collections.Counter[str] = collections.Counter()
        with tqdm(
            desc="encode", unit="token", unit_scale=True, disable=None if progress else True
        ) as bar:
            for batch in self._batches(accepted, skipped):
                for prepared in batch:
                    count["characters"] += len(prepared.entry.document.text)
                    count["documents"] += 1
                    count["unchanged"] += prepared.unchanged
                    count["replaced"] += prepared.replaces
                    count["chunks"] += len(prepared.token_ids)
                    count["tokens"] += prepared.num_tokens
                expected = count["tokens"] * characters / count["characters"]
                bar.total = round(expected) * len(self.encoders)
                for encoder in self.encoders:
                    self._encode(encoder, batch, count, bar)
                self.catalog.put([prepared.entry for prepared in batch if prepared.commit])
        return AddReport(
            documents=count["documents"],
            replaced=count["replaced"],
            unchanged=count["unchanged"],
            chunks=count["chunks"],
            tokens=count["tokens"],
            encoded=count["encoded"],
            reused=count["chunks"] * len(self.encoders) - count["encoded"],
            encoded_tokens=count["encoded_tokens"],
            skipped=tuple(skipped),
            seconds=time.perf_counter() - start,
        )

    def _keep_prefix(self) -> None:
        """Make the KV of the template's prefix durable: every prompt begins with it."""
        prefix, nothing = self._prefix, self._prefix[:0]
        if not len(prefix):
            return
        key = chunk_key(self.model, "isolated", nothing, prefix)
        if self.store.head([key], on_corrupt="skip") == [None]:
            record = provenance(self.model, "isolated", nothing, prefix)
            for _, kv in encode_chunks(self.model, "isolated", nothing, [prefix]):
                self.store.put(key, kv, record=record)

    def _batches(
        self, documents: Iterable[Document], skipped: list[BadDocument]
    ) -> Iterator[list[_Prepared]]:
        """Prepared documents in batches of about BATCH_TOKENS; refused ones go to ``skipped``."""
        batch: list[_Prepared] = []
        num_tokens = 0
        for document in documents:
            try:
                batch.append(self._prepare(document))
            except DocumentError as error:
                skipped.append(BadDocument(document.id, str(error)))
                continue
            num_tokens += batch[-1].num_tokens
            if num_tokens >= BATCH_TOKENS:
                yield batch
                batch, num_tokens = [], 0
        if batch:
            yield batch

    def _prepare(self, document: Document) -> _Prepared:
        """Cut a document, or take the cuts from the catalog when it stands there unchanged."""
        digest = _digest(document)
        known = self.catalog.document(document.id)
        same = known is not None and known.digest == digest
        if known is not None and known.file != document.file:
            if known.file is None or not os.path.exists(known.file):
                same = False  # the file has moved: record where to
            elif not same:
                raise DocumentError(
                    f"the id belongs to {known.file}; give one of the two another name or id"
                )
        if same:
            chunks = self.catalog.chunks(document.id)
        else:
            chunks = split(document.text, self._tokenizer, self.chunking)
        token_ids = tuple(
            self.template.chunk_ids(self._tokenizer, chunk.ids, document.title) for chunk in chunks
        )
        room = self.model.config.max_positions - len(self._prefix)
        longest = max(len(ids) for ids in token_ids)
        if longest > room:
            raise DocumentError(
                f"a chunk has {longest} tokens with the template's markers, and the model's "
                f"context leaves {room} behind the prefix; use smaller chunks"
            )
        keys = {
            encoder: [chunk_key(self.model, encoder, self._prefix, ids) for ids in token_ids]
            for encoder in self.encoders
        }
        held = self.catalog.keys(document.id)
        commit = not same or any(held.get(encoder) != keys[encoder] for encoder in keys)
        replaces = known is not None and not same
        return _Prepared(Entry(document, digest, chunks, keys), token_ids, same, replaces, commit)

    def _encode(
        self,
        encoder: str,
        batch: Iterable[_Prepared],
        count: collections.Counter[str],
        bar: "tqdm[Any]",
    ) -> None:
        """Make the KV of every chunk of the batch durable under one encoder."""
        wanted: dict[str, HostArray] = {}
        total = 0
        for prepared in batch:
            total += prepared.num_tokens
            wanted.update(zip(prepared.entry.keys[encoder], prepared.token_ids, strict=True))
        records = self.store.head(list(wanted), on_corrupt="skip")
        missing = [key for key, record in zip(wanted, records, strict=True) if record is None]
        chunks = [wanted[key] for key in missing]
        bar.update(total - sum(len(ids) for ids in chunks))
        with self.store.writer() as writer:
            for index, kv in encode_chunks(self.model, encoder, self._prefix, chunks):
                record = provenance(self.model, encoder, self._prefix, chunks[index])
                writer.submit(missing[index], kv, record)
                count["encoded"] += 1
                count["encoded_tokens"] += len(chunks[index])
                bar.update(len(chunks[index]))


def _accept(documents: Iterable[Source]) -> tuple[list[Document], list[BadDocument]]:
    """Sort what was given into documents and refusals; an id counts the first time only."""
    if isinstance(documents, str | Path | Document | Mapping):
        raise DocumentError(
            f"documents is one {type(documents).__name__}; expected a list: of Document, of text, "
            "or of pathlib.Path to read"
        )
    accepted: dict[str, Document] = {}
    skipped: list[BadDocument] = []
    for found in _documents(documents):
        if isinstance(found, BadDocument):
            skipped.append(found)
        elif found.id in accepted:
            first = accepted[found.id].file or "an earlier document"
            reason = f"{first} has this id already; give one of the two another name or id"
            skipped.append(BadDocument(found.file or found.id, f"id {found.id!r}: {reason}"))
        else:
            accepted[found.id] = found
    return list(accepted.values()), skipped


def _documents(given: Iterable[Source]) -> Iterator[Document | BadDocument]:
    for index, item in enumerate(given):
        if not isinstance(item, Document | BadDocument | str | Path | Mapping):
            raise DocumentError(
                f"documents[{index}] is a {type(item).__name__}; expected a Document, a text, a "
                'pathlib.Path or a mapping with a "text"'
            )
        try:
            if isinstance(item, Document | BadDocument):
                yield item
            elif isinstance(item, Path):
                yield from read_paths([item])
            elif isinstance(item, str):
                yield Document(text_id(item), item)
            else:
                yield document_from_mapping(item)
        except DocumentError as error:
            yield BadDocument(f"documents[{index}]", str(error))


def _digest(document: Document) -> str:
    content = [document.title, document.text, document.metadata]
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

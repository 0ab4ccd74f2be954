"""Documents split into chunks and looked up in the catalog, ahead of who encodes them."""

import collections
import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence

from jaxrag.base.errors import DocumentError
from jaxrag.base.types import HostArray
from jaxrag.kv.store import content_id
from jaxrag.library.catalog import Catalog, NewDocument
from jaxrag.library.documents import BadDocument, Document, Intake
from jaxrag.library.documents.chunking import Chunk, Chunking, split
from jaxrag.models.text.prompts import PromptTemplate
from jaxrag.models.text.tokenizer import Tokenizer
from jaxrag.reuse.encode import ChunkEncoding

_AHEAD_CHARACTERS = 1 << 18  # of documents that are prepared while others are encoded
_AHEAD_DOCUMENTS = 1024
Cut = Callable[[Document], Sequence[Chunk]]  # the chunks of a document

_THREADS = 2  # the tokenizer works outside of the interpreter lock


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A document that is ready to be encoded."""

    entry: NewDocument  # without chunk ids
    token_ids: tuple[HostArray, ...]  # per chunk [T] int32, as it is in the prompt
    unchanged: bool  # the catalog holds it as it is
    replaces: bool  # the catalog holds something else under its id
    commit: bool  # whether the catalog must change

    @property
    def num_tokens(self) -> int:
        """Tokens of all chunks, the template's markers included."""
        return sum(len(ids) for ids in self.token_ids)


_Waiting = BadDocument | tuple[Document, concurrent.futures.Future[Prepared]]


@dataclasses.dataclass(frozen=True)
class Preparer:
    """How the documents of one knowledge base are split, and which keys their chunks get.

    Attributes:
      chunking: sizes and places of the chunks.
      encoders: the KV variants that every chunk gets; none that sees neighbours.
      catalog: where documents are looked up.
      cut: gives the chunks of a document; None: it is split here.
    """

    encoding: ChunkEncoding
    template: PromptTemplate
    chunking: Chunking
    encoders: tuple[str, ...]
    catalog: Catalog
    cut: Cut | None = None

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's; TokenizerError when it takes no text."""
        return self.encoding.model.text_tokenizer()

    def prepare_ahead(self, intake: Intake) -> Iterator[Prepared | BadDocument]:
        """Everything that is taken in, in its order, ready while the caller works on earlier ones.

        At most _AHEAD_CHARACTERS, _AHEAD_DOCUMENTS and one document are held.
        """
        waiting: collections.deque[_Waiting] = collections.deque()
        ahead = 0
        threads = concurrent.futures.ThreadPoolExecutor(_THREADS, "jaxrag-prepare")
        try:
            for document in intake:
                if isinstance(document, BadDocument):
                    waiting.append(document)
                else:
                    waiting.append((document, threads.submit(self.prepare, document)))
                    ahead += len(document.text)
                while waiting and (ahead > _AHEAD_CHARACTERS or len(waiting) > _AHEAD_DOCUMENTS):
                    ahead -= _characters(waiting[0])
                    yield _result(waiting.popleft())
            while waiting:
                yield _result(waiting.popleft())
        finally:
            threads.shutdown(wait=True, cancel_futures=True)

    def prepare(self, document: Document) -> Prepared:
        """Split a document, or take its chunks from the catalog when it is there unchanged."""
        digest = document_digest(document)
        known = self.catalog.document(document.id)
        same = known is not None and known.digest == digest
        if known is not None and known.file != document.file:
            if known.file is None or not os.path.exists(known.file):
                same = False  # the file has moved: record where to
            elif not same:
                raise DocumentError(
                    f"the id belongs to {known.file}; give one of the two another name or id"
                )
        chunks: Sequence[Chunk]
        if same:
            chunks = self.catalog.chunks(document.id)
        elif self.cut is not None:
            chunks = self.cut(document)
        else:
            chunks = split(document.text, self.tokenizer, self.chunking, document.pages)
        token_ids = tuple(
            self.template.chunk_ids(self.tokenizer, chunk.ids, document.title) for chunk in chunks
        )
        fronts = map(self.encoding.num_before, self.encoders)
        before = max((len(self.encoding.prefix), *fronts))
        room = self.encoding.model.max_encoded - before
        longest = max(len(ids) for ids in token_ids)
        if longest > room:
            raise DocumentError(
                f"a chunk has {longest} tokens with the template's markers, and the model's "
                f"context leaves {room} behind the {before} that precede it; use smaller chunks"
            )
        keys = {
            encoder: [self.encoding.key(encoder, ids) for ids in token_ids]
            for encoder in self.encoders
        }
        held = self.catalog.keys(document.id)
        commit = not same or any(held.get(encoder) != keys[encoder] for encoder in keys)
        replaces = known is not None and not same
        content_ids = [content_id(self.tokenizer.digest, ids) for ids in token_ids]
        entry = NewDocument(document, digest, chunks, keys, content_ids, chunk_ids=())
        return Prepared(entry, token_ids, same, replaces, commit)


def _characters(waiting: _Waiting) -> int:
    return 0 if isinstance(waiting, BadDocument) else len(waiting[0].text)


def _result(waiting: _Waiting) -> Prepared | BadDocument:
    if isinstance(waiting, BadDocument):
        return waiting
    document, prepared = waiting
    try:
        return prepared.result()
    except DocumentError as error:
        return BadDocument(document.id, str(error))


def document_digest(document: Document) -> str:
    """Of its title, text, metadata and pages."""
    content = [document.title, document.text, document.metadata, document.pages]
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

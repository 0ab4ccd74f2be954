"""How new vector stores are made: as a knowledge base that is served, or for a method."""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxrag.base.errors import KnowledgeBaseError
from jaxrag.base.shapes import row_length
from jaxrag.engine.engine import Engine
from jaxrag.library.embed import Embedder
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.library.knowledge_base.settings import DEFAULT_CHUNK_TOKENS, DEFAULT_ENCODERS
from jaxrag.library.options import ChunkBy
from jaxrag.models.model import Model
from jaxrag.models.text.prompts import PromptTemplate
from jaxrag.reuse.encode import encode_chunks, encoder_named
from jaxrag.reuse.encode.packed import ROW_TOKENS
from jaxrag.reuse.methods import Method


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a new vector store is made with; None leaves it to ``KnowledgeBase.open``.

    Attributes:
      template: wraps chunks.
      chunk_tokens: largest chunk.
      overlap: tokens that consecutive chunks share.
      chunk_by: what a chunk is made of.
      encoders: the KV variants that are kept.
      embedder: makes vectors of chunks and questions.
      index: kind of vector index.
    """

    template: PromptTemplate | None = None
    chunk_tokens: int | None = None
    overlap: int | None = None
    chunk_by: ChunkBy | None = None
    encoders: tuple[str, ...] | None = None
    embedder: Embedder | None = None
    index: str | None = None

    @classmethod
    def like(cls, base: KnowledgeBase) -> "Recipe":
        """As a knowledge base was made."""
        cut, embedder = base.chunking, None
        with contextlib.suppress(KnowledgeBaseError):  # it is not at hand, and none is made with it
            embedder = base.embedder
        index = None if embedder is None else base.index
        return cls(
            base.template, cut.chunk_tokens, cut.overlap, cut.by, base.encoders, embedder, index
        )

    @classmethod
    def of(cls, methods: Mapping[str, Method]) -> "Recipe":
        """For the first of the methods that reuses chunks: with the KV that it reads."""
        encoders = (method.encoder for method in methods.values() if method.encoder is not None)
        first = next(encoders, None)
        return cls(encoders=None if first is None else (first,))

    def open(
        self, folder: Path, model: Model, salt: str, secret: bytes | None = None
    ) -> KnowledgeBase:
        """Make a knowledge base in a folder, or open what is there; raises what it raises."""
        return KnowledgeBase.open(
            folder,
            model,
            template=self.template,
            chunk_tokens=self.chunk_tokens,
            overlap=self.overlap,
            chunk_by=self.chunk_by,
            encoders=self.encoders,
            embedder=self.embedder,
            index=self.index,
            salt=salt,
            secret=secret,
            mode="rw",
        )

    def warm_up(self, model: Model, engine: Engine) -> int:
        """Compile the encoding of its chunks; how many widths of rows.

        Rows of every width that its chunks may fill, run by the engine, as indexing does. Variants
        that see neighbours are compiled when they are first needed. Nothing is kept.
        """
        if model.tokenizer is None:
            return 0
        template = self.template or model.prompt_format()
        prefix = template.prefix_ids(model.tokenizer)
        marked = len(template.chunk_ids(model.tokenizer, np.zeros(0, np.int32)))
        room = min(model.config.max_positions, ROW_TOKENS) - len(prefix)
        size = min(marked + (self.chunk_tokens or DEFAULT_CHUNK_TOKENS), room)
        counts = {
            row_length(len(prefix) + count * size): count
            for count in range(1, max(2, ROW_TOKENS // size))
        }
        for encoder in self.encoders or DEFAULT_ENCODERS:
            if encoder_named(encoder).sees_neighbours:
                continue
            for count in counts.values():
                chunks = [np.zeros(size, np.int32)] * count
                rows = functools.partial(encode_chunks, model, encoder, prefix, chunks)
                engine.spare(lambda rows=rows: sum(1 for _ in rows()))  # type: ignore[misc]
        return len(counts)

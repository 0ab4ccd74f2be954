"""How new vector stores are made: as a knowledge base that is served, or for a method."""

import contextlib
import functools
from collections.abc import Mapping

import jax
import numpy as np

from jaxrag.base.errors import KnowledgeBaseError
from jaxrag.base.shapes import row_length
from jaxrag.engine.engine import engine_of
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.library.knowledge_base.settings import DEFAULT_CHUNK_TOKENS, default_encoders
from jaxrag.library.options import KnowledgeBaseOptions
from jaxrag.models.model import Model
from jaxrag.models.text.prompts import BARE, template_named
from jaxrag.reuse.encode import (
    default_primer,
    encode_chunks,
    encoder_named,
    front,
    primer_named,
)
from jaxrag.reuse.encode.apart import encode_apart, widths_apart
from jaxrag.reuse.encode.packed import ROW_TOKENS
from jaxrag.reuse.methods import Method
from jaxrag.serve.compatibility import chosen_primer


def recipe_like(base: KnowledgeBase) -> KnowledgeBaseOptions:
    """As a knowledge base was made."""
    cut, embedder = base.chunking, None
    with contextlib.suppress(KnowledgeBaseError):  # it is not at hand, and none is made with it
        embedder = base.embedder
    return KnowledgeBaseOptions(
        template=base.template,
        chunk_tokens=cut.chunk_tokens,
        overlap=cut.overlap,
        chunk_by=cut.by,
        encoders=base.encoders,
        primer=base.primer,
        embedder=embedder,
        index=None if embedder is None else base.index,
    )


def recipe_for(methods: Mapping[str, Method]) -> KnowledgeBaseOptions:
    """For the first of the methods that reuses chunks: with the KV that it reads."""
    encoders = (method.encoder for method in methods.values() if method.encoder is not None)
    first = next(encoders, None)
    return KnowledgeBaseOptions(encoders=None if first is None else (first,))


def warm_up(recipe: KnowledgeBaseOptions, model: Model) -> int:
    """Compile the encoding of its chunks; how many widths of rows.

    Rows of every width that its chunks may fill, run by the engine, as indexing does. Variants
    that see neighbours are compiled when they are first needed. Nothing is kept.
    """
    if model.tokenizer is None:
        return 0
    template = recipe.template or model.prompt_format()
    prefix = template.prefix_ids(model.tokenizer)
    marked = len(template.chunk_ids(model.tokenizer, np.zeros(0, np.int32)))
    widths = set[int]()
    for encoder in recipe.encoders or default_encoders(model):
        chosen, visible, reader = encoder_named(encoder), prefix, model
        if chosen.sees_neighbours:
            continue
        if chosen.sees_primer:
            primer = default_primer() if recipe.primer is None else primer_named(recipe.primer)
            held = primer.tokens(template, model.tokenizer)
            reader, visible = front(model, chosen, prefix, held)
        room = min(model.config.max_positions, ROW_TOKENS) - len(visible)
        size = min(marked + (recipe.chunk_tokens or DEFAULT_CHUNK_TOKENS), room)
        counts = {
            row_length(len(visible) + count * size): count
            for count in range(1, max(2, ROW_TOKENS // size))
        }
        for count in counts.values():
            chunks = [np.zeros(size, np.int32)] * count
            rows = functools.partial(encode_chunks, reader, encoder, visible, chunks)
            engine_of(model).spare(lambda rows=rows: sum(1 for _ in rows()))  # type: ignore[misc]
        widths.update(counts)
    return len(widths)


def warm_up_passages(model: Model, method: Method) -> int:
    """Compile the encoding of passages that a method reads; how many programs. Nothing is kept."""
    if method.encoder is None or jax.process_count() > 1:
        return 0
    tokenizer, primer = model.text_tokenizer(), chosen_primer(None, method)
    first = None if primer is None else primer.tokens(template_named(BARE), tokenizer)
    reader, visible = front(model, encoder_named(method.encoder), tokenizer.leading_ids, first)
    lengths = widths_apart(model, len(visible))
    for length in lengths:
        rows = functools.partial(encode_apart, reader, visible, [np.zeros(length, np.int32)])
        engine_of(model).spare(lambda rows=rows: sum(1 for _ in rows()))  # type: ignore[misc]
    return len(lengths)

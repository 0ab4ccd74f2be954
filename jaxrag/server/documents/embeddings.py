"""POST /v1/embeddings: vectors of texts."""

import base64
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field

from jaxrag.base.types import HostArray
from jaxrag.library.embed import BertEmbedder, Embedder
from jaxrag.server.errors import invalid
from jaxrag.server.fields import Count, EmbeddedText, Named, listed
from jaxrag.server.state.entry import Call
from jaxrag.server.state.state import ServerState
from jaxrag.server.tenants import Access

_MOST_TEXTS = 2048


def _no_ids(given: Any) -> Any:
    if isinstance(given, list) and given and not isinstance(given[0], str):
        raise invalid(
            "input holds token ids; send texts (LangChain: check_embedding_ctx_length=False)",
            "input",
        )
    return listed(given)


class _EmbeddingFields(Named):
    input: Annotated[
        list[EmbeddedText],
        Field(min_length=1, max_length=_MOST_TEXTS, fail_fast=True),
        BeforeValidator(_no_ids),
    ]
    encoding_format: Literal["float", "base64"] = "float"
    input_type: Literal["document", "passage", "query"] = "passage"
    dimensions: Count | None = None


def create_embeddings(call: Call) -> dict[str, Any]:
    """Vectors of texts, as base64 of little-endian float32 or as numbers."""
    state, fields = call.state, call.read(_EmbeddingFields)
    texts, form, dimensions = list(fields.input), fields.encoding_format, fields.dimensions
    kind = "query" if fields.input_type == "query" else "passage"
    embedder, of = _embedder(state, call.access, call.named_base())
    if dimensions not in (None, embedder.dim):
        raise invalid(
            f"dimensions={dimensions}: this embedder makes vectors of {embedder.dim}; leave it out",
            "dimensions",
        )
    vectors = embedder(texts, kind)  # type: ignore[arg-type]
    tokens = _tokens(state, embedder, texts)
    return {
        "object": "list",
        "model": f"{state.name}@{of}",
        "data": [
            {"object": "embedding", "index": i, "embedding": _shown(vector, form)}
            for i, vector in enumerate(vectors)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _embedder(state: ServerState, access: Access, name: str | None) -> tuple[Embedder, str]:
    """That of the named knowledge base, or of the first that has one, and the base's name."""
    names = state.readable(access) if name is None else [name]
    for one in names:
        base = state.library.knowledge_base(access, one, uses=name is not None)
        if base.index is not None and (embedder := base.embedder) is not None:
            return embedder, one
    which = "no knowledge base here" if name is None else f"the knowledge base {name!r}"
    raise invalid(
        f"{which} has an embedder; make one with `jaxrag ingest ... --embedder DIR`"
        if name is None
        else f"{which} has no embedder; give it one with `jaxrag ingest ... --embedder DIR`",
        "model",
    )


def _tokens(state: ServerState, embedder: Embedder, texts: list[str]) -> int:
    """Tokens as the embedder counts them, or the model where the embedder is a function."""
    if isinstance(embedder, BertEmbedder):
        ids, _ = embedder.tokenizer.encode(texts)
        return sum(map(len, ids))
    tokenizer = state.model.tokenizer
    return 0 if tokenizer is None else sum(len(tokenizer.encode(text)) for text in texts)


def _shown(vector: HostArray, form: str) -> Any:
    if form == "base64":
        return base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes()).decode()
    return [float(value) for value in vector]

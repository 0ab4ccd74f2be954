"""Text embedders for search by meaning."""

from jaxrag.library.embed.bert import Pooling
from jaxrag.library.embed.embedder import (
    BertEmbedder,
    Embedder,
    FunctionEmbedder,
    Kind,
    as_embedder,
    load_embedder,
)
from jaxrag.library.embed.hf import Prefixes

__all__ = [
    "BertEmbedder",
    "Embedder",
    "FunctionEmbedder",
    "Kind",
    "Pooling",
    "Prefixes",
    "as_embedder",
    "load_embedder",
]

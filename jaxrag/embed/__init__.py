"""Text embedders for search by meaning."""

from jaxrag.embed.bert import Pooling
from jaxrag.embed.embedder import (
    BertEmbedder,
    Embedder,
    FunctionEmbedder,
    Kind,
    as_embedder,
    load_embedder,
)
from jaxrag.embed.sentence import Prefixes

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

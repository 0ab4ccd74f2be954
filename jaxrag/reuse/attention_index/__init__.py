"""Indexes over cached keys that know what queries want (RetrievalAttention, section 3.2).

RetrievalAttention: Accelerating Long-Context LLM Inference via Vector Retrieval (arXiv:2409.10516).
FAISS's inverted file and its HNSW are there to compare with.
"""

from jaxrag.reuse.attention_index.bank import QueryBank, rotated, rotated_unscaled, spread
from jaxrag.reuse.attention_index.build import build
from jaxrag.reuse.attention_index.index import AttentionIndex
from jaxrag.reuse.attention_index.keys import Keys
from jaxrag.reuse.attention_index.knn import nearest, nearest_on_device
from jaxrag.reuse.attention_index.search import FoundKeys, Searcher, open_index
from jaxrag.reuse.attention_index.spec import (
    INDEXES,
    Exact,
    Hnsw,
    Ivf,
    ProjectedGraph,
    QueryLists,
    Spec,
    name_of,
    spec_from,
    table_of,
)

__all__ = [
    "INDEXES",
    "AttentionIndex",
    "Exact",
    "FoundKeys",
    "Hnsw",
    "Ivf",
    "Keys",
    "ProjectedGraph",
    "QueryBank",
    "QueryLists",
    "Searcher",
    "Spec",
    "build",
    "name_of",
    "nearest",
    "nearest_on_device",
    "open_index",
    "rotated",
    "rotated_unscaled",
    "spec_from",
    "spread",
    "table_of",
]

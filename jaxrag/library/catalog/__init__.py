"""The catalog: the truth about a knowledge base's documents and chunks, in one SQLite file."""

from jaxrag.library.catalog.catalog import Catalog
from jaxrag.library.catalog.rows import ChunkTokens, DocumentEntry, Hit, KeyedChunk, NewDocument

__all__ = ["Catalog", "ChunkTokens", "DocumentEntry", "Hit", "KeyedChunk", "NewDocument"]

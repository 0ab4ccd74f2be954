"""KV in memory now: the paged pool on the device and what lies beside it on the host.

Keys enter the pool rotated to their place inside their chunk; a request's PageTable says where in
its prompt each page is. Pages of a chunk are immutable and shared by every request that uses
it; pages a request owns (final block, generated tokens, everything under full attention) are
released when it ends.
"""

from jaxrag.kv.cache.cache import PagedCache
from jaxrag.kv.cache.pages import CachedChunk, PageAllocator, pages_for, whole_pages
from jaxrag.kv.cache.pool import PAGE, PagePool, empty_pool
from jaxrag.kv.cache.tables import (
    MIN_TABLE_PAGES,
    ChunkAttention,
    ChunkPages,
    PageTable,
    TableBuilder,
    batch_table,
    chunk_pages,
    table_width,
)

__all__ = [
    "MIN_TABLE_PAGES",
    "PAGE",
    "CachedChunk",
    "ChunkAttention",
    "ChunkPages",
    "PageAllocator",
    "PagePool",
    "PageTable",
    "PagedCache",
    "TableBuilder",
    "batch_table",
    "chunk_pages",
    "empty_pool",
    "pages_for",
    "table_width",
    "whole_pages",
]

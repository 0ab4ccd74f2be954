"""Chunk KV by key: bit-exact, verified on every read, shared by any number of processes."""

from jaxrag.store.assemble import Assembled
from jaxrag.store.base import KVStore, Stats
from jaxrag.store.chunk_store import ChunkStore
from jaxrag.store.keys import chunk_key, content_id, context_id, fingerprint
from jaxrag.store.memory import MemoryStore
from jaxrag.store.record import KVLayout, Provenance, Record
from jaxrag.store.writer import ChunkWriter, PutResult

__all__ = [
    "Assembled",
    "ChunkStore",
    "ChunkWriter",
    "KVLayout",
    "KVStore",
    "MemoryStore",
    "Provenance",
    "PutResult",
    "Record",
    "Stats",
    "chunk_key",
    "content_id",
    "context_id",
    "fingerprint",
]

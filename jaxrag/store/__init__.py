"""Chunk KV by key: bit-exact, verified on every read, shared by any number of processes."""

from jaxrag.store.attempts import Attempt, Shard
from jaxrag.store.base import KVStore, Stats
from jaxrag.store.chunk_store import ChunkStore
from jaxrag.store.keys import chunk_key, content_id, context_id, derive, fingerprint
from jaxrag.store.layout import HeadShare, KVLayout
from jaxrag.store.memory import MemoryStore
from jaxrag.store.quantise import as_stored
from jaxrag.store.read_through import ReadThrough
from jaxrag.store.reading import Assembled, Refused
from jaxrag.store.record import AuxArray, Provenance, Record
from jaxrag.store.scrub import ScrubReport
from jaxrag.store.shared import SharedStore
from jaxrag.store.sweep import SweepReport
from jaxrag.store.writer import ChunkWriter, PutResult

__all__ = [
    "Assembled",
    "Attempt",
    "AuxArray",
    "ChunkStore",
    "ChunkWriter",
    "HeadShare",
    "KVLayout",
    "KVStore",
    "MemoryStore",
    "Provenance",
    "PutResult",
    "ReadThrough",
    "Record",
    "Refused",
    "ScrubReport",
    "Shard",
    "SharedStore",
    "Stats",
    "SweepReport",
    "as_stored",
    "chunk_key",
    "content_id",
    "context_id",
    "derive",
    "fingerprint",
]

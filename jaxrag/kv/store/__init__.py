"""Chunk KV by key: bit-exact, verified on every read, shared by any number of processes."""

from jaxrag.kv.store.attempts import Attempt, WrittenShard
from jaxrag.kv.store.base import KVStore
from jaxrag.kv.store.chunk_store import ChunkStore
from jaxrag.kv.store.keys import chunk_key, content_id, context_id, derive, fingerprint
from jaxrag.kv.store.layout import HeadShare, KVLayout
from jaxrag.kv.store.memory import MemoryStore
from jaxrag.kv.store.quantise import as_stored
from jaxrag.kv.store.read_through import ReadThrough
from jaxrag.kv.store.reading import Assembled, Refused
from jaxrag.kv.store.record import AuxArray, Provenance, Record
from jaxrag.kv.store.scrub import ScrubReport
from jaxrag.kv.store.shared import OwnRead, SharedStore
from jaxrag.kv.store.sweep import SweepReport
from jaxrag.kv.store.writer import ChunkWriter, PutResult

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
    "OwnRead",
    "Provenance",
    "PutResult",
    "ReadThrough",
    "Record",
    "Refused",
    "ScrubReport",
    "SharedStore",
    "SweepReport",
    "WrittenShard",
    "as_stored",
    "chunk_key",
    "content_id",
    "context_id",
    "derive",
    "fingerprint",
]

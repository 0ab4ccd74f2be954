"""Indexes that chunks were stored with, opened for the requests that hold these chunks."""

import dataclasses
import threading
from typing import NamedTuple

import cachetools

from jaxrag.attention_index import Searcher, open_index
from jaxrag.attention_index.document import indexes_nbytes, is_indexed, load_layer, stored_spec
from jaxrag.attention_index.spec import STORAGE_BYTES
from jaxrag.config import ModelConfig
from jaxrag.errors import ChunkCorrupt, ChunkMissing, RetrievalError
from jaxrag.store import KVStore, Record
from jaxrag.types import HostArray

KEPT_BYTES = 4 << 30  # of indexes that no request needs at the moment

Layers = list[list[Searcher]]  # [layer][KV head]


@dataclasses.dataclass(frozen=True, eq=False)
class Carried:
    """A chunk in a request's prompt whose KV came from a store.

    Attributes:
      store: where it is.
      key: of the chunk there.
      position: of its first token in the prompt.
      slots: [T] int32 of its tokens in the request.
    """

    store: KVStore
    key: str
    position: int
    slots: HostArray


@dataclasses.dataclass(frozen=True)
class Known:
    """A chunk that is stored with indexes now. Made by ``StoredIndexes.known``.

    Attributes:
      record: of the chunk.
      nbytes: of its indexes, with their keys.
    """

    record: Record
    nbytes: int


class _Opened(NamedTuple):
    attempt: str
    nbytes: int  # of the searchers
    layers: Layers


class StoredIndexes:
    """Open indexes by chunk; those used last are kept for later requests.

    Indexes larger than the bound are not kept. Safe to share between threads.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        """Keep at most ``kept_bytes``."""
        self._open: cachetools.LRUCache[str, _Opened] = cachetools.LRUCache(
            kept_bytes, lambda opened: opened.nbytes
        )
        self._lock = threading.Lock()

    def known(self, chunk: Carried, config: ModelConfig) -> Known | None:
        """The indexes that the store holds with a chunk; None where it holds none.

        Raises ChunkCorrupt, ChunkMissing and RetrievalError for what is there and damaged.
        """
        record = chunk.store.head([chunk.key])[0]
        if record is None or not is_indexed(record):
            with self._lock:
                self._open.pop(chunk.key, None)  # it has left the store
            return None
        opened = self._opened(chunk.key, record)
        if opened is not None:
            return Known(record, opened.nbytes)
        width = STORAGE_BYTES[stored_spec(chunk.store, chunk.key).storage]
        keys = config.num_layers * record.tokens * config.num_kv_heads * config.head_dim
        return Known(record, keys * width + indexes_nbytes(record))

    def open(self, chunk: Carried, known: Known, config: ModelConfig) -> Layers:
        """The searchers of a chunk, read from the store unless they were kept.

        Raises ChunkCorrupt, ChunkMissing and RetrievalError as ``document.load_layer``.
        """
        opened = self._opened(chunk.key, known.record)
        if opened is not None:
            return opened.layers
        layers = [
            [open_index(index) for index in load_layer(chunk.store, chunk.key, layer, config.rope)]
            for layer in range(config.num_layers)
        ]
        nbytes = sum(searcher.nbytes for layer in layers for searcher in layer)
        with self._lock:
            self._open.pop(chunk.key, None)  # of another attempt
            if nbytes <= self._open.maxsize:
                self._open[chunk.key] = _Opened(known.record.attempt, nbytes, layers)
        return layers

    def _opened(self, key: str, record: Record) -> _Opened | None:
        """The indexes of a chunk if they were kept and are those of this record."""
        with self._lock:
            opened = self._open.get(key)
        return opened if opened and opened.attempt == record.attempt else None


DAMAGED = (ChunkCorrupt, ChunkMissing, RetrievalError)  # what keeps a stored index from being used

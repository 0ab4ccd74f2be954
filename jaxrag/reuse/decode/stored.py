"""Indexes that chunks were stored with, opened for the requests that hold these chunks."""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import cachetools

from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import ChunkCorrupt, ChunkMissing, RetrievalError
from jaxrag.base.types import HostArray
from jaxrag.kv.store.base import KVStore
from jaxrag.kv.store.layout import WHOLE, HeadShare
from jaxrag.kv.store.ledger import StoredChunk
from jaxrag.kv.store.record import Record
from jaxrag.reuse.attention_index import AttentionIndex, Searcher, open_index
from jaxrag.reuse.attention_index.document import (
    IN_PLACE,
    indexes_nbytes,
    is_indexed,
    load_layer,
    stored_spec,
)
from jaxrag.reuse.attention_index.spec import STORAGE_BYTES

KEPT_BYTES = 4 << 30  # of indexes that no request needs at the moment
_KNOWN = 4096  # chunks of which is remembered what indexes they have

Layers = list[list[Searcher]]  # [layer][KV head]


@dataclasses.dataclass(frozen=True, eq=False)
class Carried:
    """A chunk in a request's prompt whose KV came from a store.

    Attributes:
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
      nbytes: of its indexes, with their keys.
      tables: of its indexes where they are searched over keys that lie elsewhere.
    """

    record: Record
    nbytes: int
    tables: int


@dataclasses.dataclass(frozen=True)
class _Opened:
    attempt: str
    nbytes: int  # of the searchers and indexes
    layers: list[list[Any]]


class StoredIndexes:
    """Open indexes by chunk; those used last are kept for later requests.

    Indexes larger than the bound are not kept. Safe to share between threads.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES, share: HeadShare = WHOLE) -> None:
        """Those of a share of the KV heads; configs that are passed are of so many."""
        self._share = share
        # Of a chunk all layers with their keys (-1), and single layers without.
        self._open: cachetools.LRUCache[tuple[str, int], _Opened] = cachetools.LRUCache(
            kept_bytes, lambda opened: opened.nbytes
        )
        self._known: cachetools.LRUCache[str, Known] = cachetools.LRUCache(_KNOWN)
        self._lock = threading.Lock()

    def known(self, chunk: Carried, config: ModelConfig) -> Known | None:
        """The indexes that the store holds with a chunk; None where it holds none.

        Raises ChunkCorrupt, ChunkMissing and RetrievalError for what is there and damaged.
        """
        record = chunk.store.head([chunk.key])[0]
        if record is None or not is_indexed(record):
            with self._lock:  # it has left the store
                self._known.pop(chunk.key, None)
                for at in [at for at in self._open if at[0] == chunk.key]:
                    self._open.pop(at)
            return None
        with self._lock:
            known = self._known.get(chunk.key)
        if known is not None and known.record.attempt == record.attempt:
            return known
        spec = stored_spec(chunk.store, chunk.key)
        tables = indexes_nbytes(StoredChunk.of(record).aux) // self._share.ways
        heads = chunk.store.layout.num_kv_heads  # of the share
        keys = config.num_layers * record.tokens * heads * config.head_dim
        nbytes = keys * STORAGE_BYTES[spec.storage] + tables
        known = Known(record, nbytes, tables if isinstance(spec, IN_PLACE) else nbytes)
        with self._lock:
            self._known[chunk.key] = known
        return known

    def open(self, chunk: Carried, known: Known, config: ModelConfig) -> Layers:
        """The searchers of a chunk, read from the store unless they were kept.

        Raises ChunkCorrupt, ChunkMissing and RetrievalError as ``document.load_layer``.
        """

        def load() -> tuple[Layers, int]:
            layers = [
                [
                    open_index(it)
                    for it in load_layer(
                        chunk.store, chunk.key, layer, config.rope_of(layer), share=self._share
                    )
                ]
                for layer in range(config.num_layers)
            ]
            return layers, sum(searcher.nbytes for layer in layers for searcher in layer)

        return self._kept(chunk, known, -1, load)

    def open_layer(
        self, chunk: Carried, known: Known, layer: int, config: ModelConfig
    ) -> list[AttentionIndex | Searcher]:
        """One layer by KV head: an index without keys where it is searched over those elsewhere.

        A searcher where it has to hold them. Errors as ``open``.
        """

        def load() -> tuple[list[list[AttentionIndex | Searcher]], int]:
            of = (chunk.store, chunk.key, layer, config.rope_of(layer))
            made = load_layer(*of, in_place=True, share=self._share)
            heads = [it if not len(it) else open_index(it) for it in made]
            return [heads], sum(head.nbytes for head in heads)

        return self._kept(chunk, known, layer, load)[0]

    def _kept(
        self, chunk: Carried, known: Known, layer: int, load: Callable[[], tuple[Any, int]]
    ) -> Any:
        """What was kept of a chunk if it is of this record, or loaded now."""
        at = (chunk.key, layer)
        with self._lock:
            opened = self._open.get(at)
        if opened is not None and opened.attempt == known.record.attempt:
            return opened.layers
        layers, nbytes = load()
        with self._lock:
            self._open.pop(at, None)  # of another attempt
            if nbytes <= self._open.maxsize:
                self._open[at] = _Opened(known.record.attempt, nbytes, layers)
        return layers


DAMAGED = (ChunkCorrupt, ChunkMissing, RetrievalError)  # what keeps a stored index from being used

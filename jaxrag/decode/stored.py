"""Indexes that chunks were stored with, opened for the requests that hold these chunks."""

import collections
import dataclasses

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


@dataclasses.dataclass(eq=False)
class StoredIndexes:
    """Open indexes by chunk; those used last are kept for later requests.

    Attributes:
      kept_bytes: of indexes that are kept beyond those in use.
    """

    kept_bytes: int = KEPT_BYTES
    _open: "collections.OrderedDict[str, tuple[str, int, Layers]]" = dataclasses.field(
        default_factory=collections.OrderedDict
    )

    def known(self, chunk: Carried, config: ModelConfig) -> Known | None:
        """The indexes that the store holds with a chunk; None where it holds none.

        Raises ChunkCorrupt, ChunkMissing and RetrievalError for what is there and damaged.
        """
        record = chunk.store.head([chunk.key])[0]
        if record is None or not is_indexed(record):
            self._open.pop(chunk.key, None)  # it has left the store
            return None
        attempt, nbytes, _ = self._open.get(chunk.key, ("", 0, []))
        if attempt != record.attempt:
            width = STORAGE_BYTES[stored_spec(chunk.store, chunk.key).storage]
            keys = config.num_layers * record.tokens * config.num_kv_heads * config.head_dim
            nbytes = keys * width + indexes_nbytes(record)
        return Known(record, nbytes)

    def open(self, chunk: Carried, known: Known, config: ModelConfig) -> Layers:
        """The searchers of a chunk, read from the store unless they were kept.

        Raises ChunkCorrupt, ChunkMissing and RetrievalError as ``document.load_layer``.
        """
        attempt, _, layers = self._open.get(chunk.key, ("", 0, []))
        if attempt != known.record.attempt:
            layers = [
                [
                    open_index(index)
                    for index in load_layer(chunk.store, chunk.key, layer, config.rope)
                ]
                for layer in range(config.num_layers)
            ]
        nbytes = sum(searcher.nbytes for layer in layers for searcher in layer)
        self._open[chunk.key] = (known.record.attempt, nbytes, layers)
        self._open.move_to_end(chunk.key)
        while sum(size for _, size, _ in self._open.values()) > self.kept_bytes:
            self._open.popitem(last=False)
        return layers


DAMAGED = (ChunkCorrupt, ChunkMissing, RetrievalError)  # what keeps a stored index from being used

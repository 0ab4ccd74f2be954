"""Chunk KV in the memory of this process, for requests that bring their own documents."""

import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import cachetools
import numpy as np
from numpy.typing import NDArray

from jaxrag.base.errors import ChunkAbsent, ChunkCorrupt, StoreError
from jaxrag.kv.store.base import DEFAULT_MAX_TOKENS, KVStore, NewChunk
from jaxrag.kv.store.layout import KVLayout
from jaxrag.kv.store.quantise import to_stored
from jaxrag.kv.store.reading import Lookup, ReadRequest, Refused, settle
from jaxrag.kv.store.record import (
    SCALE,
    AuxArray,
    Record,
    digest,
    layer_digests,
    new_attempt,
    new_record,
)
from jaxrag.kv.store.writer import PutResult

_KV = ""  # the name of the KV among the arrays of a chunk


class _Held(NamedTuple):
    record: Record
    arrays: dict[str, NDArray[Any]]


class MemoryStore(KVStore):
    """A ``KVStore`` in a dict.

    Keeps every chunk until it is dropped itself, or, given ``max_bytes``, at most so many bytes as
    stored: the chunks read or put least recently leave first. A chunk beyond the bound is kept
    alone.
    """

    def __init__(
        self,
        fingerprint: str,
        layout: KVLayout,
        *,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        max_bytes: int | None = None,
    ) -> None:
        """Start empty; the other arguments are those of ``ChunkStore.open``."""
        super().__init__(fingerprint, layout, max_tokens)
        self.max_bytes = max_bytes
        bound = math.inf if max_bytes is None else max(1, max_bytes)
        self._chunks: cachetools.LRUCache[str, _Held] = cachetools.LRUCache(
            bound, lambda held: min(held.record.nbytes, bound)
        )
        self._lock = threading.Lock()

    @property
    def private(self) -> bool:
        """It is of this process."""
        return True

    def keys(self) -> Iterator[str]:
        """Every key stored at this moment, ascending."""
        with self._lock:
            return iter(sorted(self._chunks))

    def records(self) -> Iterator[Record]:
        """Every record at this moment, by ascending key."""
        with self._lock:
            return iter([self._peek(key).record for key in sorted(self._chunks)])

    def _put(self, new: NewChunk) -> PutResult:
        key, kv = new.key, new.kv
        with self._lock:
            if key in self._chunks and not new.replace:
                return PutResult(won=False, attempt=None)
        entries = dict(new.described)
        arrays = {name: array.copy() for name, array in new.aux.items()}
        try:
            elements, scale, kept = to_stored(kv, self.layout)
        except StoreError as error:
            raise StoreError(f"chunk {key}: {error}") from None
        arrays[_KV] = kv.copy() if elements is kv else elements
        if scale is not None:
            arrays[SCALE] = scale
            entries[SCALE] = AuxArray(scale.shape, scale.dtype.name, (digest(scale),))
        attempt = new_attempt()
        digests = layer_digests(arrays[_KV])
        tokens = kv.shape[2] - self.layout.rows
        record = new_record(
            key, attempt, tokens, self.layout, new.record, digests, entries, kept=kept
        )
        with self._lock:
            if key in self._chunks and not new.replace:
                return PutResult(won=False, attempt=None)
            self._chunks.pop(key, None)
            self._chunks[key] = _Held(record, arrays)
        return PutResult(won=True, attempt=attempt)

    def _find(self, keys: Sequence[str]) -> dict[str, Lookup]:
        with self._lock:
            found = {key: self._chunks.get(key) for key in keys}
        return {key: held.record if held else _absent(key) for key, held in found.items()}

    def _load(self, requests: Sequence[ReadRequest]) -> list[Refused | None]:
        return [self._load_one(request) for request in requests]

    def _load_one(self, want: ReadRequest) -> Refused | None:
        arrays = self._held(want.record)
        if arrays is None:
            return _absent(want.record.key)  # replaced or dropped since its record was read
        for layer in want.layers:
            stored = arrays[_KV][layer]
            if want.direct:
                target = want.layer_out(layer)
                target[...] = stored
                stored = target
            refused = settle(want, layer, stored[None], arrays.get(SCALE))
            if refused is not None:
                return refused
        return None

    def _read_aux(self, record: Record, name: str) -> NDArray[Any] | Refused:
        arrays = self._held(record)
        if arrays is None:
            return _absent(record.key)
        array: NDArray[Any] = np.copy(arrays[name])
        if digest(array) != record.aux[name].xxh3[0]:
            return ChunkCorrupt(f"chunk {record.key}: auxiliary array {name!r} has changed")
        return array

    def _delete(self, key: str) -> bool:
        with self._lock:
            return self._chunks.pop(key, None) is not None

    def _held(self, record: Record) -> dict[str, NDArray[Any]] | None:
        """The arrays that the record names, unless they were replaced or dropped."""
        with self._lock:
            held = self._peek(record.key) if record.key in self._chunks else None
        return held.arrays if held and held.record.attempt == record.attempt else None

    def _peek(self, key: str) -> _Held:
        """A chunk that is here, not thereby used; the lock is held."""
        return cachetools.Cache.__getitem__(self._chunks, key)


def _absent(key: str) -> ChunkAbsent:
    return ChunkAbsent(f"chunk {key}: not in memory")

"""Chunk KV in the memory of this process, for requests that bring their own documents."""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxrag.errors import ChunkCorrupt, ChunkMissing, StoreError
from jaxrag.store.base import DEFAULT_MAX_TOKENS, Aux, KVStore, Stats
from jaxrag.store.layout import KVLayout
from jaxrag.store.quantise import quantise
from jaxrag.store.reading import Found, Refused, Wanted, settle
from jaxrag.store.record import (
    SCALE,
    AuxArray,
    Provenance,
    Record,
    digest,
    layer_digests,
    new_attempt,
    new_record,
)
from jaxrag.store.writer import PutResult

_KV = ""  # the name of the KV among the arrays of an attempt


class MemoryStore(KVStore):
    """A ``KVStore`` in a dict.

    Keeps every chunk until it is dropped itself, or, given ``max_bytes``, at most so many bytes as
    stored: the chunks read or put least recently leave first.
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
        self._records: OrderedDict[str, Record] = OrderedDict()  # least recently used first
        self._arrays: dict[str, dict[str, NDArray[Any]]] = {}  # by attempt: a record's own bytes
        self._lock = threading.Lock()

    def keys(self) -> Iterator[str]:
        """Every key stored at this moment, ascending."""
        with self._lock:
            return iter(sorted(self._records))

    def records(self, fingerprint: str | None = None) -> Iterator[Record]:
        """Every record at this moment, by ascending key; none of another fingerprint."""
        if fingerprint not in (None, self.fingerprint):
            return iter(())
        with self._lock:
            return iter([self._records[key] for key in sorted(self._records)])

    def stats(self) -> dict[str, Stats]:
        """What is stored, under the one fingerprint there is."""
        return {self.fingerprint: Stats.of(self.records())}

    def _put(
        self,
        key: str,
        kv: NDArray[Any],
        record: Provenance,
        aux: Aux,
        described: Mapping[str, AuxArray],
        replace: bool,
    ) -> PutResult:
        with self._lock:
            if key in self._records and not replace:
                return PutResult(won=False, attempt=None)
        entries = dict(described)
        arrays = {name: array.copy() for name, array in aux.items()}
        if self.layout.stored == "int8":
            try:
                arrays[_KV], arrays[SCALE] = quantise(kv)
            except StoreError as error:
                raise StoreError(f"chunk {key}: {error}") from None
            scale = arrays[SCALE]
            entries[SCALE] = AuxArray(scale.shape, scale.dtype.name, (digest(scale),))
        else:
            arrays[_KV] = kv.copy()
        attempt = new_attempt()
        digests = layer_digests(arrays[_KV])
        new = new_record(key, attempt, kv.shape[2], self.layout, record, digests, entries)
        with self._lock:
            old = self._records.get(key)
            if old is not None and not replace:
                return PutResult(won=False, attempt=None)
            if old is not None:
                del self._arrays[old.attempt]
            self._records[key] = new
            self._records.move_to_end(key)
            self._arrays[attempt] = arrays
            self._evict()
        return PutResult(won=True, attempt=attempt)

    def _find(self, keys: Sequence[str]) -> dict[str, Found]:
        with self._lock:
            held = {key: self._records.get(key) for key in keys}
            for key in held:
                if key in self._records:
                    self._records.move_to_end(key)
        return {key: record or _missing(key) for key, record in held.items()}

    def _load(self, wanted: Sequence[Wanted]) -> list[Refused | None]:
        return [self._load_one(want) for want in wanted]

    def _load_one(self, want: Wanted) -> Refused | None:
        arrays = self._held(want.record)
        if arrays is None:
            return _missing(want.record.key)  # replaced or dropped since its record was read
        for layer in range(*want.layers):
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
            return _missing(record.key)
        array: NDArray[Any] = np.copy(arrays[name])
        if digest(array) != record.aux[name].xxh3[0]:
            return ChunkCorrupt(f"chunk {record.key}: auxiliary array {name!r} has changed")
        return array

    def _delete(self, key: str) -> bool:
        with self._lock:
            record = self._records.pop(key, None)
            if record is not None:
                del self._arrays[record.attempt]
        return record is not None

    def _held(self, record: Record) -> dict[str, NDArray[Any]] | None:
        with self._lock:
            return self._arrays.get(record.attempt)

    def _evict(self) -> None:
        """Drop chunks beyond ``max_bytes``, never the newest; the lock is held."""
        size = sum(record.nbytes for record in self._records.values())
        while self.max_bytes is not None and size > self.max_bytes and len(self._records) > 1:
            _, record = self._records.popitem(last=False)
            del self._arrays[record.attempt]
            size -= record.nbytes


def _missing(key: str) -> ChunkMissing:
    return ChunkMissing(f"chunk {key}: not in memory")

"""Chunk KV in the memory of this process, for requests that bring their own documents."""

import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

from jaxrag.errors import ChunkCorrupt, ChunkMissing
from jaxrag.store.assemble import Found, verify_digests
from jaxrag.store.base import DEFAULT_MAX_TOKENS, KVStore, Stats
from jaxrag.store.record import ATTEMPT_DIGITS, KVLayout, Provenance, Record, new_record
from jaxrag.store.writer import PutResult


class MemoryStore(KVStore):
    """A ``KVStore`` in a dict.

    Keeps every chunk until it is dropped itself, or, given ``max_bytes``, at most so many bytes of
    KV: the chunks read or put least recently leave first.
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
        self._kv: dict[str, NDArray[Any]] = {}  # by attempt, so a record finds its own bytes
        self._lock = threading.Lock()

    def keys(self) -> Iterator[str]:
        """Every key stored at this moment, ascending."""
        with self._lock:
            return iter(sorted(self._records))

    def stats(self) -> dict[str, Stats]:
        """What is stored, under the one fingerprint there is."""
        with self._lock:
            tokens = sum(record.tokens for record in self._records.values())
            stats = Stats(len(self._records), tokens, self.layout.nbytes(tokens), corrupt=0)
        return {self.fingerprint: stats}

    def _put(self, key: str, kv: NDArray[Any], record: Provenance, replace: bool) -> PutResult:
        with self._lock:
            if key in self._records and not replace:
                return PutResult(won=False, attempt=None)
        own = kv.copy()
        attempt = secrets.token_hex(ATTEMPT_DIGITS // 2)
        new = new_record(key, attempt, own, self.layout.dtype, record)
        with self._lock:
            old = self._records.get(key)
            if old is not None and not replace:
                return PutResult(won=False, attempt=None)
            if old is not None:
                del self._kv[old.attempt]
            self._records[key] = new
            self._records.move_to_end(key)
            self._kv[attempt] = own
            self._evict()
        return PutResult(won=True, attempt=attempt)

    def _find(self, keys: Sequence[str]) -> dict[str, Found]:
        with self._lock:
            held = {key: self._records.get(key) for key in keys}
            for key in held:
                if key in self._records:
                    self._records.move_to_end(key)
        return {key: record or _missing(key) for key, record in held.items()}

    def _evict(self) -> None:
        """Drop chunks beyond ``max_bytes``, never the newest; the lock is held."""
        size = sum(kv.nbytes for kv in self._kv.values())
        while self.max_bytes is not None and size > self.max_bytes and len(self._records) > 1:
            _, record = self._records.popitem(last=False)
            size -= self._kv.pop(record.attempt).nbytes

    def _load(
        self, wanted: Sequence[tuple[Record, NDArray[Any]]], verify: bool
    ) -> list[ChunkMissing | ChunkCorrupt | None]:
        answers: list[ChunkMissing | ChunkCorrupt | None] = []
        for record, view in wanted:
            with self._lock:
                kv = self._kv.get(record.attempt)
            if kv is None:
                answers.append(_missing(record.key))  # replaced since its record was read
                continue
            view[...] = kv
            answers.append(verify_digests(record, view) if verify else None)
        return answers


def _missing(key: str) -> ChunkMissing:
    return ChunkMissing(f"chunk {key}: not in memory")

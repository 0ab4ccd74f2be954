"""What every chunk store does, whatever holds the bytes: checked puts, verified assembled gets."""

import abc
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

from jaxrag.errors import ChunkCorrupt, ChunkMissing, StoreError
from jaxrag.store.assemble import (
    Assembled,
    Found,
    OnMissing,
    Verify,
    assemble,
    require_choice,
)
from jaxrag.store.keys import FINGERPRINT_DIGITS, ID_DIGITS, chunk_key, require_hex
from jaxrag.store.record import KVLayout, Provenance, Record
from jaxrag.store.writer import ChunkWriter, PutResult

DEFAULT_MAX_TOKENS = 1 << 17  # of one chunk
DEFAULT_INFLIGHT_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True)
class Stats:
    """How much a store holds under one fingerprint."""

    chunks: int
    tokens: int
    nbytes: int  # of K and V
    corrupt: int  # commit records that were refused; not counted above


class KVStore(abc.ABC):
    """Chunk KV of one model and its settings, by key. Safe to share between threads.

    The KV of a chunk is [L, 2, T, K, H] (axis 1: K before RoPE, V), C-contiguous, in the dtype of
    the layout; what was put comes back bit for bit, or not at all.
    """

    def __init__(self, fingerprint: str, layout: KVLayout, max_tokens: int) -> None:
        """Bind the store to a fingerprint (``keys.fingerprint``) and to the sizes it may hold."""
        require_hex(fingerprint, FINGERPRINT_DIGITS, "fingerprint")
        if type(max_tokens) is not int or max_tokens < 1:
            raise StoreError(f"max_tokens={max_tokens!r}: expected a positive integer")
        self.fingerprint = fingerprint
        self.layout = layout
        self.max_tokens = max_tokens

    @property
    def writable(self) -> bool:
        """Whether chunks may be put."""
        return True

    def put(
        self, key: str, kv: NDArray[Any], *, record: Provenance, replace: bool = False
    ) -> PutResult:
        """Store the KV of one chunk; durable when this returns.

        The first put of a key wins and later ones change nothing, so that every reader of a key
        gets the same bytes. A commit record that is itself damaged does not count as a put.

        Args:
            key: ``chunk_key(fingerprint, record.content_id, record.context_id)``.
            kv: [L, 2, T, K, H] with 0 < T <= max_tokens.
            record: where the KV comes from.
            replace: put over what is committed, for a key whose read was refused. It fails to win
                when somebody else replaced the chunk meanwhile.

        Raises:
            StoreError: the KV does not fit the layout, the key is not the record's, or the storage
                failed. No part of the chunk is visible then.
        """
        expected = chunk_key(self.fingerprint, record.content_id, record.context_id)
        if key != expected:
            raise StoreError(f"chunk {key!r}: its fingerprint and record make the key {expected}")
        self.layout.require(kv, f"chunk {key}: kv")
        if not 0 < kv.shape[2] <= self.max_tokens:
            raise StoreError(
                f"chunk {key}: {kv.shape[2]} tokens, expected 1 to max_tokens={self.max_tokens}"
            )
        if not kv.flags.c_contiguous:
            raise StoreError(f"chunk {key}: kv is strided; pass numpy.ascontiguousarray(kv)")
        return self._put(key, kv, record, replace)

    def writer(self, max_inflight_bytes: int = DEFAULT_INFLIGHT_BYTES) -> ChunkWriter:
        """A context manager that puts in the background, at most so many bytes at a time."""
        return ChunkWriter(self.put, max_inflight_bytes)

    def head(self, keys: Sequence[str], on_corrupt: str = "raise") -> list[Record | None]:
        """The commit records of ``keys``, None where no chunk is committed.

        Raises:
            ChunkCorrupt: a record was refused. With ``on_corrupt="skip"`` it counts as None.
        """
        if on_corrupt not in ("raise", "skip"):
            raise StoreError(f"on_corrupt={on_corrupt!r}: expected one of raise, skip")
        found = self._find(_distinct(keys))
        for reason in found.values():
            if isinstance(reason, ChunkCorrupt) and on_corrupt == "raise":
                raise reason
        records = {key: value for key, value in found.items() if isinstance(value, Record)}
        return [records.get(key) for key in keys]

    def get(
        self, key: str, out: NDArray[Any] | None = None, verify: Verify = "always"
    ) -> NDArray[Any]:
        """The KV of one chunk, [L, 2, T, K, H]; ``get_many`` says what is raised."""
        return self.get_many([key], out, verify=verify).kv

    def get_many(
        self,
        keys: Sequence[str],
        out: NDArray[Any] | None = None,
        on_missing: OnMissing = "raise",
        verify: Verify = "always",
    ) -> Assembled:
        """Read chunks into one buffer, in the order of ``keys``; a repeated key is read once.

        Args:
            keys: the chunks to read.
            out: a buffer [L, 2, S, K, H] with S >= sum T, filled from token 0 on; None makes one.
                Its first two axes may be strided. Only the part returned as ``kv`` has a meaning.
            on_missing: "raise", or "skip" to leave refused chunks out and name them in the result.
            verify: "always" hashes every layer in the buffer; "never" trusts the storage.

        Raises:
            ChunkMissing: no chunk is committed under a key, or its bytes are gone.
            ChunkCorrupt: a record or the bytes of a chunk do not match their digests.
            StoreError: ``out`` does not fit, or the storage failed.
        """
        require_choice(on_missing, OnMissing, "on_missing")
        require_choice(verify, Verify, "verify")
        return assemble(
            self._find(_distinct(keys)),
            self.layout,
            out,
            on_missing,
            lambda wanted: self._load(wanted, verify == "always"),
        )

    @abc.abstractmethod
    def keys(self) -> Iterator[str]:
        """Every key committed under the fingerprint, ascending, streamed."""

    @abc.abstractmethod
    def stats(self) -> dict[str, Stats]:
        """What is stored, per fingerprint."""

    @abc.abstractmethod
    def _put(self, key: str, kv: NDArray[Any], record: Provenance, replace: bool) -> PutResult:
        """Commit a chunk that was checked."""

    @abc.abstractmethod
    def _find(self, keys: Sequence[str]) -> dict[str, Found]:
        """Per key, in order, its record or why there is none. The keys are distinct and valid."""

    @abc.abstractmethod
    def _load(
        self, wanted: Sequence[tuple[Record, NDArray[Any]]], verify: bool
    ) -> list[ChunkMissing | ChunkCorrupt | None]:
        """Fill each view with its record's bytes; per record, why they are refused or None."""


def _distinct(keys: Sequence[str]) -> list[str]:
    distinct = list(dict.fromkeys(keys))
    for key in distinct:
        require_hex(key, ID_DIGITS, "key")
    return distinct

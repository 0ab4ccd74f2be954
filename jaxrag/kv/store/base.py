"""What every chunk store does, whatever holds the bytes: checked puts, verified assembled gets."""

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from jaxrag.base.errors import ChunkCorrupt, StoreError
from jaxrag.kv.store.keys import FINGERPRINT_DIGITS, ID_DIGITS, chunk_key, require_hex
from jaxrag.kv.store.layout import WHOLE, HeadShare, KVLayout
from jaxrag.kv.store.reading import (
    Assembled,
    Lookup,
    OnMissing,
    ReadRequest,
    Refused,
    SomeLayers,
    assemble,
    require_choice,
)
from jaxrag.kv.store.record import AuxArray, Provenance, Record, describe_aux
from jaxrag.kv.store.scrub import ScrubReport, scrub
from jaxrag.kv.store.writer import ChunkWriter, PutResult

DEFAULT_MAX_TOKENS = 1 << 17  # of one chunk
DEFAULT_INFLIGHT_BYTES = 1 << 28

Aux = Mapping[str, NDArray[Any]]


class NewChunk(NamedTuple):
    """A chunk to be committed, which was checked; ``KVStore.put`` says more."""

    key: str
    kv: NDArray[Any]
    record: Provenance
    aux: Aux
    described: Mapping[str, AuxArray]
    replace: bool


class KVStore(abc.ABC):
    """Chunk KV of one model and its settings, by key. Safe to share between threads.

    The KV of a chunk is [L, 2, T, K, H] (axis 1: K before RoPE, V), C-contiguous, in the dtype of
    the layout. What was put comes back bit for bit, or not at all; a layout that stores int8
    gives back, bit for bit, what those integers and their scales stand for.
    """

    def __init__(self, fingerprint: str, layout: KVLayout, max_tokens: int) -> None:
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

    @property
    def private(self) -> bool:
        """Whether other processes see nothing of what is put."""
        return False

    def lease(self, key: str) -> bool:
        """Whether this process may encode a chunk that is missing now: no other does.

        No other may until ``release``, or until this process has not been heard of for
        ``leases.LEASE_SECONDS``. False also where the chunk has come meanwhile: read it again.
        """
        return True

    def release(self, key: str) -> None:  # noqa: B027  most stores have nothing to release
        """A chunk that ``lease`` allowed to encode is put, or will not be; never waits."""

    def put(
        self,
        key: str,
        kv: NDArray[Any],
        *,
        record: Provenance,
        aux: Aux | None = None,
        replace: bool = False,
    ) -> PutResult:
        """Store the KV of one chunk; durable when this returns.

        The first put of a key wins and later ones change nothing, so that every reader of a key
        gets the same bytes. A commit record that is itself damaged does not count as a put.

        Args:
            key: ``chunk_key(fingerprint, record.content_id, record.context_id)``.
            kv: [L, 2, T, K, H] with 0 < T <= max_tokens.
            record: where the KV comes from.
            aux: further arrays to keep with the chunk, by name; ``aux`` reads them.
            replace: put over what is committed, for a key whose read was refused. It fails to win
                when somebody else replaced the chunk meanwhile.

        Raises:
            StoreError: the KV or an array does not fit, the key is not the record's, the KV is to
                be stored as int8 and holds NaN or infinity, or the storage failed. No part of the
                chunk is visible then.
        """
        self._require_key(key, record)
        self.layout.require(kv, f"chunk {key}: kv")
        self._require_tokens(key, kv.shape[2] - self.layout.rows)
        if not kv.flags.c_contiguous:
            raise StoreError(f"chunk {key}: kv is strided; pass numpy.ascontiguousarray(kv)")
        return self._put(NewChunk(key, kv, record, aux or {}, describe_arrays(aux), replace))

    def writer(self, max_inflight_bytes: int = DEFAULT_INFLIGHT_BYTES) -> ChunkWriter:
        """A context manager that puts in the background, at most so many bytes at a time."""
        return ChunkWriter(self.put, max_inflight_bytes)

    def find(self, keys: Iterable[str]) -> dict[str, Lookup]:
        """Per key, in order and each once, its record or the reason why there is none."""
        return self._find(_distinct(keys))

    def head(self, keys: Sequence[str], on_corrupt: str = "raise") -> list[Record | None]:
        """The commit records of ``keys``, None where no chunk is committed.

        Raises:
            ChunkCorrupt: a record was refused. With ``on_corrupt="skip"`` it counts as None.
        """
        if on_corrupt not in ("raise", "skip"):
            raise StoreError(f"on_corrupt={on_corrupt!r}: expected one of raise, skip")
        found = self.find(keys)
        for reason in found.values():
            if isinstance(reason, ChunkCorrupt) and on_corrupt == "raise":
                raise reason
        records = {key: value for key, value in found.items() if isinstance(value, Record)}
        return [records.get(key) for key in keys]

    def get(
        self,
        key: str,
        out: NDArray[Any] | None = None,
        *,
        layers: SomeLayers = None,
    ) -> NDArray[Any]:
        """The KV of one chunk, or of some of its layers.

        ``get_many`` describes the arguments and what is raised.

        Returns:
            [layers, 2, T, K, H].
        """
        return self.get_many([key], out, layers=layers).kv

    def get_many(
        self,
        keys: Sequence[str],
        out: NDArray[Any] | None = None,
        *,
        layers: SomeLayers = None,
        on_missing: OnMissing = "raise",
        share: HeadShare = WHOLE,
    ) -> Assembled:
        """Read chunks into one buffer, in the order of ``keys``; a repeated key is read once.

        Args:
            out: a buffer [layers, 2, S, K / ways, H] with S >= sum T, filled from token 0 on; None
                makes one. Its first two axes may be strided. Only the part returned as ``kv`` has a
                meaning.
            layers: (first, end) of the layers to read, or a frozenset of them; None reads all.
            on_missing: "raise", or "skip" to leave refused chunks out and name them in the result.
            share: the heads to read, all by default. Of a chunk only the files that hold them are
                opened, and these are read whole: a digest is of all of a layer in one file.

        Raises:
            ChunkMissing: no chunk is committed under a key (ChunkAbsent), or its bytes are gone.
            ChunkCorrupt: a record or the bytes of a chunk do not match their digests.
            StoreError: ``out`` does not fit, a range is not in the chunk, or the storage failed.
        """
        require_choice(on_missing, OnMissing, "on_missing")
        found = self._nearest(_distinct(keys))
        return assemble(found, self.layout, layers, out, on_missing, self._load, share)

    def aux(self, key: str, name: str) -> NDArray[Any]:
        """An auxiliary array of a chunk, verified.

        Raises:
            ChunkMissing, ChunkCorrupt: as for ``get``.
            StoreError: the chunk has no array of this name, or the storage failed.
        """
        record = self._nearest(_distinct([key]))[key]
        if not isinstance(record, Record):
            raise record
        if name not in record.aux:
            raise StoreError(
                f"chunk {key} has no auxiliary array {name!r}: expected one of "
                f"{', '.join(record.aux) or 'none'}"
            )
        array = self._read_aux(record, name)
        if isinstance(array, Refused):
            raise array
        return array

    def delete(self, keys: Iterable[str]) -> int:
        """Remove chunks; how many there were. Their keys are missing at once, for every reader.

        A reader that already found the record gets the whole chunk or ChunkMissing.
        """
        return sum(self._delete(key) for key in _distinct(keys))

    def verify(
        self,
        keys: Iterable[str] | None = None,
        *,
        max_bytes_per_second: float | None = None,
        told: Callable[[int], object] = lambda nbytes: None,
        finite: bool = False,
    ) -> ScrubReport:
        """Read chunks and their auxiliary arrays, whole, against their digests.

        Args:
            keys: which; None takes every key of the store.
            max_bytes_per_second: a limit on what is read, to leave the disk to others.
            told: is called with the bytes of every chunk that was read.
            finite: count a chunk whose KV holds NaN or infinity, as a broken model encodes it, as
                corrupt.

        Raises:
            StoreError: the storage failed, or a rate that is not positive.
        """
        chosen = self.keys() if keys is None else _distinct(keys)
        return scrub(self, chosen, max_bytes_per_second, told, finite)

    @abc.abstractmethod
    def keys(self) -> Iterator[str]:
        """Every key committed under the fingerprint, ascending, streamed."""

    @abc.abstractmethod
    def records(self) -> Iterator[Record]:
        """Every record that can be read and is believed, by ascending key, streamed."""

    @abc.abstractmethod
    def _put(self, new: NewChunk) -> PutResult:
        """Commit a chunk that was checked."""

    @abc.abstractmethod
    def _find(self, keys: Sequence[str]) -> dict[str, Lookup]:
        """Per key, in order, its record or why there is none: ChunkAbsent where none is committed.

        The keys are distinct and valid.
        """

    def _nearest(self, keys: Sequence[str]) -> dict[str, Lookup]:
        """``_find`` for a reader, which may be given the record of a copy."""
        return self._find(keys)

    @abc.abstractmethod
    def _load(self, requests: Sequence[ReadRequest]) -> Sequence[Refused | None]:
        """Fill each destination from its record's bytes; per chunk, why it is refused or None."""

    @abc.abstractmethod
    def _read_aux(self, record: Record, name: str) -> NDArray[Any] | Refused:
        """An auxiliary array that the record names, verified, or why it is refused."""

    @abc.abstractmethod
    def _delete(self, key: str) -> bool:
        """Remove one chunk; whether there was one."""

    def _require_key(self, key: str, record: Provenance) -> None:
        expected = chunk_key(self.fingerprint, record.content_id, record.context_id)
        if key != expected:
            raise StoreError(f"chunk {key!r}: its fingerprint and record make the key {expected}")

    def _require_tokens(self, key: str, tokens: int) -> None:
        if not 0 < tokens <= self.max_tokens:
            raise StoreError(
                f"chunk {key}: {tokens} tokens, expected 1 to max_tokens={self.max_tokens}"
            )


def describe_arrays(aux: Aux | None) -> dict[str, AuxArray]:
    """What a record says about auxiliary arrays. Raises StoreError for one that it cannot hold."""
    return {name: describe_aux(name, array) for name, array in (aux or {}).items()}


def _distinct(keys: Iterable[str]) -> list[str]:
    distinct = list(dict.fromkeys(keys))
    for key in distinct:
        require_hex(key, ID_DIGITS, "key")
    return distinct

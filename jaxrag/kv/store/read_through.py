"""A local copy of what was read from far away, so that it comes from the disk the next time."""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from numpy.typing import NDArray

from jaxrag.base.errors import ChunkMissing, StoreError
from jaxrag.kv.store.base import NewChunk
from jaxrag.kv.store.chunk_store import ChunkStore
from jaxrag.kv.store.ledger import StoredChunk, Sums
from jaxrag.kv.store.prefetch import Tier
from jaxrag.kv.store.reading import Lookup, ReadRequest, Refused
from jaxrag.kv.store.record import Record
from jaxrag.kv.store.scrub import ScrubReport
from jaxrag.kv.store.sweep import SweepReport
from jaxrag.kv.store.wrapper import StoreWrapper
from jaxrag.kv.store.writer import PutResult

_LOG = logging.getLogger("jaxrag")

_COPIES = 4  # at a time; each holds one chunk in memory


class ReadThrough(StoreWrapper):
    """A remote store whose chunks are copied to a local one when they are first read.

    The remote store is the truth: puts, leases, ``find``, ``keys`` and ``verify`` go there. A read
    takes the local copy where there is one, without a word to the remote, so a chunk that others
    replaced or deleted there may be served as it was. A copy that turns out damaged is dropped and
    fetched again, so what is refused is refused by the remote; where no copy can be made, as on a
    full disk, the remote is read. The local store needs no durability, and may have a size limit.
    """

    def __init__(self, remote: ChunkStore, local: ChunkStore) -> None:
        """Read ``remote`` through ``local``, which is opened for writing in a directory.

        Raises:
            StoreError: the two are not of one fingerprint, layout and secret, or the local one is
                not local or not writable.
        """
        super().__init__(remote)
        if (local.fingerprint, local.layout) != (remote.fingerprint, remote.layout):
            raise StoreError(
                f"{local.location} holds chunks of {local.fingerprint[:16]} {local.layout}, "
                f"expected those of {remote.location}: {remote.fingerprint[:16]} {remote.layout}"
            )
        if local.sealed_by != remote.sealed_by:
            raise StoreError(
                f"{local.location} is read with secret {local.sealed_by}, {remote.location} with "
                f"{remote.sealed_by}: open both with the same"
            )
        if not local.writable or local.directory is None:
            raise StoreError(f"{local.location}: expected a directory that is open for writing")
        self.remote = remote
        self.local = local
        self._warned = False  # that copies fail
        self._threads = ThreadPoolExecutor(_COPIES, "jaxrag-copy")
        self._prefetches = ThreadPoolExecutor(1, "jaxrag-prefetch")

    def lease(self, key: str) -> bool:
        """``ChunkStore.lease`` of the remote store."""
        return self.remote.lease(key)

    def release(self, key: str) -> None:
        """``ChunkStore.release`` of the remote store."""
        self.remote.release(key)

    def verify(
        self,
        keys: Iterable[str] | None = None,
        *,
        max_bytes_per_second: float | None = None,
        told: Callable[[int], object] = lambda nbytes: None,
        finite: bool = False,
    ) -> ScrubReport:
        """``KVStore.verify`` of the remote store. Local copies are verified by every read."""
        return self.remote.verify(
            keys, max_bytes_per_second=max_bytes_per_second, told=told, finite=finite
        )

    def committed(self) -> Iterator[tuple[str, StoredChunk | Lookup]]:
        """``ChunkStore.committed`` of the remote store."""
        return self.remote.committed()

    def counted(self) -> Sums:
        """``ChunkStore.counted`` of the remote store."""
        return self.remote.counted()

    def gc(
        self,
        live: Callable[[Record], bool],
        *,
        grace_seconds: float = 3600.0,
        dry_run: bool = False,
        busy: Callable[[str], bool] = lambda key: False,
        named: Callable[[str], bool] = lambda key: False,
    ) -> SweepReport:
        """``ChunkStore.gc`` of both stores; reports the remote one's."""
        reports = [
            store.gc(live, grace_seconds=grace_seconds, dry_run=dry_run, busy=busy, named=named)
            for store in (self.remote, self.local)
        ]
        return reports[0]

    def prefetch(self, keys: Sequence[str], tier: Tier = "page") -> "Future[int]":
        """Copy chunks here in the background, then ``ChunkStore.prefetch`` them."""
        return self._prefetches.submit(self._prefetch, list(dict.fromkeys(keys)), tier)

    def close(self) -> None:
        """Let go of threads and files of both stores."""
        self._prefetches.shutdown()
        self._threads.shutdown()
        self.local.close()
        self.remote.close()

    def _prefetch(self, keys: Sequence[str], tier: Tier) -> int:
        found_locally = self.local.find(keys)
        absent = [key for key, found in found_locally.items() if not isinstance(found, Record)]
        list(self._threads.map(self._copy, absent))
        return self.local.prefetch(keys, tier).result()

    def _put(self, new: NewChunk) -> PutResult:
        result = self.remote._put(new)
        if new.replace:
            self.local.delete([new.key])
        return result

    def _nearest(self, keys: Sequence[str]) -> dict[str, Lookup]:
        found = self.local.find(keys)
        absent = [key for key, record in found.items() if not isinstance(record, Record)]
        return found | self.remote.find(absent)

    def _load(self, requests: Sequence[ReadRequest]) -> Sequence[Refused | None]:
        # The record of a chunk that is not here names an attempt that is not here either.
        answers = list(self.local._load(requests))
        refused = [index for index, answer in enumerate(answers) if answer is not None]
        copies = list(self._threads.map(self._fetch, [requests[index].record for index in refused]))
        _retry(self.local, requests, answers, dict(zip(refused, copies, strict=True)))
        # A copy may have left again to make room, or be too large to stay; what cannot be read
        # from the remote store either is refused.
        rest = [index for index in refused if answers[index] is not None]
        found = self.remote.find([requests[index].record.key for index in rest])
        _retry(self.remote, requests, answers, {i: found[requests[i].record.key] for i in rest})
        for index, copy in zip(refused, copies, strict=True):
            if answers[index] is not None and isinstance(copy, Record):
                self.local._delete(copy.key, copy.attempt)
        return answers

    def _read_aux(self, record: Record, name: str) -> NDArray[Any] | Refused:
        array = self.local._read_aux(record, name)
        if not isinstance(array, Refused):
            return array
        copy = self._fetch(record)
        if isinstance(copy, Record):
            array = self.local._read_aux(copy, name)
        if not isinstance(array, Refused):
            return array
        found = self.remote.find([record.key])[record.key]
        if not isinstance(found, Record):
            return found
        return self.remote._read_aux(found, name)

    def _delete(self, key: str) -> bool:
        deleted = self.remote.delete([key])
        self.local.delete([key])
        return bool(deleted)

    def _fetch(self, refused: Record) -> Lookup:
        """The record of a fresh copy, after that of ``refused`` could not be read here."""
        self.local._delete(refused.key, refused.attempt)
        return self._copy(refused.key)

    def _copy(self, key: str) -> Lookup:
        """The record of a copy of what the remote store holds, or why there is none."""
        record = self.remote.find([key])[key]
        limit = self.local.max_bytes
        if not isinstance(record, Record) or (limit is not None and record.nbytes > limit):
            return record
        try:
            gone = self.local.copy_in(record, self.remote)
        except StoreError as error:  # one of the two: reading the remote store will tell which
            if not self._warned:
                self._warned = True
                _LOG.warning("%s: chunks are read without a copy: %s", self.local.location, error)
            return ChunkMissing(f"chunk {key}: no copy could be made: {error}")
        self._warned = False
        return self.local.find([key])[key] if gone is None else gone


def _retry(
    store: ChunkStore,
    requests: Sequence[ReadRequest],
    answers: list[Refused | None],
    records: Mapping[int, Lookup],
) -> None:
    """Load what some places of ``requests`` ask for by these records, and note the answers."""
    again = {
        index: dataclasses.replace(requests[index], record=record)
        for index, record in records.items()
        if isinstance(record, Record)
    }
    results = store._load(list(again.values()))
    answers_of = dict(zip(again, results, strict=True))
    for index, record in records.items():
        answers[index] = answers_of[index] if isinstance(record, Record) else record

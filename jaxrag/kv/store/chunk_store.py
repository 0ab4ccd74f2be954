"""Chunk KV in a directory or an object store, shared by any number of processes.

``jaxrag.kv.store.namespace`` shows the layout. A writer fills a directory of its own and then
creates ``commit.json`` if there is none. Until then no reader can see the bytes; afterwards no one
changes them. A writer that dies leaves an attempt that no record names, for gc.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

from numpy.typing import NDArray

from jaxrag.base.errors import ChunkMissing, StoreError
from jaxrag.kv.store.attempts import Attempt, WrittenShard, start_record, start_shard
from jaxrag.kv.store.backend import Backend, IOMode, WriteFuture
from jaxrag.kv.store.base import (
    DEFAULT_INFLIGHT_BYTES,
    DEFAULT_MAX_TOKENS,
    Aux,
    KVStore,
    NewChunk,
    describe_arrays,
)
from jaxrag.kv.store.census import Census
from jaxrag.kv.store.eviction import SizeLimit
from jaxrag.kv.store.layout import KVLayout
from jaxrag.kv.store.leases import Leases
from jaxrag.kv.store.ledger import FOLDER, PARTS, Ledger, StoredChunk, Sums, disown
from jaxrag.kv.store.loading import Loader
from jaxrag.kv.store.mounts import is_shared
from jaxrag.kv.store.namespace import Namespace
from jaxrag.kv.store.prefetch import DEFAULT_HOST_BYTES, Prefetcher, Tier
from jaxrag.kv.store.reading import Lookup, ReadRequest, Refused, require_choice
from jaxrag.kv.store.record import AuxArray, Provenance, Record, new_attempt
from jaxrag.kv.store.repository import Repository
from jaxrag.kv.store.seal import Sealer
from jaxrag.kv.store.sweep import SweepReport, sweep
from jaxrag.kv.store.writer import ChunkWriter, PutResult

Mode = Literal["r", "rw"]


class ChunkStore(KVStore):
    """A repository of chunk KV as seen by one model: its fingerprint, sizes and dtype."""

    def __init__(
        self,
        backend: Backend,
        fingerprint: str,
        layout: KVLayout,
        mode: Mode,
        max_tokens: int,
        host_bytes: int,
        sealer: Sealer | None,
    ) -> None:
        """Use ``ChunkStore.open``, which checks what is there first."""
        super().__init__(fingerprint, layout, max_tokens)
        self.mode = mode
        self._backend = backend
        anyones = Namespace(backend, fingerprint, layout)
        if backend.directory is not None and backend.durable:
            folder = backend.directory / FOLDER
            if not is_shared(folder):
                path = folder / f"{fingerprint[:16]}.sqlite"
                ledger = Ledger(path, mode == "rw", anyones.folders, anyones.find)
                anyones = dataclasses.replace(anyones, ledger=ledger)
            elif mode == "rw":
                disown(folder)
        self._anyones = anyones  # the chunks of the fingerprint, however long, sealed or not
        self._space = dataclasses.replace(anyones, max_tokens=max_tokens, sealer=sealer)
        self._loader = Loader(self._space)
        self._leases = Leases(backend.location, fingerprint)
        self._limit: SizeLimit | None = None
        self._prefetcher = Prefetcher(self._space, self.get, host_bytes)

    @classmethod
    def open(
        cls,
        location: str | os.PathLike[str],
        fingerprint: str,
        layout: KVLayout,
        *,
        mode: Mode = "r",
        io_mode: IOMode = "memmap",
        max_tokens: int = DEFAULT_MAX_TOKENS,
        max_bytes: int | None = None,
        host_bytes: int = DEFAULT_HOST_BYTES,
        durable: bool = True,
        secret: bytes | None = None,
    ) -> "ChunkStore":
        """Open a repository; with mode "rw" it is created where none is.

        Args:
            location: a directory, or a URL that TensorStore can open.
            fingerprint: ``keys.fingerprint`` of the model and its settings.
            layout: the sizes and dtype that every chunk must have.
            mode: "r" changes nothing on disk; "rw" may put.
            io_mode: "memmap" maps files; "default" reads them, which is slower and turns the I/O
                errors of a network file system into exceptions instead of signals.
            max_tokens: largest chunk to accept, in tokens; longer records are refused unread.
            max_bytes: the most that the chunks of this fingerprint may take in a directory, as
                stored; of no effect with mode "r". A put makes room by removing others of the same
                fingerprint, which are missing from then on: those with the fewest reads, an old
                read counting less.
            host_bytes: the most that ``prefetch`` may keep in memory.
            durable: False lets a put return before its files are on the disk.
            secret: seals what is put, and refuses as not sealed what was put without it, whoever
                made it: 16 random bytes or more. None reads chunks sealed or not, and checks only
                their digests.

        Raises:
            StoreError: no repository (mode "r"), one of another format, one whose chunks of this
                fingerprint have other sizes, a limit on something other than a directory, a
                secret that is too short, or a location that cannot be read or written.
        """
        require_choice(mode, Mode, "mode")
        backend = Backend(location, io_mode, durable)
        sealer = None if secret is None else Sealer(secret)
        store = cls(backend, fingerprint, layout, mode, max_tokens, host_bytes, sealer)
        Repository(backend).declare(layout, fingerprint, writable=mode == "rw")
        if mode == "rw":
            store._limit = SizeLimit.open(store._anyones, max_bytes)
        return store

    @property
    def writable(self) -> bool:
        """Whether the store was opened with mode "rw"."""
        return self.mode == "rw"

    @property
    def location(self) -> str:
        """The directory or URL that the store was opened with."""
        return self._backend.location

    @property
    def directory(self) -> Path | None:
        """The local directory; None for any other kind of location."""
        return self._backend.directory

    @property
    def sealed_by(self) -> str | None:
        """The name of the secret that it was opened with; None without one."""
        return None if self._space.sealer is None else self._space.sealer.name

    @property
    def max_bytes(self) -> int | None:
        """The size limit, if there is one."""
        return None if self._limit is None else self._limit.max_bytes

    def lease(self, key: str) -> bool:
        """As ``KVStore.lease``, over all processes that have the repository open."""
        if not self.writable:
            return True
        try:
            if not self._leases.take(key):
                return False
            if not isinstance(self._find([key])[key], Record):
                return True
        except StoreError:  # to encode it twice harms nothing; who puts it gets the error
            return True
        self._leases.release(key)
        return False

    def release(self, key: str) -> None:
        """As ``KVStore.release``."""
        self._leases.release(key)

    def writer(self, max_inflight_bytes: int = DEFAULT_INFLIGHT_BYTES) -> ChunkWriter:
        """A context manager that puts in the background, at most so many bytes at a time."""
        self._require_writable()
        return super().writer(max_inflight_bytes)

    def keys(self) -> Iterator[str]:
        """Every key committed under the fingerprint, ascending, streamed."""
        return self._space.keys()

    def records(self) -> Iterator[Record]:
        """Every record that can be read and is believed, by ascending key, however long."""
        yield from (found for found in self._everything.find_all() if isinstance(found, Record))

    def committed(self) -> Iterator[tuple[str, StoredChunk | Lookup]]:
        """Per key what counts of its record, or why it is refused, by ascending key.

        In a directory only records are read that were not there, or not so, the last time.
        """
        space = self._everything
        census = self._census(space)
        if census is None:
            for lookup in space.find_all():
                if isinstance(lookup, Record):
                    yield lookup.key, StoredChunk.of(lookup)
                else:
                    yield "", lookup
            return
        for part in PARTS:
            times = census.times(part)
            found_now: dict[str, StoredChunk | Lookup] = dict(census.known(part, times))
            read = space.find([key for key in times if key not in found_now])
            records = {key: it for key, it in read.items() if isinstance(it, Record)}
            census.learn(part, times, records)
            found_now |= read | {key: StoredChunk.of(record) for key, record in records.items()}
            yield from ((key, found_now[key]) for key in times)

    def _census(self, space: Namespace) -> Census | None:
        """What is known of the folders of chunks; None where there are no folders."""
        return None if self.directory is None else Census(space, self.directory)

    def counted(self) -> Sums:
        """What is committed under the fingerprint and believed, by encoder.

        In a directory its writers have noted that, and only records of which they did not say how
        a change ended are read. All are, as ``stored`` reads them, of a store with a secret, of one
        elsewhere or that several machines write, and where no one has put or removed anything since
        an earlier version wrote it.
        """
        ledger, space = self._anyones.ledger, self._everything
        known = None if ledger is None or space.sealer is not None else ledger.counted()
        if known is None:
            sums = Sums()
            for _, stored in self.committed():
                if isinstance(stored, StoredChunk):
                    sums.add(stored)
            return sums
        sums, changing = known
        for record in space.find(changing).values():
            if isinstance(record, Record):
                sums.add(StoredChunk.of(record))
        return sums

    @property
    def _everything(self) -> Namespace:
        """The chunks of the fingerprint, however long."""
        return dataclasses.replace(self._anyones, sealer=self._space.sealer)

    def gc(
        self,
        live: Callable[[Record], bool],
        *,
        grace_seconds: float = 3600.0,
        dry_run: bool = False,
        busy: Callable[[str], bool] = lambda key: False,
        named: Callable[[str], bool] = lambda key: False,
    ) -> SweepReport:
        """Remove what no one needs of this fingerprint; safe beside readers and writers.

        Seals say nothing here: chunks of others who share the fingerprint without the secret stay.

        Removed are, each only when older than the grace: committed chunks that are not live,
        records that are refused, attempts that no record names, lock files and empty folders.

        Args:
            live: whether the chunk of a record must stay.
            grace_seconds: how old by this machine's clock. A put that takes longer than this fails
                with a StoreError, as does one that was decided on while ``live`` was asked.
            dry_run: only count what would go.
            busy: whether a writer at work has announced a key; nothing under it is touched then,
                at any grace. A writer that announces its keys before it looks for them loses
                nothing between put and reference if it is done only when ``live`` knows of it.
            named: whether a key is needed, whatever its record says. In a directory such chunks are
                not looked at again as long as their folders do not change.

        Raises:
            StoreError: the store is open for reading only, or the storage failed.
        """
        if not dry_run:
            self._require_writable()
        census = self._census(self._anyones)
        report = sweep(self._anyones, live, grace_seconds, dry_run, busy, named, census)
        if self._anyones.ledger is not None and not dry_run:
            self._anyones.ledger.check()
        if self._limit is not None:
            self._limit.recount(self.keys)
        if not dry_run:
            self._leases.remove_stale(grace_seconds)
        return report

    def prefetch(self, keys: Sequence[str], tier: Tier = "page") -> "Future[int]":
        """Bring chunks nearer in the background; keys that are not stored are passed over.

        Args:
            tier: "page" reads the files of a local directory into the page cache; "host" keeps
                verified chunks in memory, up to ``host_bytes``, from where the ``get`` and
                ``get_many`` of this object take them.

        Returns:
            A future of the bytes that were brought in or were near already. It raises what
            ``get_many`` raises when the storage fails.

        Raises:
            StoreError: the page tier of a store that is no local directory.
        """
        return self._prefetcher.start(keys, tier)

    def close(self) -> None:
        """Let go of threads and files, and write down which chunks were read."""
        self._prefetcher.close()
        self._leases.close()
        if self._anyones.ledger is not None:
            self._anyones.ledger.close()
        if self._limit is not None:
            self._limit.close()
            self._limit = None

    def begin(
        self, key: str, tokens: int, record: Provenance, *, ways: int, replace: bool = False
    ) -> Attempt | None:
        """Begin a chunk whose heads ``ways`` processes hold K / ways of each.

        One process begins and sends the attempt to all. Each calls ``put_shard`` and sends what it
        returns to the first, which calls ``commit``. Nothing is visible before.

        Returns:
            The attempt, or None when a chunk is committed under the key (and not to be replaced).

        Raises:
            StoreError: the key is not the record's, the sizes do not fit, or the storage failed.
        """
        self._require_writable()
        self._require_key(key, record)
        self._require_tokens(key, tokens)
        if type(ways) is not int or ways < 1 or self.layout.num_kv_heads % ways:
            raise StoreError(f"ways={ways!r}: expected a divisor of {self.layout.num_kv_heads}")
        if ways > 1 and self.layout.drops:
            raise StoreError(
                f"ways={ways}: stored={self.layout.stored!r} chooses tokens by all KV heads, "
                "which no writer has then; expected 1"
            )
        # The generation is read before the record: whoever commits in between makes ours stale.
        generation, there = self._backend.looked_up(self._space.commit(key))
        if there and not replace and isinstance(self._find([key])[key], Record):
            return None
        attempt = Attempt(key, new_attempt(), tokens, ways, record, generation)
        if self._limit is not None:
            self._limit.admit(key, self.layout.stored_nbytes(tokens))
        self._backend.make_directory(self._space.attempt(key, attempt.attempt))
        return attempt

    def put_shard(self, attempt: Attempt, rank: int, kv: NDArray[Any]) -> WrittenShard:
        """Write one rank's heads, ``kv`` [L, 2, T, K / ways, H]; durable when this returns.

        Rank r holds heads r * K / ways and following.

        Raises:
            StoreError: ``kv`` does not fit the attempt, or the storage failed.
        """
        self._require_writable()
        name = f"chunk {attempt.key}: kv of rank {rank}"
        if not 0 <= rank < attempt.ways:
            raise StoreError(f"rank={rank!r}: expected 0 to {attempt.ways - 1}")
        self.layout.require(kv, name, ways=attempt.ways)
        if (tokens := kv.shape[2] - self.layout.rows) != attempt.tokens:
            raise StoreError(f"{name} has {tokens} tokens: expected {attempt.tokens}")
        if not kv.flags.c_contiguous:
            raise StoreError(f"{name} is strided; pass numpy.ascontiguousarray(kv)")
        shard, writes = start_shard(self._space, attempt, rank, kv)
        self._backend.finish_writes(self._space.attempt(attempt.key, attempt.attempt), writes)
        return shard

    def commit(
        self, attempt: Attempt, shards: Sequence[WrittenShard], *, aux: Aux | None = None
    ) -> PutResult:
        """Make the chunk visible whose ranks all returned from ``put_shard``.

        Raises:
            StoreError: a shard is missing or foreign, the bytes were removed by gc meanwhile, or
                the storage failed. The chunk is not visible then.
        """
        self._require_writable()
        described = describe_arrays(aux)
        try:
            return self._commit(attempt, shards, [], aux or {}, described)
        finally:
            self._settle(attempt, described)

    def abandon(self, attempt: Attempt) -> None:
        """Remove what was written of a chunk that was begun and will not be committed."""
        self._require_writable()
        self._space.discard(attempt.key, attempt.attempt)
        self._settle(attempt, {})

    def _put(self, new: NewChunk) -> PutResult:
        tokens = new.kv.shape[2] - self.layout.rows
        attempt = self.begin(new.key, tokens, new.record, ways=1, replace=new.replace)
        if attempt is None:
            return PutResult(won=False, attempt=None)
        try:
            try:
                shard, writes = start_shard(self._space, attempt, 0, new.kv)
            except StoreError:
                self._space.discard(new.key, attempt.attempt)
                raise
            return self._commit(attempt, [shard], writes, new.aux, new.described)
        finally:
            self._settle(attempt, new.described)

    def _commit(
        self,
        attempt: Attempt,
        shards: Sequence[WrittenShard],
        writes: list[WriteFuture],
        aux: Aux,
        described: Mapping[str, AuxArray],
    ) -> PutResult:
        path = self._space.attempt(attempt.key, attempt.attempt)
        try:
            try:
                record, more = start_record(self._space, attempt, shards, aux, described)
                writes = writes + more
            finally:
                self._backend.finish_writes(path, writes)
        except StoreError:
            self._space.discard(attempt.key, attempt.attempt)
            raise
        if not self._wins(record, attempt.generation):
            return PutResult(won=False, attempt=None)
        if not self._space.complete(record):
            self._space.delete(attempt.key, attempt.attempt)
            raise StoreError(
                f"chunk {attempt.key}: its bytes were removed by gc while it was put: put it "
                "again, and run gc with a longer grace"
            )
        return PutResult(won=True, attempt=attempt.attempt)

    def _wins(self, record: Record, generation: bytes) -> bool:
        """Commit a record unless there is another since; what did not win is removed.

        An error of the commit may hide that it happened, so then the attempt has to stay.
        """
        commit = self._space.commit(record.key)
        with self._space.changing(record.key) as note:
            won = self._backend.write_if(commit, record.to_json(), generation) is not None
            if won:
                note(record)
        if not won:
            self._space.discard(record.key, record.attempt)
        return won

    def _settle(self, attempt: Attempt, described: Mapping[str, AuxArray]) -> None:
        """What ``begin`` admitted is committed, or will never be."""
        if self._limit is not None:
            nbytes = self.layout.stored_nbytes(attempt.tokens)
            self._limit.settle(attempt.key, nbytes + sum(a.nbytes for a in described.values()))

    def copy_in(self, record: Record, source: "ChunkStore") -> Refused | None:
        """Take over the chunk of a record of another store, file by file as it is there.

        Its bytes are verified when they are read. A chunk that is here already is kept. Of a
        sealed one the record is sealed again, as it names another attempt.

        Returns:
            None, or why there is nothing to copy.

        Raises:
            StoreError: one of the two could not be read or written.
        """
        self._require_writable()
        generation = self._backend.generation(self._space.commit(record.key))
        if isinstance(self._find([record.key])[record.key], Record):
            return None
        paths = source._space.files(record)
        values = source._backend.contents(paths)
        if None in values:
            return ChunkMissing(f"chunk {record.key}: committed, but its bytes are gone")
        own = dataclasses.replace(record, attempt=new_attempt()).sealed(self._space.sealer)
        base, target = source._space.bytes_of(record), self._space.bytes_of(own)
        if self._limit is not None:
            self._limit.admit(own.key, own.nbytes)
        self._backend.make_directory(target)
        try:
            for path, value in zip(paths, values, strict=True):
                self._backend.write(target + path.removeprefix(base), value or b"")
        except StoreError:
            self._space.discard(own.key, own.attempt)
            raise
        self._wins(own, generation)
        if self._limit is not None:
            self._limit.settle(own.key, own.nbytes)
        return None

    def _find(self, keys: Sequence[str]) -> dict[str, Lookup]:
        return self._space.find(keys)

    def _delete(self, key: str, attempt: str | None = None) -> bool:
        """``attempt`` spares a chunk that was written in another one."""
        self._require_writable()
        deleted = self._space.delete(key, attempt) is not None
        if self._limit is not None and (deleted or attempt is None):
            self._limit.strike([key])
        return deleted

    def _load(self, requests: Sequence[ReadRequest]) -> Sequence[Refused | None]:
        answers = self._prefetcher.host.load(requests, self._loader.load)
        if self._limit is not None:
            pairs = zip(requests, answers, strict=True)
            self._limit.read([want.record.key for want, answer in pairs if answer is None])
        return answers

    def _read_aux(self, record: Record, name: str) -> NDArray[Any] | Refused:
        return self._loader.read_aux(record, name)

    def _require_writable(self) -> None:
        if self.mode != "rw":
            raise StoreError(
                f"{self._backend.location} was opened for reading: open it with mode 'rw' to write"
            )

"""Chunks on their way into the pool: each is loaded once, however many requests wait for it.

Threads of the links fetch chunks and stage them; the engine's thread places them. A chunk that is
late may be encoded meanwhile: the first to have its KV claims it, and what comes second is dropped.
"""

import functools
import itertools
import threading
from collections import Counter, abc, deque
from collections.abc import Callable, Iterable, Mapping

from jaxrag.base.types import HostArray
from jaxrag.engine.admission import admission
from jaxrag.engine.encode_queue import EncodeQueue
from jaxrag.engine.links import Link, LinkOpen, Order
from jaxrag.engine.pending import PendingChunk, ReadBatch, SharedRead
from jaxrag.engine.scheduler import Admitted
from jaxrag.engine.sequence import Sequence
from jaxrag.engine.staging import (
    ChunkLoad,
    ChunkOrigin,
    Fetched,
    HitKind,
    NewlyEncoded,
    Staged,
    agreed,
    drop,
    encode,
    fetch,
    fetch_held,
    groups,
    is_elsewhere,
    keep,
    place,
    read_own,
    stage,
    why_refused,
)
from jaxrag.engine.state import Broken, State
from jaxrag.engine.thread import result_of
from jaxrag.kv.store import OwnRead

_FIRST_COME: Order = (0, 0, 0)


class Transfers:
    """Brings chunks into the pool, or encodes them; for the engine's thread.

    Attributes:
      hits: chunks of admitted requests, by where their KV came from.
    """

    def __init__(self, state: State, fail: Callable[[Sequence, BaseException], None]) -> None:
        """``fail`` ends a request that cannot have its chunk."""
        self._state, self._fail = state, fail
        self._pending: dict[str, PendingChunk] = {}
        self._to_encode = EncodeQueue()
        self._staged: deque[ReadBatch] = deque()
        self._reading: dict[str, ReadBatch] = {}  # chunks that are read from a store
        self._lock = threading.Lock()  # of what is read, and the requests that wait for it
        self._numbers = itertools.count()
        self._shared_reads: dict[int, SharedRead] = {}  # of several processes, by number
        self.hits = Counter[HitKind]()

    @property
    def busy(self) -> bool:
        """Is any chunk on its way into the pool?"""
        return bool(self._pending)

    def start(self, sequence: Sequence, admitted: Admitted) -> None:
        """Load the chunks of a request that no other is loading."""
        state = self._state
        order = (0, *admission(sequence))
        planned = sequence.loads
        loads = [planned[key] for key in admitted.loads]
        state.arena.asked(admitted.chunks)
        self.hits["pool"] += len(admitted.chunks) - len(loads)
        allowed = state.settings.load_deadline.of(sum(load.tokens for load in loads))
        cache = state.runner.cache
        new: dict[str, PendingChunk] = {}
        for load in loads:
            deadline = state.clock() + allowed if self._may_compute(load) else None
            pages = admitted.chunks[load.key]
            new[load.key] = PendingChunk(load, sequence, cache, pages, deadline)
            state.note("admitted", load.key)
        self._pending |= new
        self._fetch(new, order)
        for chunk in new.values():
            read = None if chunk.batch is None else chunk.batch.read
            if chunk.deadline is None or read is None:
                continue
            if state.links.seconds(read.link, order, 0) > allowed:
                self._give_up(chunk, "reading it would take too long")

    def prefetch(self, loads: Iterable[ChunkLoad]) -> None:
        """Read into the arena what is neither there, nor in the pool, nor on its way."""
        if not self._state.arena.max_bytes:
            return
        for group in groups([load for load in loads if self._is_far(load)]):
            for load in group:
                self._state.note("prefetch", load.key)
            self._read(ReadBatch(group, {}), (1, 0, next(self._numbers)))

    def place(self) -> bool:
        """Write to the pool what is staged, up to ``place_bytes`` of it; True where any was."""
        left = before = self._state.settings.place_bytes
        while self._staged and left > 0:
            batch = self._staged[0]
            assert batch.staged is not None
            blocks, first = batch.staged.blocks, batch.placed
            size = blocks[0][0].nbytes if blocks else 0
            end = first + max(1, left // size) if size else 0
            pages = {key: chunk.pages for key, chunk in batch.waiting.items()}
            try:
                place(self._state.runner, batch.staged, pages, first, end)
            except Exception as error:
                raise Broken(error, [chunk.owner for chunk in batch.waiting.values()]) from error
            batch.placed = min(end, len(blocks))
            left -= max((batch.placed - first) * size, 1)
            if batch.placed == len(blocks):
                self._staged.popleft()
                self._arrived(batch, batch.staged)
        return left < before

    def _arrived(self, batch: ReadBatch, staged: Staged) -> None:
        """All chunks of a batch are in the pool."""
        state = self._state
        self._done(batch)
        for load, origin, _ in staged.chunks:
            self._pending.pop(load.key).owner.came(load.key, origin)
            self.hits[origin.counted] += 1
            state.note("placed", load.key)
            for number in state.scheduler.staged(
                load.key, load.tokens, staged.dropped.get(load.key)
            ):
                state.live[number].moments["ready"] = state.clock()

    def clear(self) -> None:
        """The pool was lost, and what was on its way to it; what is read goes to the arena."""
        for chunk in self._pending.values():
            chunk.abandon()
        for batch in self._staged:
            self._done(batch)
        self._pending.clear()
        self._to_encode.clear()
        self._staged.clear()

    # Chunks that are late, or missing.

    def expire(self, now: float) -> None:
        """Have computed what was not read in time, and look again for what others encode."""
        for chunk in list(self._pending.values()):
            if chunk.deadline is None or chunk.deadline > now:
                continue
            if not chunk.pause:
                self._give_up(chunk, "it was not read in time", blame=True)
            elif self._is_wanted(chunk):
                chunk.deadline = None
                self._read(ReadBatch([chunk.load], {chunk.load.key: chunk}), _FIRST_COME)

    def next_deadline(self) -> float | None:
        """When ``expire`` has something to do; None where nothing is due."""
        due = (load.deadline for load in self._pending.values() if not (load.late or load.claimed))
        return min((deadline for deadline in due if deadline is not None), default=None)

    def encode_some(self) -> bool:
        """Run one program for chunks that no store gave; others wait for the next decode step.

        True where any of them waits no more: a job may wait for the last of them.
        """
        before = len(self._to_encode)
        chunks = self._to_encode.take(self._is_wanted)
        try:
            made = encode([late.load for late in chunks], reads=chunks[0].stores) if chunks else []
        except Exception as error:
            self._lost([chunk for chunk in chunks if chunk.claim()], error)
            return True
        for chunk, encoded in zip(chunks, made, strict=True):
            if chunk.claim():
                self._call_off(chunk)
                self._keep(chunk, encoded)
        return len(self._to_encode) < before

    def _is_wanted(self, chunk: PendingChunk) -> bool:
        """Is it still to be encoded? One that no request waits for is called off."""
        if not self._is_open(chunk):
            return False
        key = chunk.load.key
        if self._state.runner.cache.allocator.chunks[key].ref_count:
            return True
        if chunk.abandon():
            self._call_off(chunk)
            del self._pending[key]
            self._state.scheduler.refused(key)
        return False

    def _may_compute(self, load: ChunkLoad) -> bool:
        """May a chunk be computed because its store is slow?"""
        settings = self._state.settings
        waits = settings.slow_load != "compute" or settings.lockstep
        return load.misses == "encode" and not waits and not load.encoding.store.private

    def _is_pending(self, chunk: PendingChunk) -> bool:
        """Is it still waited for, in this pool?"""
        return self._pending.get(chunk.load.key) is chunk

    def _is_open(self, chunk: PendingChunk) -> bool:
        """Is it still to be had?"""
        return self._is_pending(chunk) and not chunk.claimed

    def _give_up(self, chunk: PendingChunk, why: str, *, blame: bool = False) -> None:
        """Encode a chunk that is being read; ``blame``: a read that has begun counts as failed."""
        if chunk.late or not self._is_open(chunk):
            return
        chunk.late = True
        batch = chunk.batch
        read = batch.read if blame and batch is not None else None
        if batch is not None and read is not None and self._state.links.give_up(read):
            with self._lock:  # later requests do not wait for it
                self._forget(batch)
        chunk.origin, chunk.stores = ChunkOrigin("encoded", why), False
        self._to_encode.append(chunk)

    def _refuse(self, chunk: PendingChunk, origin: ChunkOrigin | None, stores: bool = True) -> None:
        """No store gives a chunk: it is encoded, or its requests compute it in place.

        ``origin`` None: another process encodes it, and it is looked for again.
        """
        if chunk.late or not self._is_open(chunk):
            chunk.release()
            return
        if origin is None:
            chunk.wait(self._state.moment())
            return
        chunk.deadline, chunk.origin, chunk.stores = None, origin, stores
        if chunk.load.misses == "encode":
            self._to_encode.append(chunk)
            return
        chunk.claim()
        state, key = self._state, chunk.load.key
        del self._pending[key]
        chunk.owner.came(key, origin)
        self.hits["in place"] += 1
        for number in state.scheduler.refused(key):  # they ask for other pages then
            sequence = state.live[number]
            load = sequence.loads.get(key)  # None: it waits for all layers, and needs some
            if load is not None and load.misses == "in_place":
                sequence.came(key, origin)

    def _failed(self, chunks: Iterable[PendingChunk], error: BaseException) -> None:
        """A read failed: its chunks are computed where they may be, else their requests fail."""
        lost = []
        for chunk in chunks:
            if isinstance(error, LinkOpen) or chunk.deadline is not None:
                how = "encoded" if chunk.load.misses == "encode" else "nowhere"
                self._refuse(chunk, ChunkOrigin(how, str(error)), stores=False)  # type: ignore[arg-type]
            elif not chunk.late and self._is_open(chunk):
                lost.append(chunk)
        self._lost(lost, error)

    def _lost(self, chunks: Iterable[PendingChunk], error: BaseException) -> None:
        """Chunks cannot be had: the requests that wait for them fail."""
        for chunk in chunks:
            chunk.abandon()
            del self._pending[chunk.load.key]
            for number in self._state.scheduler.refused(chunk.load.key):
                self._fail(self._state.live[number], error)

    # Reads: begun on the engine's thread, fetched and staged on threads of the links.

    def _fetch(self, new: Mapping[str, PendingChunk], order: Order) -> None:
        """Fetch chunks from the arena or their stores, or join reads that have begun."""
        arena, runner = self._state.arena, self._state.runner
        held: dict[str, HostArray] = {}
        origins: dict[str, ChunkOrigin] = {}
        absent: list[ChunkLoad] = []
        for key, chunk in new.items():
            if self._join(chunk, order):
                continue
            kv = arena.get(key)
            if kv is None and (whole := arena.get(chunk.load.stored_key)) is not None:
                kv = chunk.load.of(whole)
            if kv is None:
                absent.append(chunk.load)
            else:
                held[key] = kv
                origins[key] = ChunkOrigin("store" if arena.use(key) else "host")

        def batch(group: abc.Sequence[ChunkLoad], held: bool) -> ReadBatch:
            return ReadBatch(group, {load.key: new[load.key] for load in group}, held)

        for group in groups(new[key].load for key in held):
            job = functools.partial(fetch_held, runner, group, held, origins)
            self._submit_read(batch(group, True), self._state.arena_link, order, job)
        for group in groups(absent):
            self._read(batch(group, False), order)

    def _join(self, chunk: PendingChunk, order: Order) -> bool:
        """Wait for a chunk that is being read already; False where it is not."""
        with self._lock:
            batch = self._reading.get(chunk.load.key)
            if batch is None:
                return False
            batch.waiting[chunk.load.key] = chunk
            chunk.batch = batch
        if batch.read is not None:
            self._state.links.hasten(batch.read, order)
        return True

    def _read(self, batch: ReadBatch, order: Order) -> None:
        """Read a batch from its store."""
        with self._lock:
            self._reading.update(dict.fromkeys((load.key for load in batch.loads), batch))

        def read() -> Fetched:
            for load in batch.loads:
                self._state.note("read", load.key)
            return fetch(self._state.runner, batch.loads)

        self._submit_read(batch, self._state.link_of(batch.loads[0].encoding.store), order, read)

    def _submit_read(
        self, batch: ReadBatch, link: Link, order: Order, job: Callable[[], Fetched]
    ) -> None:
        """Fetch on a thread of the link; at once where time does not count."""
        state = self._state
        for chunk in batch.waiting.values():
            chunk.batch = batch
        nbytes = sum(load.nbytes for load in batch.loads)
        if state.settings.lockstep:
            if state.report is None:
                self._on_fetched(batch, result_of(job))
            else:
                self._read_own_part(batch, link, nbytes, state.report)
            return
        then = functools.partial(self._on_fetched, batch)
        with self._lock:  # ``_on_fetched`` sees the batch with its read
            batch.read = state.links.submit(link, order, nbytes, job, then)

    def _read_own_part(
        self, batch: ReadBatch, link: Link, nbytes: int, report: Callable[[int], None]
    ) -> None:
        """Read this process's part on a thread of the link, and report that it is there.

        All processes begin the same reads in the same order, so that none waits for one that
        another cannot begin.
        """
        number, shared = next(self._numbers), SharedRead(batch)
        self._shared_reads[number] = shared

        def then(own: tuple[OwnRead, HostArray | None] | BaseException) -> bool:
            shared.own = own
            report(number)
            return True

        def job() -> tuple[OwnRead, HostArray | None]:
            for load in batch.loads:
                self._state.note("read", load.key)
            return read_own(self._state.runner, batch.loads)

        batch.read = self._state.links.submit(link, _FIRST_COME, nbytes, job, then)

    def loaded(self, number: int) -> None:
        """Every process has read its part of a batch; all are told in the same iteration."""
        shared = self._shared_reads.pop(number)
        batch, own = shared.batch, shared.own
        assert own is not None
        if not self._on_fetched(batch, result_of(functools.partial(agreed, batch.loads, own))):
            self._done(batch)

    def _on_fetched(self, batch: ReadBatch, answer: Fetched | BaseException) -> bool:
        """Keep what was fetched, and stage what is waited for; True where its bytes are held."""
        batch.mark("read", self._state.clock())
        kept = result_of(functools.partial(batch.keep, self._state.arena, answer))
        with self._lock:  # no chunk joins any more
            self._forget(batch)
        waiting = batch.waiting
        for key in waiting:
            self._state.arena.use(key)
        try:
            for outcome in (answer, kept):
                if isinstance(outcome, BaseException):
                    raise outcome
            assert isinstance(answer, Fetched)
            refused = [
                (load, None if is_elsewhere(load.load, why) else why_refused(load.load, why))
                for key, load in waiting.items()
                if (why := answer.refused.get(key)) is not None and not load.late
            ]
        except BaseException as error:
            self._post(functools.partial(self._failed, list(waiting.values()), error))
            return False
        batch.waiting = {k: load for k, load in waiting.items() if k in answer.at and load.claim()}
        staged = None
        if batch.waiting:
            staged = result_of(functools.partial(self._stage, batch, answer))
        else:  # it was read ahead, or comes too late
            drop(self._state.runner, answer)
        if batch.waiting or refused:
            self._post(functools.partial(self._on_staged, batch, staged, refused))
        return bool(batch.waiting)

    def _stage(self, batch: ReadBatch, fetched: Fetched) -> Staged:
        chunks = batch.waiting.values()
        pages = {key: chunk.pages for key, chunk in batch.waiting.items()}
        cache = next(iter(chunks)).cache
        staged = stage(self._state.runner, cache, fetched, [chunk.load for chunk in chunks], pages)
        batch.mark("staged", self._state.clock())
        return staged

    def _on_staged(
        self,
        batch: ReadBatch,
        staged: Staged | BaseException | None,
        refused: abc.Sequence[tuple[PendingChunk, ChunkOrigin | None]] = (),
    ) -> None:
        """Take over what a thread staged; on the engine's."""
        there = [chunk for chunk in batch.waiting.values() if self._is_pending(chunk)]
        if isinstance(staged, BaseException):
            self._done(batch)
            self._lost(there, staged)
        elif len(there) < len(batch.waiting):  # the pool was lost meanwhile: they are loaded again
            self._done(batch)
        elif staged is not None:
            batch.staged = staged
            self._staged.append(batch)
        for chunk, origin in refused:
            self._refuse(chunk, origin)

    def _keep(self, chunk: PendingChunk, made: NewlyEncoded) -> None:
        """Store a chunk that was encoded, and stage it."""
        state, load, store = self._state, chunk.load, chunk.load.encoding.store
        batch = ReadBatch([load], {load.key: chunk})

        def kept() -> Staged:
            try:
                fetched = keep(load, chunk.origin, made, stores=chunk.stores)
            finally:
                chunk.release()
            staged = self._stage(batch, fetched)
            if chunk.stores and not store.private and state.arena.max_bytes:
                kv = fetched.kv
                state.arena.put(load.key, kv if kv.base is None else kv.copy())
                state.arena.use(load.key)
            return staged

        def job() -> tuple[Staged | BaseException]:
            return (result_of(kept),)  # what goes wrong with a chunk is no fault of the link

        def then(answer: tuple[Staged | BaseException] | BaseException) -> bool:
            outcome = answer if isinstance(answer, BaseException) else answer[0]
            self._post(functools.partial(self._on_staged, batch, outcome))
            return False

        if state.settings.lockstep:
            then(job())
            return
        link = self._state.link_of(store, " (writes)") if chunk.stores else self._state.arena_link
        state.links.submit(link, (0, 0, 0), made.chunk.kv.nbytes, job, then)

    def _call_off(self, chunk: PendingChunk) -> None:
        """A chunk is not to be read, if that has not begun and no other of its batch is wanted."""
        with self._lock:
            batch = self._reading.get(chunk.load.key)
            if batch is None or batch.read is None:
                return
            wanted = not all(chunk.claimed for chunk in batch.waiting.values())
            if not wanted and self._state.links.cancel(batch.read):
                self._forget(batch)

    def _forget(self, batch: ReadBatch) -> None:
        """No chunk joins a batch any more; under the lock."""
        for load in batch.loads:
            if self._reading.get(load.key) is batch:
                del self._reading[load.key]

    def _is_far(self, load: ChunkLoad) -> bool:
        """Is it worth reading ahead, and is there room for it?"""
        state, store = self._state, load.encoding.store
        nbytes, most = load.nbytes, state.arena.max_bytes
        return not (
            store.private
            or any(
                state.runner.has(key) or key in state.arena for key in (load.key, load.stored_key)
            )
            or load.key in self._reading
            or nbytes > most
            or state.links.is_open(state.link_of(store))
            or state.links.backlog(state.link_of(store)) + nbytes > most // 2
        )

    def _post(self, event: Callable[[], None]) -> None:
        """Call it on the engine's thread; at once where time does not count."""
        if self._state.settings.lockstep:
            event()
        else:
            self._state.post(event)

    def _done(self, batch: ReadBatch) -> None:
        """The bytes of a batch are where they belong, or were dropped."""
        if batch.read is not None:
            self._state.links.done(batch.read)

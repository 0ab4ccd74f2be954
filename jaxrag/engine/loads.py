"""Chunks on their way into the pool: each is loaded once, whoever waits for it.

The engine's thread decides what is read and places what was; threads of the links read and stage.
A chunk that is late may be encoded meanwhile: whoever has its KV first takes it (``Way``), and what
the other brings is dropped.
"""

import functools
import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from jaxrag.cache import PagedCache
from jaxrag.encode import Encoded
from jaxrag.engine.links import Link, LinkOpen, Order, Trip
from jaxrag.engine.live import Live
from jaxrag.engine.loader import (
    ChunkLoad,
    Fetched,
    Found,
    Missed,
    Near,
    Staged,
    drop,
    encode,
    fetch,
    fetch_held,
    groups,
    keep,
    missed,
    place,
    stage,
)
from jaxrag.engine.scheduler import Admitted
from jaxrag.engine.state import Broken, State
from jaxrag.engine.thread import result_of
from jaxrag.engine.tiers import Hits
from jaxrag.store import KVStore
from jaxrag.types import HostArray


class Way:
    """A chunk that the pool waits for.

    Attributes:
      load: which.
      owner: who asked first.
      cache: with the pool.
      pages: of it that the chunk is to lie in.
      deadline: by the engine's clock, when it is computed instead; None: it is waited for.
      trip: that reads it; None where none is begun or it is over.
    """

    def __init__(
        self,
        load: ChunkLoad,
        owner: Live,
        cache: PagedCache,
        pages: tuple[int, ...],
        deadline: float | None,
    ) -> None:
        self.load, self.owner, self.deadline = load, owner, deadline
        self.cache, self.pages = cache, pages
        self.trip: Trip | None = None
        self.late = False  # it is read and computed, who is first takes it
        self._taken = False
        self._lock = threading.Lock()

    def take(self) -> bool:
        """True for the first who asks: what it has is placed, and nothing else is."""
        with self._lock:
            taken, self._taken = self._taken, True
            return not taken

    @property
    def taken(self) -> bool:
        """Has somebody the KV, or given it up?"""
        return self._taken


class _Reading:
    """Chunks that are fetched at once, and those of them that the pool waits for."""

    def __init__(
        self, loads: Sequence[ChunkLoad], ways: Iterable[Way] = (), *, held: bool = False
    ) -> None:
        self.loads, self.held = loads, held
        self.ways = {way.load.key: way for way in ways}
        self.trip: Trip | None = None


class _Landing:
    """KV on the device that is to be written to its pages, in one turn of the loop or several."""

    def __init__(self, staged: Staged, ways: Mapping[str, Way], trip: Trip | None) -> None:
        self.staged, self.ways, self.trip = staged, ways, trip
        self.placed = 0  # blocks


class Loads:
    """Reads chunks on threads, and places or encodes them on the engine's."""

    def __init__(self, state: State, fail: Callable[[Live, BaseException], None]) -> None:
        """``fail`` ends a request whose chunk cannot be had."""
        self._state, self._fail = state, fail
        self._ways: dict[str, Way] = {}
        self._to_encode: deque[tuple[Way, Missed]] = deque()
        self._landings: deque[_Landing] = deque()
        self._readings: dict[str, _Reading] = {}  # of chunks that are read from a store
        self._lock = threading.Lock()  # of the readings and their ways
        self._numbers = itertools.count()
        self._hits = Counter[Hits]()

    @property
    def busy(self) -> bool:
        """Is any chunk on its way into the pool?"""
        return bool(self._ways)

    @property
    def hits(self) -> Counter[Hits]:
        """Chunks of admitted requests by where their KV came from."""
        return self._hits

    # What is asked for.

    def start(self, live: Live, admitted: Admitted) -> None:
        """Load the chunks of a request that nobody else is loading."""
        state = self._state
        entry = state.scheduler.live[live.number]
        assert entry.order is not None
        order = (0, entry.priority, entry.order)
        loads = [live.plan.loads[key] for key in admitted.loads]
        state.arena.asked(admitted.chunks)
        self._hits["pool"] += len(admitted.chunks) - len(loads)
        allowed = state.settings.load_deadline.of(sum(load.tokens for load in loads))
        cache = state.runner.cache
        held: dict[str, HostArray] = {}
        how: dict[str, Near] = {}
        absent: list[ChunkLoad] = []
        for load in loads:
            waits = load.misses != "encode" or not self._computes(load)
            deadline = None if waits else state.clock() + allowed
            way = Way(load, live, cache, admitted.chunks[load.key], deadline)
            self._ways[load.key] = way
            state.note("admitted", load.key)
            if self._join(way, order):
                continue
            kv = state.arena.get(load.key)
            if kv is None:
                absent.append(load)
            else:
                held[load.key] = kv
                how[load.key] = "store" if state.arena.use(load.key) else "host"
        for group in groups(load for load in loads if load.key in held):
            self._fetch_held(group, held, how, order)
        for group in groups(absent):
            self._fetch(group, [self._ways[load.key] for load in group], order)
        for load in loads:
            late = self._ways.get(load.key)
            if late is None or late.deadline is None or late.trip is None:
                continue
            if state.links.seconds(late.trip.link, order, 0) > allowed:
                self._give_up(late, "reading it would take too long", begun=False)

    def prefetch(self, loads: Iterable[ChunkLoad]) -> None:
        """Read into the arena what is neither there, nor in the pool, nor on its way."""
        state = self._state
        if not state.arena.max_bytes:
            return
        wanted = [load for load in loads if self._is_far(load)]
        for group in groups(wanted):
            for load in group:
                state.note("prefetch", load.key)
            self._fetch(group, [], (1, 0, next(self._numbers)))

    def _is_far(self, load: ChunkLoad) -> bool:
        state, store = self._state, load.encoding.store
        nbytes = store.layout.nbytes(load.tokens)
        return not (
            store.private
            or state.runner.has(load.key)
            or load.key in state.arena
            or load.key in self._readings
            or nbytes > state.arena.max_bytes
            or state.links.is_open(self._link(store))
            or state.links.backlog(self._link(store)) + nbytes > state.arena.max_bytes // 2
        )

    def _computes(self, load: ChunkLoad) -> bool:
        """May a chunk be computed because its store is slow?"""
        settings = self._state.settings
        return (
            settings.slow_load == "compute"
            and not settings.lockstep
            and not load.encoding.store.private
        )

    # On its way.

    def _link(self, store: KVStore, what: str = "") -> Link:
        named = str(getattr(store, "location", "memory" if store.private else "store"))
        return self._state.links.of(store, named + what)

    @property
    def _from_arena(self) -> Link:
        return self._state.links.of(self._state.arena, "host")

    def _join(self, way: Way, order: Order) -> bool:
        """Wait for a chunk that is being read already; False where it is not."""
        with self._lock:
            reading = self._readings.get(way.load.key)
            if reading is None:
                return False
            reading.ways[way.load.key] = way
            way.trip = reading.trip
        if way.trip is not None:
            self._state.links.hasten(way.trip, order)
        return True

    def _fetch(self, group: Sequence[ChunkLoad], ways: Sequence[Way], order: Order) -> None:
        """Read a group from its store."""
        reading, runner = _Reading(group, ways), self._state.runner
        with self._lock:
            self._readings.update(dict.fromkeys((load.key for load in group), reading))

        def read() -> Fetched:
            for load in group:
                self._state.note("read", load.key)
            return fetch(runner, group)

        self._run(reading, self._link(group[0].encoding.store), order, read)

    def _fetch_held(
        self,
        group: Sequence[ChunkLoad],
        held: Mapping[str, HostArray],
        how: Mapping[str, Near],
        order: Order,
    ) -> None:
        """Take a group from the arena."""
        reading = _Reading(group, [self._ways[load.key] for load in group], held=True)
        job = functools.partial(fetch_held, self._state.runner, group, held, how)
        self._run(reading, self._from_arena, order, job)

    def _run(self, reading: _Reading, link: Link, order: Order, job: Callable[[], Fetched]) -> None:
        """Fetch on a thread, and take what came on this one; at once where time does not count."""
        state, first = self._state, reading.loads[0]
        if state.settings.lockstep:
            self._fetched(reading, result_of(job))
            return
        layout = first.encoding.store.layout
        nbytes = sum(layout.nbytes(load.tokens) for load in reading.loads)
        then = functools.partial(self._fetched, reading)
        with self._lock:  # a thread that is done with it waits until it is known
            reading.trip = state.links.submit(link, order, nbytes, job, then)
            for way in reading.ways.values():
                way.trip = reading.trip

    def _fetched(self, reading: _Reading, answer: Fetched | BaseException) -> bool:
        """Keep what was fetched, and stage what is waited for; on a thread of the link."""
        runner = self._state.runner
        kept = result_of(lambda: self._keep_in_arena(reading, answer))
        ways = self._close(reading)
        trip = reading.trip  # known once the lock was had

        def look(fetched: Fetched) -> list[tuple[Way, Missed]]:
            if isinstance(kept, BaseException):
                raise kept
            refused = [it for key, it in ways.items() if key in fetched.refused and not it.late]
            return [(it, missed(runner, it.load, fetched.refused[it.load.key])) for it in refused]

        found = answer if isinstance(answer, BaseException) else result_of(lambda: look(answer))
        if isinstance(found, BaseException):
            self._post(functools.partial(self._not_read, list(ways.values()), found))
        if isinstance(answer, BaseException) or isinstance(found, BaseException):
            return False
        mine = {key: way for key, way in ways.items() if key in answer.at and way.take()}
        staged: Staged | BaseException | None = None
        if mine:
            staged = result_of(lambda: self._stage(mine, answer))
        else:  # it was read ahead, or comes too late
            drop(runner, answer)
        if mine or found:
            self._post(functools.partial(self._staged, staged, mine, found, trip))
        return bool(mine)

    def _stage(self, ways: Mapping[str, Way], fetched: Fetched) -> Staged:
        loads = [way.load for way in ways.values()]
        pages = {key: way.pages for key, way in ways.items()}
        cache = next(iter(ways.values())).cache
        return stage(self._state.runner, cache, fetched, loads, pages)

    def _close(self, reading: _Reading) -> dict[str, Way]:
        """Nobody can wait for it any more; who does."""
        with self._lock:
            for load in reading.loads:
                if self._readings.get(load.key) is reading:
                    del self._readings[load.key]
            ways = dict(reading.ways)
        for key in ways:
            self._state.arena.use(key)
        return ways

    def _keep_in_arena(self, reading: _Reading, fetched: Fetched | BaseException) -> None:
        state = self._state
        if isinstance(fetched, BaseException) or reading.held or not state.arena.max_bytes:
            return
        for load in reading.loads:
            if load.key in fetched.at and not load.encoding.store.private:
                state.arena.put(load.key, fetched.of(load))

    def _post(self, event: Callable[[], None]) -> None:
        if self._state.settings.lockstep:
            event()
        else:
            self._state.post(event)

    def _is_on_way(self, way: Way) -> bool:
        """Does anybody wait for it still, in this pool?"""
        return self._ways.get(way.load.key) is way

    # What came, on the engine's thread.

    def _staged(
        self,
        staged: Staged | BaseException | None,
        ways: Mapping[str, Way],
        lacking: Sequence[tuple[Way, Missed]],
        trip: Trip | None,
    ) -> None:
        there = {key: way for key, way in ways.items() if self._is_on_way(way)}
        if isinstance(staged, BaseException):
            self._done(trip)
            self._lost(list(there.values()), staged)
        elif len(there) < len(ways):  # the pool was lost meanwhile: they are asked for again
            self._done(trip)
        elif staged is not None and there:
            self._landings.append(_Landing(staged, there, trip))
        for way, one in lacking:
            self._lack(way, one)

    def _lack(self, way: Way, one: Missed) -> None:
        """A chunk is to be had nowhere."""
        if not self._is_on_way(way) or way.late or way.taken:
            return
        way.deadline = None
        if one.load.misses == "encode":
            self._to_encode.append((way, one))
        else:
            way.take()
            self._in_place(one)

    def _not_read(self, ways: Sequence[Way], error: BaseException) -> None:
        """A read failed: what it was for is computed, if it may be, or fails."""
        lost = []
        for way in ways:
            if not self._is_on_way(way) or way.late or way.taken:
                continue
            if isinstance(error, LinkOpen) or way.deadline is not None:
                encoded = way.load.misses == "encode"
                found = Found("encoded" if encoded else "nowhere", str(error))
                self._lack(way, Missed(way.load, found, keeps=False))
            else:
                lost.append(way)
        self._lost(lost, error)

    def place(self) -> bool:
        """Write to the pool what came, up to ``place_bytes`` of it; True where anything was."""
        left = before = self._state.settings.place_bytes
        while self._landings and left > 0:
            landing = self._landings[0]
            blocks = landing.staged.blocks
            size = blocks[0][0].nbytes if blocks else 0
            first = landing.placed
            end = first + max(1, left // size) if size else 0
            pages = {key: way.pages for key, way in landing.ways.items()}
            try:
                place(self._state.runner, landing.staged, pages, first, end)
            except Exception as error:
                owners = [way.owner for way in landing.ways.values()]
                raise Broken(error, owners) from error
            landing.placed = min(end, len(blocks))
            left -= max((landing.placed - first) * size, 1)
            if landing.placed == len(blocks):
                self._landings.popleft()
                self._landed(landing)
        return left < before

    def _landed(self, landing: _Landing) -> None:
        state = self._state
        self._done(landing.trip)
        for load, found, _ in landing.staged.chunks:
            way = self._ways.pop(load.key)
            way.owner.found[load.key] = found
            self._hits["in place" if found.how == "nowhere" else found.how] += 1
            state.note("placed", load.key)
            for number in state.scheduler.staged(load.key, load.tokens):
                state.live[number].ready = state.clock()

    def _done(self, trip: Trip | None) -> None:
        if trip is not None:
            self._state.links.done(trip)

    # Late, missing, lost.

    def expire(self, now: float) -> None:
        """Have computed what was not read in time."""
        for way in list(self._ways.values()):
            if way.deadline is not None and way.deadline <= now and not way.late:
                self._give_up(way, "it was not read in time", begun=True)

    def next_deadline(self) -> float | None:
        """When ``expire`` has something to do; None where nothing is due."""
        due = (way.deadline for way in self._ways.values() if not (way.late or way.taken))
        return min((it for it in due if it is not None), default=None)

    def _give_up(self, way: Way, why: str, *, begun: bool) -> None:
        """Encode a chunk that is being read; ``begun``: its link is blamed for one that runs."""
        if way.late or way.taken or not self._is_on_way(way):
            return
        way.late = True
        if begun and way.trip is not None and self._state.links.give_up(way.trip):
            with self._lock:  # who asks for its chunks later does not wait for this one
                same = [key for key, it in self._readings.items() if it.trip is way.trip]
                for key in same:
                    del self._readings[key]
        self._to_encode.append((way, Missed(way.load, Found("encoded", why), keeps=False)))

    def encode_one(self) -> bool:
        """Encode one chunk that no store gave; the others come after the next decode step."""
        state = self._state
        while self._to_encode:
            way, one = self._to_encode.popleft()
            if not self._is_on_way(way) or way.taken:
                continue
            key = way.load.key
            chunk = state.runner.cache.allocator.chunks[key]
            if not chunk.ref_count:  # nobody waits any more
                if way.take():
                    self._call_off(way)
                    del self._ways[key]
                    state.scheduler.refused(key)
                continue
            try:
                made, runs = encode(way.load, reads=one.keeps)
            except Exception as error:
                if way.take():
                    self._lost([way], error)
                return True
            if way.take():
                self._call_off(way)
                self._store(way, one, made, runs)
            return True
        return False

    def _store(
        self, way: Way, one: Missed, made: Encoded, runs: tuple[tuple[int, int], ...]
    ) -> None:
        """Keep a chunk that was encoded, and stage it."""
        state, key, store = self._state, way.load.key, way.load.encoding.store

        def kept() -> Staged:
            staged, kv = keep(state.runner, way.cache, one, made, runs, {key: way.pages})
            if one.keeps and not store.private and state.arena.max_bytes:
                state.arena.put(key, kv if kv.base is None else kv.copy())
                state.arena.use(key)
            return staged

        def then(answer: tuple[Staged | BaseException]) -> bool:
            self._post(lambda: self._staged(answer[0], {key: way}, (), None))
            return False

        def job() -> tuple[Staged | BaseException]:
            return (result_of(kept),)  # what a chunk does wrong is no fault of the link

        if state.settings.lockstep:
            then(job())
            return
        link = self._link(store, " (writes)") if one.keeps else self._from_arena
        state.links.submit(link, (0, 0, 0), made.kv.nbytes, job, then)

    def _call_off(self, way: Way) -> None:
        """A chunk is read for nobody: not at all, if that has not begun."""
        with self._lock:
            reading = self._readings.get(way.load.key)
            if reading is None or reading.trip is None:
                return
            if not all(it.taken for it in reading.ways.values()):
                return
            if self._state.links.cancel(reading.trip):
                for load in reading.loads:
                    del self._readings[load.key]

    def _in_place(self, one: Missed) -> None:
        """A chunk is nowhere: whoever computes it in place then asks for other pages."""
        key = one.load.key
        self._ways.pop(key).owner.found[key] = one.found
        self._hits["in place"] += 1
        for number in self._state.scheduler.refused(key):
            live = self._state.live[number]
            if live.plan.loads[key].misses == "in_place":
                live.plan.gone.add(key)
                live.found[key] = one.found

    def _lost(self, ways: Sequence[Way], error: BaseException) -> None:
        """Chunks cannot be had: whoever waits for one fails, and is told why."""
        for way in ways:
            key = way.load.key
            way.take()
            del self._ways[key]
            for number in self._state.scheduler.refused(key):
                self._fail(self._state.live[number], error)

    def clear(self) -> None:
        """The pool was lost, and what was on its way with it; what is read goes to the arena."""
        for way in self._ways.values():
            way.take()
        for landing in self._landings:
            self._done(landing.trip)
        self._ways.clear()
        self._to_encode.clear()
        self._landings.clear()

"""Chunks on their way into host memory: one read a chunk, whoever waits for it.

The engine's thread asks; threads of the links read, keep what they read in the arena, and stage
what the pool waits for.
"""

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from jaxrag.base.types import HostArray
from jaxrag.engine.links import Link, Order, Trip
from jaxrag.engine.live import Live
from jaxrag.engine.loader import (
    ChunkLoad,
    Fetched,
    Missed,
    Near,
    Staged,
    drop,
    fetch,
    fetch_held,
    groups,
    missed,
    stage,
)
from jaxrag.engine.state import State
from jaxrag.engine.thread import result_of
from jaxrag.kv.cache import PagedCache
from jaxrag.kv.store import KVStore


class Way:
    """A chunk that the pool waits for.

    Attributes:
      load: which.
      owner: who asked first.
      cache: with the pool.
      pages: of it that the chunk is to lie in.
      deadline: by the engine's clock, when it is computed instead; None: it is waited for.
      trip: that reads it; None where time does not count.
      late: it is read and computed, and who is first takes it.
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
        self.late = False
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


# What was staged of some ways or why not, those whose stores have nothing, and what read it.
Came = Callable[
    [
        Staged | BaseException | None,
        Mapping[str, Way],
        Sequence[tuple[Way, Missed]],
        Trip | None,
    ],
    None,
]


class Reads:
    """Fetches chunks on threads; what comes of it is told on the engine's."""

    def __init__(
        self, state: State, came: Came, failed: Callable[[Sequence[Way], BaseException], None]
    ) -> None:
        """``failed`` is told of ways whose read raised."""
        self._state, self._came, self._failed = state, came, failed
        self._readings: dict[str, _Reading] = {}  # of chunks that are read from a store
        self._lock = threading.Lock()  # of the readings and their ways
        self._numbers = itertools.count()

    def start(self, ways: Mapping[str, Way], order: Order) -> None:
        """Fetch chunks from the arena or their stores, or wait for who reads them already."""
        arena = self._state.arena
        held: dict[str, HostArray] = {}
        how: dict[str, Near] = {}
        absent: list[ChunkLoad] = []
        for key, way in ways.items():
            if self._join(way, order):
                continue
            kv = arena.get(key)
            if kv is None:
                absent.append(way.load)
            else:
                held[key] = kv
                how[key] = "store" if arena.use(key) else "host"
        for group in groups(ways[key].load for key in held):
            job = functools.partial(fetch_held, self._state.runner, group, held, how)
            reading = _Reading(group, [ways[load.key] for load in group], held=True)
            self._run(reading, self.from_arena, order, job)
        for group in groups(absent):
            self._fetch(group, [ways[load.key] for load in group], order)

    def prefetch(self, loads: Iterable[ChunkLoad]) -> None:
        """Read into the arena what is neither there, nor in the pool, nor on its way."""
        if not self._state.arena.max_bytes:
            return
        for group in groups([load for load in loads if self._is_far(load)]):
            for load in group:
                self._state.note("prefetch", load.key)
            self._fetch(group, [], (1, 0, next(self._numbers)))

    def give_up(self, way: Way) -> None:
        """A read takes too long: who asks for its chunks later does not wait for it."""
        if way.trip is not None and self._state.links.give_up(way.trip):
            with self._lock:
                same = [key for key, it in self._readings.items() if it.trip is way.trip]
                for key in same:
                    del self._readings[key]

    def call_off(self, way: Way) -> None:
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

    def link(self, store: KVStore, what: str = "") -> Link:
        """The link of a store; ``what`` names another than that which is read over."""
        named = str(getattr(store, "location", "memory" if store.private else "store"))
        return self._state.links.of(store, named + what)

    @property
    def from_arena(self) -> Link:
        """The link of the arena."""
        return self._state.links.of(self._state.arena, "host")

    def post(self, event: Callable[[], None]) -> None:
        """Have something done on the engine's thread; at once where time does not count."""
        if self._state.settings.lockstep:
            event()
        else:
            self._state.post(event)

    def _is_far(self, load: ChunkLoad) -> bool:
        state, store = self._state, load.encoding.store
        nbytes = store.layout.nbytes(load.tokens)
        return not (
            store.private
            or state.runner.has(load.key)
            or load.key in state.arena
            or load.key in self._readings
            or nbytes > state.arena.max_bytes
            or state.links.is_open(self.link(store))
            or state.links.backlog(self.link(store)) + nbytes > state.arena.max_bytes // 2
        )

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

        self._run(reading, self.link(group[0].encoding.store), order, read)

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
            self.post(functools.partial(self._failed, list(ways.values()), found))
        if isinstance(answer, BaseException) or isinstance(found, BaseException):
            return False
        mine = {key: way for key, way in ways.items() if key in answer.at and way.take()}
        staged: Staged | BaseException | None = None
        if mine:
            staged = result_of(lambda: self._stage(mine, answer))
        else:  # it was read ahead, or comes too late
            drop(runner, answer)
        if mine or found:
            self.post(functools.partial(self._came, staged, mine, found, trip))
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

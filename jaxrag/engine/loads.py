"""Chunks on their way into the pool: each is loaded once, whoever waits for it.

Threads fetch and stage what was not near (``jaxrag.engine.reads``), the engine's places it. A chunk
that is late may be encoded meanwhile: whoever has its KV first takes it (``Way``), and what the
other brings is dropped.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from jaxrag.engine.links import LinkOpen, Trip
from jaxrag.engine.live import Live
from jaxrag.engine.loader import ChunkLoad, Found, Missed, Staged, encode, keep, place
from jaxrag.engine.reads import Reads, Way
from jaxrag.engine.scheduler import Admitted
from jaxrag.engine.state import Broken, State
from jaxrag.engine.thread import result_of
from jaxrag.engine.tiers import Hits
from jaxrag.reuse.encode import Encoded


class _Landing:
    """KV on the device that is to be written to its pages, in one turn of the loop or several."""

    def __init__(self, staged: Staged, ways: Mapping[str, Way], trip: Trip | None) -> None:
        self.staged, self.ways, self.trip = staged, ways, trip
        self.placed = 0  # blocks


class Loads:
    """Brings chunks into the pool, or encodes them; for the engine's thread."""

    def __init__(self, state: State, fail: Callable[[Live, BaseException], None]) -> None:
        """``fail`` ends a request whose chunk cannot be had."""
        self._state, self._fail = state, fail
        self._ways: dict[str, Way] = {}
        self._to_encode: deque[tuple[Way, Missed]] = deque()
        self._landings: deque[_Landing] = deque()
        self._reads = Reads(state, self._staged, self._not_read)
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
        ways: dict[str, Way] = {}
        for load in loads:
            waits = load.misses != "encode" or not self._computes(load)
            deadline = None if waits else state.clock() + allowed
            ways[load.key] = Way(load, live, cache, admitted.chunks[load.key], deadline)
            state.note("admitted", load.key)
        self._ways |= ways
        self._reads.start(ways, order)
        for load in loads:
            late = self._ways.get(load.key)
            if late is None or late.deadline is None or late.trip is None:
                continue
            if state.links.seconds(late.trip.link, order, 0) > allowed:
                self._give_up(late, "reading it would take too long", begun=False)

    def prefetch(self, loads: Iterable[ChunkLoad]) -> None:
        """Read into the arena what is neither there, nor in the pool, nor on its way."""
        self._reads.prefetch(loads)

    def _computes(self, load: ChunkLoad) -> bool:
        """May a chunk be computed because its store is slow?"""
        settings = self._state.settings
        return (
            settings.slow_load == "compute"
            and not settings.lockstep
            and not load.encoding.store.private
        )

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
        if begun:
            self._reads.give_up(way)
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
                    self._reads.call_off(way)
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
                self._reads.call_off(way)
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
            self._reads.post(lambda: self._staged(answer[0], {key: way}, (), None))
            return False

        def job() -> tuple[Staged | BaseException]:
            return (result_of(kept),)  # what a chunk does wrong is no fault of the link

        if state.settings.lockstep:
            then(job())
            return
        link = self._reads.link(store, " (writes)") if one.keeps else self._reads.from_arena
        state.links.submit(link, (0, 0, 0), made.kv.nbytes, job, then)

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

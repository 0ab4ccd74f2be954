"""Who runs when: requests as states, and the pages and rows that they hold.

A request is given every page that it will ever write, and all its chunks, at once or not at all;
it never asks for more, so whoever holds something can finish. Nothing here computes, waits or
looks at a clock: the engine reports events, and asks what may be done now.
"""

import dataclasses
import heapq
from bisect import insort
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from jaxrag.base.errors import RequestError
from jaxrag.base.types import HostArray
from jaxrag.engine.admission import (
    HUNGRY,
    QUEUED,
    RUNNING,
    Entry,
    Need,
    Queue,
    RequestStatus,
    SchedulerSettings,
    Seats,
    Turns,
    admission,
    turn,
)
from jaxrag.kv.cache import PAGE, PageAllocator

__all__ = ["Admitted", "Ending", "Entry", "Need", "RequestStatus", "Scheduler", "SchedulerSettings"]

Ending = Literal["finished", "cancelled", "expired", "failed"]

GENERATED = 2.0  # virtual service of a generated token; one of the prompt is 1


@dataclasses.dataclass(frozen=True)
class Admitted:
    """A request that has all its pages.

    Attributes:
      chunks: pages of every chunk, also of those that others load.
      loads: keys that it is the first to want: the engine starts loading these.
    """

    number: int
    own: tuple[int, ...]
    chunks: dict[str, tuple[int, ...]]
    loads: tuple[str, ...]


class Scheduler:
    """Requests from submission to their end.

    Order of admission: by class; within a class who was admitted before (swapped, or a chunk did
    not come), then the tenant with the least virtual service; within a tenant as they came. Who is
    first and does not fit is passed by smaller ones of its class and of worse ones within the
    bounds of the settings, and by none while one is being swapped out; better classes go
    first always and are not counted.

    Events of requests that are over, and of chunks that are not loading, are ignored: they may be
    late.

    Attributes:
      ended: how many requests ended in which way.
      preempted: how often one was set aside for another.
      given: virtual service of all tenants, by no weight.
    """

    def __init__(self, allocator: PageAllocator, settings: SchedulerSettings | None = None) -> None:
        self.ended = Counter[Ending]()
        self.preempted = 0
        self.given = 0.0
        self.new_tokens = 0
        self._allocator = allocator
        self._settings = settings or SchedulerSettings()
        self._queue = Queue(self._settings)
        self._turns = Turns(self._settings.weights)
        self._live: dict[int, Entry] = {}
        self._lanes: dict[Hashable | None, Seats] = {}
        self._subscribers: dict[str, dict[int, Entry]] = {}  # of loading chunks
        self._outgrown: dict[int, Entry] = {}
        self._counts = dict.fromkeys(RequestStatus, 0)
        self._deadlines: list[tuple[float, int]] = []  # a heap; with some that are over
        self._arrivals = self._admissions = 0

    @property
    def live(self) -> MappingProxyType[int, Entry]:
        """Requests that have not ended, by number."""
        return MappingProxyType(self._live)

    @property
    def counts(self) -> MappingProxyType[RequestStatus, int]:
        """Live requests of every status."""
        return MappingProxyType(self._counts)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of the requests that hold nothing."""
        return self._queue.tokens

    @property
    def service(self) -> Mapping[str, float]:
        """Virtual service of every tenant, by weight; comparable among those that wait."""
        return MappingProxyType(self._queue.service)

    @property
    def occupancy(self) -> dict[Hashable, int]:
        """Rows held in every lane that has live requests; on any thread."""
        lanes = list(self._lanes.items())
        return {name: len(it.held) for name, it in lanes if it.rows is not None}

    def full(self, lane: Hashable | None) -> bool:
        """Whether no row of the lane can be given now."""
        found = self._lanes.get(lane)
        return found is not None and found.rows is not None and found.room() == 0

    def hungry(self, lane: Hashable | None) -> bool:
        """Whether some request of the lane has no row yet."""
        found = self._lanes.get(lane)
        return found is not None and found.hungry > 0

    def submit(self, entry: Entry, now: float) -> None:
        """Let a request wait; RequestError when it can never run, Overloaded when too many do."""
        settings = self._settings
        if not 0 <= entry.priority < settings.classes:
            raise RequestError(
                f"priority {entry.priority} is not known; ask for 0 to {settings.classes - 1}"
            )
        need, there = entry.need(lambda key: False).pages, self._allocator.num_pages
        if need > there:
            raise RequestError(
                f"the prompt of {entry.tokens} tokens and its answer need {need * PAGE} tokens of "
                f"cache, the pool has {there * PAGE}; raise cache_tokens or use fewer chunks"
            )
        self._queue.check_room(entry)
        assert entry.number not in self._live, f"request {entry.number} was submitted before"
        entry.arrived, entry.arrival = now, self._arrivals
        self._arrivals += 1
        self._live[entry.number] = entry
        rows = None if entry.lane is None else entry.rows
        lane = self._lanes.setdefault(entry.lane, Seats(rows))
        assert lane.rows == rows, f"lane {entry.lane} has {lane.rows} rows, not {rows}"
        lane.members += 1
        self._count(entry, 1)
        self._queue.add(entry)
        if entry.deadline is not None:
            heapq.heappush(self._deadlines, (entry.deadline, entry.number))

    def admit(self, now: float) -> list[Admitted]:
        """Give requests their pages, all of them or none, while the next one in order fits."""
        admitted = []
        while True:
            found, outgrown = self._fitting(now)
            for entry in outgrown:
                self._queue.remove(entry)
                self._outgrown[entry.number] = entry
            if found is not None:
                admitted.append(self._grant(*found))
            elif not outgrown:
                return admitted

    def outgrown(self) -> list[int]:
        """Waiting requests that no longer fit even the empty pool; the engine is to finish them.

        What a request needs may grow when a chunk does not come, and a new pool may be smaller.
        """
        return list(self._outgrown)

    def staged(self, key: str, tokens: int, dropped: HostArray | None = None) -> list[int]:
        """A chunk lies in its pages, but for tokens ``dropped``; the requests that became ready."""
        if not self._loading(key):
            return []
        self._allocator.complete(key, tokens, dropped)
        ready = []
        for entry in sorted(self._subscribers.pop(key, {}).values(), key=admission):
            entry.missing.remove(key)
            if not entry.missing:
                self._make_ready(entry)
                ready.append(entry.number)
        return ready

    def refused(self, key: str) -> list[int]:
        """A chunk will not come: who waited for it, and is asked again what it needs."""
        if not self._loading(key):
            return []
        back = sorted(self._subscribers.get(key, {}).values(), key=admission)
        for entry in back:
            self._requeue(entry, RequestStatus.WAITING)
        self._allocator.abandon(key)
        return [entry.number for entry in back]

    def next_prefill(self) -> int | None:
        """Give a row to a ready request whose lane has one; it is prefilled now.

        Better classes go first, then whose turn it is by the service of their tenants (``Turns``);
        of one tenant as they were admitted.

        In static mode a lane is filled until it is full or none is ready for it, and then again
        when it is empty.
        """
        firsts = [lane.first(self._settings.static) for lane in self._lanes.values()]
        entry = min((it for it in firsts if it is not None), key=turn, default=None)
        if entry is None:
            return None
        self._turns.begin(entry)
        self._lanes[entry.lane].take(entry)
        self._move(entry, RequestStatus.PREFILL)
        return entry.number

    def revise(self, number: int) -> None:
        """Ask again what a ready request needs: what others have computed since, it shares.

        It can only need fewer pages of its own, and gives the others back.
        """
        entry, allocator = self._live[number], self._allocator
        need = entry.need(allocator.__contains__)
        if need.own > len(entry.own) or not all(key in allocator for key in need.chunks):
            return
        for key in need.chunks.keys() - set(entry.held):
            allocator.subscribe(key)
        for key in set(entry.held) - need.chunks.keys():
            allocator.release(key)
        allocator.free(entry.own[need.own :])
        entry.own, entry.held = entry.own[: need.own], tuple(need.chunks)

    def share(self, number: int, key: str, pages: tuple[int, ...], tokens: int) -> None:
        """Own pages of a request hold a part of its prompt that others may map from now on."""
        entry = self._live[number]
        assert set(pages) <= set(entry.own), f"request {number} shares pages that are not its own"
        if key in self._allocator.chunks:  # another request was first
            return
        self._allocator.insert(key, pages, tokens)
        entry.own = tuple(page for page in entry.own if page not in pages)
        entry.held = (*entry.held, key)

    def prefilled(self, number: int, indexing: bool = False) -> None:
        """Its prompt is computed; with ``indexing``, what its rule searches is yet to be built."""
        self._step(
            number,
            RequestStatus.PREFILL,
            RequestStatus.INDEXING if indexing else RequestStatus.DECODE,
        )

    def indexed(self, number: int) -> None:
        """What its rule searches is built."""
        self._step(number, RequestStatus.INDEXING, RequestStatus.DECODE)

    def generated(self, number: int, count: int) -> None:
        """Charge new tokens to its tenant."""
        entry = self._live.get(number)
        if entry is not None:
            self.new_tokens += count
            self._turns.charge(entry.tenant, GENERATED * count)
            self._charge(entry, GENERATED * count)

    def victims(self, now: float) -> list[int]:
        """Requests that make room for better classes: their own pages are to be copied to the host.

        For every ready request without a row, and for the first of a class that does not fit; the
        worst class first, then who has the fewest own pages; none that would not help.
        """
        if self._settings.classes == 1:
            return []
        leaving = [it for it in self._holders() if it.status is RequestStatus.SWAPPING]
        chosen = self._for_rows(leaving)
        chosen += self._for_pages(leaving + chosen, now)
        for entry in chosen:
            entry.preemptions += 1
            self.preempted += 1
            self._move(entry, RequestStatus.SWAPPING)
        return [entry.number for entry in chosen]

    def swapped(self, number: int) -> None:
        """Its own pages are copied: it gives back what it holds and waits in its old place."""
        entry = self._live.get(number)
        if entry is not None and entry.status is RequestStatus.SWAPPING:
            self._requeue(entry, RequestStatus.SWAPPED)

    def finish(self, number: int, why: Ending) -> RequestStatus | None:
        """A request ends and gives back what it holds; where it stood, None if it is not live."""
        entry = self._live.pop(number, None)
        if entry is None:
            return None
        was, lane = entry.status, self._lanes[entry.lane]
        if self._outgrown.pop(number, None) is None and was in QUEUED:
            self._queue.remove(entry)
        self._let_go(entry)
        self._count(entry, -1)
        entry.status = RequestStatus.DONE
        self.ended[why] += 1
        lane.members -= 1
        if not lane.members:
            del self._lanes[entry.lane]
        if len(self._deadlines) > 2 * len(self._live) + 64:
            self._deadlines = [it for it in self._deadlines if it[1] in self._live]
            heapq.heapify(self._deadlines)
        return was

    def expired(self, now: float) -> list[int]:
        """Live requests whose deadline has passed, until they are finished."""
        passed = []
        while (first := self.next_deadline()) is not None and first <= now:
            passed.append(heapq.heappop(self._deadlines))
        for it in passed:
            heapq.heappush(self._deadlines, it)
        return [number for _, number in passed]

    def next_deadline(self) -> float | None:
        """The nearest deadline of a live request."""
        while self._deadlines and self._deadlines[0][1] not in self._live:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def reset(self, allocator: PageAllocator) -> None:
        """The pool was lost: who held pages of it waits again, ahead of those who wait.

        Who is swapped stays so, as its content is on the host. Loads into the old pool must not be
        reported any more.
        """
        self._subscribers.clear()
        for entry in self._live.values():
            if entry.number in self._outgrown:
                self._queue.add(entry)
            elif entry.status not in QUEUED:
                entry.own, entry.held, entry.missing = (), (), set()
                self._requeue(entry, RequestStatus.WAITING)
        self._outgrown.clear()
        self._allocator = allocator

    def check(self) -> None:
        """AssertionError unless pages, users, rows and counts agree with what requests hold."""
        allocator, live = self._allocator, self._live.values()
        owned = [page for entry in live for page in entry.own]
        allocator.check(owned)
        parts = (allocator.num_free, allocator.num_unpinned, allocator.num_pinned)
        assert sum(parts) + allocator.num_loading + len(owned) == allocator.num_pages
        users = Counter(key for entry in live for key in entry.held)
        assert users == {key: it.ref_count for key, it in allocator.chunks.items() if it.ref_count}
        waiting = [it for it in live if it.status in QUEUED and it.number not in self._outgrown]
        assert self._queue.waiting == Counter(entry.tenant for entry in waiting)
        assert self._queue.tokens == sum(entry.tokens for entry in waiting)
        assert all(entry in self._queue for entry in waiting)
        counts = Counter(entry.status for entry in live)
        assert all(self._counts[status] == counts[status] for status in RequestStatus)
        for entry in live:
            lane, status = self._lanes[entry.lane], entry.status
            assert entry.missing == {it for it in entry.held if not allocator.chunks[it].ready}
            assert bool(entry.missing) == (status is RequestStatus.LOADING)
            assert status not in QUEUED or not (entry.own or entry.held)
            assert (entry in lane.ready) == (status is RequestStatus.READY)
            assert (entry.row is not None) == (status in RUNNING and lane.rows is not None)
            assert entry.row is None or lane.held[entry.row] is entry
        missing = {(key, entry.number) for entry in live for key in entry.missing}
        assert missing == {(key, n) for key, those in self._subscribers.items() for n in those}
        assert all(self._subscribers.values())
        assert set(self._lanes) == {entry.lane for entry in live}
        for name, lane in self._lanes.items():
            members = [entry for entry in live if entry.lane == name]
            assert lane.members == len(members)
            assert lane.hungry == sum(it.status in HUNGRY for it in members)
            assert len(lane.held) == sum(it.row is not None for it in members)
            assert lane.ready == sorted(lane.ready, key=turn)
            assert len(lane.held) < 2 or not any(it.alone for it in lane.held.values())

    def _fitting(self, now: float) -> tuple[tuple[Entry, Need] | None, list[Entry]]:
        """The next to admit, and those met on the way that will never fit."""
        passed, outgrown = list[Entry](), list[Entry]()
        for entry, first in self._queue:
            need = entry.need(self._is_there)
            if need.pages > self._allocator.num_pages:
                outgrown.append(entry)
            elif self._lacking(need) <= 0:
                for other in passed:
                    other.bypassed += 1
                return (entry, need), outgrown
            elif first or entry.blocked is not None:
                self._queue.block(entry, now)
                passed.append(entry)
                # What is being swapped out is meant for who is first.
                if self._counts[RequestStatus.SWAPPING] or self._exhausted(entry, now):
                    break
        return None, outgrown

    def _exhausted(self, entry: Entry, now: float) -> bool:
        """Whether no request may pass it any more."""
        waited = 0.0 if entry.blocked is None else now - entry.blocked
        settings = self._settings
        return entry.bypassed >= settings.max_bypass or waited >= settings.max_bypass_seconds

    def _grant(self, entry: Entry, need: Need) -> Admitted:
        allocator, why = self._allocator, f"request {entry.number}"
        self._queue.remove(entry)
        allocator.tick()
        loads = tuple(key for key in need.chunks if not self._is_there(key))
        for key in need.chunks:  # before anything is allocated, which could evict them
            allocator.subscribe(key)
        for key in loads:
            allocator.begin(key, need.chunks[key], why)
        entry.own, entry.held = allocator.allocate(need.own, why), tuple(need.chunks)
        entry.missing = {key for key in entry.held if not allocator.chunks[key].ready}
        for key in entry.missing:
            self._subscribers.setdefault(key, {})[entry.number] = entry
        if entry.order is None:
            entry.order = self._admissions
            self._admissions += 1
            self._turns.admit(entry)
            self._charge(entry, entry.cost)
        if entry.missing:
            self._move(entry, RequestStatus.LOADING)
        else:
            self._make_ready(entry)
        chunks = {key: allocator.chunks[key].pages for key in entry.held}
        return Admitted(entry.number, entry.own, chunks, loads)

    def _charge(self, entry: Entry, service: float) -> None:
        self.given += service
        self._queue.charge(entry.tenant, service)

    def _is_there(self, key: str) -> bool:
        return key in self._allocator.chunks

    def _loading(self, key: str) -> bool:
        return self._is_there(key) and key not in self._allocator

    def _lacking(self, need: Need) -> int:
        """How many pages more would have to be available."""
        pages = need.own
        for key, count in need.chunks.items():
            found = self._allocator.chunks.get(key)
            if found is None:
                pages += count
            elif found.ready and not found.ref_count:  # available now, and not once it is mapped
                pages += len(found.pages)
        return pages - self._allocator.num_available

    def _freed(self, leaving: Sequence[Entry], but: Collection[str]) -> int:
        """Pages that are available when these requests are gone, beside those of some chunks."""
        gone = Counter(key for entry in leaving for key in entry.held if key not in but)
        chunks = (self._allocator.chunks[key] for key, users in gone.items())
        unpinned = (
            it for it, users in zip(chunks, gone.values(), strict=True) if it.ref_count == users
        )
        return sum(len(it.own) for it in leaving) + sum(len(it.pages) for it in unpinned)

    def _holders(self) -> Iterator[Entry]:
        return (entry for lane in self._lanes.values() for entry in lane.held.values())

    def _preemptible(
        self, holders: Iterable[Entry], priority: int, leaving: Collection[Entry]
    ) -> list[Entry]:
        """Who may be preempted for a request of this class, the cheapest first."""
        most = self._settings.max_preemptions
        found = (it for it in holders if it.status is RequestStatus.DECODE and it not in leaving)
        worse = (it for it in found if it.priority > priority)
        able = (it for it in worse if it.swappable and it.preemptions < most)
        return sorted(able, key=lambda it: (-it.priority, len(it.own), -(it.order or 0)))

    def _for_rows(self, leaving: list[Entry]) -> list[Entry]:
        chosen = list[Entry]()
        if self._settings.static:  # a row that is given back is not given again
            return chosen
        for lane in self._lanes.values():
            for place, entry in enumerate(lane.ready):
                gone = leaving + chosen
                if entry.alone or lane.rows is None:
                    break
                if place >= lane.room(gone):
                    found = self._preemptible(lane.held.values(), entry.priority, gone)
                    if not found:
                        break
                    chosen.append(found[0])
        return chosen

    def _for_pages(self, leaving: list[Entry], now: float) -> list[Entry]:
        for head in self._queue.heads():
            need = head.need(self._is_there)
            lacking = self._lacking(need)

            def enough(chosen: list[Entry], need: Need = need, lacking: int = lacking) -> bool:
                return self._freed(leaving + chosen, need.chunks) >= lacking

            if enough([]):
                return []  # it is admitted first
            chosen = list[Entry]()
            for entry in self._preemptible(self._holders(), head.priority, leaving):
                chosen.append(entry)
                if enough(chosen):
                    for it in chosen[-2::-1]:
                        rest = [other for other in chosen if other is not it]
                        chosen = rest if enough(rest) else chosen
                    return chosen
            if self._exhausted(head, now):
                return []
        return []

    def _step(self, number: int, before: RequestStatus, after: RequestStatus) -> None:
        entry = self._live.get(number)
        if entry is not None:
            assert entry.status is before, f"request {number} is {entry.status.value}"
            self._move(entry, after)

    def _make_ready(self, entry: Entry) -> None:
        self._move(entry, RequestStatus.READY)
        insort(self._lanes[entry.lane].ready, entry, key=turn)

    def _requeue(self, entry: Entry, status: RequestStatus) -> None:
        self._let_go(entry)
        self._move(entry, status)
        self._queue.add(entry)

    def _let_go(self, entry: Entry) -> None:
        """Give back its pages, chunks and row."""
        for key in entry.missing:
            self._subscribers[key].pop(entry.number)
            if not self._subscribers[key]:
                del self._subscribers[key]
        for key in entry.held:
            self._allocator.release(key)
        self._allocator.free(entry.own)
        self._lanes[entry.lane].leave(entry)
        entry.own, entry.held, entry.missing = (), (), set()

    def _move(self, entry: Entry, status: RequestStatus) -> None:
        self._count(entry, -1)
        entry.status = status
        self._count(entry, 1)

    def _count(self, entry: Entry, change: int) -> None:
        self._counts[entry.status] += change
        if entry.status in HUNGRY:
            self._lanes[entry.lane].hungry += change

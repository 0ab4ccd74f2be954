"""Who runs when: requests as states, and the pages and rows that they hold.

A request is given every page that it will ever write, and all its chunks, at once or not at all;
it never asks for more, so whoever holds something can finish. Nothing here computes, waits or
looks at a clock: the engine reports events, and asks what may be done now.
"""

import dataclasses
import heapq
from bisect import insort
from collections import Counter, abc
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from types import MappingProxyType

from jaxrag.base.errors import RequestError
from jaxrag.base.types import HostArray
from jaxrag.engine.admission import (
    HUNGRY,
    QUEUED,
    RUNNING,
    FairStart,
    Queue,
    SchedulerSettings,
    Seats,
    admission,
    row_order,
)
from jaxrag.engine.sequence import Ending, Need, RequestStatus, Sequence
from jaxrag.kv.cache import PAGE, PageAllocator

__all__ = ["Admitted", "Scheduler", "SchedulerSettings"]

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
        self._fair_start = FairStart(self._settings.weights)
        self._live: dict[int, Sequence] = {}
        self._batches: dict[Hashable | None, Seats] = {}
        self._subscribers: dict[str, dict[int, Sequence]] = {}  # of loading chunks
        self._outgrown: dict[int, Sequence] = {}
        self._preemptions = Counter[int]()  # of live requests that were preempted
        self._counts = dict.fromkeys(RequestStatus, 0)
        self._deadlines: list[tuple[float, int]] = []  # a heap; with some that are over

    @property
    def live(self) -> MappingProxyType[int, Sequence]:
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
        """Rows held in every batch that has live requests; on any thread."""
        batches = list(self._batches.items())
        return {name: len(seats.held) for name, seats in batches if seats.rows is not None}

    def row_of(self, sequence: Sequence) -> int | None:
        """The row that a request has in its batch."""
        return self._batches[sequence.batch].row_of(sequence)

    def full(self, batch: Hashable | None) -> bool:
        """Whether no row of the batch can be given now."""
        seats = self._batches.get(batch)
        return seats is not None and seats.rows is not None and seats.room() == 0

    def hungry(self, batch: Hashable | None) -> bool:
        """Whether some request of the batch has no row yet."""
        seats = self._batches.get(batch)
        return seats is not None and seats.hungry > 0

    def submit(self, sequence: Sequence, now: float) -> None:
        """Let a request wait; RequestError when it can never run, Overloaded when too many do."""
        settings = self._settings
        if not 0 <= sequence.request.priority < settings.classes:
            raise RequestError(
                f"priority {sequence.request.priority} is not known; ask for 0 to "
                f"{settings.classes - 1}"
            )
        need, there = sequence.need(lambda key: False).pages, self._allocator.num_pages
        if need > there:
            raise RequestError(
                f"the prompt of {sequence.num_tokens} tokens and its answer need {need * PAGE} "
                f"tokens of cache, the pool has {there * PAGE}; raise cache_tokens or use fewer "
                "chunks"
            )
        self._queue.check_room(sequence)
        assert sequence.number not in self._live, f"request {sequence.number} was submitted before"
        sequence.moments.setdefault("added", now)
        self._live[sequence.number] = sequence
        rows = None if sequence.batch is None else sequence.request.rows
        batch = self._batches.setdefault(sequence.batch, Seats(rows))
        assert batch.rows == rows, f"batch {sequence.batch} has {batch.rows} rows, not {rows}"
        batch.members += 1
        self._count(sequence, 1)
        self._queue.add(sequence)
        if sequence.deadline is not None:
            heapq.heappush(self._deadlines, (sequence.deadline, sequence.number))

    def admit(self, now: float) -> list[Admitted]:
        """Give requests their pages, all of them or none, while the next one in order fits."""
        admitted = []
        while True:
            fitting, outgrown = self._fitting(now)
            for sequence in outgrown:
                self._queue.remove(sequence)
                self._outgrown[sequence.number] = sequence
            if fitting is not None:
                admitted.append(self._grant(*fitting))
            elif not outgrown:
                return admitted

    def missing(self, sequence: Sequence) -> set[str]:
        """Keys of the chunks that a request maps and that are not there yet; on any thread."""
        chunks = self._allocator.chunks
        return {key for key in sequence.held if (chunk := chunks.get(key)) and not chunk.ready}

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
        for sequence in sorted(self._subscribers.pop(key, {}).values(), key=admission):
            if not self.missing(sequence):
                self._make_ready(sequence)
                ready.append(sequence.number)
        return ready

    def refused(self, key: str) -> list[int]:
        """A chunk will not come: who waited for it, and is asked again what it needs."""
        if not self._loading(key):
            return []
        back = sorted(self._subscribers.get(key, {}).values(), key=admission)
        for sequence in back:
            self._requeue(sequence, RequestStatus.WAITING)
        self._allocator.abandon(key)
        return [sequence.number for sequence in back]

    def next_prefill(self) -> int | None:
        """Give a row to a ready request whose batch has one; it is prefilled now.

        Better classes go first, then by the service of their tenants (``FairStart``);
        of one tenant as they were admitted.

        In static mode a batch is filled until it is full or none is ready for it, and then again
        when it is empty.
        """
        firsts = [batch.first(self._settings.static) for batch in self._batches.values()]
        sequence = min((seq for seq in firsts if seq is not None), key=row_order, default=None)
        if sequence is None:
            return None
        self._fair_start.begin(sequence)
        self._batches[sequence.batch].take(sequence)
        self._move(sequence, RequestStatus.PREFILL)
        return sequence.number

    def revise(self, number: int) -> None:
        """Ask again what a ready request needs: what others have computed since, it shares.

        It can only need fewer pages of its own, and gives the others back.
        """
        sequence, allocator = self._live[number], self._allocator
        need = sequence.need(allocator.__contains__)
        if need.own > len(sequence.own) or not all(key in allocator for key in need.chunks):
            return
        for key in need.chunks.keys() - set(sequence.held):
            allocator.subscribe(key)
        for key in set(sequence.held) - need.chunks.keys():
            allocator.release(key)
        allocator.free(sequence.own[need.own :])
        sequence.own, sequence.held = sequence.own[: need.own], tuple(need.chunks)

    def share(self, number: int, key: str, pages: tuple[int, ...], tokens: int) -> None:
        """Own pages of a request hold a part of its prompt that others may map from now on."""
        sequence = self._live[number]
        assert set(pages) <= set(sequence.own), (
            f"request {number} shares pages that are not its own"
        )
        if key in self._allocator.chunks:  # another request was first
            return
        self._allocator.insert(key, pages, tokens)
        sequence.own = tuple(page for page in sequence.own if page not in pages)
        sequence.held = (*sequence.held, key)

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
        sequence = self._live.get(number)
        if sequence is not None:
            self.new_tokens += count
            self._fair_start.charge(sequence.request.tenant, GENERATED * count)
            self._charge(sequence, GENERATED * count)

    def victims(self, now: float) -> list[int]:
        """Requests that make room for better classes: their own pages are to be copied to the host.

        For every ready request without a row, and for the first of a class that does not fit; the
        worst class first, then who has the fewest own pages; none that would not help.
        """
        if self._settings.classes == 1:
            return []
        leaving = [holder for holder in self._holders() if holder.status is RequestStatus.SWAPPING]
        chosen = self._for_rows(leaving)
        chosen += self._for_pages(leaving + chosen, now)
        for sequence in chosen:
            self._preemptions[sequence.number] += 1
            self.preempted += 1
            self._move(sequence, RequestStatus.SWAPPING)
        return [sequence.number for sequence in chosen]

    def swapped(self, number: int) -> None:
        """Its own pages are copied: it gives back what it holds and waits in its old place."""
        sequence = self._live.get(number)
        if sequence is not None and sequence.status is RequestStatus.SWAPPING:
            self._requeue(sequence, RequestStatus.SWAPPED)

    def finish(self, number: int, why: Ending) -> RequestStatus | None:
        """A request ends and gives back what it holds; where it stood, None if it is not live."""
        sequence = self._live.pop(number, None)
        if sequence is None:
            return None
        was, batch = sequence.status, self._batches[sequence.batch]
        if self._outgrown.pop(number, None) is None and was in QUEUED:
            self._queue.remove(sequence)
        self._let_go(sequence)
        self._preemptions.pop(number, None)
        self._count(sequence, -1)
        sequence.status = RequestStatus.DONE
        self.ended[why] += 1
        batch.members -= 1
        if not batch.members:
            del self._batches[sequence.batch]
        if len(self._deadlines) > 2 * len(self._live) + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._live]
            heapq.heapify(self._deadlines)
        return was

    def expired(self, now: float) -> list[int]:
        """Live requests whose deadline has passed, until they are finished."""
        passed = []
        while (first := self.next_deadline()) is not None and first <= now:
            passed.append(heapq.heappop(self._deadlines))
        for entry in passed:
            heapq.heappush(self._deadlines, entry)
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
        for sequence in self._live.values():
            if sequence.number in self._outgrown:
                self._queue.add(sequence)
            elif sequence.status not in QUEUED:
                sequence.own, sequence.held = (), ()
                self._requeue(sequence, RequestStatus.WAITING)
        self._outgrown.clear()
        self._allocator = allocator

    def check(self) -> None:
        """AssertionError unless pages, users, rows and counts agree with what requests hold."""
        allocator, live = self._allocator, self._live.values()
        owned = [page for sequence in live for page in sequence.own]
        allocator.check(owned)
        parts = (allocator.num_free, allocator.num_unpinned, allocator.num_pinned)
        assert sum(parts) + allocator.num_loading + len(owned) == allocator.num_pages
        users = Counter(key for sequence in live for key in sequence.held)
        assert users == {key: kv.ref_count for key, kv in allocator.chunks.items() if kv.ref_count}
        waiting = [seq for seq in live if seq.status in QUEUED and seq.number not in self._outgrown]
        assert self._queue.waiting == Counter(sequence.request.tenant for sequence in waiting)
        assert self._queue.tokens == sum(sequence.num_tokens for sequence in waiting)
        assert all(sequence in self._queue for sequence in waiting)
        counts = Counter(sequence.status for sequence in live)
        assert all(self._counts[status] == counts[status] for status in RequestStatus)
        for sequence in live:
            batch, status = self._batches[sequence.batch], sequence.status
            assert bool(self.missing(sequence)) == (status is RequestStatus.LOADING)
            assert status not in QUEUED or not (sequence.own or sequence.held)
            assert (sequence in batch.ready) == (status is RequestStatus.READY)
            seated = list(batch.held.values()).count(sequence)
            assert seated == (status in RUNNING and batch.rows is not None)
        missing = {(key, sequence.number) for sequence in live for key in self.missing(sequence)}
        assert missing == {(key, n) for key, those in self._subscribers.items() for n in those}
        assert all(self._subscribers.values())
        assert set(self._batches) == {sequence.batch for sequence in live}
        for name, batch in self._batches.items():
            members = [sequence for sequence in live if sequence.batch == name]
            assert batch.members == len(members)
            assert batch.hungry == sum(member.status in HUNGRY for member in members)
            assert set(batch.held.values()) <= set(members)
            assert batch.ready == sorted(batch.ready, key=row_order)
            assert len(batch.held) < 2 or not any(holder.alone for holder in batch.held.values())

    def _fitting(self, now: float) -> tuple[tuple[Sequence, Need] | None, list[Sequence]]:
        """The next to admit, and those met on the way that will never fit."""
        passed, outgrown = list[Sequence](), list[Sequence]()
        for sequence, first in self._queue:
            need = sequence.need(self._is_there)
            there = self._allocator.num_pages
            lacking = self._allocator.lacking(need.own, need.chunks)
            if lacking > 0 and self._allocator.num_available == there:
                for key in need.chunks:  # in its own way: whole, or parts of too many pages
                    self._allocator.evict(key)
                need = sequence.need(self._is_there)
                lacking = self._allocator.lacking(need.own, need.chunks)
            if need.pages > there and sequence.need(lambda key: False).pages > there:
                outgrown.append(sequence)
            elif lacking <= 0:
                for other in passed:
                    self._queue.passed(other)
                return (sequence, need), outgrown
            elif first or sequence in self._queue.blocked:
                self._queue.block(sequence, now)
                passed.append(sequence)
                # What is being swapped out is meant for who is first.
                if self._counts[RequestStatus.SWAPPING] or self._queue.exhausted(sequence, now):
                    break
        return None, outgrown

    def _grant(self, sequence: Sequence, need: Need) -> Admitted:
        allocator, why = self._allocator, f"request {sequence.number}"
        self._queue.remove(sequence)
        allocator.tick()
        loads = tuple(key for key in need.chunks if not self._is_there(key))
        for key in need.chunks:  # before anything is allocated, which could evict them
            allocator.subscribe(key)
        sequence.own, sequence.held = allocator.allocate(need.own, why), tuple(need.chunks)
        for key in sorted(loads, key=lambda key: need.chunks[key] < 0):  # what is left is cut up
            allocator.begin(key, need.chunks[key], why)
        missing = self.missing(sequence)
        for key in missing:
            self._subscribers.setdefault(key, {})[sequence.number] = sequence
        if sequence.start_tag is None:
            self._fair_start.admit(sequence)
            self._charge(sequence, sequence.cost)
        if missing:
            self._move(sequence, RequestStatus.LOADING)
        else:
            self._make_ready(sequence)
        chunks = {key: allocator.chunks[key].pages for key in sequence.held}
        return Admitted(sequence.number, sequence.own, chunks, loads)

    def _charge(self, sequence: Sequence, service: float) -> None:
        self.given += service
        self._queue.charge(sequence.request.tenant, service)

    def _is_there(self, key: str) -> bool:
        return key in self._allocator.chunks

    def _loading(self, key: str) -> bool:
        return self._is_there(key) and key not in self._allocator

    def _freed(self, leaving: abc.Sequence[Sequence], but: Collection[str]) -> int:
        """Pages that are available when these requests are gone, beside those of some chunks."""
        gone = Counter(key for sequence in leaving for key in sequence.held if key not in but)
        chunks = self._allocator.chunks
        unpinned = [key for key, users in gone.items() if chunks[key].ref_count == users]
        return sum(len(sequence.own) for sequence in leaving) + self._allocator.freed(unpinned, but)

    def _holders(self) -> Iterator[Sequence]:
        return (sequence for batch in self._batches.values() for sequence in batch.held.values())

    def _preemptible(
        self, holders: Iterable[Sequence], priority: int, leaving: Collection[Sequence]
    ) -> list[Sequence]:
        """Who may be preempted for a request of this class, the cheapest first."""
        most = self._settings.max_preemptions
        decoding = (seq for seq in holders if seq.status is RequestStatus.DECODE)
        worse = (seq for seq in decoding if seq.request.priority > priority and seq not in leaving)
        able = (seq for seq in worse if seq.swappable and self._preemptions[seq.number] < most)
        return sorted(
            able, key=lambda seq: (-seq.request.priority, len(seq.own), -admission(seq)[1])
        )

    def _for_rows(self, leaving: list[Sequence]) -> list[Sequence]:
        chosen = list[Sequence]()
        if self._settings.static:  # a row that is given back is not given again
            return chosen
        for batch in self._batches.values():
            for place, sequence in enumerate(batch.ready):
                gone = leaving + chosen
                if sequence.alone or batch.rows is None:
                    break
                if place >= batch.room(gone):
                    able = self._preemptible(batch.held.values(), sequence.request.priority, gone)
                    if not able:
                        break
                    chosen.append(able[0])
        return chosen

    def _for_pages(self, leaving: list[Sequence], now: float) -> list[Sequence]:
        for head in self._queue.heads():
            need = head.need(self._is_there)
            lacking = self._allocator.lacking(need.own, need.chunks)

            def enough(chosen: list[Sequence], need: Need = need, lacking: int = lacking) -> bool:
                return self._freed(leaving + chosen, need.chunks) >= lacking

            if enough([]):
                return []  # it is admitted first
            chosen = list[Sequence]()
            for sequence in self._preemptible(self._holders(), head.request.priority, leaving):
                chosen.append(sequence)
                if enough(chosen):
                    for spared in chosen[-2::-1]:
                        rest = [other for other in chosen if other is not spared]
                        chosen = rest if enough(rest) else chosen
                    return chosen
            if self._queue.exhausted(head, now):
                return []
        return []

    def _step(self, number: int, before: RequestStatus, after: RequestStatus) -> None:
        sequence = self._live.get(number)
        if sequence is not None:
            assert sequence.status is before, f"request {number} is {sequence.status.value}"
            self._move(sequence, after)

    def _make_ready(self, sequence: Sequence) -> None:
        self._move(sequence, RequestStatus.READY)
        insort(self._batches[sequence.batch].ready, sequence, key=row_order)

    def _requeue(self, sequence: Sequence, status: RequestStatus) -> None:
        self._let_go(sequence)
        self._move(sequence, status)
        self._queue.add(sequence)

    def _let_go(self, sequence: Sequence) -> None:
        """Give back its pages, chunks and row."""
        for key in self.missing(sequence):
            self._subscribers[key].pop(sequence.number)
            if not self._subscribers[key]:
                del self._subscribers[key]
        for key in sequence.held:
            self._allocator.release(key)
        self._allocator.free(sequence.own)
        self._batches[sequence.batch].leave(sequence)
        sequence.own, sequence.held = (), ()

    def _move(self, sequence: Sequence, status: RequestStatus) -> None:
        self._count(sequence, -1)
        sequence.status = status
        self._count(sequence, 1)

    def _count(self, sequence: Sequence, change: int) -> None:
        self._counts[sequence.status] += change
        if sequence.status in HUNGRY:
            self._batches[sequence.batch].hungry += change

"""Links: the ways from tiers of storage into host memory, and the threads that fetch over them.

A link belongs to one store. It knows how fast it is, how much is on its way, and whether it works:
after failures in a row its circuit is open, and nothing but a probe now and then goes over it.
"""

import atexit
import dataclasses
import heapq
import itertools
import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Literal

from jaxrag.base.errors import StoreError
from jaxrag.engine.thread import result_of

FAILURES = 5  # in a row that open a circuit
OPEN_SECONDS = 10.0  # until a probe is let through

_DECAY = 0.8  # of what was measured before, with every read
_TRUSTED = 16  # times as many bytes as were measured are estimated from that
_MOST_LATE = 8  # reads of a link that nobody waits for any more: no other is begun beside them
_LINGER = 1.0  # seconds that an idle thread waits for work before it ends
_EXIT = 2.0  # seconds that the interpreter waits at exit for what is being fetched

Order = tuple[int, int, int]  # the smallest goes first
Circuit = Literal["closed", "open"]


class LinkOpen(StoreError):
    """A read that was not tried, as its link failed again and again."""


@dataclasses.dataclass(frozen=True)
class LinkState:
    """A link at one moment.

    Attributes:
      name: of its store, or "host" for the arena.
      rate: bytes a second, of late; None before anything was read.
      bytes_read: all that came over it.
      bytes_in_flight: of reads that were begun and whose KV is not in the pool yet, nor given up.
      queued: reads that wait for their turn.
      late: reads that were given up, and have not come back.
      reads: that ended well.
      failures: of all reads.
      circuit: "open" while it is not used, but for probes.
      opened: how often it was.
    """

    name: str
    rate: float | None
    bytes_read: int
    bytes_in_flight: int
    queued: int
    late: int
    reads: int
    failures: int
    circuit: Circuit
    opened: int


@dataclasses.dataclass(eq=False)
class Trip:
    """One read over a link.

    Attributes:
      link: which.
      nbytes: of KV.
      fetch: reads, on a thread.
      then: takes what it returned or raised, on the same thread; True where the bytes stay in
        flight until ``Links.done``.
      order: of those that wait.
      status: of its life.
      late: it was given up while it was read.
      held: its bytes count as in flight.
      probe: it is to show whether the link works again.
    """

    link: "Link"
    nbytes: int
    fetch: Callable[[], Any]
    then: Callable[[Any], bool]
    order: Order
    status: Literal["queued", "reading", "over"] = "queued"
    late: bool = False
    held: bool = False
    probe: bool = False


class Link:
    """What is known of one way; for ``Links``, under its lock."""

    def __init__(self, name: str) -> None:
        """Nothing was read yet."""
        self.name = name
        self.queue: list[tuple[Order, int, Trip]] = []  # a heap; also of trips that are elsewhere
        self.running = self.reading = 0  # threads on it; those of them that read
        self.in_flight = self.ahead = 0  # bytes; of those that are not read yet
        self.late = self.reads = self.failures = self.opened = self.bytes_read = 0
        self.in_a_row = 0
        self.open_until: float | None = None
        self.probing = False
        self.measured = 0.0  # bytes behind the rate
        self._seconds = self._since = 0.0

    @property
    def rate(self) -> float | None:
        """Bytes a second; None before anything was read, and where no time passed."""
        return self.measured / self._seconds if self.measured and self._seconds else None

    @property
    def waiting(self) -> list[Trip]:
        """Those that wait for their turn."""
        return [trip for order, _, trip in self.queue if _is_queued(trip, order)]

    def begin(self, now: float) -> None:
        """One more is being read."""
        if not self.reading:
            self._since = now
        self.reading += 1

    def end(self, now: float, nbytes: int) -> None:
        """One has been read; the time in which several were counts once."""
        self.reading -= 1
        self._seconds = _DECAY * self._seconds + max(now - self._since, 0.0)
        self.measured = _DECAY * self.measured + nbytes
        self._since = now

    def failed(self, now: float) -> None:
        """A read failed, or was given up."""
        self.failures += 1
        self.in_a_row += 1
        if self.open_until is not None or self.in_a_row >= FAILURES:
            self.opened += self.open_until is None
            self.open_until = now + OPEN_SECONDS

    def worked(self, nbytes: int) -> None:
        """A read ended well, in time."""
        self.in_a_row, self.open_until = 0, None
        self.reads += 1
        self.bytes_read += nbytes


class Links:
    """All links of an engine. Safe to share between threads."""

    def __init__(self, clock: Callable[[], float], threads: int, max_bytes: int) -> None:
        """No thread runs yet.

        Args:
          clock: seconds.
          threads: that read over one link at a time.
          max_bytes: in flight on one link; a read that is larger goes alone.
        """
        self._clock, self._threads, self._max_bytes = clock, threads, max_bytes
        self._changed = threading.Condition()
        self._tiers: weakref.WeakKeyDictionary[Any, dict[str, Link]] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._workers: set[threading.Thread] = set()
        self._idle = 0
        self._closed = False

    def of(self, tier: Any, name: str) -> Link:
        """A link of a tier, any object, by its name; made when it is first asked for."""
        with self._changed:
            links: dict[str, Link] = self._tiers.setdefault(tier, {})
            return links.setdefault(name, Link(name))

    def submit(
        self,
        link: Link,
        order: Order,
        nbytes: int,
        fetch: Callable[[], Any],
        then: Callable[[Any], bool],
    ) -> Trip:
        """Read over a link when its turn comes; the arguments are those of ``Trip``."""
        trip = Trip(link, nbytes, fetch, then, order)
        with self._changed:
            heapq.heappush(link.queue, (order, next(self._numbers), trip))
            self._employ()
        return trip

    def hasten(self, trip: Trip, order: Order) -> None:
        """Somebody more urgent waits for it."""
        with self._changed:
            if trip.status == "queued" and order < trip.order:
                trip.order = order
                heapq.heappush(trip.link.queue, (order, next(self._numbers), trip))

    def cancel(self, trip: Trip) -> bool:
        """Nobody wants it any more; True where it was not begun and never will be."""
        with self._changed:
            if trip.status != "queued":
                return False
            trip.status = "over"
            return True

    def give_up(self, trip: Trip) -> bool:
        """It takes too long: another may be read beside it, and that counts as a failure.

        False where it is not being read.
        """
        with self._changed:
            if trip.status != "reading" or trip.late:
                return False
            trip.late = True
            link = trip.link
            link.late += 1
            link.running -= 1
            self._read(trip, 0)
            self._release(trip)
            self._failed(trip)
            self._employ()
            return True

    def done(self, trip: Trip) -> None:
        """What it brought is where it was to go, or was dropped."""
        with self._changed:
            self._release(trip)
            self._employ()

    def is_open(self, link: Link) -> bool:
        """Would a read not be tried now?"""
        with self._changed:
            return self._shut(link)

    def backlog(self, link: Link) -> int:
        """Bytes that are still to be read."""
        with self._changed:
            return link.ahead + sum(trip.nbytes for trip in link.waiting)

    def seconds(self, link: Link, order: Order, nbytes: int) -> float:
        """When so many bytes more would be read, by what goes before them; 0 where unknown.

        It is where much less was measured: that was latency, not the rate.
        """
        with self._changed:
            before = sum(trip.nbytes for trip in link.waiting if trip.order <= order)
            ahead = link.ahead + before + nbytes
            known = link.rate is not None and ahead <= _TRUSTED * link.measured
            return ahead / link.rate if known and link.rate else 0.0

    def states(self) -> tuple[LinkState, ...]:
        """Every link that is in use, by name."""
        with self._changed:
            return tuple(
                LinkState(
                    name=it.name,
                    rate=it.rate,
                    bytes_read=it.bytes_read,
                    bytes_in_flight=it.in_flight,
                    queued=len(it.waiting),
                    late=it.late,
                    reads=it.reads,
                    failures=it.failures,
                    circuit="closed" if it.open_until is None else "open",
                    opened=it.opened,
                )
                for it in sorted(self._all(), key=lambda it: it.name)
            )

    def close(self) -> None:
        """Begin nothing more, and wait a while for what was begun."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            workers = list(self._workers)
        end = time.monotonic() + _EXIT
        for worker in workers:
            worker.join(max(end - time.monotonic(), 0.0))

    # Under the lock.

    def _all(self) -> list[Link]:
        return [link for links in self._tiers.values() for link in links.values()]

    def _shut(self, link: Link) -> bool:
        if link.late >= _MOST_LATE:
            return True
        if link.open_until is None:
            return False
        return link.probing or self._clock() < link.open_until

    def _next(self) -> Trip | None:
        """Take the most urgent read that may begin now; one over an open circuit ends at once."""
        best: tuple[Order, int, Trip] | None = None
        for link in self._all():
            while link.queue and not _is_queued(link.queue[0][2], link.queue[0][0]):
                heapq.heappop(link.queue)
            if not link.queue:
                continue
            first = link.queue[0]
            trip = first[2]
            room = not link.in_flight or link.in_flight + trip.nbytes <= self._max_bytes
            if self._shut(link) or (link.running < self._threads and room):
                best = first if best is None else min(best, first, key=lambda it: it[:2])
        if best is None:
            return None
        heapq.heappop(best[2].link.queue)
        return best[2]

    def _employ(self) -> None:
        """Have a thread look whether there is anything to do."""
        if self._closed or not any(link.queue for link in self._all()):
            return
        if self._idle:
            self._changed.notify()
            return
        if len(self._workers) >= self._most_workers():
            return
        worker = threading.Thread(target=self._work, name="jaxrag-load", daemon=True)
        worker.start()
        if not self._workers:
            atexit.register(self.close)
        self._workers.add(worker)

    def _most_workers(self) -> int:
        return sum(self._threads + link.late for link in self._all())

    def _release(self, trip: Trip) -> None:
        if trip.held:
            trip.held = False
            trip.link.in_flight -= trip.nbytes

    def _failed(self, trip: Trip) -> None:
        if trip.probe:
            trip.link.probing = trip.probe = False
        trip.link.failed(self._clock())

    def _begin(self, trip: Trip) -> bool:
        """Count a read as begun; False where its link is not to be used."""
        link = trip.link
        if self._shut(link):
            trip.status = "over"
            return False
        if link.open_until is not None:
            trip.probe = link.probing = True
        trip.status, trip.held = "reading", True
        link.running += 1
        link.in_flight += trip.nbytes
        link.ahead += trip.nbytes
        link.begin(self._clock())
        return True

    def _read(self, trip: Trip, nbytes: int) -> None:
        trip.link.ahead -= trip.nbytes
        trip.link.end(self._clock(), nbytes)

    def _end(self, trip: Trip, answer: Any) -> None:
        """Count a read as ended."""
        link = trip.link
        trip.status = "over"
        if trip.late:
            link.late -= 1
        elif isinstance(answer, BaseException):
            self._read(trip, 0)
            self._failed(trip)
        else:
            self._read(trip, trip.nbytes)
            link.worked(trip.nbytes)
            if trip.probe:
                link.probing = trip.probe = False

    # On a thread.

    def _work(self) -> None:
        while True:
            with self._changed:
                trip = None if self._closed else self._next()
                if trip is None:
                    self._idle += 1
                    called = not self._closed and self._changed.wait(_LINGER)
                    self._idle -= 1
                    if not called and (self._closed or not self._waits()):
                        self._workers.discard(threading.current_thread())
                        if not self._workers and not self._closed:
                            atexit.unregister(self.close)
                        return
                    continue
                begun = self._begin(trip)
                self._employ()
            if not begun:
                why = f"{trip.link.name} failed {trip.link.in_a_row} times in a row"
                result_of(lambda trip=trip, why=why: trip.then(LinkOpen(why)))  # type: ignore[misc]
                continue
            answer = result_of(trip.fetch)
            with self._changed:
                self._end(trip, answer)
            kept = result_of(lambda: trip.then(answer))  # noqa: B023
            del answer
            with self._changed:
                if kept is not True:
                    self._release(trip)
                if not trip.late:
                    trip.link.running -= 1
                self._employ()

    def _waits(self) -> bool:
        """Is there anything that could begin now?"""
        return any(
            link.waiting and (self._shut(link) or link.running < self._threads)
            for link in self._all()
        )


def _is_queued(trip: Trip, order: Order) -> bool:
    return trip.status == "queued" and trip.order == order


@dataclasses.dataclass(frozen=True)
class LoadDeadline:
    """How long a load may take before its chunks are computed instead.

    Attributes:
      seconds: whatever their length.
      per_1000_tokens: seconds more.
      most: seconds, whatever their length.
    """

    seconds: float = 0.5
    per_1000_tokens: float = 0.1
    most: float = 30.0

    def of(self, tokens: int) -> float:
        """Seconds for so many tokens."""
        return min(self.seconds + self.per_1000_tokens * tokens / 1000, self.most)

    @property
    def sound(self) -> bool:
        """Is it made of times, and not all 0?"""
        parts = dataclasses.astuple(self)
        return all(0 <= it < math.inf for it in parts) and self.of(1) > 0

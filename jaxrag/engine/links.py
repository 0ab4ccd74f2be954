"""Links from tiers of storage into host memory, and the threads that read over them.

A link belongs to one store. It knows how fast it is, how much is on its way, and whether it works:
after failures in a row its circuit is open, and nothing but a probe now and then goes over it.
"""

import atexit
import dataclasses
import itertools
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal

from jaxrag.base.errors import StoreError
from jaxrag.base.rates import Rate
from jaxrag.engine.thread import result_of

FAILURES = 5  # in a row that open a circuit
OPEN_SECONDS = 10.0  # until a probe is let through

_DECAY = 0.8  # of what was measured before, with every read
_TRUSTED = 16  # times as many bytes as were measured are estimated from that
_MOST_LATE = 8  # reads of a link that no request waits for any more: no other is begun beside them
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
      queued: reads that wait to begin.
      late: reads that were given up, and have not come back.
      circuit: "open" while it is not used, but for probes.
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
class Read:
    """One read over a link.

    Attributes:
      fetch: reads, on a thread.
      then: gets what it returned or raised, on the same thread; True where the bytes stay in
        flight until ``Links.done``.
      number: among those of one order.
    """

    link: "Link"
    nbytes: int
    fetch: Callable[[], Any]
    then: Callable[[Any], bool]
    order: Order
    number: int


class Link:
    """What is known of one way; for ``Links``, under its lock."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: list[Read] = []  # that wait to begin
        self.reading: set[Read] = set()  # and were not given up
        self.running: set[Read] = set()  # these, and those whose ``then`` runs
        self.in_flight: set[Read] = set()  # whose bytes count
        self.late = self.reads = self.failures = self.opened = self.bytes_read = 0
        self.in_a_row = 0
        self.open_until: float | None = None
        self.speed = Rate()  # bytes a second
        self.since = 0.0  # when the speed was last measured

    def begin(self, read: Read, now: float) -> None:
        """It is being read; over an open circuit it is a probe, and the next may go later."""
        if self.open_until is not None:
            self.open_until = now + OPEN_SECONDS
        if not self.reading:
            self.since = now
        for reads in (self.reading, self.running, self.in_flight):
            reads.add(read)

    def end(self, read: Read, now: float, nbytes: int) -> None:
        """So much of it came; the time in which several were read counts once."""
        self.reading.remove(read)
        self.speed.add(nbytes, max(now - self.since, 0.0), _DECAY)
        self.since = now

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
    """All links of an engine. Safe to share between threads.

    Every read has a thread of its own. An executor's would not do: its threads are waited for when
    the interpreter ends, so that a store that hangs would keep it for ever, and none of them is
    free again for others when a read is given up.
    """

    def __init__(self, clock: Callable[[], float], threads: int, max_bytes: int) -> None:
        """No thread runs yet.

        Args:
          clock: seconds.
          threads: that read over one link at a time.
          max_bytes: in flight on one link; a read that is larger goes alone.
        """
        self._clock, self._most, self._max_bytes = clock, threads, max_bytes
        self._lock = threading.RLock()
        self._tiers: weakref.WeakKeyDictionary[Any, dict[str, Link]] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._threads: set[threading.Thread] = set()
        self._closed = False

    def of(self, tier: Any, name: str) -> Link:
        """A link of a tier, any object, by its name; made when it is first asked for."""
        with self._lock:
            links: dict[str, Link] = self._tiers.setdefault(tier, {})
            return links.setdefault(name, Link(name))

    def submit(
        self,
        link: Link,
        order: Order,
        nbytes: int,
        fetch: Callable[[], Any],
        then: Callable[[Any], bool],
    ) -> Read:
        """Read over a link when those before it have begun; the arguments are those of ``Read``."""
        read = Read(link, nbytes, fetch, then, order, next(self._numbers))
        with self._lock:
            link.queue.append(read)
            self._begin(link)
        return read

    def hasten(self, read: Read, order: Order) -> None:
        """Somebody more urgent waits for it."""
        with self._lock:
            read.order = min(order, read.order)

    def cancel(self, read: Read) -> bool:
        """Nobody wants it any more; True where it was not begun and never will be."""
        with self._lock:
            if read not in read.link.queue:
                return False
            read.link.queue.remove(read)
            return True

    def give_up(self, read: Read) -> bool:
        """It takes too long: another may be read beside it, and that counts as a failure.

        False where it is not being read.
        """
        with self._lock:
            link, now = read.link, self._clock()
            if read not in link.reading:
                return False
            link.late += 1
            link.end(read, now, 0)
            link.failed(now)
            link.running.remove(read)
            self.done(read)
            return True

    def done(self, read: Read) -> None:
        """What it brought is where it was to go, or was dropped."""
        with self._lock:
            read.link.in_flight.discard(read)
            self._begin(read.link)

    def is_open(self, link: Link) -> bool:
        """Would a read not be tried now?"""
        with self._lock:
            waits = link.open_until is not None and self._clock() < link.open_until
            return waits or link.late >= _MOST_LATE

    def backlog(self, link: Link) -> int:
        """Bytes that are still to be read."""
        with self._lock:
            return _bytes(link.reading) + _bytes(link.queue)

    def seconds(self, link: Link, order: Order, nbytes: int) -> float:
        """When so many bytes more would be read, by what goes before them; 0 where unknown.

        It is where much less was measured: that was latency, not the rate.
        """
        with self._lock:
            before = [*link.reading, *(read for read in link.queue if read.order <= order)]
            ahead, rate = _bytes(before) + nbytes, link.speed.per_second
            return ahead / rate if rate and ahead <= _TRUSTED * link.speed.amount else 0.0

    def states(self) -> tuple[LinkState, ...]:
        """Every link that is in use, by name."""
        with self._lock:
            links = [link for links in self._tiers.values() for link in links.values()]
            return tuple(
                LinkState(
                    name=state.name,
                    rate=state.speed.per_second,
                    bytes_read=state.bytes_read,
                    bytes_in_flight=_bytes(state.in_flight),
                    queued=len(state.queue),
                    late=state.late,
                    reads=state.reads,
                    failures=state.failures,
                    circuit="closed" if state.open_until is None else "open",
                    opened=state.opened,
                )
                for state in sorted(links, key=lambda state: state.name)
            )

    def close(self) -> None:
        """Begin nothing more, and wait a while for what was begun."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
        end = time.monotonic() + _EXIT
        for thread in threads:
            thread.join(max(end - time.monotonic(), 0.0))

    def _begin(self, link: Link) -> None:
        """Begin what may be read now, the most urgent first; refuse all over an open circuit."""
        link.queue.sort(key=lambda read: (read.order, read.number))
        while link.queue and not self._closed:
            if self.is_open(link):
                refused, link.queue = link.queue, []
                self._start(self._refuse, refused)
                return
            read, held = link.queue[0], _bytes(link.in_flight)
            if len(link.running) >= self._most or 0 < held > self._max_bytes - read.nbytes:
                return
            link.queue.pop(0)
            link.begin(read, self._clock())
            self._start(self._read, read)

    def _start(self, job: Callable[[Any], None], of: Any) -> None:
        def work() -> None:
            job(of)
            with self._lock:
                self._threads.discard(thread)
                if not self._threads and not self._closed:
                    atexit.unregister(self.close)

        thread = threading.Thread(target=work, name="jaxrag-load", daemon=True)
        if not self._threads:
            atexit.register(self.close)
        self._threads.add(thread)
        thread.start()

    def _read(self, read: Read) -> None:
        """On a thread of its own."""
        link, answer = read.link, result_of(read.fetch)
        with self._lock:
            if read not in link.reading:
                link.late -= 1
            elif isinstance(answer, BaseException):
                link.end(read, self._clock(), 0)
                link.failed(self._clock())
            else:
                link.end(read, self._clock(), read.nbytes)
                link.worked(read.nbytes)
        kept = result_of(lambda: read.then(answer))
        with self._lock:
            link.running.discard(read)
            if kept is not True:
                link.in_flight.discard(read)
            self._begin(link)

    def _refuse(self, reads: Iterable[Read]) -> None:
        for read in reads:
            why = f"{read.link.name} failed {read.link.in_a_row} times in a row"
            result_of(lambda: read.then(LinkOpen(why)))  # noqa: B023


def _bytes(reads: Iterable[Read]) -> int:
    return sum(read.nbytes for read in reads)


@dataclasses.dataclass(frozen=True)
class LoadDeadline:
    """How long a load may take before its chunks are computed instead.

    Attributes:
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
        return all(0 <= part < math.inf for part in parts) and self.of(1) > 0

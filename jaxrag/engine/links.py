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
from collections.abc import Callable
from typing import Any, Literal

from jaxrag.base.errors import StoreError
from jaxrag.base.rates import Rate
from jaxrag.engine.thread import result_of

FAILURES = 5  # in a row that open a circuit
OPEN_SECONDS = 10.0  # until a probe is let through

_DECAY = 0.8  # of what was measured before, with every read
_TRUSTED = 16  # times as many bytes as were measured are estimated from that
_MOST_LATE = 8  # reads of a link that no request waits for any more: no other is begun beside them
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
      late: it was given up after it had begun.
      held: its bytes count as in flight.
      probe: it shows whether the link works again.
    """

    link: "Link"
    nbytes: int
    fetch: Callable[[], Any]
    then: Callable[[Any], bool]
    order: Order
    number: int
    status: Literal["queued", "reading", "over"] = "queued"
    late: bool = False
    held: bool = False
    probe: bool = False


class Link:
    """What is known of one way; for ``Links``, under its lock."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: list[Read] = []  # that wait for their turn
        self.running = self.reading = 0  # threads on it; those of them that read
        self.in_flight = self.ahead = 0  # bytes; of those that are not read yet
        self.late = self.reads = self.failures = self.opened = self.bytes_read = 0
        self.in_a_row = 0
        self.open_until: float | None = None
        self.probing = False
        self.speed = Rate()  # bytes a second
        self._since = 0.0

    def begin(self, now: float) -> None:
        """One more is being read."""
        if not self.reading:
            self._since = now
        self.reading += 1

    def end(self, now: float, nbytes: int) -> None:
        """One has been read; the time in which several were counts once."""
        self.reading -= 1
        self.speed.add(nbytes, max(now - self._since, 0.0), _DECAY)
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
    ) -> Read:
        """Read over a link when its turn comes; the arguments are those of ``Read``."""
        read = Read(link, nbytes, fetch, then, order, next(self._numbers))
        with self._changed:
            link.queue.append(read)
            self._employ()
        return read

    def hasten(self, read: Read, order: Order) -> None:
        """Somebody more urgent waits for it."""
        with self._changed:
            if read.status == "queued":
                read.order = min(order, read.order)

    def cancel(self, read: Read) -> bool:
        """Nobody wants it any more; True where it was not begun and never will be."""
        with self._changed:
            if read.status != "queued":
                return False
            read.status = "over"
            read.link.queue.remove(read)
            return True

    def give_up(self, read: Read) -> bool:
        """It takes too long: another may be read beside it, and that counts as a failure.

        False where it is not being read.
        """
        with self._changed:
            if read.status != "reading" or read.late:
                return False
            read.late = True
            link = read.link
            link.late += 1
            link.running -= 1
            self._count(read, 0)
            self._release(read)
            self._failed(read)
            self._employ()
            return True

    def done(self, read: Read) -> None:
        """What it brought is where it was to go, or was dropped."""
        with self._changed:
            self._release(read)
            self._employ()

    def is_open(self, link: Link) -> bool:
        """Would a read not be tried now?"""
        with self._changed:
            return self._shut(link)

    def backlog(self, link: Link) -> int:
        """Bytes that are still to be read."""
        with self._changed:
            return link.ahead + sum(read.nbytes for read in link.queue)

    def seconds(self, link: Link, order: Order, nbytes: int) -> float:
        """When so many bytes more would be read, by what goes before them; 0 where unknown.

        It is where much less was measured: that was latency, not the rate.
        """
        with self._changed:
            before = sum(read.nbytes for read in link.queue if read.order <= order)
            ahead = link.ahead + before + nbytes
            rate = link.speed.per_second
            return ahead / rate if rate and ahead <= _TRUSTED * link.speed.amount else 0.0

    def states(self) -> tuple[LinkState, ...]:
        """Every link that is in use, by name."""
        with self._changed:
            return tuple(
                LinkState(
                    name=it.name,
                    rate=it.speed.per_second,
                    bytes_read=it.bytes_read,
                    bytes_in_flight=it.in_flight,
                    queued=len(it.queue),
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

    def _next(self) -> Read | None:
        """Take the most urgent read that may begin now; one over an open circuit ends at once."""
        firsts = []
        for link in self._all():
            if not link.queue:
                continue
            read = min(link.queue, key=_turn)
            room = not link.in_flight or link.in_flight + read.nbytes <= self._max_bytes
            if self._shut(link) or (link.running < self._threads and room):
                firsts.append(read)
        best = min(firsts, key=_turn, default=None)
        if best is not None:
            best.link.queue.remove(best)
        return best

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

    def _release(self, read: Read) -> None:
        if read.held:
            read.held = False
            read.link.in_flight -= read.nbytes

    def _failed(self, read: Read) -> None:
        if read.probe:
            read.link.probing = read.probe = False
        read.link.failed(self._clock())

    def _begin(self, read: Read) -> bool:
        """Count a read as begun; False where its link is not to be used."""
        link = read.link
        if self._shut(link):
            read.status = "over"
            return False
        if link.open_until is not None:
            read.probe = link.probing = True
        read.status, read.held = "reading", True
        link.running += 1
        link.in_flight += read.nbytes
        link.ahead += read.nbytes
        link.begin(self._clock())
        return True

    def _count(self, read: Read, nbytes: int) -> None:
        read.link.ahead -= read.nbytes
        read.link.end(self._clock(), nbytes)

    def _end(self, read: Read, answer: Any) -> None:
        """Count a read as ended."""
        link = read.link
        read.status = "over"
        if read.late:
            link.late -= 1
        elif isinstance(answer, BaseException):
            self._count(read, 0)
            self._failed(read)
        else:
            self._count(read, read.nbytes)
            link.worked(read.nbytes)
            if read.probe:
                link.probing = read.probe = False

    # On a thread.

    def _work(self) -> None:
        while True:
            with self._changed:
                read = None if self._closed else self._next()
                if read is None:
                    self._idle += 1
                    called = not self._closed and self._changed.wait(_LINGER)
                    self._idle -= 1
                    if not called and (self._closed or not self._waits()):
                        self._workers.discard(threading.current_thread())
                        if not self._workers and not self._closed:
                            atexit.unregister(self.close)
                        return
                    continue
                begun = self._begin(read)
                self._employ()
            if not begun:
                why = f"{read.link.name} failed {read.link.in_a_row} times in a row"
                result_of(lambda read=read, why=why: read.then(LinkOpen(why)))  # type: ignore[misc]
                continue
            answer = result_of(read.fetch)
            with self._changed:
                self._end(read, answer)
            kept = result_of(lambda: read.then(answer))  # noqa: B023
            del answer
            with self._changed:
                if kept is not True:
                    self._release(read)
                if not read.late:
                    read.link.running -= 1
                self._employ()

    def _waits(self) -> bool:
        """Is there anything that could begin now?"""
        return any(
            link.queue and (self._shut(link) or link.running < self._threads)
            for link in self._all()
        )


def _turn(read: Read) -> tuple[Order, int]:
    return read.order, read.number


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
        return all(0 <= it < math.inf for it in parts) and self.of(1) > 0

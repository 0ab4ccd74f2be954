"""Where the requests of an engine stand, what they hold, and how fast it serves them.

The engine's thread counts, and any other may read: what is looked at are copies, taken without a
lock, each of one moment but not all of the same.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal

from jaxrag.engine.admission import QUEUED, Entry, Status
from jaxrag.engine.decoding import LaneKey
from jaxrag.engine.live import Live
from jaxrag.engine.scheduler import GENERATED, Ending, Scheduler
from jaxrag.kv.cache import PageAllocator

PageState = Literal["free", "unpinned", "pinned", "loading", "own"]
_HALF_LIFE = 30.0  # seconds of work after which what was done counts half as much


class Pace:
    """Virtual service a second, of late; for one thread to count, and any to read."""

    def __init__(self) -> None:
        """Nothing was done yet."""
        self._done = self._seconds = 0.0
        self._last: tuple[float, float] | None = None  # when, and what was done by then

    def turn(self, now: float, given: float) -> None:
        """At this moment so much service has been given since the engine began."""
        if self._last is None:
            self._last = now, given
        before, had = self._last
        if (passed := now - before) > 0:
            keep = 0.5 ** (passed / _HALF_LIFE)
            self._seconds = self._seconds * keep + passed
            self._done = self._done * keep + given - had
            self._last = now, given

    def rest(self) -> None:
        """There is nothing to do: time does not count until the next turn."""
        self._last = None

    @property
    def rate(self) -> float | None:
        """Service a second while there was work; None before any was measured."""
        return self._done / self._seconds if self._seconds and self._done else None


@dataclasses.dataclass(frozen=True)
class Ages:
    """How long requests have been in one state.

    Attributes:
      longest: seconds.
      total: seconds of all of them.
    """

    longest: float = 0.0
    total: float = 0.0

    @classmethod
    def of(cls, since: Iterable[float], now: float) -> "Ages":
        """Of requests that have been there since then."""
        ages = [max(now - it, 0.0) for it in since]
        return cls(max(ages, default=0.0), sum(ages))


@dataclasses.dataclass(frozen=True)
class Standing:
    """An engine at one moment.

    Attributes:
      requests: that have not ended, by status ("waiting", "loading", "ready", "prefill", ...).
      pages: of the pool. "free": nobody has them; "unpinned": of chunks that no request maps;
        "pinned": of chunks that some do; "loading": of chunks on their way; "own": of requests.
      rows: held and there, of every lane that has requests, by the name of its program.
      waiting: how long requests have been waiting for room.
      loading: how long those that have room have been waiting for chunks.
      waiting_tokens: of the prompts that wait.
      queued_cost: virtual service of all that waits for room, with as many tokens as answers have
        had on average; a token that is computed is 1.
      rate: virtual service a second while there was work, of late; None before any was measured.
      ended: requests by how they ended.
      new_tokens: that were generated.
      preempted: requests set aside for others.
      evicted: chunks that left the pool for others.
      restarts: pools that were lost in a step that failed, and made anew.
    """

    requests: Mapping[str, int]
    pages: Mapping[PageState, int]
    rows: Mapping[str, tuple[int, int]]
    waiting: Ages
    loading: Ages
    waiting_tokens: int
    queued_cost: float
    rate: float | None
    ended: Mapping[Ending, int]
    new_tokens: int
    preempted: int
    evicted: int
    restarts: int

    @property
    def queued_seconds(self) -> float:
        """How long what waits for room takes at this rate; 0 where the rate is not known."""
        return self.queued_cost / self.rate if self.rate else 0.0


def standing_of(
    scheduler: Scheduler,
    allocator: PageAllocator,
    live: Mapping[int, Live],
    pace: Pace,
    *,
    restarts: int,
    now: float,
) -> Standing:
    """Look at the parts of an engine; on any thread."""
    entries = list(scheduler.live.copy().values())
    queued = [it for it in entries if it.status in QUEUED]
    loading = [it.number for it in entries if it.status is Status.LOADING]
    ended = dict(scheduler.ended)
    finished, new_tokens = ended.get("finished", 0), scheduler.new_tokens
    answer = GENERATED * new_tokens / finished if finished else 0.0
    return Standing(
        requests={status.value: n for status, n in scheduler.counts.copy().items()},
        pages=_pages(allocator, entries),
        rows=_rows(scheduler),
        waiting=Ages.of((it.arrived for it in queued), now),
        loading=Ages.of(_admitted(live, loading), now),
        waiting_tokens=scheduler.waiting_tokens,
        queued_cost=sum(it.cost + answer for it in queued),
        rate=pace.rate,
        ended=ended,
        new_tokens=new_tokens,
        preempted=scheduler.preempted,
        evicted=allocator.evicted,
        restarts=restarts,
    )


def _pages(allocator: PageAllocator, entries: Iterable[Entry]) -> dict[PageState, int]:
    """Of the pool by state; all but what is read in between adds up to its pages."""
    chunks = list(allocator.chunks.copy().values())
    return {
        "free": allocator.num_free,
        "unpinned": sum(len(it.pages) for it in chunks if it.ready and not it.ref_count),
        "pinned": sum(len(it.pages) for it in chunks if it.ready and it.ref_count),
        "loading": sum(len(it.pages) for it in chunks if not it.ready),
        "own": sum(len(it.own) for it in entries),
    }


def _rows(scheduler: Scheduler) -> dict[str, tuple[int, int]]:
    """Of every lane of the engine's."""
    lanes = {key: held for key, held in scheduler.occupancy.items() if isinstance(key, LaneKey)}
    return {
        f"{key.rule.name}: {key.pages} pages, {key.room} generated, {key.rows} rows": (
            held,
            key.rows,
        )
        for key, held in lanes.items()
    }


def _admitted(live: Mapping[int, Live], numbers: Iterable[int]) -> Iterable[float]:
    found = (live.get(number) for number in numbers)
    return [it.admitted for it in found if it is not None and it.admitted is not None]

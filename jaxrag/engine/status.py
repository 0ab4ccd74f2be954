"""The status of an engine: its requests, what they hold, how fast they go, where chunk KV is.

The engine's thread counts, and any other may read: what is looked at are copies, taken without a
lock, each of one moment but not all of the same.
"""

import dataclasses
from collections import Counter, abc
from collections.abc import Iterable, Mapping
from typing import Literal

from jaxrag.engine.admission import QUEUED
from jaxrag.engine.arena import ArenaState
from jaxrag.engine.links import LinkState
from jaxrag.engine.request import BatchKey
from jaxrag.engine.scheduler import GENERATED, Scheduler
from jaxrag.engine.sequence import Ending, RequestStatus, Sequence
from jaxrag.engine.staging import HitKind
from jaxrag.engine.state import State
from jaxrag.kv.cache import PAGE, PageAllocator

PageState = Literal["free", "unpinned", "pinned", "loading", "own"]


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
        ages = [max(now - begun, 0.0) for begun in since]
        return cls(max(ages, default=0.0), sum(ages))


@dataclasses.dataclass(frozen=True)
class EngineStatus:
    """An engine at one moment.

    Attributes:
      requests: that have not ended, by status ("waiting", "loading", "ready", "prefill", ...).
      pages: of the pool. "free": not in use; "unpinned": of chunks that no request maps;
        "pinned": of chunks that some do; "loading": of chunks on their way; "own": of requests.
      rows: held and there, of every batch that has requests, by the name of its program.
      waiting: how long requests have been waiting for room.
      loading: how long those that have room have been waiting for chunks.
      waiting_tokens: of the prompts that wait.
      queued_cost: virtual service of all that waits for room, with as many tokens as answers have
        had on average; a token that is computed is 1.
      rate: virtual service a second while there was work, of late; None before any was measured.
      ended: requests by how they ended.
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


@dataclasses.dataclass(frozen=True)
class Tiers:
    """The tiers of an engine at one moment.

    Attributes:
      hits: chunks and prefixes that admitted requests were given since the engine began, by where
        their KV came from. "pool": it was there, or on its way for another request.
      pool_chunks: that lie in the pool or are on their way into it.
      pool_bytes: of the pool's pages that chunks have.
      links: from the stores, and from the arena to the device.
    """

    hits: Mapping[HitKind, int]
    pool_chunks: int
    pool_bytes: int
    max_pool_bytes: int
    host: ArenaState
    links: tuple[LinkState, ...]


def status_of(state: State) -> EngineStatus:
    """Look at the parts of an engine; on any thread."""
    scheduler, now = state.scheduler, state.clock()
    allocator = state.runner.cache.allocator
    sequences = list(scheduler.live.copy().values())
    queued = [sequence for sequence in sequences if sequence.status in QUEUED]
    loading = [seq.moments.copy() for seq in sequences if seq.status is RequestStatus.LOADING]
    admitted = [moments["admitted"] for moments in loading if "admitted" in moments]
    ended = dict(scheduler.ended)
    finished, new_tokens = ended.get("finished", 0), scheduler.new_tokens
    answer = GENERATED * new_tokens / finished if finished else 0.0
    return EngineStatus(
        requests={status.value: n for status, n in scheduler.counts.copy().items()},
        pages=_pages(allocator, sequences),
        rows=_rows(scheduler),
        waiting=Ages.of((sequence.moments["added"] for sequence in queued), now),
        loading=Ages.of(admitted, now),
        waiting_tokens=scheduler.waiting_tokens,
        queued_cost=sum(sequence.cost + answer for sequence in queued),
        rate=state.pace.per_second,
        ended=ended,
        new_tokens=new_tokens,
        preempted=scheduler.preempted,
        evicted=allocator.evicted,
        restarts=state.restarts,
    )


def tiers_of(state: State, hits: Mapping[HitKind, int]) -> Tiers:
    """Where the chunks of an engine are; on any thread."""
    cache = state.runner.cache
    per_page = PAGE * state.runner.model.config.kv_bytes_per_token
    return Tiers(
        hits=dict(hits),
        pool_chunks=len(cache.allocator.chunks),
        pool_bytes=cache.allocator.num_held * per_page,
        max_pool_bytes=cache.allocator.num_pages * per_page,
        host=state.arena.state,
        links=state.links.states(),
    )


def all_status(engines: Mapping[str, EngineStatus]) -> EngineStatus:
    """Of several engines, by name, as one: sums, and the longest ages."""
    statuses = list(engines.values())
    rates = [status.rate for status in statuses if status.rate is not None]
    return EngineStatus(
        requests=_sum(status.requests for status in statuses),
        pages=_sum(status.pages for status in statuses),
        rows={f"{name}: {row}": n for name, its in engines.items() for row, n in its.rows.items()},
        waiting=_ages(status.waiting for status in statuses),
        loading=_ages(status.loading for status in statuses),
        waiting_tokens=sum(status.waiting_tokens for status in statuses),
        queued_cost=sum(status.queued_cost for status in statuses),
        rate=sum(rates) if rates else None,
        ended=_sum(status.ended for status in statuses),
        new_tokens=sum(status.new_tokens for status in statuses),
        preempted=sum(status.preempted for status in statuses),
        evicted=sum(status.evicted for status in statuses),
        restarts=sum(status.restarts for status in statuses),
    )


def all_tiers(engines: abc.Sequence[Tiers]) -> Tiers:
    """Of several engines as one: sums; a link for each of every engine."""
    hosts = [engine.host for engine in engines]
    return Tiers(
        hits=_sum(engine.hits for engine in engines),
        pool_chunks=sum(engine.pool_chunks for engine in engines),
        pool_bytes=sum(engine.pool_bytes for engine in engines),
        max_pool_bytes=sum(engine.max_pool_bytes for engine in engines),
        host=ArenaState(
            nbytes=sum(host.nbytes for host in hosts),
            max_bytes=sum(host.max_bytes for host in hosts),
            chunks=sum(host.chunks for host in hosts),
            evicted=sum(host.evicted for host in hosts),
        ),
        links=tuple(link for engine in engines for link in engine.links),
    )


def _sum[Name](counts: Iterable[Mapping[Name, int]]) -> dict[Name, int]:
    total: Counter[Name] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)


def _ages(given: Iterable[Ages]) -> Ages:
    ages = list(given)
    return Ages(max((age.longest for age in ages), default=0.0), sum(age.total for age in ages))


def _pages(allocator: PageAllocator, sequences: Iterable[Sequence]) -> dict[PageState, int]:
    """Of the pool by state; all but what is read in between adds up to its pages."""
    return {
        "free": allocator.num_free,
        "unpinned": allocator.num_unpinned,
        "pinned": allocator.num_pinned,
        "loading": allocator.num_loading,
        "own": sum(len(sequence.own) for sequence in sequences),
    }


def _rows(scheduler: Scheduler) -> dict[str, tuple[int, int]]:
    """Of every batch of the engine's."""
    batches = {key: held for key, held in scheduler.occupancy.items() if isinstance(key, BatchKey)}
    return {
        f"{key.rule.name}: {key.pages} pages, {key.room} generated, {key.rows} rows": (
            held,
            key.rows,
        )
        for key, held in batches.items()
    }

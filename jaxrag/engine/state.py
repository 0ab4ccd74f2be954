"""Requests in the engine, and what the parts of its loop share; for the engine's thread."""

import dataclasses
from collections import abc, deque
from collections.abc import Callable
from typing import Literal, get_args

from jaxrag.base.errors import ConfigError
from jaxrag.base.rates import WorkRate
from jaxrag.engine.admission import SchedulerSettings
from jaxrag.engine.arena import HostArena
from jaxrag.engine.links import Link, Links, LoadDeadline
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.scheduler import Scheduler
from jaxrag.engine.sequence import Ending, Sequence
from jaxrag.kv.cache.heat import HALF_LIFE
from jaxrag.kv.store import KVStore, SharedStore
from jaxrag.models.compiled import CompileTimes

SlowLoad = Literal["wait", "compute"]
Happening = Literal["prefetch", "admitted", "read", "placed"]
Post = Callable[[Callable[[], None]], None]  # has a function called on the engine's thread


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """How an engine serves.

    Attributes:
      prefill_tokens: that are run between two decode steps at most, or one piece.
      together_flops: prompts are run as many at once as their batch has rows, whether there are so
        many or not, where a piece of all of them takes no more operations than that: then it is
        the call that costs.
      load_threads: that read chunks of one store and stage them.
      half_life: requests after which a use of a chunk counts half as much; the coldest chunk leaves
        pool and arena first.
      arena_bytes: of chunk KV that is kept in host memory between stores and pool; None: a quarter
        of what is free; 0: none. Chunks of a store that is in memory itself are not kept twice.
      max_loading_bytes: of chunk KV on the way from one store: read, staged, not placed yet.
      place_bytes: of chunk KV that are written to the pool between two decode steps, or one block.
      slow_load: "wait": for the store, however long it takes; "compute": a chunk that was not read
        by ``load_deadline``, or will not be by what its link measured, is encoded, and what comes
        first is used. Answers then depend on time, by the rounding of one encoding and another.
      load_deadline: for the chunks that a request has to load.
      spare_wait: while somebody is served, a spare job (``Engine.spare``) waits this many times as
        long as the one before it took.
      keep_events: how many events of chunks ``Engine.events`` gives.
      lockstep: nothing depends on time: loads and indexes are waited for where they are asked for.
        What several processes need that run one model together; where one of them leads, chunks
        are read beside the computing, and count as there in the iteration that the leader says.
    """

    scheduler: SchedulerSettings = dataclasses.field(default_factory=SchedulerSettings)
    prefill_tokens: int = 1024
    together_flops: float = 1e9
    load_threads: int = 2
    half_life: float = HALF_LIFE
    arena_bytes: int | None = None
    max_loading_bytes: int = 1 << 30
    place_bytes: int = 64 << 20
    slow_load: SlowLoad = "wait"
    load_deadline: LoadDeadline = dataclasses.field(default_factory=LoadDeadline)
    spare_wait: float = 4.0
    keep_events: int = 0
    lockstep: bool = False

    def __post_init__(self) -> None:
        for name in ("prefill_tokens", "load_threads", "max_loading_bytes", "place_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: expected at least 1")
        for name in ("arena_bytes", "keep_events"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"{name}={getattr(self, name)}: expected 0 or more")
        if not self.spare_wait >= 0:
            raise ConfigError(f"spare_wait={self.spare_wait}: expected 0 or more")
        if self.slow_load not in get_args(SlowLoad):
            known = ", ".join(get_args(SlowLoad))
            raise ConfigError(f"slow_load={self.slow_load!r}: expected one of {known}")
        if not self.load_deadline.sound:
            raise ConfigError(f"load_deadline={self.load_deadline}: expected seconds of 0 or more")


@dataclasses.dataclass(frozen=True)
class ChunkEvent:
    """What happened to a chunk, and when.

    Attributes:
      time: by the engine's clock.
      what: "prefetch": it is read before any request is admitted for it; "admitted": a request
        that has pages waits for it; "read": a store begins to read it; "placed": it is in the pool.
    """

    time: float
    what: Happening
    key: str


@dataclasses.dataclass(eq=False)
class State:
    """The engine's state.

    Attributes:
      runner: the model on its device.
      scheduler: who is where, and who holds which pages.
      post: has a function called on the engine's thread, from any.
      clock: seconds.
      now: of this iteration by the leader's clock, by which all processes decide; None: ``clock``
        does.
      compile_times: when its thread compiled.
      arena: chunk KV in host memory.
      links: from the stores, and from the arena.
      live: requests whose clients wait, by number.
      ending: those that were sent the last, and still are in a step in flight, and how they ended.
      epoch: counts the pools; what was begun for an earlier one is void.
      restarts: pools that were lost in a step that failed.
      pace: at which requests are served.
      report: of several processes that are led: tells the leader that this one has read its part
        of a batch of chunks, by its number; on any thread.
    """

    runner: ModelRunner
    settings: EngineSettings
    scheduler: Scheduler
    post: Post
    clock: Callable[[], float]
    compile_times: CompileTimes
    arena: HostArena
    links: Links
    events: deque[ChunkEvent]
    live: dict[int, Sequence] = dataclasses.field(default_factory=dict)
    ending: dict[Sequence, Ending] = dataclasses.field(default_factory=dict)
    epoch: int = 0
    restarts: int = 0
    pace: WorkRate = dataclasses.field(default_factory=WorkRate)
    now: float | None = None
    report: Callable[[int], None] | None = None

    def ended(self, sequence: Sequence) -> bool:
        """Was its client sent the last of it?"""
        return sequence.number not in self.live

    def moment(self) -> float:
        """The time that decides: on several processes the same."""
        return self.clock() if self.now is None else self.now

    def note(self, what: Happening, key: str) -> None:
        """Something happened to a chunk; on any thread."""
        if self.settings.keep_events:
            self.events.append(ChunkEvent(self.clock(), what, key))

    def link_of(self, store: KVStore, what: str = "") -> Link:
        """The link of a store; ``what`` names another than that of its reads."""
        named = str(getattr(store, "location", "memory" if store.private else "store"))
        tier = store.inner if isinstance(store, SharedStore) else store
        return self.links.of(tier, named + what)

    @property
    def arena_link(self) -> Link:
        """The link of host memory."""
        return self.links.of(self.arena, "host")


class Broken(Exception):
    """A call that failed on the device, or on its way there.

    Attributes:
      suspects: the requests that took part.
      shared: whether others may have lost something with it.
    """

    def __init__(
        self, error: BaseException, suspects: abc.Sequence[Sequence], *, shared: bool = True
    ) -> None:
        super().__init__(str(error))
        self.error = error
        self.suspects = list(suspects)
        self.shared = shared

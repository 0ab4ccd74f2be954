"""Requests in the engine, and what the parts of its loop share; for the engine's thread."""

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

import numpy as np

from jaxrag.base.errors import ConfigError, EngineError
from jaxrag.base.rates import WorkRate
from jaxrag.base.types import HostArray
from jaxrag.engine.admission import SchedulerSettings
from jaxrag.engine.arena import HostArena
from jaxrag.engine.decoding import FAILED, LaneKey, LaneRows
from jaxrag.engine.links import Link, Links, LoadDeadline, Read
from jaxrag.engine.looks import LooksSoFar
from jaxrag.engine.mapping import RequestPlan, RequestState
from jaxrag.engine.progress import Sink
from jaxrag.engine.request import FinishReason, Request
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.scheduler import Ending, Scheduler
from jaxrag.engine.staging import ChunkLoad, ChunkOrigin, Fetched, Staged
from jaxrag.kv.cache import PAGE, PagedCache
from jaxrag.kv.cache.heat import HALF_LIFE
from jaxrag.kv.store import KVStore, OwnRead, SharedStore
from jaxrag.models.compiled import CompileTimes
from jaxrag.models.text.guidance import Matcher
from jaxrag.reuse.decode import Decoding

SlowLoad = Literal["wait", "compute"]
Happening = Literal["prefetch", "admitted", "read", "placed"]
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5  # seconds between two looks for what others encode
Post = Callable[[Callable[[], None]], None]  # has a function called on the engine's thread


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """How an engine serves.

    Attributes:
      prefill_tokens: that are run between two decode steps at most, or one piece.
      together_flops: prompts are run as many at once as their lane has rows, whether there are so
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
        are read beside the computing, and count as there in the turn that the leader says.
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


@dataclasses.dataclass(eq=False)
class Swapped:
    """What a request that was set aside had on the device.

    Attributes:
      pages: K and V of its own pages, [L, n, page, K, H] each.
      row: of its lane, and what its rule carried.
    """

    pages: tuple[HostArray, HostArray]
    row: tuple[LaneRows, Decoding | None]


@dataclasses.dataclass(eq=False)
class RunningRequest:
    """One request from ``add`` until nothing of it is left.

    Attributes:
      lane: that it decodes in; None where a single token is all.
      added: when, by the engine's clock; the other times likewise, None before.
      run: counts how often it was begun or set aside; what was started in an earlier run is void.
      moments: of ``progress.MOMENTS`` those with no attribute of their own.
      found: by key where the chunks came from that were loaded for it.
      state: where its KV lies, once it is mapped.
      tokens: its answer so far, as its client has it.
      read: tokens of this run that were read; fewer than ``tokens`` after it was begun again.
      left: tokens that are still to be run.
      row: its place in the lane.
      search: its number in the host's search.
      ahead: what its selector made of the question before its chunks were there.
      in_flight: what was started for it and has not come back.
      ended: its client was sent the last of it.
      strikes: steps that broke while it took part.
      matcher: how far this run of its answer has come in its grammar, if there is one.
      allowed: what may come next by that, as ``Matcher.allowed``.
      looks: of this run of its answer, if it is ``cited``.
    """

    number: int
    request: Request
    plan: RequestPlan
    lane: LaneKey | None
    sink: Sink
    added: float
    run: int = 0
    moments: dict[str, float] = dataclasses.field(default_factory=dict)
    found: dict[str, ChunkOrigin] = dataclasses.field(default_factory=dict)
    admitted: float | None = None
    ready: float | None = None
    first: float | None = None
    state: RequestState | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    read: int = 0
    left: int = 0
    row: int | None = None
    search: int | None = None
    ahead: Any = None
    in_flight: int = 0
    ended: bool = False
    why: Ending = "failed"
    strikes: int = 0
    swapped: Swapped | None = None
    matcher: Matcher | None = None
    allowed: HostArray | None = None
    looks: LooksSoFar = dataclasses.field(default_factory=LooksSoFar)

    def accept(self, ids: Sequence[int]) -> tuple[list[int], FinishReason | None]:
        """Take what was sampled, up to the end: what is new of it, and why the answer ends here.

        Raises EngineError for logits that hold a NaN, and for an answer that differs from what was
        sent before the request was begun again.
        """
        new: list[int] = []
        grammar = self.request.grammar
        if grammar is not None and self.matcher is None:
            self.matcher = grammar.matcher()
        for token_id in ids:
            if token_id == FAILED:
                raise EngineError(
                    f"the logits of token {self.read} hold a NaN; check the model's weights, and "
                    "encode stored KV that is no numbers again with jaxrag kb verify --repair"
                )
            if token_id in self.request.eos_ids:
                return new, "stop"
            if self.read < len(self.tokens):
                if self.tokens[self.read] != token_id:
                    raise EngineError(
                        f"token {self.read} came out as {token_id} and was "
                        f"{self.tokens[self.read]} before the engine was restarted; ask again"
                    )
            else:
                self.tokens.append(token_id)
                new.append(token_id)
            self.read += 1
            if self.matcher is not None:
                self.allowed = self.matcher.take(token_id)
                if self.allowed is None:
                    return new, "stop"
            if self.read == self.request.max_new_tokens:
                return new, "length"
        return new, None

    def turn_pages(self) -> Iterator[tuple[str, int, int]]:
        """Key, page and number of tokens of every page with question and answer, if they stay.

        The answer's last token is not among them, as it may never have been run. Under a sparse
        decode rule no answer is: its KV is not what prefill computes.
        """
        state = self.state
        if state is None or self.swapped is not None or not self.read:
            return
        if not self.request.keeps_turns:
            return
        sparse = self.request.method.decode.sparse
        answer = np.array([] if sparse else self.tokens[: self.read - 1], np.int32)
        turn = np.concatenate((self.request.prompt.final, answer)).astype(np.int32)
        pages = state.table.pages[state.first_slot // PAGE :]
        for page, (key, piece) in zip(pages, self.plan.context.pieces(turn), strict=False):
            if not sparse or len(piece) == PAGE:  # a shorter one would begin another page
                yield key, page, len(piece)

    def restart(self) -> None:
        """Begin from the start; what was sent is not sent again."""
        self.run += 1
        self.state = self.row = self.swapped = self.matcher = self.allowed = None
        self.read = self.left = self.in_flight = 0
        self.found, self.looks = {}, LooksSoFar()
        self.plan.gone.clear()


@dataclasses.dataclass(eq=False)
class PendingChunk:
    """A chunk that the pool waits for.

    Attributes:
      owner: the request that asked first.
      pages: of the pool, for its KV.
      deadline: by the engine's clock, when it is computed instead, or with a ``pause`` looked for
        again; None: it is waited for.
      batch: that it is read in.
      late: it is read and computed, and the first to finish claims it.
      found: why it is to be encoded.
      stores: its store gets it once it is encoded.
      pause: another process encodes it: seconds until it is looked for again.
    """

    load: ChunkLoad
    owner: RunningRequest
    cache: PagedCache
    pages: tuple[int, ...]
    deadline: float | None
    batch: "ReadBatch | None" = None
    late: bool = False
    found: ChunkOrigin = dataclasses.field(default_factory=lambda: ChunkOrigin("encoded"))
    stores: bool = True
    pause: float = 0.0
    _claim: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def claim(self) -> bool:
        """True for the first caller: only its KV is placed. On any thread."""
        return self._claim.acquire(blocking=False)

    @property
    def claimed(self) -> bool:
        """Is its KV there, or given up?"""
        return self._claim.locked()

    def abandon(self) -> bool:
        """As ``claim``, for nothing to be placed."""
        self.release()
        return self.claim()

    def wait(self, now: float) -> None:
        """Another process encodes it: it is looked for again, less often with every time."""
        self.pause = min(2 * self.pause or _FIRST_PAUSE, _LONGEST_PAUSE)
        self.deadline = now + self.pause

    def release(self) -> None:
        """Other processes may encode it, or find it in the store; on any thread."""
        self.load.encoding.store.release(self.load.key)


@dataclasses.dataclass(eq=False)
class ReadBatch:
    """Chunks that are read together, from where they are until they are placed.

    Attributes:
      waiting: by key, those that the pool waits for; once they are fetched, those claimed.
      held: they are in the arena.
      read: over a link; None where there is none.
      placed: blocks that are written there.
    """

    loads: Sequence[ChunkLoad]
    waiting: dict[str, PendingChunk]
    held: bool = False
    read: Read | None = None
    staged: Staged | None = None
    placed: int = 0

    def mark(self, what: str, now: float) -> None:
        """A moment of those who asked for its chunks first; on any thread."""
        for chunk in list(self.waiting.values()):
            chunk.owner.moments[what] = now

    def keep(self, arena: HostArena, fetched: Fetched | BaseException) -> None:
        """Put what was read into the arena; on any thread."""
        if isinstance(fetched, BaseException) or self.held or not arena.max_bytes:
            return
        for load in self.loads:
            if load.key in fetched.at and not load.encoding.store.private:
                arena.put(load.key, fetched.of(load))


@dataclasses.dataclass(eq=False)
class SharedRead:
    """A batch of which every process reads its part.

    Attributes:
      own: the part of this process, once it is read.
    """

    batch: ReadBatch
    own: tuple[OwnRead, HostArray | None] | BaseException | None = None


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
      now: of this turn by the leader's clock, by which all processes decide; None: ``clock`` does.
      compile_times: when its thread compiled.
      arena: chunk KV in host memory.
      links: from the stores, and from the arena.
      live: requests whose clients wait, by number.
      ending: those that were sent the last, and still are in a step in flight.
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
    live: dict[int, RunningRequest] = dataclasses.field(default_factory=dict)
    ending: dict[int, RunningRequest] = dataclasses.field(default_factory=dict)
    epoch: int = 0
    restarts: int = 0
    pace: WorkRate = dataclasses.field(default_factory=WorkRate)
    now: float | None = None
    report: Callable[[int], None] | None = None

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
        self, error: BaseException, suspects: Sequence[RunningRequest], *, shared: bool = True
    ) -> None:
        super().__init__(str(error))
        self.error = error
        self.suspects = list(suspects)
        self.shared = shared

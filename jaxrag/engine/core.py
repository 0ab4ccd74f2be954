"""The engine's loop: admit, load, encode, prefill, step, deliver; and how requests end."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from jaxrag.base.errors import (
    Cancelled,
    ContextExceeded,
    DeadlineExceeded,
    EngineError,
    JaxragError,
)
from jaxrag.engine.arena import HostArena, default_arena_bytes
from jaxrag.engine.lanes import Lanes
from jaxrag.engine.links import Links
from jaxrag.engine.live import Live
from jaxrag.engine.loader import ChunkLoad
from jaxrag.engine.loads import Loads
from jaxrag.engine.progress import Outcome, Progress, outcome_of
from jaxrag.engine.prompts import Prompts
from jaxrag.engine.request import FinishReason
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.scheduler import Ending, Entry, Scheduler, Status
from jaxrag.engine.standing import Standing, standing_of
from jaxrag.engine.state import Broken, EngineSettings, Post, State
from jaxrag.engine.thread import result_of
from jaxrag.engine.tiers import Tiers
from jaxrag.engine.turns import leave_turn
from jaxrag.kv.cache import PAGE
from jaxrag.kv.cache.host import arrived

_LOG = logging.getLogger("jaxrag")

_STRIKES = 2  # broken steps after which a request fails


class Core:
    """An engine at work, for one thread.

    Attributes:
      state: who is served, and where everybody stands.
    """

    def __init__(
        self,
        runner: ModelRunner,
        settings: EngineSettings,
        post: Post,
        clock: Callable[[], float],
    ) -> None:
        """Serves nobody yet."""
        self.state = State(
            runner=runner,
            settings=settings,
            scheduler=Scheduler(runner.cache.allocator, settings.scheduler),
            post=post,
            clock=clock,
            arena=HostArena(_arena_bytes(runner, settings), runner.has, settings.half_life),
            links=Links(clock, settings.load_threads, settings.max_loading_bytes),
            events=deque(maxlen=settings.keep_events),
        )
        self._new: list[Live] = []
        self._loads = Loads(self.state, self._fail)
        self._lanes = Lanes(self.state, self._took, self._release)
        self._prompts = Prompts(self.state, self._lanes, self._release)
        self._jobs: deque[tuple[Callable[[ModelRunner], Any], Future[Any]]] = deque()
        self._spare: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._spare_due = 0.0

    # From clients.

    def submit(self, live: Live, entry: Entry) -> None:
        """Queue a request; its client is told where the queue is full."""
        self.state.live[live.number] = live
        try:
            self.state.scheduler.submit(entry, self.state.clock())
            self._new.append(live)
        except JaxragError as error:
            self._fail(live, error)

    def abort(self, number: int) -> None:
        """The client wants nothing more of a request; a turn that it has read of stays."""
        live = self.state.live.get(number)
        if live is not None:
            leave_turn(self.state.scheduler, live)
            self._fail(live, Cancelled(f"request {number} was aborted"), "cancelled")

    def stop(self, number: int) -> None:
        """The client wants no more tokens of a request, and its outcome, if it has one by now."""
        live = self.state.live.get(number)
        # One that begins again on a new pool has been told a token, and is not mapped yet.
        if live is not None and live.first is not None and live.state is not None:
            self._finish(live, "stop")
        else:
            self.abort(number)

    def queue(self, job: Callable[[ModelRunner], Any], future: "Future[Any]") -> None:
        """Run a job once no chunk is on its way; nobody is admitted before."""
        self._jobs.append((job, future))

    def queue_spare(self, job: Callable[[], Any], future: "Future[Any]") -> None:
        """Run a job that needs no pool when nobody is served, or others have had their share."""
        self._spare.append((job, future))

    def forget(self) -> None:
        """A new pool, with nothing in it, nor in the arena; who is being served begins again."""
        self._rebuild()
        self.state.arena.clear()

    def prefetch(self, loads: Iterable[ChunkLoad]) -> None:
        """Read chunks into the arena, for a request that is going to ask for them."""
        self._loads.prefetch(loads)

    def tiers(self) -> Tiers:
        """Where chunk KV came from, and lies; on any thread."""
        state, cache = self.state, self.state.runner.cache
        per_page = PAGE * state.runner.model.config.kv_bytes_per_token
        chunks = list(cache.allocator.chunks.values())
        return Tiers(
            hits=dict(self._loads.hits),
            pool_chunks=len(chunks),
            pool_bytes=sum(len(it.pages) for it in chunks) * per_page,
            max_pool_bytes=cache.allocator.num_pages * per_page,
            host=state.arena.state,
            links=state.links.states(),
        )

    def standing(self) -> Standing:
        """Where requests stand and what they hold; on any thread."""
        state = self.state
        return standing_of(
            state.scheduler,
            state.runner.cache.allocator,
            state.live,
            state.pace,
            restarts=state.restarts,
            now=state.clock(),
        )

    # The loop.

    @property
    def busy(self) -> bool:
        """Is there anything to wait for?"""
        jobs = self._jobs or self._spare
        return bool(self.state.live or self._lanes.busy or self._loads.busy or jobs)

    def handle(self, event: Callable[[], None]) -> None:
        """Do what was posted."""
        try:
            event()
        except Broken as broken:
            self._recover(broken)

    def run_once(self) -> bool:
        """One turn of the loop; False where nothing could be done before the next event."""
        try:
            return self._turn()
        except Broken as broken:
            self._recover(broken)
            return True

    def _turn(self) -> bool:
        state, was = self.state, self._lanes.busy
        self._lanes.deliver_blocks()
        now = state.clock()
        state.pace.turn(now, state.scheduler.given)
        for number in state.scheduler.expired(now):
            self._expire(number)
        self._loads.expire(now)
        self._run_jobs()
        admitted = [] if self._jobs else state.scheduler.admit(now)
        for one in admitted:
            live = state.live.get(one.number)
            if live is None:  # a chunk that it shares with one before it was waited for, and failed
                for key in one.loads:
                    state.scheduler.refused(key)
                continue
            live.admitted = now if live.admitted is None else live.admitted
            self._loads.start(live, one)
            entry = state.scheduler.live.get(one.number)
            if entry is not None and entry.status is Status.READY:
                live.ready = state.clock()
            else:
                self._prompts.expect(live)
        for number in state.scheduler.outgrown():
            self._fail(state.live[number], self._too_large(state.live[number]))
        self._prefetch_waiting()
        placed = self._loads.place()
        encoded = self._loads.encode_one()
        self._make_room(now)
        prefilled = self._prompts.run()
        self._lanes.turn()
        moved = bool(was or admitted or placed or encoded or prefilled or self._lanes.busy)
        return self._run_spare(moved) or moved

    def patience(self) -> float | None:
        """Seconds until something is due without an event; None: nothing is."""
        dues = (self.state.scheduler.next_deadline(), self._loads.next_deadline())
        due = min((it for it in dues if it is not None), default=None)
        return None if due is None else max(due - self.state.clock(), 0.001)

    def _prefetch_waiting(self) -> None:
        """Those who came and found no room wait for it while their chunks are read."""
        new, self._new = self._new, []
        for live in new:
            entry = self.state.scheduler.live.get(live.number)
            if entry is not None and entry.status is Status.WAITING:
                self._loads.prefetch(live.plan.loads.values())

    def rest(self) -> None:
        """There is nothing to do: what lanes hold on the device goes."""
        self.state.pace.rest()
        self._lanes.clear()

    def _run_jobs(self) -> None:
        """Run jobs that want the pool to themselves."""
        while self._jobs and not self._loads.busy:
            self._lanes.deliver()
            job, future = self._jobs.popleft()
            answer = result_of(lambda job=job: job(self.state.runner))  # type: ignore[misc]
            if self.state.runner.cache.lost:
                self._rebuild()
            if isinstance(answer, BaseException):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    def _run_spare(self, others: bool) -> bool:
        """Run one spare job if nothing else moved, or its kind waited long enough; did it?

        A job may run when what is served has had ``spare_wait`` times as long as the one before
        took, so that neither stops the other.
        """
        start = self.state.clock()
        if not self._spare or (others and start < self._spare_due):
            return False
        job, future = self._spare.popleft()
        answer = result_of(job)
        now = self.state.clock()
        self._spare_due = now + self.state.settings.spare_wait * (now - start)
        if isinstance(answer, BaseException):
            future.set_exception(answer)
        else:
            future.set_result(answer)
        return True

    # Ends.

    def _took(self, live: Live, ids: list[int], probability: list[float]) -> None:
        """Hand new tokens to the client."""
        skip = max(len(live.tokens) - live.read, 0)  # told before it was begun again
        try:
            new, reason = live.take(ids)
        except EngineError as error:
            self._fail(live, error)
            return
        told = probability[skip : skip + len(new)]
        self.state.scheduler.generated(live.number, len(new))
        if reason is not None:
            self._finish(live, reason, new, told)
        elif new and self._tell(live, Progress(live.number, new, told)):
            self._finish(live, "stop")

    def _finish(
        self,
        live: Live,
        reason: FinishReason,
        new: Sequence[int] = (),
        probability: Sequence[float] = (),
    ) -> None:
        """The answer is complete: its outcome, and everything it holds is given back."""
        outcome = self._outcome(live)
        leave_turn(self.state.scheduler, live)
        self._end(live, "finished")
        self._tell(live, Progress(live.number, list(new), list(probability), reason, outcome))

    def _fail(self, live: Live, error: BaseException, why: Ending = "failed") -> None:
        self._end(live, why)
        self._tell(live, Progress(live.number, error=error))

    def _tell(self, live: Live, progress: Progress) -> bool:
        """Tell the client; a client that fails ends its request, and no other."""
        try:
            return bool(live.sink(progress))
        except Exception as error:
            _LOG.warning("the client of request %d failed: %s", live.number, error)
            if not live.ended:
                self._end(live, "cancelled")
            return False

    def _expire(self, number: int) -> None:
        live = self.state.live.get(number)
        if live is not None:
            over = f"request {number} took longer than timeout={live.request.timeout} s"
            self._fail(live, DeadlineExceeded(f"{over}; allow more, or ask for less"), "expired")

    def _too_large(self, live: Live) -> ContextExceeded:
        tokens, pool = live.request.prompt.num_tokens, self.state.runner.num_pages * PAGE
        return ContextExceeded(
            f"the prompt of {tokens} tokens needs more than the {pool} tokens of the pool, now that"
            " chunks of it were not found; raise cache_tokens or use fewer chunks"
        )

    def _outcome(self, live: Live) -> Outcome:
        now = self.state.clock()
        assert live.state is not None and live.first is not None
        admitted = live.added if live.admitted is None else live.admitted
        ready = admitted if live.ready is None else live.ready
        searched = None
        if live.search is not None:
            searched = self.state.runner.host_search.account_of([live.search])
        return outcome_of(
            self.state.runner.model,
            live.request,
            live.state,
            searched,
            wait=admitted - live.added,
            load=ready - admitted,
            prefill=live.first - ready,
            per_token=(now - live.first) / (live.read - 1) if live.read > 1 else 0.0,
        )

    def _end(self, live: Live, why: Ending) -> None:
        """Nothing more is done for a request; what it holds goes with what is in flight for it."""
        live.ended, live.why = True, why
        self.state.ending[live.number] = self.state.live.pop(live.number)
        self._lanes.leave(live)
        if not live.flying:
            self._release(live)

    def _release(self, live: Live) -> None:
        """Nothing in flight needs what a request holds."""
        runner = self.state.runner
        self._lanes.free(live)
        if runner.cache.host is not None:
            # Callbacks of what is in flight reach into host memory of its pages.
            arrived(runner.cache.pool.k)
        if live.search is not None:
            runner.host_search.release([live.search])
        del self.state.ending[live.number]
        self.state.scheduler.finish(live.number, live.why)

    # Preemption.

    def _make_room(self, now: float) -> None:
        """Set requests aside for others of a better class."""
        victims = self.state.scheduler.victims(now)
        if victims:
            self._lanes.deliver()
        for number in victims:
            live = self.state.live.get(number)
            if live is None:  # its last token was among what was read
                continue
            try:
                self._lanes.set_aside(live)
            except Exception as error:
                raise Broken(error, [live]) from error
            self.state.scheduler.swapped(number)

    # Failure.

    def _recover(self, broken: Broken) -> None:
        """What a request did wrong is its own; else all begin again on a new pool.

        A request that took part in two broken steps, alone in the second, fails.
        """
        error, suspects = broken.error, [it for it in broken.suspects if not it.ended]
        if isinstance(error, JaxragError) and not (broken.shared or self.state.runner.cache.lost):
            for live in suspects:
                self._fail(live, error)
            return
        _LOG.error("a step of the engine failed, its pool is made anew", exc_info=error)
        self.state.restarts += 1
        for live in suspects:
            live.strikes += 1
            self.state.scheduler.live[live.number].alone = True
        self._rebuild()
        for live in suspects:
            if live.strikes >= _STRIKES:
                text = " ".join(str(error).split())[:300]
                broke = f"request {live.number} broke the engine {live.strikes} times"
                self._fail(live, EngineError(f"{broke}: {type(error).__name__}: {text}"))

    def fail_all(self, error: BaseException) -> None:
        """Every client is told, and the pool is made anew."""
        self._rebuild()
        for live in list(self.state.live.values()):
            self._fail(live, error)
        self._drop_jobs(error)

    def abandon(self, error: BaseException) -> None:
        """Every client is told, and nothing else is touched: this object is done."""
        for live in list(self.state.live.values()):
            live.ended = True
            self._tell(live, Progress(live.number, error=error))
        self.state.live.clear()
        self._drop_jobs(error)

    def _drop_jobs(self, error: BaseException) -> None:
        for jobs in (self._jobs, self._spare):
            while jobs:
                jobs.popleft()[1].set_exception(error)

    def _rebuild(self) -> None:
        """A new pool; every request begins again, and its client hears only what is new."""
        state = self.state
        state.epoch += 1
        for part in (self._lanes, self._loads, self._prompts):
            part.clear()
        state.runner.forget_cache()
        for live in (*state.live.values(), *state.ending.values()):
            if live.search is not None:
                state.runner.host_search.release([live.search])
                live.search = None
            live.again()
        for live in state.ending.values():
            state.scheduler.finish(live.number, live.why)
        state.ending.clear()
        state.scheduler.reset(state.runner.cache.allocator)


def _arena_bytes(runner: ModelRunner, settings: EngineSettings) -> int:
    """None beside a pool that lies in host memory itself, nor where time plays no part."""
    if settings.lockstep:
        return 0
    if settings.arena_bytes is None:
        return 0 if runner.model.kv == "host" else default_arena_bytes()
    return settings.arena_bytes

"""The engine's loop: admit, load, encode, prefill, step, deliver; and how requests end."""

import dataclasses
import logging
import zlib
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
from jaxrag.engine.attribution import PIECE, read_again
from jaxrag.engine.lanes import Lanes
from jaxrag.engine.links import Links
from jaxrag.engine.looks import Looks
from jaxrag.engine.outcome import outcome_of
from jaxrag.engine.prefill_queue import PrefillQueue
from jaxrag.engine.progress import Outcome, Progress, Top
from jaxrag.engine.request import FinishReason
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.scheduler import Ending, Entry, RequestStatus, Scheduler
from jaxrag.engine.staging import ChunkLoad
from jaxrag.engine.state import Broken, EngineSettings, Post, RunningRequest, State
from jaxrag.engine.status import EngineStatus, Tiers, status_of, tiers_of
from jaxrag.engine.thread import result_of
from jaxrag.engine.transfers import Transfers
from jaxrag.kv.cache import PAGE
from jaxrag.kv.cache.host import arrived
from jaxrag.models.compiled import CompileTimes

_LOG = logging.getLogger("jaxrag")

_STRIKES = 2  # broken steps after which a request fails


class Core:
    """An engine at work, for one thread.

    Attributes:
      state: the requests that are served, and the status of each.
    """

    def __init__(
        self,
        runner: ModelRunner,
        settings: EngineSettings,
        post: Post,
        clock: Callable[[], float],
        compile_times: CompileTimes,
    ) -> None:
        self.state = State(
            runner=runner,
            settings=settings,
            scheduler=Scheduler(runner.cache.allocator, settings.scheduler),
            post=post,
            clock=clock,
            compile_times=compile_times,
            arena=HostArena(_arena_bytes(runner, settings), runner.has, settings.half_life),
            links=Links(clock, settings.load_threads, settings.max_loading_bytes),
            events=deque(maxlen=settings.keep_events),
        )
        self._new: list[RunningRequest] = []
        self._transfers = Transfers(self.state, self._fail)
        self._lanes = Lanes(self.state, self._took, self._release)
        self._prefills = PrefillQueue(self.state, self._lanes, self._release)
        self._jobs: deque[tuple[Callable[[ModelRunner], Any], Future[Any]]] = deque()
        self._spare: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._spare_due = 0.0
        self._given = 0.0  # service, at the last turn

    # From clients.

    def submit(self, running: RunningRequest, entry: Entry) -> None:
        """Queue a request; its client is notified where the queue is full."""
        self.state.live[running.number] = running
        try:
            self.state.scheduler.submit(entry, self.state.moment())
            self._new.append(running)
        except JaxragError as error:
            self._fail(running, error)

    def abort(self, number: int) -> None:
        """The client wants nothing more of a request; a turn that it has read of stays."""
        running = self.state.live.get(number)
        if running is not None:
            self._leave_turn(running)
            self._fail(running, Cancelled(f"request {number} was aborted"), "cancelled")

    def stop(self, number: int) -> None:
        """The client wants no more tokens of a request, and its outcome, if it has one by now."""
        running = self.state.live.get(number)
        # One that begins again on a new pool has been sent a token, and is not mapped yet.
        if running is not None and running.first is not None and running.state is not None:
            self._finish(running, "stop")
        else:
            self.abort(number)

    def queue(self, job: Callable[[ModelRunner], Any], future: "Future[Any]") -> None:
        """Run a job once no chunk is on its way; no request is admitted before."""
        self._jobs.append((job, future))

    def queue_spare(self, job: Callable[[], Any], future: "Future[Any]") -> None:
        """Run a job that needs no pool when none is served, or others have had their share."""
        self._spare.append((job, future))

    def forget(self) -> None:
        """A new pool, with nothing in it, nor in the arena; who is being served begins again."""
        self._rebuild()
        self.state.arena.clear()

    def report_loads(self, report: Callable[[int], None]) -> None:
        """Chunks are read beside the computing; ``report`` tells what this process has read."""
        self.state.report = report

    def loaded(self, number: int) -> None:
        """Every process has read its part of a batch of chunks."""
        self._transfers.loaded(number)

    def drop(self, keys: Sequence[str]) -> None:
        """Let chunks leave the pool, if no request maps them, and the arena."""
        for key in keys:
            self.state.runner.cache.allocator.evict(key)
        self.state.arena.drop(keys)

    def prefetch(self, loads: Iterable[ChunkLoad]) -> None:
        """Read chunks into the arena, for a request that is going to ask for them."""
        self._transfers.prefetch(loads)

    def tiers(self) -> Tiers:
        """Where chunk KV came from, and lies; on any thread."""
        return tiers_of(self.state, self._transfers.hits)

    def status(self) -> EngineStatus:
        """Where requests are and what they hold; on any thread."""
        return status_of(self.state)

    # The loop.

    @property
    def busy(self) -> bool:
        """Is there anything to wait for?"""
        jobs = self._jobs or self._spare
        return bool(self.state.live or self._lanes.busy or self._transfers.busy or jobs)

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
        now = state.moment()
        state.pace.work(now, state.scheduler.given - self._given)
        self._given = state.scheduler.given
        for number in state.scheduler.expired(now):
            self._expire(number)
        self._transfers.expire(now)
        self._run_jobs()
        admitted = [] if self._jobs else state.scheduler.admit(now)
        for one in admitted:
            running = state.live.get(one.number)
            if (
                running is None
            ):  # a chunk that it shares with one before it was waited for, and failed
                for key in one.loads:
                    state.scheduler.refused(key)
                continue
            running.admitted = now if running.admitted is None else running.admitted
            self._transfers.start(running, one)
            entry = state.scheduler.live.get(one.number)
            if entry is not None and entry.status is RequestStatus.READY:
                running.ready = state.clock()
            else:
                self._prefills.expect(running)
        for number in state.scheduler.outgrown():
            self._fail(state.live[number], self._too_large(state.live[number]))
        self._prefetch_waiting()
        placed = self._transfers.place()
        encoded = self._transfers.encode_some()
        self._make_room(now)
        prefilled = self._prefills.run()
        self._lanes.turn()
        moved = bool(was or admitted or placed or encoded or prefilled or self._lanes.busy)
        return self._run_spare(moved) or moved

    def digest(self) -> int:
        """Of who is served and how far: equal where processes made equal turns."""
        live = [(it.number, len(it.tokens), it.tokens[-1:]) for it in self.state.live.values()]
        free = self.state.runner.cache.allocator.num_free
        return zlib.crc32(repr((live, free)).encode())

    def patience(self) -> float | None:
        """Seconds until something is due without an event; None: nothing is."""
        dues = (self.state.scheduler.next_deadline(), self._transfers.next_deadline())
        due = min((it for it in dues if it is not None), default=None)
        return None if due is None else max(due - self.state.clock(), 0.001)

    def _prefetch_waiting(self) -> None:
        """Those who came and found no room wait for it while their chunks are read."""
        new, self._new = self._new, []
        for running in new:
            entry = self.state.scheduler.live.get(running.number)
            if entry is not None and entry.status is RequestStatus.WAITING:
                self._transfers.prefetch(running.plan.loads.values())

    def rest(self) -> None:
        """There is nothing to do: what lanes hold on the device goes."""
        self.state.pace.rest()
        self._lanes.clear()

    def _run_jobs(self) -> None:
        """Run jobs that want the pool to themselves."""
        while self._jobs and not self._transfers.busy:
            self._lanes.deliver()
            job, future = self._jobs.popleft()
            answer = result_of(lambda job=job: job(self.state.runner))  # type: ignore[misc]
            if self.state.runner.cache.lost:
                self._rebuild()
            _settle(future, answer)

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
        _settle(future, answer)
        return True

    # Ends.

    def _took(
        self, running: RunningRequest, ids: list[int], probability: list[float], top: list[Top]
    ) -> None:
        """Hand new tokens to the client."""
        skip = max(len(running.tokens) - running.read, 0)  # sent before it was begun again
        try:
            new, reason = running.accept(ids)
        except EngineError as error:
            self._fail(running, error)
            return
        here = slice(skip, skip + len(new))
        told = Progress(running.number, new, probability[here], top=top[here])
        self.state.scheduler.generated(running.number, len(new))
        if reason is not None:
            self._finish(running, reason, told)
        elif new and self._tell(running, told):
            self._finish(running, "stop")
        elif running.request.cited and running.read - running.looks.done >= PIECE:
            try:
                self._read_again(running)
            except Exception as error:
                self._fail(running, error)

    def _read_again(self, running: RunningRequest) -> None:
        """The next piece of an answer, for its citations."""
        assert running.state is not None
        tokens = running.tokens[: running.read]
        prompt = running.request.prompt
        read_again(self.state.runner, running.state, prompt, tokens, running.looks)

    def _looks(self, running: RunningRequest) -> Looks | None:
        """Which chunks the tokens of an answer were chosen for, where that is asked and known."""
        if not running.request.cited or not running.read or running.swapped is not None:
            return None
        while running.looks.done < running.read:
            self._read_again(running)
        return running.looks.whole(len(running.request.prompt.chunks))

    def _finish(
        self,
        running: RunningRequest,
        reason: FinishReason,
        told: Progress | None = None,
    ) -> None:
        """The answer is complete: its outcome, and everything it holds is given back."""
        try:
            outcome = self._outcome(running)
        except Exception as error:  # of reading it once more
            self._fail(running, error)
            return
        self._leave_turn(running)
        self._end(running, "finished")
        last = told or Progress(running.number)
        self._tell(running, dataclasses.replace(last, finish_reason=reason, outcome=outcome))

    def _leave_turn(self, running: RunningRequest) -> None:
        """A request gets no more tokens: its turn stays in the pool for prompts that go on from it.

        Nothing stays of one that is set aside, as its pages are others' now.
        """
        for key, page, tokens in running.turn_pages():
            self.state.scheduler.share(running.number, key, (page,), tokens)

    def _fail(self, running: RunningRequest, error: BaseException, why: Ending = "failed") -> None:
        self._end(running, why)
        self._tell(running, Progress(running.number, error=error))

    def _tell(self, running: RunningRequest, progress: Progress) -> bool:
        """Tell the client; a client that fails ends its request, and no other."""
        try:
            return bool(running.sink(progress))
        except Exception as error:
            _LOG.warning("the client of request %d failed: %s", running.number, error)
            if not running.ended:
                self._end(running, "cancelled")
            return False

    def _expire(self, number: int) -> None:
        running = self.state.live.get(number)
        if running is not None:
            over = f"request {number} took longer than timeout={running.request.timeout} s"
            self._fail(running, DeadlineExceeded(f"{over}; allow more, or ask for less"), "expired")

    def _too_large(self, running: RunningRequest) -> ContextExceeded:
        tokens, pool = running.request.prompt.num_tokens, self.state.runner.num_pages * PAGE
        return ContextExceeded(
            f"the prompt of {tokens} tokens needs more than the {pool} tokens of the pool, now that"
            " chunks of it were not found; raise cache_tokens or use fewer chunks"
        )

    def _outcome(self, running: RunningRequest) -> Outcome:
        now = self.state.clock()
        assert running.state is not None and running.first is not None
        admitted = running.added if running.admitted is None else running.admitted
        ready = admitted if running.ready is None else running.ready
        searched = None
        if running.search is not None:
            searched = self.state.runner.host_search.account_of([running.search])
        outcome = outcome_of(
            self.state.runner.model,
            running.request,
            running.state,
            searched,
            moments=(running.added, admitted, ready, running.first, now),
            compiling=self.state.compile_times.between,
            tokens=running.read,
        )
        told = {
            **running.moments,
            "added": running.added,
            "admitted": admitted,
            "ready": ready,
            "first": running.first,
        }
        return dataclasses.replace(outcome, moments=told, looks=self._looks(running))

    def _end(self, running: RunningRequest, why: Ending) -> None:
        """Nothing more is done for a request; what it holds goes with what is in flight for it."""
        running.ended, running.why = True, why
        self.state.ending[running.number] = self.state.live.pop(running.number)
        self._lanes.leave(running)
        if not running.in_flight:
            self._release(running)

    def _release(self, running: RunningRequest) -> None:
        """Nothing in flight needs what a request holds."""
        runner = self.state.runner
        self._lanes.free(running)
        if runner.cache.host is not None:
            # Callbacks of what is in flight reach into host memory of its pages.
            arrived(runner.cache.pool.k)
        if running.search is not None:
            runner.host_search.release([running.search])
        del self.state.ending[running.number]
        self.state.scheduler.finish(running.number, running.why)

    # Preemption.

    def _make_room(self, now: float) -> None:
        """Set requests aside for others of a better class."""
        victims = self.state.scheduler.victims(now)
        if victims:
            self._lanes.deliver()
        for number in victims:
            running = self.state.live.get(number)
            if running is None:  # its last token was among what was read
                continue
            try:
                self._lanes.set_aside(running)
            except Exception as error:
                raise Broken(error, [running]) from error
            self.state.scheduler.swapped(number)

    # Failure.

    def _recover(self, broken: Broken) -> None:
        """What a request did wrong is its own; else all begin again on a new pool.

        A request that took part in two broken steps, alone in the second, fails.
        """
        error = broken.error
        suspects = [it for it in dict.fromkeys(broken.suspects) if not it.ended]
        if isinstance(error, JaxragError) and not (broken.shared or self.state.runner.cache.lost):
            for running in suspects:
                self._fail(running, error)
            return
        if self.state.now is not None:  # other processes may not have failed
            raise error
        _LOG.error("a step of the engine failed, its pool is made anew", exc_info=error)
        self.state.restarts += 1
        for running in suspects:
            running.strikes += 1
            self.state.scheduler.live[running.number].alone = True
        self._rebuild()
        for running in suspects:
            if running.strikes >= _STRIKES:
                text = " ".join(str(error).split())[:300]
                broke = f"request {running.number} broke the engine {running.strikes} times"
                self._fail(running, EngineError(f"{broke}: {type(error).__name__}: {text}"))

    def fail_all(self, error: BaseException) -> None:
        """Every client is told, and the pool is made anew."""
        self._rebuild()
        for running in list(self.state.live.values()):
            self._fail(running, error)
        self._drop_jobs(error)

    def abandon(self, error: BaseException) -> None:
        """Every client is told, and nothing else is touched: this object is done."""
        for running in list(self.state.live.values()):
            running.ended = True
            self._tell(running, Progress(running.number, error=error))
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
        for part in (self._lanes, self._transfers, self._prefills):
            part.clear()
        state.runner.forget_cache()
        for running in (*state.live.values(), *state.ending.values()):
            if running.search is not None:
                state.runner.host_search.release([running.search])
                running.search = None
            running.restart()
        for running in state.ending.values():
            state.scheduler.finish(running.number, running.why)
        state.ending.clear()
        state.scheduler.reset(state.runner.cache.allocator)


def _settle(future: "Future[Any]", answer: Any) -> None:
    if isinstance(answer, BaseException):
        future.set_exception(answer)
    else:
        future.set_result(answer)


def _arena_bytes(runner: ModelRunner, settings: EngineSettings) -> int:
    """None beside a pool that lies in host memory itself, nor where time plays no part."""
    if settings.lockstep:
        return 0
    if settings.arena_bytes is None:
        return 0 if runner.model.placement.away else default_arena_bytes()
    return settings.arena_bytes

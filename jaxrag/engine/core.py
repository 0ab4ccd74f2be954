"""The engine's loop: admit, load, encode, prefill, step, deliver; and how requests end."""

import dataclasses
import logging
import zlib
from collections import abc, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from jaxrag.base.errors import (
    Cancelled,
    ContextExceeded,
    DeadlineExceeded,
    EngineError,
    JaxragError,
    RequestError,
)
from jaxrag.engine.admission import SchedulerSettings
from jaxrag.engine.arena import HostArena, default_arena_bytes
from jaxrag.engine.attribution import Attribution
from jaxrag.engine.citing import PIECE, read_again
from jaxrag.engine.decode_batches import DecodeBatches
from jaxrag.engine.links import Links
from jaxrag.engine.mapping import turn_pages
from jaxrag.engine.outcome import outcome_of
from jaxrag.engine.prefill_queue import PrefillQueue
from jaxrag.engine.progress import Outcome, Progress, Top
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.sampling_params import FinishReason
from jaxrag.engine.scheduler import Scheduler
from jaxrag.engine.sequence import Ending, RequestStatus, Sequence
from jaxrag.engine.staging import key_in_part
from jaxrag.engine.state import Broken, EngineSettings, Post, State
from jaxrag.engine.status import EngineStatus, Tiers, status_of, tiers_of
from jaxrag.engine.thread import result_of
from jaxrag.engine.transfers import Transfers
from jaxrag.kv.cache import PAGE
from jaxrag.kv.cache.host import arrived
from jaxrag.models.compiled import CompileTimes

_LOG = logging.getLogger("jaxrag")


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
            scheduler=Scheduler(runner.cache.allocator, _preempting(runner, settings)),
            post=post,
            clock=clock,
            compile_times=compile_times,
            arena=HostArena(_arena_bytes(runner, settings), runner.has, settings.half_life),
            links=Links(clock, settings.load_threads, settings.max_loading_bytes),
            events=deque(maxlen=settings.keep_events),
        )
        self._new: list[Sequence] = []
        self._transfers = Transfers(self.state, self._fail)
        self._batches = DecodeBatches(self.state, self._on_tokens, self._release)
        self._prefills = PrefillQueue(
            self.state, self._batches.join, self._batches.put_back, self._release
        )
        self._jobs: deque[tuple[Callable[[ModelRunner], Any], Future[Any]]] = deque()
        self._spare: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._spare_due = 0.0
        self._given = 0.0  # service, at the last iteration

    # From clients.

    def submit(self, sequence: Sequence) -> None:
        """Queue a request; its client is notified where the queue is full."""
        self.state.live[sequence.number] = sequence
        try:
            self.state.scheduler.submit(sequence, self.state.moment())
            self._new.append(sequence)
        except JaxragError as error:
            self._fail(sequence, error)

    def abort(self, number: int) -> None:
        """The client wants nothing more of a request; a turn that it has read of stays."""
        sequence = self.state.live.get(number)
        if sequence is not None:
            self._leave_turn(sequence)
            self._fail(sequence, Cancelled(f"request {number} was aborted"), "cancelled")

    def stop(self, number: int) -> None:
        """The client wants no more tokens of a request, and its outcome, if it has one by now."""
        sequence = self.state.live.get(number)
        # One that begins again on a new pool has been sent a token, and is not mapped yet.
        if sequence is not None and "first" in sequence.moments and sequence.is_mapped:
            self._finish(sequence, "stop")
        else:
            self.abort(number)

    def queue(self, job: Callable[[ModelRunner], Any], future: "Future[Any]") -> None:
        """Run a job once no chunk is on its way; no request is admitted before."""
        self._jobs.append((job, future))

    def queue_spare(self, job: Callable[[], Any], future: "Future[Any]") -> None:
        """Run a job that needs no pool when none is served, or others have had their share."""
        self._spare.append((job, future))

    def forget(self) -> None:
        """Nothing is in the pool, nor in the arena; who is being served begins again."""
        self._rebuild(keep_pool=True)
        self.state.arena.clear()

    def report_loads(self, report: Callable[[int], None]) -> None:
        """Chunks are read beside the computing; ``report`` tells what this process has read."""
        self.state.report = report

    def loaded(self, number: int) -> None:
        """Every process has read its part of a batch of chunks."""
        self._transfers.loaded(number)

    def drop(self, keys: abc.Sequence[str]) -> None:
        """Let chunks leave the pool, if no request maps them, and the arena."""
        every = [*keys, *map(key_in_part, keys)]
        for key in every:
            self.state.runner.cache.allocator.evict(key)
        self.state.arena.drop(every)

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
        return bool(self.state.live or self._batches.busy or self._transfers.busy or jobs)

    def handle(self, event: Callable[[], None]) -> None:
        """Do what was posted."""
        try:
            event()
        except Broken as broken:
            self._recover(broken)

    def run_iteration(self) -> bool:
        """Once round the loop; False where nothing could be done before the next event."""
        try:
            return self._iterate()
        except Broken as broken:
            self._recover(broken)
            return True

    def _iterate(self) -> bool:
        state, was = self.state, self._batches.busy
        self._batches.deliver_blocks()
        now = state.moment()
        state.pace.work(now, state.scheduler.given - self._given)
        self._given = state.scheduler.given
        for number in state.scheduler.expired(now):
            self._expire(number)
        self._transfers.expire(now)
        self._run_jobs()
        admitted = [] if self._jobs else state.scheduler.admit(now)
        for admitted_one in admitted:
            sequence = state.live.get(admitted_one.number)
            # A chunk that it shares with one before it may have been waited for, and have failed.
            if sequence is None:
                for key in admitted_one.loads:
                    state.scheduler.refused(key)
                continue
            sequence.moments.setdefault("admitted", now)
            self._transfers.start(sequence, admitted_one)
            if sequence.batch is not None:
                self._batches.expect(sequence.batch)
            if sequence.status is RequestStatus.READY:
                sequence.moments["ready"] = state.clock()
            else:
                self._prefills.expect(sequence)
        for number in state.scheduler.outgrown():
            self._fail(state.live[number], self._too_large(state.live[number]))
        self._prefetch_waiting()
        placed = self._transfers.place()
        encoded = self._transfers.encode_some()
        self._make_room(now)
        prefilled = self._prefills.run_pieces()
        self._batches.step_and_deliver()
        moved = bool(was or admitted or placed or encoded or prefilled or self._batches.busy)
        return self._run_spare(moved) or moved

    def digest(self) -> int:
        """Of who is served and how far: equal where processes made equal iterations."""
        live = [(seq.number, len(seq.tokens), seq.tokens[-1:]) for seq in self.state.live.values()]
        free = self.state.runner.cache.allocator.num_free
        return zlib.crc32(repr((live, free)).encode())

    def patience(self) -> float | None:
        """Seconds until something is due without an event; None: nothing is."""
        dues = (self.state.scheduler.next_deadline(), self._transfers.next_deadline())
        due = min((moment for moment in dues if moment is not None), default=None)
        return None if due is None else max(due - self.state.clock(), 0.001)

    def _prefetch_waiting(self) -> None:
        """Those who came and found no room wait for it while their chunks are read."""
        new, self._new = self._new, []
        for sequence in new:
            if sequence.status is RequestStatus.WAITING:
                self._transfers.prefetch(sequence.loads.values())

    def rest(self) -> None:
        """There is nothing to do: what batches hold on the device goes."""
        self.state.pace.rest()
        self._batches.clear()

    def _run_jobs(self) -> None:
        """Run jobs that want the pool to themselves."""
        while self._jobs and not self._transfers.busy:
            self._batches.deliver()
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

    def _on_tokens(
        self, sequence: Sequence, ids: list[int], probability: list[float], top: list[Top]
    ) -> None:
        """Hand new tokens to the client."""
        skip = max(len(sequence.tokens) - sequence.read, 0)  # sent before it was begun again
        try:
            new, reason = sequence.accept(ids)
        except (EngineError, RequestError) as error:
            self._fail(sequence, error)
            return
        taken = slice(skip, skip + len(new))
        progress = Progress(sequence.number, new, probability[taken], top=top[taken])
        self.state.scheduler.generated(sequence.number, len(new))
        if reason is not None:
            self._finish(sequence, reason, progress)
        elif new and self._tell(sequence, progress):
            self._finish(sequence, "stop")
        elif sequence.request.cited and sequence.read - sequence.attribution.done >= PIECE:
            try:
                read_again(self.state.runner, sequence)
            except Exception as error:
                self._fail(sequence, error)

    def _attribution(self, sequence: Sequence) -> Attribution | None:
        """Which chunks the tokens of an answer were chosen for, where that is asked and known."""
        if not sequence.request.cited or not sequence.read or sequence.swapped is not None:
            return None
        while sequence.attribution.done < sequence.read:
            read_again(self.state.runner, sequence)
        return sequence.attribution.whole(len(sequence.request.prompt.chunks))

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        progress: Progress | None = None,
    ) -> None:
        """The answer is complete: its outcome, and everything it holds is given back."""
        try:
            outcome = self._outcome(sequence)
        except Exception as error:  # of reading it once more
            self._fail(sequence, error)
            return
        self._leave_turn(sequence)
        self._end(sequence, "finished")
        last = progress or Progress(sequence.number)
        self._tell(sequence, dataclasses.replace(last, finish_reason=reason, outcome=outcome))

    def _leave_turn(self, sequence: Sequence) -> None:
        """A request gets no more tokens: its turn stays in the pool for prompts that go on from it.

        Nothing stays of one that is set aside, as its pages are others' now.
        """
        for key, page, tokens in turn_pages(self.state.runner.model, sequence):
            self.state.scheduler.share(sequence.number, key, (page,), tokens)

    def _fail(self, sequence: Sequence, error: BaseException, why: Ending = "failed") -> None:
        self._end(sequence, why)
        self._tell(sequence, Progress(sequence.number, error=error))

    def _tell(self, sequence: Sequence, progress: Progress) -> bool:
        """Tell the client; a client that fails ends its request, and no other."""
        try:
            return bool(sequence.sink(progress))
        except Exception as error:
            _LOG.warning("the client of request %d failed: %s", sequence.number, error)
            if not self.state.ended(sequence):
                self._end(sequence, "cancelled")
            return False

    def _expire(self, number: int) -> None:
        sequence = self.state.live.get(number)
        if sequence is not None:
            over = f"request {number} took longer than timeout={sequence.request.timeout} s"
            self._fail(
                sequence, DeadlineExceeded(f"{over}; allow more, or ask for less"), "expired"
            )

    def _too_large(self, sequence: Sequence) -> ContextExceeded:
        tokens, pool = sequence.request.prompt.num_tokens, self.state.runner.num_pages * PAGE
        return ContextExceeded(
            f"the prompt of {tokens} tokens needs more than the {pool} tokens of the pool, now that"
            " chunks of it were not found; raise cache_tokens or use fewer chunks"
        )

    def _outcome(self, sequence: Sequence) -> Outcome:
        searched = None
        if sequence.search is not None:
            searched = self.state.runner.host_search.account_of([sequence.search])
        return outcome_of(
            self.state.runner.model,
            sequence,
            searched,
            now=self.state.clock(),
            compiling=self.state.compile_times.between,
            attribution=self._attribution(sequence),
        )

    def _end(self, sequence: Sequence, why: Ending) -> None:
        """Nothing more is done for a request; what it holds goes with what is in flight for it."""
        self._prefills.forget(sequence)
        self.state.ending[self.state.live.pop(sequence.number)] = why
        self._batches.leave(sequence)
        if not (self._batches.runs(sequence) or self._prefills.runs(sequence)):
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Nothing in flight needs what a request holds."""
        runner = self.state.runner
        self._batches.free(sequence)
        if runner.cache.host is not None:
            # Callbacks of what is in flight reach into host memory of its pages.
            arrived(runner.cache.pool.k)
        if sequence.search is not None:
            runner.host_search.release([sequence.search])
        self.state.scheduler.finish(sequence.number, self.state.ending.pop(sequence))

    # Preemption.

    def _make_room(self, now: float) -> None:
        """Set requests aside for others of a better class."""
        victims = self.state.scheduler.victims(now)
        if victims:
            self._batches.deliver()
        for number in victims:
            sequence = self.state.live.get(number)
            if sequence is None:  # its last token was among what was read
                continue
            try:
                self._batches.set_aside(sequence)
            except Exception as error:
                raise Broken(error, [sequence]) from error
            self.state.scheduler.swapped(number)

    # Failure.

    def _recover(self, broken: Broken) -> None:
        """What a request did wrong is its own; else all begin again on a new pool.

        A request that took part in two broken steps, alone in the second, fails.
        """
        error = broken.error
        suspects = [seq for seq in dict.fromkeys(broken.suspects) if not self.state.ended(seq)]
        if isinstance(error, JaxragError) and not (broken.shared or self.state.runner.cache.lost):
            for sequence in suspects:
                self._fail(sequence, error)
            return
        if self.state.now is not None:  # other processes may not have failed
            raise error
        _LOG.error("a step of the engine failed, its pool is made anew", exc_info=error)
        self.state.restarts += 1
        again = [suspect for suspect in suspects if suspect.alone]
        for sequence in suspects:
            sequence.alone = True
        self._rebuild()
        for sequence in again:
            text = " ".join(str(error).split())[:300]
            broke = f"request {sequence.number} broke the engine 2 times"
            self._fail(sequence, EngineError(f"{broke}: {type(error).__name__}: {text}"))

    def fail_all(self, error: BaseException) -> None:
        """Every client is told, and the pool is made anew."""
        self._rebuild()
        for sequence in list(self.state.live.values()):
            self._fail(sequence, error)
        self._drop_jobs(error)

    def abandon(self, error: BaseException) -> None:
        """Every client is told, and nothing else is touched: this object is done."""
        live = list(self.state.live.values())
        self.state.live.clear()
        for sequence in live:
            self._tell(sequence, Progress(sequence.number, error=error))
        self._drop_jobs(error)

    def _drop_jobs(self, error: BaseException) -> None:
        for jobs in (self._jobs, self._spare):
            while jobs:
                jobs.popleft()[1].set_exception(error)

    def _rebuild(self, keep_pool: bool = False) -> None:
        """A new pool, or an empty one; every request begins again, its client hears what is new."""
        state = self.state
        state.epoch += 1
        for part in (self._batches, self._transfers, self._prefills):
            part.clear()
        state.runner.forget_cache(keep_pool)
        for sequence in (*state.live.values(), *state.ending):
            if sequence.search is not None:
                state.runner.host_search.release([sequence.search])
            sequence.restart()
        for sequence, why in state.ending.items():
            state.scheduler.finish(sequence.number, why)
        state.ending.clear()
        state.scheduler.reset(state.runner.cache.allocator)


def _settle(future: "Future[Any]", answer: Any) -> None:
    if isinstance(answer, BaseException):
        future.set_exception(answer)
    else:
        future.set_result(answer)


def _preempting(runner: ModelRunner, settings: EngineSettings) -> SchedulerSettings:
    """Nobody is set aside whose KV is not all on the device."""
    if runner.model.placement.on_device:
        return settings.scheduler
    return dataclasses.replace(settings.scheduler, max_preemptions=0)


def _arena_bytes(runner: ModelRunner, settings: EngineSettings) -> int:
    """None beside a pool that lies in host memory itself, nor where time plays no part."""
    if settings.lockstep:
        return 0
    if settings.arena_bytes is None:
        return 0 if runner.model.placement.away else default_arena_bytes()
    return settings.arena_bytes

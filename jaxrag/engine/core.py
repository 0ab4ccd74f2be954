"""The engine's loop body: admit, load, place, prefill, step, deliver; for one thread."""

import dataclasses
import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxrag.cache import PAGE, CachedChunk, PagePool
from jaxrag.cache.host import arrived
from jaxrag.decode import Decoding
from jaxrag.engine.admission import HUNGRY
from jaxrag.engine.decoding import Lane, LaneKey, SamplingRows, sample_first, start_decoding
from jaxrag.engine.live import Live, Swapped
from jaxrag.engine.loader import Missed, Staged, encode, groups, keep, place, read
from jaxrag.engine.mapping import map_planned
from jaxrag.engine.prefill import Prefill, select_tokens
from jaxrag.engine.progress import Outcome, Progress, outcome_of
from jaxrag.engine.request import DECODE_BLOCK, FinishReason
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.scheduler import (
    Admitted,
    Ending,
    Entry,
    Scheduler,
    SchedulerSettings,
    Status,
)
from jaxrag.engine.swap import swap_in, swap_out
from jaxrag.engine.thread import ask
from jaxrag.errors import Cancelled, DeadlineExceeded, EngineError, JaxragError, RequestError
from jaxrag.types import Array

_LOG = logging.getLogger("jaxrag")

_STRIKES = 2  # broken steps after which a request fails


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """How an engine serves.

    Attributes:
      scheduler: order, bounds and classes.
      prefill_tokens: that are run between two decode steps at most, or one piece.
      load_threads: that read chunks and stage them.
      lockstep: nothing depends on time: loads and indexes are waited for where they are asked for.
        What several processes need that run one model together.
    """

    scheduler: SchedulerSettings = dataclasses.field(default_factory=SchedulerSettings)
    prefill_tokens: int = 1024
    load_threads: int = 2
    lockstep: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class _Ticket:
    """A step in flight: new ids [R, block] and how many of them each row is to have."""

    lane: LaneKey
    new: Array
    rows: list[tuple[int, Live, int, int]]  # row, request, its run, tokens


class Core:
    """The engine's state, for one thread.

    Attributes:
      runner: the model on its device.
      scheduler: who is where, and who holds which pages.
      live: requests whose clients wait, by number.
      restarts: how often the pool was lost.
    """

    def __init__(
        self,
        runner: ModelRunner,
        settings: EngineSettings,
        post: Callable[[Callable[["Core"], None]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``post`` has a function called with this object on the engine's thread, from any."""
        self.runner = runner
        self.settings = settings
        self.scheduler = Scheduler(runner.cache.allocator, settings.scheduler)
        self.live: dict[int, Live] = {}
        self.restarts = 0
        self._post, self._clock = post, clock
        self._lanes: dict[LaneKey, Lane] = {}
        self._rows: dict[LaneKey, list[Live | None]] = {}
        self._leaving: dict[int, Live] = {}  # ended, with something in flight
        self._owner: dict[str, Live] = {}  # of chunks on their way: who asked first
        self._to_encode: deque[tuple[int, Missed]] = deque()
        self._jobs: deque[tuple[Callable[[ModelRunner], Any], Future[Any]]] = deque()
        self._prefilling: tuple[Live, Prefill] | None = None
        self._first: list[tuple[Live, int, Array]] = []  # tokens that were sampled and not read
        self._flying: list[_Ticket] = []
        self._threads: ThreadPoolExecutor | None = None
        self._indexers: ThreadPoolExecutor | None = None

    # From clients.

    def submit(self, live: Live, entry: Entry) -> None:
        """Queue a request; its client is told where the queue is full."""
        self.live[live.number] = live
        try:
            self.scheduler.submit(entry, self._clock())
        except JaxragError as error:
            self._fail(live, error)

    def abort(self, number: int) -> None:
        """The client wants nothing more of a request."""
        live = self.live.get(number)
        if live is not None:
            self._fail(live, Cancelled(f"request {number} was aborted"), "cancelled")

    def stop(self, number: int) -> None:
        """The client wants no more tokens of a request, and its outcome."""
        live = self.live.get(number)
        if live is None:
            return
        if live.state is None or live.first is None:
            self._fail(live, Cancelled(f"request {number} was stopped before its first token"))
        else:
            self._finish(live, [], "stop")

    def queue(self, job: Callable[[ModelRunner], Any], future: Future[Any]) -> None:
        """Run a job once no chunk is on its way; nobody is admitted before."""
        self._jobs.append((job, future))

    # The loop.

    @property
    def busy(self) -> bool:
        """Is there anything to wait for?"""
        return bool(self.live or self._flying or self._first or self._owner or self._jobs)

    def run_once(self) -> bool:
        """One turn of the loop; False where nothing could be done before the next event."""
        before = self._flying
        # Blocks are read first: rows that ended in one would idle through the next.
        if any(ticket.new.shape[1] > 1 for ticket in before):
            self._deliver_all()
        now = self._clock()
        for number in self.scheduler.expired(now):
            live = self.live.get(number)
            if live is not None:
                over = f"request {number} took longer than timeout={live.request.timeout} s"
                self._fail(
                    live, DeadlineExceeded(f"{over}; allow more, or ask for less"), "expired"
                )
        self._run_jobs()
        admitted = [] if self._jobs else self.scheduler.admit(now)
        for one in admitted:
            self._admitted(one, now)
        for number in self.scheduler.outgrown():
            self._fail(self.live[number], _too_large(self.live[number], self.runner))
        encoded = self._encode_one()
        self._make_room(now)
        prefilled = self._prefill()
        flying, self._flying = self._flying, []
        self._step()
        self._deliver_first()
        self._deliver(flying)
        return bool(admitted or encoded or prefilled or before or self._flying)

    def patience(self) -> float | None:
        """Seconds until something is due without an event; None: nothing is."""
        due = self.scheduler.next_deadline()
        return None if due is None else max(due - self._clock(), 0.001)

    def rest(self) -> None:
        """There is nothing to do: what lanes hold on the device goes."""
        self._lanes.clear()
        self._rows.clear()

    def forget(self) -> None:
        """A new pool, with nothing in it; who is being served begins again."""
        self._rebuild()

    def fail_all(self, error: BaseException) -> None:
        """Every client is told, and the pool is made anew."""
        for live in list(self.live.values()):
            self._fail(live, error)
        self._rebuild()

    def _run_jobs(self) -> None:
        while self._jobs and not self._owner:
            job, future = self._jobs.popleft()
            self._deliver_all()
            try:
                future.set_result(job(self.runner))
            except BaseException as error:
                future.set_exception(error)
            if self.runner.cache.lost:
                self._rebuild()

    # Loading.

    def _admitted(self, one: Admitted, now: float) -> None:
        live = self.live[one.number]
        if live.admitted is None:
            live.admitted = now
        for group in groups(live.plan.loads[key] for key in one.loads):
            keys = [load.key for load in group]
            self._owner.update(dict.fromkeys(keys, live))
            job = functools.partial(read, self.runner, group, one.chunks)
            self._start(job, functools.partial(_loaded, keys=keys, epoch=self.restarts))
        if self.scheduler.live[one.number].status is Status.READY:
            live.ready = self._clock()

    def _start(self, job: Callable[[], Any], then: Callable[["Core", Any], None]) -> None:
        """Run a job on a loading thread, and what follows on this one with its result."""
        if self.settings.lockstep:
            then(self, _result_of(job))
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.settings.load_threads, "load")
        post = self._post

        def run() -> None:
            result = _result_of(job)
            post(lambda core: then(core, result))

        self._threads.submit(run)

    def loaded(
        self, keys: Sequence[str], epoch: int, answer: tuple[Staged, list[Missed]] | BaseException
    ) -> None:
        """A loading thread is done with some chunks."""
        if epoch != self.restarts:
            return
        if isinstance(answer, BaseException):
            for key in keys:
                self._not_loaded(key, answer)
            return
        staged, missed = answer
        here = {load.key: self._chunk(load.key).pages for load, _, _ in staged.chunks}
        try:
            place(self.runner, staged, here)
        except Exception as error:
            self._broken(error, [self._owner[key] for key in keys])
            return
        for load, found, _ in staged.chunks:
            self._owner.pop(load.key).found[load.key] = found
            for number in self.scheduler.staged(load.key, load.tokens):
                self.live[number].ready = self._clock()
        for one in missed:
            if one.load.misses == "encode":
                self._to_encode.append((epoch, one))
            else:
                self._in_place(one)

    def _in_place(self, missed: Missed) -> None:
        """A chunk is nowhere: whoever computes it in place then asks for other pages."""
        key = missed.load.key
        self._owner.pop(key).found[key] = missed.found
        for number in self.scheduler.refused(key):
            live = self.live[number]
            load = live.plan.loads.get(key)
            if load is not None and load.misses == "in_place":
                live.plan.gone.add(key)
                live.found[key] = missed.found

    def _not_loaded(self, key: str, error: BaseException) -> None:
        """The storage failed: whoever waits for the chunk fails, and is told why."""
        self._owner.pop(key, None)
        for number in self.scheduler.refused(key):
            self._fail(self.live[number], error)

    def _encode_one(self) -> bool:
        """Encode one chunk that no store had; the others come after the next decode step."""
        while self._to_encode:
            epoch, missed = self._to_encode.popleft()
            key = missed.load.key
            if epoch != self.restarts:
                continue
            if not self._chunk(key).ref_count:
                del self._owner[key]
                self.scheduler.refused(key)
                continue
            try:
                made, runs = encode(missed.load)
            except Exception as error:
                self._not_loaded(key, error)
                return True
            pages = {key: self._chunk(key).pages}
            job = functools.partial(keep, self.runner, missed, made, runs, pages)
            self._start(job, functools.partial(_kept, keys=[key], epoch=epoch))
            return True
        return False

    # Prefill.

    def _prefill(self) -> bool:
        """Run pieces of prompts, within the budget; True where any was run."""
        budget = self.settings.prefill_tokens
        while budget > 0:
            if self._prefilling is None and not self._next():
                break
            if self._prefilling is None:  # it failed, or had been prefilled before
                continue
            live, prefill = self._prefilling
            try:
                budget -= prefill.next_piece()
                if not prefill.left:
                    self._prefilling = None
                    self._prefilled(live, prefill)
            except Exception as error:
                self._prefilling = None
                self._broken(error, [live])
        return budget < self.settings.prefill_tokens

    def _next(self) -> bool:
        """Take the next request that is ready; False where there is none, or no row for it."""
        number = self.scheduler.next_prefill()
        if number is None:
            return False
        live = self.live[number]
        try:
            entry = self.scheduler.live[number]
            chunks, own = {key: self._chunk(key) for key in entry.held}, entry.own
            state = map_planned(live.plan, chunks, own, live.found)
            if live.swapped is not None:
                self._put_back(live, live.swapped, state, own)
                return True
            live.state = state
            select_tokens(self.runner, [state])
            rule = live.request.method.decode
            observe = rule.observe if live.lane is not None else None  # one token needs no rule
            self._prefilling = (live, Prefill(self.runner, [state], observe))
        except Exception as error:
            self._broken(error, [live])
        return True

    def _chunk(self, key: str) -> CachedChunk:
        return self.runner.cache.allocator.chunks[key]

    def _prefilled(self, live: Live, prefill: Prefill) -> None:
        """A prompt is in the pool: its first token is sampled, and its row is begun."""
        state, request = live.state, live.request
        assert state is not None
        for key, part in state.keep.items():
            self.scheduler.share(live.number, key, part.pages, len(part.ids))
        logits, _, bank = prefill.prefilled
        if live.lane is None:
            self.scheduler.prefilled(live.number)
            first = sample_first(logits, SamplingRows.of([request.sampling]))
            self._first.append((live, live.run, first[0]))
            return
        rule = request.method.decode
        start = functools.partial(start_decoding, self.runner, [state], rule, bank, live.lane.room)
        if rule.searches is None:
            self.scheduler.prefilled(live.number)
            self._join(live, logits, start())
            return
        live.logits, live.search = logits, self.runner.host_search.admit()
        self.scheduler.prefilled(live.number, indexing=True)
        self._index(live, functools.partial(start, [live.search]))

    def _index(self, live: Live, start: Callable[..., Decoding | None]) -> None:
        """Have the indexes of a request made, by a thread of their own."""
        live.flying += 1
        then = functools.partial(_indexed, live=live, run=live.run)
        if self.settings.lockstep:
            then(self, _result_of(start))
            return
        if self._indexers is None:
            self._indexers = ThreadPoolExecutor(1, "index")
        post, epoch = self._post, self.restarts

        def on_pool(use: Callable[[PagePool], Any]) -> Any:
            return ask(post, lambda core: core.read_pool(use, epoch))

        def run() -> None:
            result = _result_of(functools.partial(start, on_pool=on_pool))
            post(lambda core: then(core, result))

        self._indexers.submit(run)

    def read_pool(self, use: Callable[[PagePool], Any], epoch: int) -> Any:
        """Call a function with the pool, unless that is another one by now."""
        if epoch != self.restarts:
            raise EngineError("the pool was lost while indexes were made over it; they are void")
        return use(self.runner.cache.pool)

    def indexed(self, live: Live, run: int, answer: Decoding | BaseException | None) -> None:
        """The indexes of a request are made."""
        if run != live.run:
            return
        live.flying -= 1
        if live.ended:
            self._release(live)
        elif isinstance(answer, BaseException):
            self._broken(answer, [live])
        else:
            self.scheduler.indexed(live.number)
            logits, live.logits = live.logits, None
            assert logits is not None
            try:
                self._join(live, logits, answer)
            except Exception as error:
                self._broken(error, [live])

    def _join(self, live: Live, logits: Array, decoding: Decoding | None) -> None:
        assert live.state is not None
        lane, row = self._row_for(live)
        first = lane.join(row, live.request, live.state, logits, 0, decoding)
        live.left = live.request.room
        self._first.append((live, live.run, first))

    def _row_for(self, live: Live) -> tuple[Lane, int]:
        """The lane of a request, made where it is the first, and a row that is its own now."""
        key = live.lane
        assert key is not None
        if key not in self._lanes:
            self._lanes[key] = Lane(self.runner, key)
            self._rows[key] = [None] * key.rows
        row = self.scheduler.live[live.number].row
        assert row is not None
        live.row, self._rows[key][row] = row, live
        return self._lanes[key], row

    # Steps.

    def _step(self) -> None:
        """Dispatch a step of every lane that has anything to run."""
        for key, rows in list(self._rows.items()):
            here = [
                (row, live)
                for row, live in enumerate(rows)
                if live and live.left and not live.ended
            ]
            if not here:
                continue
            block = self._block(key, [live for _, live in here])
            try:
                new = self._lanes[key].step(block)
            except Exception as error:
                self._broken(error, [live for _, live in here])
                return
            tickets = []
            for row, live in here:
                count = min(block, live.left)
                live.left -= count
                live.flying += 1
                tickets.append((row, live, live.run, count))
            self._flying.append(_Ticket(key, new, tickets))

    def _block(self, key: LaneKey, here: Sequence[Live]) -> int:
        """Tokens of the next step: many where nobody watches and nobody could join before."""
        if any(live.request.watched for live in here) or max(live.left for live in here) == 1:
            return 1
        waiting = sum(self.scheduler.counts[it] for it in HUNGRY)
        return 1 if waiting and not self.scheduler.full(key) else DECODE_BLOCK

    # Delivery.

    def _deliver_all(self) -> None:
        """Read everything in flight."""
        self._deliver_first()
        before, self._flying = self._flying, []
        self._deliver(before)

    def _deliver_first(self) -> None:
        firsts, self._first = self._first, []
        for live, run, first in firsts:
            if live.ended or run != live.run:
                continue
            try:
                token = int(np.asarray(first))
            except Exception as error:
                self._broken(error, [live])
                return
            if live.first is None:
                live.first = self._clock()
            self._took(live, [token])

    def _deliver(self, tickets: Sequence[_Ticket]) -> None:
        for ticket in tickets:
            try:
                ids = np.asarray(ticket.new)
            except Exception as error:
                self._broken(error, [live for _, live, _, _ in ticket.rows])
                return  # the others were lost with the pool
            for row, live, run, count in ticket.rows:
                if run != live.run:
                    continue
                live.flying -= 1
                if not live.ended:
                    self._took(live, ids[row, :count].tolist())
                elif not live.flying:
                    self._release(live)

    def _took(self, live: Live, ids: list[int]) -> None:
        """Hand new tokens to the client."""
        try:
            new, reason = live.take(ids)
        except EngineError as error:
            self._fail(live, error)
            return
        self.scheduler.generated(live.number, len(new))
        if reason is not None:
            self._finish(live, new, reason)
            return
        if not new:
            return
        try:
            enough = live.tell(Progress(live.number, new))
        except Exception as error:
            _LOG.warning("the client of request %d failed: %s", live.number, error)
            self._end(live, "cancelled")
            return
        if enough:
            self._finish(live, [], "stop")

    def _finish(self, live: Live, new: list[int], reason: FinishReason) -> None:
        """The answer is complete: its outcome, and everything it holds is given back."""
        outcome = self._outcome(live)
        self._end(live, "finished")
        self._tell_last(live, Progress(live.number, new, reason, outcome))

    def _fail(self, live: Live, error: BaseException, why: Ending = "failed") -> None:
        self._end(live, why)
        self._tell_last(live, Progress(live.number, [], error=error))

    def _tell_last(self, live: Live, progress: Progress) -> None:
        try:
            live.tell(progress)
        except Exception as error:
            _LOG.warning("the client of request %d failed: %s", live.number, error)

    def _outcome(self, live: Live) -> Outcome:
        now = self._clock()
        assert live.state is not None and live.first is not None
        admitted = live.added if live.admitted is None else live.admitted
        ready = admitted if live.ready is None else live.ready
        searched = None
        if live.search is not None:
            searched = self.runner.host_search.account_of([live.search])
        return outcome_of(
            self.runner.model,
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
        live.ended = True
        del self.live[live.number]
        if self._prefilling is not None and self._prefilling[0] is live:
            self._prefilling = None
        live.why = why
        if live.row is not None and live.lane is not None and live.left:
            live.left = 0
            self._lanes[live.lane].leave([live.row])
        if live.flying:
            self._leaving[live.number] = live
        else:
            self._release(live)

    def _release(self, live: Live) -> None:
        self._leaving.pop(live.number, None)
        if live.row is not None and live.lane is not None:
            self._rows[live.lane][live.row] = None
        if self.runner.cache.values is not None:
            # Callbacks of what is in flight reach into host memory of its pages.
            arrived(self.runner.cache.pool.k)
        if live.search is not None:
            self.runner.host_search.release([live.search])
        self.scheduler.finish(live.number, live.why)

    # Preemption.

    def _make_room(self, now: float) -> None:
        """Set requests aside for others of a better class."""
        if self.settings.scheduler.classes < 2:
            return
        victims = self.scheduler.victims(now)
        if victims:
            self._deliver_all()
        for number in victims:
            live = self.live.get(number)
            if live is None:  # its last token was among what was read
                continue
            assert live.lane is not None and live.row is not None
            try:
                lane = self._lanes[live.lane]
                content = swap_out(self.runner, self.scheduler.live[number].own)
                live.swapped = Swapped(content, lane.take_out(live.row))
                lane.leave([live.row])
            except Exception as error:
                self._broken(error, [live])
                return
            self._rows[live.lane][live.row] = None
            live.row = None
            self.scheduler.swapped(number)

    def _put_back(self, live: Live, swapped: Swapped, state: Any, own: Sequence[int]) -> None:
        """A request that was set aside goes on where it was."""
        assert live.state is not None
        swap_in(self.runner, own, swapped.pages)
        live.state.table = state.table
        lane, row = self._row_for(live)
        lane.put_back(row, live.state, swapped.row)
        live.swapped = None
        self.scheduler.prefilled(live.number)

    # Failure.

    def _broken(self, error: BaseException, suspects: Sequence[Live]) -> None:
        """A step failed. What a request did wrong is its own; else all begin again on a new pool.

        A request that took part in two broken steps, alone in the second, fails.
        """
        if isinstance(error, JaxragError) and not self.runner.cache.lost:
            for live in suspects:
                if not live.ended:
                    self._fail(live, error)
            return
        _LOG.error("a step of the engine failed, its pool is made anew: %s", error, exc_info=error)
        for live in suspects:
            if live.ended:
                continue
            live.strikes += 1
            if live.strikes >= _STRIKES:
                text = " ".join(str(error).split())[:300]
                self._fail(
                    live,
                    EngineError(
                        f"request {live.number} broke the engine {live.strikes} times, the last "
                        f"time with {type(error).__name__}: {text}"
                    ),
                )
            else:
                self.scheduler.live[live.number].alone = True
        self._rebuild()

    def _rebuild(self) -> None:
        """A new pool; every request begins again, and its client hears only what is new."""
        self.restarts += 1
        self._lanes.clear()
        self._rows.clear()
        self._owner.clear()
        self._to_encode.clear()
        self._first.clear()
        self._flying.clear()
        self._prefilling = None
        for live in self._leaving.values():
            live.run += 1  # what is in flight for it comes back to nobody
            if live.search is not None:
                self.runner.host_search.release([live.search])
            self.scheduler.finish(live.number, live.why)
        self._leaving.clear()
        self.runner.forget_cache()
        self.scheduler.reset(self.runner.cache.allocator)
        for live in self.live.values():
            if live.search is not None:
                self.runner.host_search.release([live.search])
                live.search = None
            live.again()


def _too_large(live: Live, runner: ModelRunner) -> RequestError:
    return RequestError(
        f"the prompt of {live.request.prompt.num_tokens} tokens needs more than the "
        f"{runner.num_pages * PAGE} tokens of the pool, now that chunks of it were not found; "
        "raise cache_tokens or use fewer chunks"
    )


def _loaded(core: Core, answer: Any, *, keys: Sequence[str], epoch: int) -> None:
    core.loaded(keys, epoch, answer)


def _kept(core: Core, answer: Any, *, keys: Sequence[str], epoch: int) -> None:
    core.loaded(keys, epoch, (answer, []) if isinstance(answer, Staged) else answer)


def _indexed(core: Core, answer: Any, *, live: Live, run: int) -> None:
    core.indexed(live, run, answer)


def _result_of(job: Callable[[], Any]) -> Any:
    """What a job returns, or what it raised."""
    try:
        return job()
    except BaseException as error:
        return error

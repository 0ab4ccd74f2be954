"""The engine of a model: requests of token ids in, from any thread, and their tokens out."""

import contextlib
import dataclasses
import functools
import itertools
import logging
import queue
import threading
import time
import weakref
from collections import Counter, abc, deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from concurrent.futures import Future

from jax.stages import Lowered

from jaxrag.base.errors import ContextExceeded, EngineError, RequestError
from jaxrag.base.sharding import collectives_by, processes_of
from jaxrag.engine.core import Core
from jaxrag.engine.mapping import most_pages, sequence_of
from jaxrag.engine.progress import CommandedSink, Progress, Sink, Where, unheard
from jaxrag.engine.ranks import Follower, Leader
from jaxrag.engine.request import Request
from jaxrag.engine.rows import RowCore, RowRunner, row_sequence
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.sequence import Sequence
from jaxrag.engine.state import ChunkEvent, EngineSettings
from jaxrag.engine.status import EngineStatus, Tiers
from jaxrag.engine.thread import Event as Posted
from jaxrag.engine.thread import Mailbox, ask
from jaxrag.engine.warmup import programs_of
from jaxrag.engine.wire import Abort, Command, Forget, Loaded, Stop, Submit
from jaxrag.kv.cache import PAGE
from jaxrag.kv.store import MemoryStore
from jaxrag.models.compiled import CompileTimes, compile_beside, counting
from jaxrag.models.model import Model

_LOG = logging.getLogger("jaxrag")

_MEMORY_BYTES = 4 << 30  # of KV of documents passed without a knowledge base
_MAKING = threading.Lock()  # two threads that ask a model for the first time get one engine


def engine_of(model: Model) -> "Engine":
    """The engine that serves a model: made at the first request, gone with the model."""
    with _MAKING:
        if model.engine is None:
            model.engine = Engine(model)
        engine: Engine = model.engine
    return engine


class Engine:
    """Serves requests of one model. Safe to share between threads.

    One thread of its own has the page pool and calls everything that is compiled. It is started by
    the first request and ends when there is nothing to do.

    Attributes:
      runner: the model on its device, with the page pool; run things on it by ``call``.
      compiled: how many programs its thread compiled, or read from the disk, by function.
      compile_times: when it did.
      iterations: how often its thread went round and found something to do.
    """

    def __init__(
        self,
        model: Model,
        settings: EngineSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        several = len(processes_of(model.mesh)) > 1
        settings = settings or EngineSettings()
        self.settings = dataclasses.replace(settings, lockstep=several or settings.lockstep)
        make_runner = ModelRunner if model.backend is None else RowRunner
        self.runner = make_runner(model, self.settings.half_life)
        self.compiled = Counter[str]()
        self.iterations = 0
        self._clock = clock
        self._numbers = itertools.count()
        self._making = threading.Lock()
        self._memory: MemoryStore | None = None
        self._core: Core | None = None
        self._lost = 0  # pools, of cores that are gone
        served = functools.partial(_serve_while_alive, weakref.ref(self))
        self._mail = Mailbox("jaxrag-engine", served, clock)
        self.compile_times = CompileTimes(self._mail.moved)
        self._leader: Leader | None = None

    def lead(self, leader: Leader) -> None:
        """Send every iteration from now on to the model's other processes, which ``follow``."""
        self._leader = leader
        collectives_by(self._mail.mine)
        leader.on_lost(self._abandon)
        leader.on_loaded(self._all_loaded)
        # The pool is made by all at once.
        ask(self._mail.post, lambda: self._running_core.report_loads(leader.loaded))

    @property
    def leads(self) -> bool:
        """Do other processes make its iterations, too?"""
        return self._leader is not None

    @property
    def lost(self) -> EngineError | None:
        """Why it serves no more: another process of the model is lost."""
        return None if self._leader is None else self._leader.lost

    @property
    def memory(self) -> MemoryStore:
        """KV of documents that come without a knowledge base."""
        with self._making:
            if self._memory is None:
                model = self.runner.model
                self._memory = MemoryStore(
                    model.fingerprint,
                    model.kv_layout,
                    max_tokens=model.config.max_positions,
                    max_bytes=_MEMORY_BYTES,
                )
            return self._memory

    @property
    def num_pages(self) -> int:
        """Of its pool."""
        return self.runner.num_pages

    def check_fits(self, request: Request) -> None:
        """ContextExceeded for a request that the pool could not hold if it held nothing else."""
        pages = most_pages(self.runner.model, request)
        if pages > self.num_pages:
            raise ContextExceeded(
                f"the prompt of {request.prompt.num_tokens} tokens and its answer need "
                f"{pages * PAGE} tokens of cache, the pool has {self.num_pages * PAGE}; raise "
                "cache_tokens or use fewer chunks"
            )

    def add(self, request: Request, sink: Sink) -> int:
        """Serve a request; ``sink`` is notified of its progress. Returns its number.

        Raises RequestError for what can never be served: a request larger than the pool, or a rule
        that cannot serve this model.
        """
        return self.add_all([(request, sink)])[0]

    def add_all(self, asked: abc.Sequence[tuple[Request, Sink]]) -> list[int]:
        """As ``add``, for requests that come at one moment."""
        if self.lost is not None:
            raise self.lost
        made = [self._new_sequence(request, self._client_sink(sink)) for request, sink in asked]
        if self._leader is None:
            _ = self.runner.cache  # the first request is refused where the pool has no room

        def event() -> None:
            for sequence in made:
                try:
                    self._running_core.submit(sequence)
                except Exception as error:
                    sequence.sink(Progress(sequence.number, error=error))

        self._post(event, [self._command(sequence) for sequence in made])
        return [sequence.number for sequence in made]

    def abort(self, number: int) -> None:
        """Nothing more is wanted of a request; its client gets ``Cancelled`` if it still runs."""
        with contextlib.suppress(RuntimeError):  # closed: there is nothing to abort
            self._post(lambda: self._running_core.abort(number), [Abort(number)])

    def stop(self, number: int) -> None:
        """No more tokens are wanted of a request; its outcome comes as if it had ended.

        Before its first token, and while it begins again, that is to abort it.
        """
        self._post(lambda: self._running_core.stop(number), [Stop(number)])

    def call[Result](self, job: Callable[[ModelRunner], Result]) -> Result:
        """Run a job that has the pool to itself, between two steps, and wait for its result."""
        if self._mail.mine():
            return job(self.runner)
        self._check_alone()
        _ = self.runner.cache
        future: Future[Result] = Future()
        return self._queued(lambda: self._running_core.queue(job, future), future)

    def spare[Result](self, job: Callable[[], Result]) -> Result:
        """Run a job that needs no pool while others are served, and wait for its result.

        It runs at once where none is served, else after ``EngineSettings.spare_wait`` times as
        long as the one before took. Nothing else runs meanwhile: a job should be short.
        """
        if self._mail.mine():
            return job()
        self._check_alone()
        future: Future[Result] = Future()
        return self._queued(lambda: self._running_core.queue_spare(job, future), future)

    def _queued[Result](self, begin: Callable[[], None], future: "Future[Result]") -> Result:
        def event() -> None:
            try:
                begin()
            except Exception as error:
                future.set_exception(error)

        # Waited for by this: Ctrl-C within the future's own lock would lock out who sets it.
        done: queue.SimpleQueue[Future[Result]] = queue.SimpleQueue()
        future.add_done_callback(done.put)
        self._mail.post(event)
        return done.get().result()

    def forget(self) -> None:
        """Empty the pool and the arena: chunks are read when they are next asked for."""
        ask(lambda event: self._post(event, [Forget()]), lambda: self._running_core.forget())

    def drop(self, keys: abc.Sequence[str]) -> None:
        """Let the KV of chunks leave the pool and the arena, where no request reads it now.

        Raises RequestError where several processes hold the model.
        """
        self._check_alone()
        if self._core is not None:
            ask(self._mail.post, lambda: self._running_core.drop(keys))

    def tiers(self) -> Tiers | None:
        """Where chunk KV came from, and lies now; None before the first request."""
        core = self._core
        return None if core is None else core.tiers()

    def status(self) -> EngineStatus | None:
        """Where requests are, what they hold and how fast they go; None before the first."""
        core = self._core
        if core is None:
            return None
        status = core.status()
        return dataclasses.replace(status, restarts=status.restarts + self._lost)

    @property
    def looked(self) -> float | None:
        """When its thread last came on, by its clock; None before the first request."""
        return self._mail.looked

    @property
    def compiles(self) -> bool:
        """Whether its thread compiles, or waits for what is compiled."""
        return self.compile_times.under_way > 0

    @property
    def silence(self) -> float:
        """Seconds for which its thread has been at one iteration of its loop; 0 while it waits.

        While it compiles, or waits for what is compiled, they are 0, and begin anew behind that. A
        long job counts; one that never ends is a thread that is stuck.
        """
        return 0.0 if self.compiles else self._mail.silence

    def where(self, number: int) -> Where | None:
        """Status of a request; None for one that is over, or not begun."""
        core = self._core
        scheduler = None if core is None else core.state.scheduler
        sequence = None if scheduler is None else scheduler.live.get(number)
        if scheduler is None or sequence is None:
            return None
        chunks, missing = len(sequence.held), len(scheduler.missing(sequence))
        return Where(sequence.status.value, chunks - missing, chunks)

    def held(self) -> tuple[list[str], list[str]]:
        """Keys of the KV in its pool, or on its way there, and of that in its host arena."""
        core = self._core
        if core is None:
            return [], []
        return list(self.runner.cache.allocator.chunks.copy()), core.state.arena.keys()

    def events(self) -> list[ChunkEvent]:
        """What happened to chunks, the newest ``EngineSettings.keep_events`` of it, in order."""
        core = self._core
        return [] if core is None else list(core.state.events)

    def warm_up(self, requests: abc.Sequence[Request]) -> int:
        """Compile what requests like these need, before others wait for it; how many programs.

        The large ones are compiled side by side, then every request is served, for the rest, up to
        its second token. Only shapes count: ids may be any, chunks of any kind and length that will
        be asked for. On disk, programs are kept for the next process
        (``models.compiled.keep_compiled``).
        """
        before, programs = sum(self.compiled.values()), self.compile_ahead(requests)
        for progress in self.iterate(requests, enough=2):
            if progress.error is not None:
                raise progress.error
        return programs + sum(self.compiled.values()) - before

    def compile_ahead(
        self,
        requests: abc.Sequence[Request],
        at_a_time: int | None = None,
        done: Callable[[], None] = lambda: None,
    ) -> int:
        """Compile the large programs of requests like these; how many. Runs nothing.

        Each is traced by the engine's thread, between two iterations, and compiled by another.

        Args:
          requests: of the shapes that will come.
          at_a_time: programs that are compiled; None: as many as there are processors.
          done: called as those of each request are there.
        """
        places: dict[Hashable, int] = {}
        needed: list[list[int]] = []

        def traced() -> Iterator[Lowered]:
            for request in requests if self._leader is None and self.runner.compiles else ():
                programs = self.spare(
                    functools.partial(programs_of, self.runner, self.settings, request)
                )
                new = [program for name, program in programs.items() if name not in places]
                needed.append([places.setdefault(name, len(places)) for name in programs])
                yield from new

        compiled = compile_beside(traced(), at_a_time)
        for places_of in needed:
            for at in places_of:
                compiled[at].result()
            done()
        return len(compiled)

    def iterate(
        self, requests: abc.Sequence[Request], enough: int | None = None
    ) -> Generator[Progress]:
        """Serve requests and iterate over their progress, in the order it comes.

        ``Progress.number`` counts the requests from 0. Closing the iterator aborts what is left.
        ``enough``: tokens after which a request is stopped (None: its own).
        """
        news: queue.SimpleQueue[Progress] = queue.SimpleQueue()

        def sink() -> Sink:
            count = 0

            def tell(progress: Progress) -> bool:
                nonlocal count
                count += len(progress.new)
                news.put(progress)
                return enough is not None and count >= enough

            return tell

        numbers = self.add_all([(request, sink()) for request in requests])
        place = {number: at for at, number in enumerate(numbers)}
        left = set(numbers)
        try:
            while left:
                progress = news.get()
                if progress.last:
                    left.discard(progress.number)
                yield dataclasses.replace(progress, number=place[progress.number])
        finally:
            for number in left:
                self.abort(number)

    def follow(self, follower: Follower) -> None:
        """Make the leader's iterations, until it ends; this thread calls what is compiled.

        Raises what an iteration raises: this process can make no other then.
        """
        with counting(self.compiled, self.compile_times):
            core = self._running_core
            core.report_loads(follower.loaded)
            for iteration in follower.iterations():
                core.state.now = iteration.now
                for command in iteration.commands:
                    self._carry_out(core, command)
                if iteration.rests:
                    core.rest()
                else:
                    self.iterations += core.run_iteration()
                    follower.done(iteration.number, core.digest())

    def _carry_out(self, core: Core, command: Command) -> None:
        """What the leader's client asked for; the leader alone answers."""
        if isinstance(command, Submit):
            made = self._new_sequence(command.request, unheard, command.number, command.added)
            core.handle(lambda: core.submit(made))
        elif isinstance(command, Forget):
            core.handle(core.forget)
        else:
            act = {Abort: core.abort, Stop: core.stop, Loaded: core.loaded}[type(command)]
            core.handle(lambda: act(command.number))

    def _check_alone(self) -> None:
        """RequestError where other processes would have to do the same, and are not asked to."""
        if self._leader is not None:
            raise RequestError(
                "this is not done where several processes hold the model; ask a server of one "
                "process, or use `jaxrag generate --distributed`"
            )

    def _client_sink(self, sink: Sink) -> Sink:
        """What a client answers is the leader's alone: it becomes a command to all."""
        return sink if self._leader is None else CommandedSink(sink, self.abort, self.stop)

    def _command(self, sequence: Sequence) -> Submit | None:
        if self._leader is None:
            return None
        store = self._leader.name_of(sequence.request.store)
        return Submit(sequence.number, sequence.moments["added"], store, sequence.request)

    def _post(self, event: Posted, commands: abc.Sequence[Command | None]) -> None:
        """Have the engine's thread do something, and every other process with it."""
        given = () if self._leader is None else tuple(it for it in commands if it is not None)
        self._mail.post(_Commanded(event, given) if given else event)

    def _all_loaded(self, number: int) -> None:
        """Every process has read its part of a batch, on any thread: all go on with it."""
        with contextlib.suppress(RuntimeError):  # closed: nobody waits for it
            self._post(lambda: self._running_core.loaded(number), [Loaded(number)])

    def _abandon(self, error: EngineError) -> None:
        """Another process is lost, on any thread: everybody is told, and nothing is begun."""
        self._mail.closed = True
        core = self._core
        if core is not None:
            core.abandon(error)

    def _new_sequence(
        self, request: Request, sink: Sink, number: int | None = None, now: float | None = None
    ) -> Sequence:
        model, rule = self.runner.model, request.method.decode
        placement = model.placement
        request = request.over(model.batch_ways)
        if request.room:
            rule.check_mesh(model.config, model.mesh, placement)
        if request.room or placement.away:
            check = request.method.check_placement
            check(model.config, placement, generates=bool(request.room))
        request.sampling.check_ids(model.config.vocab_size, request.eos_ids)
        number = next(self._numbers) if number is None else number
        self.check_fits(request)
        make_sequence = sequence_of if model.backend is None else row_sequence
        sequence = make_sequence(model, request, number)
        sequence.sink = sink
        sequence.moments["added"] = self._clock() if now is None else now
        return sequence

    @property
    def _running_core(self) -> Core:
        """What serves; for the engine's thread."""
        if self._core is None:
            make_core = Core if self.runner.model.backend is None else RowCore
            self._core = make_core(
                self.runner, self.settings, self._mail.post, self._clock, self.compile_times
            )
        return self._core

    def _serve_events(self, events: Iterable[Posted]) -> None:
        """Serve until nothing is left to do; on the engine's thread."""
        mail, left = self._mail, deque(events)
        while self.lost is None:
            try:
                core = self._running_core
            except Exception:
                _LOG.exception("the engine's pool cannot be made")
                while left:  # those who posted learn it from their events
                    with contextlib.suppress(Exception):
                        left.popleft()()
                return
            try:
                iteration = self._send_iteration(core, left)
                while left:
                    core.handle(left.popleft())
                moved = core.run_iteration()
                self.iterations += moved
                if iteration is not None:
                    self._leader.done(iteration, core.digest())  # type: ignore[union-attr]
            except Exception as error:
                self._rescue(core, error)
                continue
            if mail.closed:
                for event in mail.next():  # the last: what is abandoned makes no iteration again
                    core.handle(event)
                core.abandon(EngineError("the engine was closed, as its interpreter ends"))
                return
            if core.busy:
                left.extend(mail.next(0.0 if moved else core.patience()))
            elif events := mail.next():
                left.extend(events)
            else:
                if self._leader is not None:
                    self._leader.send(0.0, rests=True)
                core.rest()
                return

    def _send_iteration(self, core: Core, events: Iterable[Posted]) -> int | None:
        """Send the others what is done now, by the same clock; the number of the iteration."""
        if self._leader is None:
            return None
        commands = [
            it for event in events if isinstance(event, _Commanded) for it in event.commands
        ]
        core.state.now = self._clock()
        return self._leader.send(core.state.now, commands)

    def _rescue(self, core: Core, error: Exception) -> None:
        """The loop itself failed: everybody is told, and what comes next finds it anew."""
        if self._leader is not None:
            self._leader.lose(f"the leader failed with {type(error).__name__}: {error}")
            return
        _LOG.exception("the engine failed; everything that it served is told")
        failure = EngineError(f"the engine failed with {type(error).__name__}: {error}; ask again")
        core.state.restarts += 1
        try:
            core.fail_all(failure)
        except Exception:
            _LOG.exception("the engine's pool cannot be made anew now")
            core.abandon(failure)
            self._lost += core.state.restarts
            self._core = None
            self.runner.forget_cache()


@dataclasses.dataclass(frozen=True)
class _Commanded:
    """An event that every process carries out."""

    event: Posted
    commands: tuple[Command, ...]

    def __call__(self) -> None:
        self.event()


def _serve_while_alive(engine: "weakref.ref[Engine]", mail: Mailbox) -> None:
    """The engine's thread; while it waits with nothing to do, the engine may go."""
    while events := mail.first():
        served = engine()
        if served is None:
            return
        with counting(served.compiled, served.compile_times):
            served._serve_events(events)
        del served, events

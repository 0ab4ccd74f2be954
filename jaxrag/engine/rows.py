"""An engine whose requests have rows of their own: their chunks from the store, their steps.

Who waits for what, in which order, and what is told of it is as for every other model (core,
scheduler). But there is no pool that requests share: a request has cells of its own for all of its
prompt and its answer, its chunks are put there from the store when its row begins, and what is not
stored is computed there.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NoReturn

import jax
import numpy as np

from jaxrag.base.errors import EngineError, JaxragError, ModelError, RequestError
from jaxrag.base.types import HostArray, Step, on_host
from jaxrag.engine.core import Core
from jaxrag.engine.decoding import sampling_rows
from jaxrag.engine.mapping import sequence_of
from jaxrag.engine.progress import PrefillSink
from jaxrag.engine.request import FAILED, BatchKey, Request
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.sequence import Need, PromptPart, Sequence, stored_exact
from jaxrag.engine.staging import ChunkOrigin, why_refused
from jaxrag.engine.steps import Drawn, SamplingRows, sample_rows
from jaxrag.kv.cache import PageAllocator, pages_for
from jaxrag.models.backend import ROWS
from jaxrag.models.model import Model
from jaxrag.reuse.decode import Dense

_NO_POOL = "this looks at KV on the device in pages, which a model with rows of its own has not"
_BATCH = BatchKey(Dense(), 0, 0, ROWS)


@dataclasses.dataclass
class _Cells:
    """Who has how much of the KV of rows, in pages; in the place of a pool."""

    allocator: PageAllocator
    host: None = None
    lost: bool = False

    def __getattr__(self, name: str) -> NoReturn:
        raise RequestError(_NO_POOL)


class RowRunner(ModelRunner):
    """A model without a pool of ours."""

    compiles = False

    @property
    def num_pages(self) -> int:
        """Of the backend's KV."""
        assert self.model.backend is not None
        return pages_for(self.model.backend.cells)

    @functools.cached_property
    def cells(self) -> _Cells:
        """Made when they are first needed."""
        return _Cells(PageAllocator(self.num_pages))

    @property
    def cache(self) -> Any:
        """What the scheduler counts with."""
        return self.cells

    def forget_cache(self, keep_pool: bool = False) -> None:
        """Nobody has anything."""
        self.__dict__.pop("cells", None)


class RowSequence(Sequence):
    """A request with cells of its own for everything."""

    def need(self, held: Any) -> Need:
        """Its prompt and its answer."""
        return Need({}, pages_for(self.num_tokens + self.request.room))


def row_sequence(model: Model, request: Request, number: int) -> RowSequence:
    """As ``sequence_of``; one of the rows that all requests share decodes it.

    Raises RequestError for a method that does more than to read chunks as they are stored.
    """
    if not request.method.as_stored:
        assert model.backend is not None
        raise RequestError(
            f"method {request.method.name!r} computes chunk tokens again, or attends to some as to "
            f"no others, which {model.backend.called} does not do"
        )
    made = sequence_of(model, dataclasses.replace(request, rows=ROWS), number)
    fields = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
    return RowSequence(**fields | {"batch": _BATCH})


@dataclasses.dataclass(eq=False)
class _Running:
    """A request with a row.

    Attributes:
      place: position of the next token that is run.
      pieces: what is left of its prompt: token ids to run, or None where something else was done.
      todo: ids to run next, none where ``pieces`` is asked for more.
      ends: whether the logits behind them are wanted.
      computed: ids that were run of its prompt.
    """

    sequence: Sequence
    row: int
    sampling: SamplingRows
    pieces: Iterator[HostArray | None] = dataclasses.field(default_factory=lambda: iter(()))
    place: int = 0
    todo: HostArray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    ends: bool = False
    computed: list[HostArray] = dataclasses.field(default_factory=list)


class RowCore(Core):
    """An engine at work, for one thread, on a model with rows."""

    def __init__(self, runner: ModelRunner, *others: Any) -> None:
        super().__init__(runner, *others)
        backend = runner.model.backend
        assert backend is not None
        self._backend = backend
        self._running: dict[int, _Running] = {}
        self._hits = self._transfers.hits
        self._life = 0  # of the backend, whose rows these are

    @property
    def busy(self) -> bool:
        """Is there anything to wait for?"""
        return bool(self.state.live or self._jobs or self._spare)

    def submit(self, sequence: Sequence) -> None:
        """Queue a request; its client is notified where it may not run."""
        super().submit(sequence)
        if isinstance(sequence.sink, PrefillSink) and not self.state.ended(sequence):
            self._fail(sequence, RequestError(_NO_POOL))

    def stop(self, number: int) -> None:
        """The client wants no more tokens of a request, and its outcome, if it has one by now."""
        sequence = self.state.live.get(number)
        if sequence is not None and "first" in sequence.moments:
            self._finish(sequence, "stop")
        else:
            self.abort(number)

    def _iterate(self) -> bool:
        state = self.state
        now = state.moment()
        state.pace.work(now, state.scheduler.given - self._given)
        self._given = state.scheduler.given
        for number in state.scheduler.expired(now):
            self._expire(number)
        self._run_jobs()
        for admitted in state.scheduler.admit(now):
            state.live[admitted.number].moments.setdefault("admitted", now)
        for number in state.scheduler.outgrown():
            self._fail(state.live[number], self._too_large(state.live[number]))
        try:
            if state.live:
                self._revive()
            while (ready := state.scheduler.next_prefill()) is not None:
                self._begin(state.live[ready])
            self._advance()
            self._step()
        except EngineError as error:
            self._lose(error)
        except ModelError as error:  # no process can be started
            for sequence in list(state.live.values()):
                self._fail(sequence, error)
        moved = bool(state.live)
        return self._run_spare(moved) or moved

    def _revive(self) -> None:
        """Have it run; whoever had a row of another life than this one has lost it."""
        life = self._backend.live()
        if life != self._life:
            self._lose(EngineError(f"{self._backend.called} was started anew meanwhile; ask again"))
            self._life = life

    def _begin(self, sequence: Sequence) -> None:
        row = self.state.scheduler.row_of(sequence)
        assert row is not None
        processes = sequence.request.sampling.processes
        vocab_size = self.state.runner.model.config.vocab_size if processes else None
        self._backend.leave(row)
        running = _Running(sequence, row, sampling_rows([sequence], 1, vocab_size))
        running.pieces = self._pieces(running)
        self._running[sequence.number] = running

    def _pieces(self, running: _Running) -> Iterator[HostArray | None]:
        """Bring its prompt in, part by part, and yield what of it has to be run.

        Nothing is run before what precedes it is there. After each chunk that had to be encoded
        others go on.
        """
        sequence, exact = running.sequence, True
        stored = self._stored(sequence)
        waiting, place = list[HostArray](), 0
        for part in sequence.parts:
            if not len(part.ids):
                continue
            kv = stored.get(part.asked_key)
            if kv is None and part.load is not None and part.load.misses == "encode":
                kv = stored[part.load.key] = self._encoded(part)
                yield None
            here = kv is None or stored_exact(sequence.request.method, sequence.parts, part)
            part.exact = exact = exact and here
            if kv is None:
                waiting.append(part.ids)
            else:
                if waiting:
                    yield np.concatenate(waiting)
                    waiting = []
                first = self._first(part)
                self._backend.restore(running.row, kv, first, place, self._life)
                running.place = place + len(part.ids)
            place += len(part.ids)
        sequence.moments.setdefault("ready", self.state.clock())
        running.ends = True
        yield np.concatenate([*waiting, sequence.request.prompt.final])

    def _first(self, part: PromptPart) -> int:
        """How many tokens the KV of a part was read behind."""
        assert part.load is not None
        encoding, ids = part.load.encoding, part.ids
        front = np.zeros(encoding.num_before(part.load.encoder), np.int32)
        return len(self._backend.before(front, ids))

    def _stored(self, sequence: Sequence) -> dict[str, HostArray]:
        """The KV of its parts that is in host memory, or in their store and what was put there."""
        arena, kv_of = self.state.arena, dict[str, HostArray]()
        loads = sequence.loads
        arena.asked(loads)
        for key in loads:
            if (kv := arena.get(key)) is not None:
                kv_of[key] = kv
                sequence.came(key, ChunkOrigin("host"))
        left = [key for key in loads if key not in kv_of]
        if left:
            held = loads[left[0]].encoding.held
            read = held.get_many(left, on_missing="skip")
            for key, (start, length) in read.offsets.items():
                kv = kv_of[key] = np.ascontiguousarray(read.kv[:, :, start : start + length])
                sequence.came(key, ChunkOrigin("store"))
                if not held.private:
                    arena.put(key, kv)
            for key, why in read.refused.items():
                sequence.came(key, why_refused(loads[key], why))
        for part in sequence.distinct:
            assert part.origin is not None
            self._hits[part.origin.counted] += 1
        return kv_of

    def _encoded(self, part: PromptPart) -> HostArray:
        """The KV of a part that no store gave, which is kept where the store takes it."""
        load = part.load
        assert load is not None and part.origin is not None
        [made] = load.encoding.encode(load.encoder, {load.key: load.chunk})
        before = load.encoding.num_before(load.encoder)
        part.origin = dataclasses.replace(
            part.origin,
            not_stored=load.encoding.offer(made),
            runs=((load.tokens, before + load.tokens),),
        )
        return made.kv

    def _advance(self) -> None:
        """Bring in the next piece of every prompt that is not there yet."""
        for running in list(self._running.values()):
            if not len(running.todo):
                try:
                    ids = next(running.pieces, None)
                except (EngineError, ModelError):
                    raise
                except JaxragError as error:  # of its store, or of a chunk: its own
                    self._fail(running.sequence, error)
                    continue
                if ids is not None:
                    running.todo = ids
                    running.computed.append(ids)

    def _step(self) -> None:
        """Run tokens of every row that has some, and draw the next ones."""
        room, runs, asked = self.state.settings.prefill_tokens, [], list[_Running]()
        for running in sorted(self._running.values(), key=lambda running: len(running.todo)):
            ids = running.todo[: max(room, 1)]
            if len(ids) and (room > 0 or len(running.todo) == 1):
                ends = running.ends and len(ids) == len(running.todo)
                runs.append((running.row, running.place, ids, ends))
                running.place += len(ids)
                running.todo = running.todo[len(ids) :]
                room -= len(ids)
                asked += [running] * ends
        if not runs:
            return
        logits = self._backend.step(runs, self._life)
        for running, row in zip(asked, logits, strict=True):
            self._draw(running, row)

    def _draw(self, running: _Running, logits: HostArray) -> None:
        sequence = running.sequence
        matcher, processors = sequence.matcher, running.sampling.processors
        if matcher is not None and matcher.next is not None and processors is not None:
            allowed = processors.replace(allowed=matcher.next[None])
            running.sampling = running.sampling.replace(processors=allowed)
        index = np.array([sequence.read], np.int32)
        if processors is None and not running.sampling.temperature.any():
            drawn = _likeliest(logits)
        else:
            drawn, running.sampling = _draw(logits[None], running.sampling, index)
        ids, logprobs = np.asarray(drawn.ids), np.asarray(drawn.logprobs)
        top = []
        if drawn.top is not None and (count := sequence.request.sampling.top_logprobs):
            pairs = (np.asarray(values)[0, :count].tolist() for values in drawn.top)
            top = [list(zip(*pairs, strict=True))]
        if "first" not in sequence.moments:
            sequence.moments["first"] = self.state.clock()
            computed = np.concatenate(running.computed)
            nowhere = np.zeros(len(computed), np.int32)
            sequence.run = on_host(Step, computed, nowhere, nowhere)
        running.todo = ids
        self._on_tokens(sequence, ids.tolist(), logprobs.tolist(), top)

    def _release(self, sequence: Sequence) -> None:
        running = self._running.pop(sequence.number, None)
        super()._release(sequence)
        if running is not None:
            with contextlib.suppress(EngineError):
                self._backend.leave(running.row)

    def _lose(self, error: EngineError) -> None:
        """Everybody with a row is told; who waits is served from now on."""
        self.state.restarts += bool(self._running)
        for running in list(self._running.values()):
            self._fail(running.sequence, error)

    def _rebuild(self, keep_pool: bool = False) -> None:
        self._running.clear()
        super()._rebuild(keep_pool)


def _likeliest(logits: HostArray) -> Drawn:
    """What ``_draw`` gives at temperature 0, in an eighth of the time."""
    drawn = logits.argmax()
    logprob = -np.log(np.exp(logits - logits[drawn]).sum())
    token: Any = np.where(np.isnan(logprob), FAILED, drawn).astype(np.int32)
    return Drawn(token[None], logprob[None])


@jax.jit
def _draw(logits: Any, sampling: SamplingRows, index: Any) -> tuple[Drawn, SamplingRows]:
    """The next token of one row, and how the one behind it is drawn."""
    drawn = sample_rows(logits, sampling, index)
    if sampling.processors is None:
        return drawn, sampling
    return drawn, sampling.replace(processors=sampling.processors.counted(drawn.ids))

"""Chunks on their way into the pool: each is loaded once, whoever waits for it."""

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from jaxrag.encode import Encoded
from jaxrag.engine.live import Live
from jaxrag.engine.loader import Missed, Staged, encode, groups, keep, place, read
from jaxrag.engine.scheduler import Admitted
from jaxrag.engine.state import Broken, State
from jaxrag.engine.thread import result_of

Answer = tuple[Staged, list[Missed]]


def _keep(
    state: State,
    missed: Missed,
    made: Encoded,
    runs: tuple[tuple[int, int], ...],
    pages: Mapping[str, Sequence[int]],
) -> Answer:
    return keep(state.runner, missed, made, runs, pages), []


class Loads:
    """Reads chunks on threads, and places or encodes them on the engine's."""

    def __init__(self, state: State, fail: Callable[[Live, BaseException], None]) -> None:
        """``fail`` ends a request whose chunk cannot be had."""
        self._state, self._fail = state, fail
        self._owner: dict[str, Live] = {}  # of every chunk on its way: who asked first
        self._to_encode: deque[Missed] = deque()
        self._threads: ThreadPoolExecutor | None = None

    @property
    def busy(self) -> bool:
        """Is any chunk on its way?"""
        return bool(self._owner)

    def start(self, live: Live, admitted: Admitted) -> None:
        """Load the chunks of a request that nobody else is loading."""
        state = self._state
        for group in groups(live.plan.loads[key] for key in admitted.loads):
            keys = [load.key for load in group]
            self._owner.update(dict.fromkeys(keys, live))
            self._run(functools.partial(read, state.runner, group, admitted.chunks), keys)

    def clear(self) -> None:
        """The pool was lost, and what was on its way with it."""
        self._owner.clear()
        self._to_encode.clear()

    def encode_one(self) -> bool:
        """Encode one chunk that no store had; the others come after the next decode step."""
        while self._to_encode:
            missed = self._to_encode.popleft()
            key = missed.load.key
            chunk = self._state.runner.cache.allocator.chunks[key]
            if not chunk.ref_count:  # nobody waits any more
                del self._owner[key]
                self._state.scheduler.refused(key)
                continue
            try:
                made, runs = encode(missed.load)
            except Exception as error:
                self._lost([key], error)
                return True
            pages = {key: chunk.pages}
            self._run(functools.partial(_keep, self._state, missed, made, runs, pages), [key])
            return True
        return False

    def _run(self, job: Callable[[], Answer], keys: Sequence[str]) -> None:
        """Run a job on a thread, and take what it loaded on this one."""
        state, epoch = self._state, self._state.epoch
        if state.settings.lockstep:
            self._loaded(keys, result_of(job))
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(state.settings.load_threads, "load")

        def run() -> None:
            answer = result_of(job)
            state.post(lambda: self._loaded(keys, answer) if epoch == state.epoch else None)

        self._threads.submit(run)

    def _loaded(self, keys: Sequence[str], answer: Answer | BaseException) -> None:
        if isinstance(answer, BaseException):
            self._lost(keys, answer)
            return
        state, (staged, missed) = self._state, answer
        chunks = state.runner.cache.allocator.chunks
        pages = {load.key: chunks[load.key].pages for load, _, _ in staged.chunks}
        try:
            place(state.runner, staged, pages)
        except Exception as error:
            raise Broken(error, [self._owner[key] for key in keys]) from error
        for load, found, _ in staged.chunks:
            self._owner.pop(load.key).found[load.key] = found
            for number in state.scheduler.staged(load.key, load.tokens):
                state.live[number].ready = state.clock()
        for one in missed:
            if one.load.misses == "encode":
                self._to_encode.append(one)
            else:
                self._in_place(one)

    def _in_place(self, missed: Missed) -> None:
        """A chunk is nowhere: whoever computes it in place then asks for other pages."""
        key = missed.load.key
        self._owner.pop(key).found[key] = missed.found
        for number in self._state.scheduler.refused(key):
            live = self._state.live[number]
            if live.plan.loads[key].misses == "in_place":
                live.plan.gone.add(key)
                live.found[key] = missed.found

    def _lost(self, keys: Sequence[str], error: BaseException) -> None:
        """Chunks cannot be had: whoever waits for one fails, and is told why."""
        for key in keys:
            del self._owner[key]
            for number in self._state.scheduler.refused(key):
                self._fail(self._state.live[number], error)

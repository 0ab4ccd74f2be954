"""Prompts on their way through the model, piece by piece, and the indexes that rules search."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxrag.cache import PagePool
from jaxrag.decode import Decoding
from jaxrag.engine.decoding import start_decoding
from jaxrag.engine.lanes import Lanes
from jaxrag.engine.live import Live
from jaxrag.engine.mapping import map_planned
from jaxrag.engine.prefill import Prefill, select_tokens
from jaxrag.engine.state import Broken, State
from jaxrag.engine.thread import ask, result_of
from jaxrag.errors import EngineError


class Prompts:
    """Prefills one request after the other, and hands each to its lane."""

    def __init__(self, state: State, lanes: Lanes, release: Callable[[Live], None]) -> None:
        """``release`` gets a request that ended while its indexes were made."""
        self._state, self._lanes, self._release = state, lanes, release
        self._now: tuple[Live, Prefill] | None = None
        self._indexers: ThreadPoolExecutor | None = None

    def run(self) -> bool:
        """Run pieces of prompts, within the budget; True where any was run."""
        budget = left = self._state.settings.prefill_tokens
        while left > 0:
            if self._now is None:
                number = self._state.scheduler.next_prefill()
                if number is None:
                    break
                self._begin(self._state.live[number])
                continue
            live, prefill = self._now
            try:
                left -= prefill.next_piece()
                if not prefill.left:
                    self._now = None
                    self._end(live, prefill)
            except Exception as error:
                self._now = None
                raise Broken(error, [live], shared=False) from error
        return left < budget

    def leave(self, live: Live) -> None:
        """A request ended; the rest of its prompt is not run."""
        if self._now is not None and self._now[0] is live:
            self._now = None

    def clear(self) -> None:
        """The pool was lost."""
        self._now = None

    def _begin(self, live: Live) -> None:
        state = self._state
        try:
            if live.request.method.prefix_cache:
                state.scheduler.revise(live.number)
            entry = state.scheduler.live[live.number]
            chunks = {key: state.runner.cache.allocator.chunks[key] for key in entry.held}
            mapped = map_planned(live.plan, chunks, entry.own, live.found)
            if live.swapped is not None:
                self._lanes.put_back(live, mapped)
                state.scheduler.prefilled(live.number)
                return
            live.state = mapped
            select_tokens(state.runner, [mapped])
            rule = live.request.method.decode
            observe = None if live.lane is None else rule.observe  # one token needs no rule
            self._now = (live, Prefill(state.runner, [mapped], observe))
        except Exception as error:
            raise Broken(error, [live], shared=False) from error

    def _end(self, live: Live, prefill: Prefill) -> None:
        """A prompt is in the pool."""
        state, mapped = self._state, live.state
        assert mapped is not None
        for key, part in mapped.keep.items():
            state.scheduler.share(live.number, key, part.pages, len(part.ids))
        logits, _, bank = prefill.prefilled
        rule = live.request.method.decode
        if live.lane is None or not rule.sparse:
            state.scheduler.prefilled(live.number)
            self._lanes.join(live, logits, None)
            return
        start = functools.partial(
            start_decoding, state.runner, [mapped], rule, bank, live.lane.room
        )
        if rule.searches is None:
            state.scheduler.prefilled(live.number)
            self._lanes.join(live, logits, start())
            return
        live.logits, live.search = logits, state.runner.host_search.admit()
        state.scheduler.prefilled(live.number, indexing=True)
        self._index(live, functools.partial(start, [live.search]))

    def _index(self, live: Live, start: Callable[..., Decoding | None]) -> None:
        """Have the indexes of a request made, by a thread of their own."""
        live.flying += 1
        state, run, epoch = self._state, live.run, self._state.epoch
        if state.settings.lockstep:
            self._indexed(live, run, result_of(start))
            return
        if self._indexers is None:
            self._indexers = ThreadPoolExecutor(1, "index")

        def read(use: Callable[[PagePool], Any]) -> Any:
            if epoch != state.epoch:
                raise EngineError("the pool was lost while indexes were made over it; ask again")
            return use(state.runner.cache.pool)

        def on_pool(use: Callable[[PagePool], Any]) -> Any:
            return ask(state.post, functools.partial(read, use))

        def index() -> None:
            answer = result_of(functools.partial(start, on_pool=on_pool))
            state.post(lambda: self._indexed(live, run, answer))

        self._indexers.submit(index)

    def _indexed(self, live: Live, run: int, answer: Decoding | BaseException | None) -> None:
        if run != live.run:
            return
        live.flying -= 1
        if live.ended:
            self._release(live)
            return
        if isinstance(answer, BaseException):
            raise Broken(answer, [live], shared=False) from answer
        self._state.scheduler.indexed(live.number)
        logits, live.logits = live.logits, None
        assert logits is not None
        try:
            self._lanes.join(live, logits, answer)
        except Exception as error:
            raise Broken(error, [live], shared=False) from error

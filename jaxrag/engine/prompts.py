"""Prompts on their way through the model, piece by piece, and the indexes that rules search."""

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxrag.base.errors import EngineError
from jaxrag.base.shapes import bucket, pieces
from jaxrag.base.types import Array
from jaxrag.engine.away import start_away
from jaxrag.engine.decoding import FEWEST_ROOM, LaneKey, start_decoding
from jaxrag.engine.lanes import Lanes
from jaxrag.engine.layerwise import LayerPrefill
from jaxrag.engine.live import Live
from jaxrag.engine.mapping import RequestState, map_planned
from jaxrag.engine.prefill import Prefill, select_tokens, start_prefill
from jaxrag.engine.prefilled import PREFILL_TOKENS
from jaxrag.engine.request import Request
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.state import Broken, EngineSettings, State
from jaxrag.engine.thread import ask, result_of
from jaxrag.kv.cache import PagePool, table_width
from jaxrag.reuse.decode import Decoding, Observe


def rows_together(
    runner: ModelRunner, settings: EngineSettings, request: Request, widths: Iterable[int]
) -> int:
    """Rows of the program that prefills a request in pieces of these widths."""
    if runner.cache.host is not None:  # layer by layer, one prompt after the other
        return 1
    cost = 2 * runner.num_params * max(widths) * request.rows
    return request.rows if cost <= settings.together_flops else 1


@dataclasses.dataclass(frozen=True)
class _Shape:
    """What prompts have in common that are run together, however many there are of them.

    Attributes:
      lane: that they are for; None for single tokens.
      pages: of their tables.
      widths: of their pieces.
      observe: the queries that are kept.
      rows: of the program that runs them.
      alone: the number of one that is to have it for itself.
    """

    lane: LaneKey | None
    pages: int
    widths: tuple[int, ...]
    observe: Observe | None
    rows: int
    alone: int | None


@dataclasses.dataclass(eq=False)
class _Group:
    """Prompts that are run together; none joins once the first piece has been run."""

    shape: _Shape
    members: list[Live]
    prefill: Prefill | LayerPrefill | None = None


class Prompts:
    """Prefills requests, together where their pieces are small, and hands them to their lanes."""

    def __init__(self, state: State, lanes: Lanes, release: Callable[[Live], None]) -> None:
        """``release`` gets a request that ended while something was made for it."""
        self._state, self._lanes, self._release = state, lanes, release
        self._groups: list[_Group] = []
        self._expected: deque[Live] = deque()
        self._indexers: ThreadPoolExecutor | None = None

    def run(self) -> bool:
        """Run pieces of prompts, within the budget; True where any was run."""
        budget = left = self._state.settings.prefill_tokens
        while left > 0:
            self._take()
            if not self._groups:
                break
            group = self._groups[0]
            try:
                if group.prefill is None:
                    group.prefill = self._start(group)
                left -= group.prefill.next_piece() * len(group.members)
                if not group.prefill.left:
                    del self._groups[0]
                    self._end(group, group.prefill)
            except Exception as error:
                raise Broken(error, group.members) from error
        return left < budget or self._look_ahead()

    def expect(self, live: Live) -> None:
        """The chunks of a request are on their way; its selector may begin with the question."""
        method = live.request.method
        if method.recomputes and method.recompute_ratio != 1:
            self._expected.append(live)

    def _look_ahead(self) -> bool:
        """Have one selector begin, where nothing else is to be run before the next step."""
        while self._expected:
            live = self._expected.popleft()
            if live.ended or live.state is not None:
                continue
            request, model = live.request, self._state.runner.model
            try:
                live.ahead = request.method.selector.ahead(model, request.prompt.final)
            except Exception as error:
                raise Broken(error, [live], shared=False) from error
            if live.ahead is not None:
                return True
        return False

    def clear(self) -> None:
        """The pool was lost."""
        self._groups.clear()
        self._expected.clear()

    def _take(self) -> None:
        """Take every request that is ready and has a row.

        Not behind one that leaves parts of its prompt to those after it.
        """
        while not any(it.state and it.state.keep for g in self._groups for it in g.members):
            number = self._state.scheduler.next_prefill()
            if number is None:
                return
            live = self._state.live[number]
            try:
                self._begin(live)
            except Exception as error:
                raise Broken(error, [live], shared=False) from error

    def _begin(self, live: Live) -> None:
        """Map a request over its chunks, have its tokens selected, and put it in a group."""
        state = self._state
        if live.plan.looks:
            state.scheduler.revise(live.number)
        entry = state.scheduler.live[live.number]
        chunks = {key: state.runner.cache.allocator.chunks[key] for key in entry.held}
        mapped = map_planned(live.plan, chunks, entry.own, live.found)
        if live.swapped is not None:
            self._lanes.put_back(live, mapped)
            state.scheduler.prefilled(live.number)
            return
        live.state = mapped
        if mapped.scene is not None:
            mapped.scene = dataclasses.replace(mapped.scene, ahead=live.ahead)
            live.ahead = None
        select_tokens(state.runner, [mapped])
        shape = self._shape(live, mapped, entry.alone)
        live.flying += 1
        for group in self._groups:
            if group.shape == shape and group.prefill is None and len(group.members) < shape.rows:
                group.members.append(live)
                return
        self._groups.append(_Group(shape, [live]))

    def _shape(self, live: Live, mapped: RequestState, alone: bool) -> _Shape:
        """What a request runs in, which nobody else decides."""
        widths = tuple(width for _, width in pieces(len(mapped.ids), PREFILL_TOKENS))
        rule = live.request.method.decode
        return _Shape(
            lane=live.lane,
            pages=table_width(mapped.table),
            widths=widths,
            observe=None if live.lane is None else rule.observe,  # one token needs no rule
            rows=rows_together(self._state.runner, self._state.settings, live.request, widths),
            alone=live.number if alone else None,
        )

    def _start(self, group: _Group) -> Prefill | LayerPrefill:
        states = [live.state for live in group.members if live.state is not None]
        shape = group.shape
        return start_prefill(self._state.runner, states, shape.observe, shape.rows)

    def _end(self, group: _Group, prefill: Prefill | LayerPrefill) -> None:
        """Prompts are in the pool: their lane has them next, or who makes the rule's indexes."""
        state, logits = self._state, prefill.prefilled.logits
        lane = group.shape.lane
        place: list[Live | None] = []
        begins = lane is not None and (lane.rule.sparse or state.runner.cache.away)
        for row, live in enumerate(group.members):
            live.flying -= 1
            place.append(None if live.ended else live)
            if live.ended:
                if not live.flying:
                    self._release(live)
                continue
            assert live.state is not None
            for key, part in live.state.keep.items():
                state.scheduler.share(live.number, key, part.pages, len(part.ids))
            if lane is None or not begins:
                state.scheduler.prefilled(live.number)
            else:
                self._begin_rule(live, lane, [*[None] * row, live], prefill)
        if lane is None or not begins:
            self._lanes.join(place, logits)

    def _begin_rule(
        self, live: Live, lane: LaneKey, place: list[Live | None], prefill: Prefill | LayerPrefill
    ) -> None:
        """Make what a sparse rule carries; ``place`` ends with the request, at its row."""
        state, mapped = self._state, live.state
        assert mapped is not None
        bank, logits = prefill.bank_of(len(place) - 1), prefill.prefilled.logits
        if state.runner.cache.away:
            live.search = number = state.runner.host_search.admit()
            state.scheduler.prefilled(live.number, indexing=True)
            room = bucket(live.request.room, FEWEST_ROOM)

            def begin(on_pool: object = None) -> Decoding:  # it reads host memory only
                return start_away(state.runner, mapped, lane.rule, bank, room, number)

            self._index(live, begin, place, logits)
            return
        start = functools.partial(
            start_decoding, state.runner, [mapped], lane.rule, bank, lane.room
        )
        if lane.rule.searches is None:
            state.scheduler.prefilled(live.number)
            self._lanes.join(place, logits, start())
            return
        live.search = state.runner.host_search.admit()
        state.scheduler.prefilled(live.number, indexing=True)
        self._index(live, functools.partial(start, [live.search]), place, logits)

    def _index(
        self,
        live: Live,
        start: Callable[..., Decoding | None],
        place: list[Live | None],
        logits: Array,
    ) -> None:
        """Have the indexes of a request made, by a thread of their own."""
        live.flying += 1
        state, run, epoch = self._state, live.run, self._state.epoch
        if state.settings.lockstep:
            self._indexed(live, run, result_of(start), place, logits)
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
            state.post(lambda: self._indexed(live, run, answer, place, logits))

        self._indexers.submit(index)

    def _indexed(
        self,
        live: Live,
        run: int,
        answer: Decoding | BaseException | None,
        place: list[Live | None],
        logits: Array,
    ) -> None:
        if run != live.run:
            return
        live.flying -= 1
        if live.ended:
            self._release(live)
            return
        if isinstance(answer, BaseException):
            raise Broken(answer, [live], shared=False) from answer
        self._state.scheduler.indexed(live.number)
        try:
            self._lanes.join(place, logits, answer)
        except Exception as error:
            raise Broken(error, [live], shared=False) from error

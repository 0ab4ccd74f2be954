"""Prompts on their way through the model, piece by piece, and the indexes that rules search."""

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxrag.base.errors import EngineError
from jaxrag.base.shapes import pieces
from jaxrag.base.types import Array
from jaxrag.engine.away import start_row
from jaxrag.engine.decoding import LaneKey
from jaxrag.engine.lanes import Lanes
from jaxrag.engine.layerwise import LayerPrefill, start_prefill
from jaxrag.engine.mapping import RequestState, map_planned
from jaxrag.engine.prefill import PREFILL_TOKENS, Prefill, Prefilled, select_tokens
from jaxrag.engine.request import Request
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.state import Broken, EngineSettings, RunningRequest, State
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
    members: list[RunningRequest]
    prefill: Prefill | LayerPrefill | None = None


class PrefillQueue:
    """Prefills requests, together where their pieces are small, and hands them to their lanes."""

    def __init__(
        self, state: State, lanes: Lanes, release: Callable[[RunningRequest], None]
    ) -> None:
        """``release`` gets a request that ended while something was made for it."""
        self._state, self._lanes, self._release = state, lanes, release
        self._groups: list[_Group] = []
        self._expected: deque[RunningRequest] = deque()
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
                    self._end(group, group.prefill.prefilled)
            except Exception as error:
                raise Broken(error, group.members) from error
        return left < budget or self._look_ahead()

    def expect(self, running: RunningRequest) -> None:
        """The chunks of a request are on their way; its selector may begin with the question."""
        method = running.request.method
        if method.recomputes and method.recompute_ratio != 1:
            self._expected.append(running)

    def _look_ahead(self) -> bool:
        """Have one selector begin, where nothing else is to be run before the next step."""
        while self._expected:
            running = self._expected.popleft()
            if running.ended or running.state is not None:
                continue
            request, model = running.request, self._state.runner.model
            try:
                running.ahead = request.method.selector.ahead(model, request.prompt.final)
            except Exception as error:
                raise Broken(error, [running], shared=False) from error
            if running.ahead is not None:
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
            running = self._state.live[number]
            try:
                self._begin(running)
            except Exception as error:
                raise Broken(error, [running], shared=False) from error

    def _begin(self, running: RunningRequest) -> None:
        """Map a request over its chunks, have its tokens selected, and put it in a group."""
        state = self._state
        if running.plan.looks:
            state.scheduler.revise(running.number)
        entry = state.scheduler.live[running.number]
        chunks = {key: state.runner.cache.allocator.chunks[key] for key in entry.held}
        mapped = map_planned(running.plan, chunks, entry.own, running.found)
        if running.swapped is not None:
            self._lanes.put_back(running, mapped)
            state.scheduler.prefilled(running.number)
            return
        running.state = mapped
        if mapped.scene is not None:
            mapped.scene = dataclasses.replace(mapped.scene, ahead=running.ahead)
            running.ahead = None
        select_tokens(state.runner, [mapped])
        running.moments["mapped"] = state.clock()
        shape = self._shape(running, mapped, entry.alone)
        running.in_flight += 1
        for group in self._groups:
            if group.shape == shape and group.prefill is None and len(group.members) < shape.rows:
                group.members.append(running)
                return
        self._groups.append(_Group(shape, [running]))

    def _shape(self, running: RunningRequest, mapped: RequestState, alone: bool) -> _Shape:
        """Pages, pieces and queries of a request's prefill."""
        widths = tuple(width for _, width in pieces(len(mapped.ids), PREFILL_TOKENS))
        rule = running.request.method.decode
        return _Shape(
            lane=running.lane,
            pages=table_width(mapped.table),
            widths=widths,
            observe=None if running.lane is None else rule.observe,  # one token needs no rule
            rows=rows_together(self._state.runner, self._state.settings, running.request, widths),
            alone=running.number if alone else None,
        )

    def _start(self, group: _Group) -> Prefill | LayerPrefill:
        states = [running.state for running in group.members if running.state is not None]
        shape = group.shape
        return start_prefill(self._state.runner, states, shape.observe, shape.rows)

    def _end(self, group: _Group, prefilled: Prefilled) -> None:
        """Prompts are in the pool: their lane has them next, or who makes the rule's indexes."""
        state, logits = self._state, prefilled.logits
        lane = group.shape.lane
        place: list[RunningRequest | None] = []
        begins = lane is not None and (lane.rule.sparse or state.runner.model.placement.away)
        now = state.clock()
        for row, running in enumerate(group.members):
            running.in_flight -= 1
            running.moments["prefilled"] = now
            place.append(None if running.ended else running)
            if running.ended:
                if not running.in_flight:
                    self._release(running)
                continue
            assert running.state is not None
            if running.request.on_prefill is not None:
                running.request.on_prefill(state.runner, running.state, prefilled.row(row))
            for key, part in running.state.keep.items():
                state.scheduler.share(running.number, key, part.pages, len(part.ids))
            if lane is None or not begins:
                state.scheduler.prefilled(running.number)
            else:
                self._begin_rule(running, lane, [*[None] * row, running], prefilled)
        if lane is None or not begins:
            self._lanes.join(place, logits)

    def _begin_rule(
        self,
        running: RunningRequest,
        lane: LaneKey,
        place: list[RunningRequest | None],
        prefilled: Prefilled,
    ) -> None:
        """Make what a sparse rule carries; ``place`` ends with the request, at its row."""
        state, mapped = self._state, running.state
        assert mapped is not None
        bank, logits = prefilled.row(len(place) - 1).bank, prefilled.logits
        begin = functools.partial(start_row, state.runner, lane, running.request, mapped, bank)
        host = state.runner.searches(lane.rule)
        if host is None:
            state.scheduler.prefilled(running.number)
            self._lanes.join(place, logits, begin())
            return
        running.search = host.admit()
        state.scheduler.prefilled(running.number, indexing=True)
        self._index(running, functools.partial(begin, running.search), place, logits)

    def _index(
        self,
        running: RunningRequest,
        start: Callable[..., Decoding | None],
        place: list[RunningRequest | None],
        logits: Array,
    ) -> None:
        """Have the indexes of a request made, by a thread of their own."""
        running.in_flight += 1
        state, run, epoch = self._state, running.run, self._state.epoch
        if state.settings.lockstep:
            self._indexed(running, run, result_of(start), place, logits)
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
            state.post(lambda: self._indexed(running, run, answer, place, logits))

        self._indexers.submit(index)

    def _indexed(
        self,
        running: RunningRequest,
        run: int,
        answer: Decoding | BaseException | None,
        place: list[RunningRequest | None],
        logits: Array,
    ) -> None:
        if run != running.run:
            return
        running.in_flight -= 1
        if running.ended:
            self._release(running)
            return
        if isinstance(answer, BaseException):
            raise Broken(answer, [running], shared=False) from answer
        self._state.scheduler.indexed(running.number)
        try:
            self._lanes.join(place, logits, answer)
        except Exception as error:
            raise Broken(error, [running], shared=False) from error

"""Prompts on their way through the model, piece by piece, and the indexes that rules search."""

import dataclasses
import functools
from collections import abc, deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxrag.base.errors import EngineError
from jaxrag.base.shapes import pieces
from jaxrag.base.types import Array
from jaxrag.engine.away import start_row
from jaxrag.engine.layerwise import LayerPrefill
from jaxrag.engine.mapping import map_sequence
from jaxrag.engine.prefill import PREFILL_TOKENS, Prefill, Prefilled, select_tokens
from jaxrag.engine.progress import PrefillSink
from jaxrag.engine.request import BatchKey, Request
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.sequence import RequestStatus, Sequence
from jaxrag.engine.state import Broken, EngineSettings, State
from jaxrag.engine.thread import ask, result_of
from jaxrag.kv.cache import ChunkAttention, PagePool, table_width
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
      batch: that they are for; None for single tokens.
      observe: the queries that are kept.
      rows: of the program that runs them.
      alone: the number of one that is to have it for itself.
      attention: how they attend to their chunks; None: as to all else.
    """

    batch: BatchKey | None
    pages: int
    widths: tuple[int, ...]
    observe: Observe | None
    rows: int
    alone: int | None
    attention: ChunkAttention | None


@dataclasses.dataclass(eq=False)
class _Group:
    """Prompts that are run together; none joins once the first piece has been run."""

    shape: _Shape
    members: list[Sequence]
    prefill: Prefill | LayerPrefill | None = None


class PrefillQueue:
    """Prefills requests, together where their pieces are small, and hands them to their batches."""

    def __init__(
        self,
        state: State,
        join: Callable[[abc.Sequence[Sequence | None], Array, Decoding | None], None],
        put_back: Callable[[Sequence], None],
        release: Callable[[Sequence], None],
    ) -> None:
        """``join`` and ``put_back`` are as of ``DecodeBatches``.

        ``release`` gets a request that ended while something was made for it.
        """
        self._state, self._join, self._put_back, self._release = state, join, put_back, release
        self._groups: list[_Group] = []
        self._expected: deque[Sequence] = deque()
        self._ahead: dict[int, Any] = {}  # what selectors made of questions whose chunks come yet
        self._indexers: ThreadPoolExecutor | None = None

    def run_pieces(self) -> bool:
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
                    self._end(group, group.prefill.prefilled)
                    del self._groups[0]
                    for sequence in group.members:
                        if self._state.ended(sequence) and not self.runs(sequence):
                            self._release(sequence)
            except Exception as error:
                raise Broken(error, group.members) from error
        return left < budget or self._look_ahead()

    def expect(self, sequence: Sequence) -> None:
        """The chunks of a request are on their way; its selector may begin with the question."""
        method = sequence.request.method
        if method.recomputes and method.recompute_ratio != 1:
            self._expected.append(sequence)

    def _look_ahead(self) -> bool:
        """Have one selector begin, where nothing else is to be run before the next step."""
        while self._expected:
            sequence = self._expected.popleft()
            if self._state.ended(sequence) or sequence.is_mapped:
                continue
            request, model = sequence.request, self._state.runner.model
            try:
                ahead = request.method.selector.ahead(model, request.prompt.final)
            except Exception as error:
                raise Broken(error, [sequence], shared=False) from error
            if ahead is not None:
                self._ahead[sequence.number] = ahead
                return True
        return False

    def clear(self) -> None:
        """The pool was lost."""
        self._groups.clear()
        self._expected.clear()
        self._ahead.clear()

    def runs(self, sequence: Sequence) -> bool:
        """Is anything made for a request that has not come back?"""
        indexing = sequence.status is RequestStatus.INDEXING
        return indexing or any(sequence in group.members for group in self._groups)

    def forget(self, sequence: Sequence) -> None:
        """A request ended."""
        self._ahead.pop(sequence.number, None)

    def _take(self) -> None:
        """Take every request that is ready and has a row.

        Not behind one that leaves parts of its prompt to those after it.
        """
        while not any(member.kept_parts for group in self._groups for member in group.members):
            number = self._state.scheduler.next_prefill()
            if number is None:
                return
            sequence = self._state.live[number]
            try:
                self._begin(sequence)
            except Exception as error:
                raise Broken(error, [sequence], shared=False) from error

    def _begin(self, sequence: Sequence) -> None:
        """Map a request over its chunks, have its tokens selected, and put it in a group."""
        state = self._state
        if sequence.attends_kept:
            state.scheduler.revise(sequence.number)
        pool = state.runner.cache.allocator.chunks
        map_sequence(sequence, {key: pool[key] for key in sequence.held})
        if sequence.swapped is not None:
            self._put_back(sequence)
            state.scheduler.prefilled(sequence.number)
            return
        select_tokens(state.runner, sequence, self._ahead.pop(sequence.number, None))
        sequence.moments["mapped"] = state.clock()
        shape = self._shape(sequence)
        for group in self._groups:
            if group.shape == shape and group.prefill is None and len(group.members) < shape.rows:
                group.members.append(sequence)
                return
        self._groups.append(_Group(shape, [sequence]))

    def _shape(self, sequence: Sequence) -> _Shape:
        """Pages, pieces and queries of a request's prefill."""
        widths = tuple(width for _, width in pieces(len(sequence.run.ids), PREFILL_TOKENS))
        rule = sequence.request.method.decode
        return _Shape(
            batch=sequence.batch,
            pages=table_width(sequence.table),
            widths=widths,
            observe=None if sequence.batch is None else rule.observe,  # one token needs no rule
            rows=rows_together(self._state.runner, self._state.settings, sequence.request, widths),
            alone=sequence.number if sequence.alone else None,
            attention=sequence.table.attention,
        )

    def _start(self, group: _Group) -> Prefill | LayerPrefill:
        runner, shape = self._state.runner, group.shape
        if runner.cache.host is None:
            return Prefill(runner, group.members, shape.observe, shape.rows)
        [sequence] = group.members
        return LayerPrefill(runner, sequence, shape.observe)

    def _end(self, group: _Group, prefilled: Prefilled) -> None:
        """Prompts are in the pool: their batch has them next, or who makes the rule's indexes."""
        state, logits = self._state, prefilled.logits
        batch = group.shape.batch
        place: list[Sequence | None] = []
        begins = batch is not None and (batch.rule.sparse or state.runner.model.placement.away)
        now = state.clock()
        for row, sequence in enumerate(group.members):
            sequence.moments["prefilled"] = now
            place.append(None if state.ended(sequence) else sequence)
            if state.ended(sequence):
                continue
            if isinstance(sequence.sink, PrefillSink):
                sequence.sink.on_prefill(state.runner, sequence, prefilled.row(row))
            for key, part in sequence.kept_parts.items():
                state.scheduler.share(sequence.number, key, part.pages, len(part.ids))
            if batch is None or not begins:
                state.scheduler.prefilled(sequence.number)
            else:
                self._begin_rule(sequence, batch, [*[None] * row, sequence], prefilled)
        if batch is None or not begins:
            self._join(place, logits, None)

    def _begin_rule(
        self,
        sequence: Sequence,
        batch: BatchKey,
        place: list[Sequence | None],
        prefilled: Prefilled,
    ) -> None:
        """Make what a sparse rule carries; ``place`` ends with the request, at its row."""
        state = self._state
        bank, logits = prefilled.row(len(place) - 1).bank, prefilled.logits
        begin = functools.partial(start_row, state.runner, batch, sequence, bank)
        host = state.runner.searches(batch.rule)
        if host is None:
            state.scheduler.prefilled(sequence.number)
            self._join(place, logits, begin())
            return
        sequence.search = host.admit()
        state.scheduler.prefilled(sequence.number, indexing=True)
        self._index(sequence, functools.partial(begin, sequence.search), place, logits)

    def _index(
        self,
        sequence: Sequence,
        start: Callable[..., Decoding | None],
        place: list[Sequence | None],
        logits: Array,
    ) -> None:
        """Have the indexes of a request made, by a thread of their own."""
        state, epoch = self._state, self._state.epoch
        if state.settings.lockstep:
            self._indexed(sequence, epoch, result_of(start), place, logits)
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
            state.post(lambda: self._indexed(sequence, epoch, answer, place, logits))

        self._indexers.submit(index)

    def _indexed(
        self,
        sequence: Sequence,
        epoch: int,
        answer: Decoding | BaseException | None,
        place: list[Sequence | None],
        logits: Array,
    ) -> None:
        if epoch != self._state.epoch:  # it began again
            return
        if self._state.ended(sequence):
            self._release(sequence)
            return
        self._state.scheduler.indexed(sequence.number)
        if isinstance(answer, BaseException):
            raise Broken(answer, [sequence], shared=False) from answer
        try:
            self._join(place, logits, answer)
        except Exception as error:
            raise Broken(error, [sequence], shared=False) from error

"""The batches of an engine, who has which row, and the steps in flight."""

import contextlib
import dataclasses
from collections import Counter, abc, defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any

import jax
from jax.stages import Compiled

from jaxrag.base.sharding import to_host
from jaxrag.base.types import Array, HostArray
from jaxrag.engine.decoding import DecodeBatch, sample_first, sampling_rows
from jaxrag.engine.progress import Top
from jaxrag.engine.request import DECODE_BLOCK, BatchKey
from jaxrag.engine.sequence import RequestStatus, Sequence, Swapped
from jaxrag.engine.state import Broken, State
from jaxrag.engine.steps import Drawn
from jaxrag.engine.swap import swap_in, swap_out
from jaxrag.models.compiled import compile_beside
from jaxrag.reuse.decode import Decoding


@dataclasses.dataclass(frozen=True, eq=False)
class _Ticket:
    """A step in flight: new tokens of every row, and who is still to have how many of which.

    ``epoch``: of the pool that it runs on; it is void on another.
    """

    epoch: int
    new: Drawn
    block: int
    rows: list[tuple[int, Sequence, int]]  # row, request, tokens


class DecodeBatches:
    """Gives rows to requests, dispatches steps, and reads them when they are done."""

    def __init__(
        self,
        state: State,
        on_tokens: Callable[[Sequence, list[int], list[float], list[Top]], None],
        release: Callable[[Sequence], None],
    ) -> None:
        """``on_tokens`` gets new tokens; ``release`` a request that ended, once nothing runs it."""
        self._state, self._on_tokens, self._release = state, on_tokens, release
        self._batches: dict[BatchKey, DecodeBatch] = {}
        self._rows: dict[BatchKey, list[Sequence | None]] = {}
        self._left: dict[BatchKey, set[int]] = defaultdict(
            set
        )  # rows that still run for no request
        self._first: list[tuple[int, list[tuple[int, Sequence]], Drawn]] = []  # epoch, who, what
        self._in_flight: list[_Ticket] = []
        self._compiled: dict[BatchKey, list[Future[Compiled]]] = {}

    def expect(self, key: BatchKey) -> None:
        """A request will want a row: the program of its batch is compiled beside its prefill.

        That of a dense rule; what another rule is compiled for is not known before.
        """
        state = self._state
        alone = not state.settings.lockstep and state.runner.cache.host is None
        if key in self._compiled or key.rule.sparse or not alone:
            return
        with contextlib.suppress(Exception):  # it is raised where the batch steps, and told there
            self._compiled[key] = compile_beside(self._made(key).lower())

    @property
    def busy(self) -> bool:
        """Is anything in flight?"""
        return bool(self._in_flight or self._first)

    def join(
        self,
        requests: abc.Sequence[Sequence | None],
        logits: Array,
        decoding: Decoding | None,
    ) -> None:
        """Requests of one batch are prefilled: their first tokens are sampled, and they have rows.

        Args:
          requests: in the order of ``logits``; None for one that does not join now.
          logits: [B', V] float32, B' at least their number.
          decoding: what the rule of the one that joins carries; None where it carries nothing.
        """
        joining = [request for request in requests if request is not None]
        if not joining:
            return
        key, every = joining[0].batch, [request or joining[0] for request in requests]
        if key is None:
            asks = any(request.request.sampling.processes for request in every)
            vocab_size = self._state.runner.model.config.vocab_size if asks else None
            first = sample_first(logits, sampling_rows(every, len(logits), vocab_size))
        else:
            rows = [
                None if sequence is None else self._take_row(sequence, key) for sequence in requests
            ]
            first = self._batches[key].join(rows, every, logits, decoding)
        placed = [(at, request) for at, request in enumerate(requests) if request is not None]
        self._first.append((self._state.epoch, placed, first))

    def set_aside(self, sequence: Sequence) -> None:
        """Copy what a request has on the device to the host, and take it from its row."""
        place = self._place(sequence)
        assert place is not None
        batch, row = place
        content = swap_out(self._state.runner, sequence.own)
        sequence.swapped = Swapped(content, self._batches[batch].take_out(row))
        self._left[batch].add(row)
        self.free(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """A request that was set aside, and is mapped again, goes on where it was."""
        assert sequence.batch is not None and sequence.swapped is not None
        swap_in(self._state.runner, sequence.own, sequence.swapped.pages)
        row = self._take_row(sequence, sequence.batch)
        self._batches[sequence.batch].put_back(row, sequence, sequence.swapped.row)
        sequence.swapped = None

    def leave(self, sequence: Sequence) -> None:
        """A request wants no more steps; those in flight still run it."""
        place = self._place(sequence)
        if place is not None and _to_run(sequence, self._begun):
            self._left[place[0]].add(place[1])

    def free(self, sequence: Sequence) -> None:
        """Nothing in flight runs a request: others may have its row."""
        place = self._place(sequence)
        if place is not None:
            self._rows[place[0]][place[1]] = None

    def _place(self, sequence: Sequence) -> tuple[BatchKey, int] | None:
        """The batch and the row of a request that has joined it."""
        batch = sequence.batch
        if batch is None or sequence not in self._rows.get(batch, ()):
            return None
        return batch, self._rows[batch].index(sequence)

    def runs(self, sequence: Sequence) -> bool:
        """Is a step in flight that a request takes part in?"""
        return any(other is sequence for ticket in self._in_flight for _, other, _ in ticket.rows)

    @property
    def _begun(self) -> Counter[int]:
        """Tokens in steps in flight, by the request's number."""
        begun = Counter[int]()
        for ticket in self._in_flight:
            begun.update({sequence.number: count for _, sequence, count in ticket.rows})
        return begun

    def step(self) -> None:
        """Dispatch a step of every batch that has anything to run."""
        for key, rows in self._rows.items():
            active = self._active(rows)
            if not active:
                continue
            batch = self._batches[key]
            block = self._block(key, active)
            try:
                if key in self._compiled:
                    self._await(self._compiled[key])
                if guided := _allowed(active):
                    batch.allow(guided)
                if left := self._left.pop(key, None):
                    batch.leave(left)
                new = batch.step(block, any(seq.request.sampling.processes for _, seq, _ in active))
            except Exception as error:
                raise Broken(error, [seq for _, seq, _ in active]) from error
            running = [(row, sequence, min(block, left)) for row, sequence, left in active]
            self._in_flight.append(_Ticket(self._state.epoch, new, block, running))

    def step_and_deliver(self) -> None:
        """Dispatch the next steps, then read what was in flight before them."""
        batches = self._batches.items()
        if any(not batch.compiled and self._active(self._rows[key]) for key, batch in batches):
            self._deliver_first()  # no client is to wait for the program of the second token
        if any(seq.matcher for its in self._rows.values() for _, seq, _ in self._active(its)):
            self.deliver()  # what may come next depends on it
        before = len(self._in_flight)
        self.step()
        now = self._state.clock()
        for _, placed, _ in self._first:
            for _, sequence in placed:
                sequence.moments["stepped"] = now
        self._deliver_first()
        self._deliver_steps(before)

    def deliver_blocks(self) -> None:
        """Read what is in flight, if it is blocks.

        Rows that ended in one would idle through the next, and no request could join.
        """
        if any(ticket.block > 1 for ticket in self._in_flight):
            self.deliver()

    def deliver(self) -> None:
        """Read everything in flight."""
        self._deliver_first()
        self._deliver_steps(len(self._in_flight))

    def _deliver_first(self) -> None:
        firsts, self._first = self._first, []
        for epoch, requests, first in firsts:
            try:
                drawn = jax.tree.map(to_host, first)
            except Exception as error:
                raise Broken(error, [sequence for _, sequence in requests]) from error
            for at, sequence in requests:
                if self._state.ended(sequence) or epoch != self._state.epoch:
                    continue
                sequence.moments.setdefault("first", self._state.clock())
                self._on_tokens(sequence, *_drawn_for(drawn, sequence, (slice(at, at + 1),)))

    def _deliver_steps(self, count: int) -> None:
        for ticket in self._in_flight[:count]:
            try:
                drawn = jax.tree.map(to_host, ticket.new)
            except Exception as error:
                raise Broken(error, [sequence for _, sequence, _ in ticket.rows]) from error
            while ticket.rows:
                if ticket.epoch != self._state.epoch:  # a client had the pool made anew
                    return
                row, sequence, new = ticket.rows.pop(0)
                if not self._state.ended(sequence):
                    self._on_tokens(sequence, *_drawn_for(drawn, sequence, (row, slice(new))))
                elif not self.runs(sequence):
                    self._release(sequence)
            if ticket.epoch == self._state.epoch:
                self._in_flight.remove(ticket)

    def clear(self) -> None:
        """Nobody has a row; what the batches hold on the device goes."""
        self._batches.clear()
        self._rows.clear()
        self._left.clear()
        self._first.clear()
        self._in_flight.clear()

    def _take_row(self, sequence: Sequence, key: BatchKey) -> int:
        """The row that a request was given, in its batch, which is made where it is the first."""
        self._made(key)
        row = self._state.scheduler.row_of(sequence)
        assert row is not None and self._rows[key][row] is None
        self._left[key].discard(row)
        self._rows[key][row] = sequence
        return row

    def _made(self, key: BatchKey) -> DecodeBatch:
        """The batch, which is made where it is not there."""
        if key not in self._batches:
            self._batches[key] = DecodeBatch(self._state.runner, key)
            self._rows[key] = [None] * key.rows
        return self._batches[key]

    def _await(self, compiled: list[Future[Compiled]]) -> None:
        if not all(program.done() for program in compiled):
            with self._state.compile_times.waiting():
                wait(compiled)
        for program in compiled:
            program.result()

    def _active(self, rows: abc.Sequence[Sequence | None]) -> list[tuple[int, Sequence, int]]:
        """Rows with tokens to run, whose they are, and how many."""
        begun = self._begun
        able = ((row, who) for row, who in enumerate(rows) if who and not self._state.ended(who))
        active = ((row, who, _to_run(who, begun)) for row, who in able)
        return [(row, sequence, left) for row, sequence, left in active if left]

    def _block(self, key: BatchKey, active: abc.Sequence[tuple[int, Sequence, int]]) -> int:
        """Tokens of the next step: many where no client watches and none could join before."""
        if any(sequence.request.watched or sequence.matcher for _, sequence, _ in active):
            return 1
        if max(left for *_, left in active) == 1:
            return 1
        scheduler = self._state.scheduler
        soon = scheduler.counts[RequestStatus.LOADING] + scheduler.counts[RequestStatus.READY]
        return 1 if soon and not scheduler.full(key) else DECODE_BLOCK


def _to_run(sequence: Sequence, begun: Mapping[int, int]) -> int:
    """Tokens of a request with a row that are in no step yet; the last of an answer never is."""
    return sequence.request.max_new_tokens - max(sequence.read, 1) - begun.get(sequence.number, 0)


def _drawn_for(
    drawn: Drawn, sequence: Sequence, at: tuple[Any, ...]
) -> tuple[list[int], list[float], list[Top]]:
    """Some tokens on the host, their log-probabilities, and the likeliest that were asked for."""
    ids, logprobs = drawn.ids[at].tolist(), drawn.logprobs[at].tolist()
    count = sequence.request.sampling.top_logprobs
    if drawn.top is None or not count:
        return ids, logprobs, []
    pairs = zip(*(x[at][:, :count].tolist() for x in drawn.top), strict=True)
    return ids, logprobs, [list(zip(*pair, strict=True)) for pair in pairs]


def _allowed(active: abc.Sequence[tuple[int, Sequence, int]]) -> dict[int, HostArray]:
    """By row what may come next in answers that follow a grammar."""
    matchers = [(row, sequence.matcher) for row, sequence, _ in active if sequence.matcher]
    return {row: matcher.next for row, matcher in matchers if matcher.next is not None}

"""The lanes of an engine, who has which row, and the steps in flight."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxrag.base.sharding import to_host
from jaxrag.base.types import Array
from jaxrag.engine.decoding import Drawn, Lane, LaneKey, sample_first, sampling_rows
from jaxrag.engine.mapping import RequestState
from jaxrag.engine.progress import Top
from jaxrag.engine.request import DECODE_BLOCK
from jaxrag.engine.scheduler import RequestStatus
from jaxrag.engine.state import Broken, RunningRequest, State, Swapped
from jaxrag.engine.swap import swap_in, swap_out
from jaxrag.reuse.decode import Decoding


@dataclasses.dataclass(frozen=True, eq=False)
class _Ticket:
    """A step in flight: new tokens of every row, and who is to have how many of which."""

    new: Drawn
    block: int
    rows: list[tuple[int, RunningRequest, int, int]]  # row, request, its run, tokens


class Lanes:
    """Gives rows to requests, dispatches steps, and reads them when they are done."""

    def __init__(
        self,
        state: State,
        took: Callable[[RunningRequest, list[int], list[float], list[Top]], None],
        release: Callable[[RunningRequest], None],
    ) -> None:
        """``took`` gets new tokens; ``release`` a request that ended, once nothing runs it."""
        self._state, self._took, self._release = state, took, release
        self._lanes: dict[LaneKey, Lane] = {}
        self._rows: dict[LaneKey, list[RunningRequest | None]] = {}
        self._left: dict[LaneKey, set[int]] = defaultdict(set)  # rows that still run for no request
        self._first: list[
            tuple[list[tuple[int, RunningRequest, int]], Drawn]
        ] = []  # sampled tokens that were not read
        self._in_flight: list[_Ticket] = []

    @property
    def busy(self) -> bool:
        """Is anything in flight?"""
        return bool(self._in_flight or self._first)

    def join(
        self,
        requests: Sequence[RunningRequest | None],
        logits: Array,
        decoding: Decoding | None = None,
    ) -> None:
        """Requests of one lane are prefilled: their first tokens are sampled, and they have rows.

        Args:
          requests: in the order of ``logits``; None for one that does not join now.
          logits: [B', V] float32, B' at least their number.
          decoding: what the rule of the one that joins carries, if it carries anything.
        """
        joining = [it for it in requests if it is not None]
        if not joining:
            return
        key = joining[0].lane
        if key is None:
            here = [(it or joining[0]).request for it in requests]
            asks = any(it.sampling.processes for it in here)
            vocab_size = self._state.runner.model.config.vocab_size if asks else None
            first = sample_first(logits, sampling_rows(here, len(logits), vocab_size))
        else:
            rows = [
                None if running is None else self._take_row(running, key) for running in requests
            ]
            asked = [(it.request, it.state) for it in joining if it.state is not None]
            places = iter(asked)
            every = [asked[0] if it is None else next(places) for it in requests]
            first = self._lanes[key].join(rows, every, logits, decoding)
        for running in joining:
            running.left = 0 if key is None else running.request.room
        told = [
            (at, running, running.run) for at, running in enumerate(requests) if running is not None
        ]
        self._first.append((told, first))

    def set_aside(self, running: RunningRequest) -> None:
        """Copy what a request has on the device to the host, and take it from its row."""
        assert running.lane is not None and running.row is not None
        own = self._state.scheduler.live[running.number].own
        content = swap_out(self._state.runner, own)
        running.swapped = Swapped(content, self._lanes[running.lane].take_out(running.row))
        self._left[running.lane].add(running.row)
        self.free(running)

    def put_back(self, running: RunningRequest, mapped: RequestState) -> None:
        """A request that was set aside goes on where it was, over pages that may be others."""
        assert (
            running.lane is not None and running.state is not None and running.swapped is not None
        )
        own = self._state.scheduler.live[running.number].own
        swap_in(self._state.runner, own, running.swapped.pages)
        if running.state.choice is not None and running.state.choice.copied:
            mapped.use_copies()
        running.state.table = mapped.table
        row = self._take_row(running, running.lane)
        self._lanes[running.lane].put_back(row, running.state, running.swapped.row)
        running.swapped = None

    def leave(self, running: RunningRequest) -> None:
        """A request wants no more steps; those in flight still run it."""
        if running.row is not None and running.lane is not None and running.left:
            running.left = 0
            self._left[running.lane].add(running.row)

    def free(self, running: RunningRequest) -> None:
        """Nothing in flight runs a request: others may have its row."""
        if running.row is not None and running.lane is not None:
            self._rows[running.lane][running.row] = None
            running.row = None

    def step(self) -> None:
        """Dispatch a step of every lane that has anything to run."""
        for key, rows in self._rows.items():
            active = _active(rows)
            if not active:
                continue
            lane = self._lanes[key]
            block = self._block(key, [it for _, it in active])
            try:
                if guided := {row: it.allowed for row, it in active if it.allowed is not None}:
                    lane.allow(guided)
                if left := self._left.pop(key, None):
                    lane.leave(left)
                new = lane.step(block, any(it.request.sampling.processes for _, it in active))
            except Exception as error:
                raise Broken(error, [it for _, it in active]) from error
            told = []
            for row, running in active:
                count = min(block, running.left)
                running.left -= count
                running.in_flight += 1
                told.append((row, running, running.run, count))
            self._in_flight.append(_Ticket(new, block, told))

    def turn(self) -> None:
        """Dispatch the next steps, then read what was in flight before them."""
        lanes = self._lanes.items()
        if any(not lane.compiled and _active(self._rows[key]) for key, lane in lanes):
            self._deliver_first()  # no client is to wait for the program of the second token
        if any(it and it.left and it.request.grammar for its in self._rows.values() for it in its):
            self.deliver()  # what may come next depends on it
        before, self._in_flight = self._in_flight, []
        try:
            self.step()
        finally:
            in_flight, self._in_flight = self._in_flight, before
        now = self._state.clock()
        for told, _ in self._first:
            for _, running, _ in told:
                running.moments["stepped"] = now
        self.deliver()
        self._in_flight = in_flight

    def deliver_blocks(self) -> None:
        """Read what is in flight, if it is blocks.

        Rows that ended in one would idle through the next, and no request could join.
        """
        if any(ticket.block > 1 for ticket in self._in_flight):
            self.deliver()

    def deliver(self) -> None:
        """Read everything in flight."""
        self._deliver_first()
        self._deliver_steps()

    def _deliver_first(self) -> None:
        firsts, self._first = self._first, []
        for requests, first in firsts:
            try:
                drawn = jax.tree.map(to_host, first)
            except Exception as error:
                raise Broken(error, [running for _, running, _ in requests]) from error
            for at, running, run in requests:
                if running.ended or run != running.run:
                    continue
                if running.first is None:
                    running.first = self._state.clock()
                self._took(running, *_told(drawn, running, (slice(at, at + 1),)))

    def _deliver_steps(self) -> None:
        tickets, self._in_flight = self._in_flight, []
        for ticket in tickets:
            try:
                drawn = jax.tree.map(to_host, ticket.new)
            except Exception as error:
                raise Broken(error, [running for _, running, _, _ in ticket.rows]) from error
            for row, running, run, count in ticket.rows:
                if run != running.run:
                    continue
                running.in_flight -= 1
                if not running.ended:
                    self._took(running, *_told(drawn, running, (row, slice(count))))
                elif not running.in_flight:
                    self._release(running)

    def clear(self) -> None:
        """Nobody has a row; what the lanes hold on the device goes."""
        self._lanes.clear()
        self._rows.clear()
        self._left.clear()
        self._first.clear()
        self._in_flight.clear()

    def _take_row(self, running: RunningRequest, key: LaneKey) -> int:
        """The row that a request was given, in its lane, which is made where it is the first."""
        if key not in self._lanes:
            self._lanes[key] = Lane(self._state.runner, key)
            self._rows[key] = [None] * key.rows
        row = self._state.scheduler.live[running.number].row
        assert row is not None and self._rows[key][row] is None
        self._left[key].discard(row)
        running.row, self._rows[key][row] = row, running
        return row

    def _block(self, key: LaneKey, here: Sequence[RunningRequest]) -> int:
        """Tokens of the next step: many where no client watches and none could join before."""
        if (
            any(running.request.watched or running.request.grammar for running in here)
            or max(running.left for running in here) == 1
        ):
            return 1
        scheduler = self._state.scheduler
        soon = scheduler.counts[RequestStatus.LOADING] + scheduler.counts[RequestStatus.READY]
        return 1 if soon and not scheduler.full(key) else DECODE_BLOCK


def _told(
    drawn: Drawn, running: RunningRequest, here: tuple[Any, ...]
) -> tuple[list[int], list[float], list[Top]]:
    """Some tokens on the host, their log-probabilities, and the likeliest that were asked for."""
    ids, logprobs = drawn.ids[here].tolist(), drawn.logprobs[here].tolist()
    count = running.request.sampling.top_logprobs
    if drawn.top is None or not count:
        return ids, logprobs, []
    pairs = zip(*(x[here][:, :count].tolist() for x in drawn.top), strict=True)
    return ids, logprobs, [list(zip(*pair, strict=True)) for pair in pairs]


def _active(rows: Sequence[RunningRequest | None]) -> list[tuple[int, RunningRequest]]:
    """Rows with tokens to run, and whose they are."""
    return [
        (row, running) for row, running in enumerate(rows) if running is not None and running.left
    ]

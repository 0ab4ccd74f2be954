"""The lanes of an engine, who has which row, and the steps in flight."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence

from jaxrag.decode import Decoding
from jaxrag.engine.decoding import Drawn, Lane, LaneKey, SamplingRows, sample_first
from jaxrag.engine.live import Live, Swapped
from jaxrag.engine.mapping import RequestState
from jaxrag.engine.request import DECODE_BLOCK
from jaxrag.engine.scheduler import Status
from jaxrag.engine.state import Broken, State
from jaxrag.engine.swap import swap_in, swap_out
from jaxrag.sharding import to_host
from jaxrag.types import Array


@dataclasses.dataclass(frozen=True, eq=False)
class _Ticket:
    """A step in flight: new tokens [R, block], and who is to have how many of which row."""

    new: Drawn
    rows: list[tuple[int, Live, int, int]]  # row, request, its run, tokens


class Lanes:
    """Gives rows to requests, dispatches steps, and reads them when they are done."""

    def __init__(
        self,
        state: State,
        took: Callable[[Live, list[int], list[float]], None],
        release: Callable[[Live], None],
    ) -> None:
        """``took`` gets new tokens; ``release`` a request that ended, once nothing runs it."""
        self._state, self._took, self._release = state, took, release
        self._lanes: dict[LaneKey, Lane] = {}
        self._rows: dict[LaneKey, list[Live | None]] = {}
        self._left: dict[LaneKey, set[int]] = defaultdict(set)  # rows that still run for nobody
        self._first: list[tuple[Live, int, Drawn]] = []  # sampled tokens that were not read
        self._flying: list[_Ticket] = []

    @property
    def busy(self) -> bool:
        """Is anything in flight?"""
        return bool(self._flying or self._first)

    @property
    def running(self) -> bool:
        """Has any row tokens to run?"""
        return any(_active(rows) for rows in self._rows.values())

    def join(self, live: Live, logits: Array, decoding: Decoding | None) -> None:
        """A request is prefilled, and its first token is sampled: [1, V] ``logits``."""
        if live.lane is None:
            first = sample_first(logits, SamplingRows.of([live.request.sampling]))
        else:
            assert live.state is not None
            lane, row = self._take_row(live, live.lane)
            first = lane.join(row, live.request, live.state, logits, 0, decoding)
            live.left = live.request.room
        self._first.append((live, live.run, first))

    def set_aside(self, live: Live) -> None:
        """Copy what a request has on the device to the host, and take it from its row."""
        assert live.lane is not None and live.row is not None
        own = self._state.scheduler.live[live.number].own
        content = swap_out(self._state.runner, own)
        live.swapped = Swapped(content, self._lanes[live.lane].take_out(live.row))
        self._left[live.lane].add(live.row)
        self.free(live)

    def put_back(self, live: Live, mapped: RequestState) -> None:
        """A request that was set aside goes on where it was, over pages that may be others."""
        assert live.lane is not None and live.state is not None and live.swapped is not None
        own = self._state.scheduler.live[live.number].own
        swap_in(self._state.runner, own, live.swapped.pages)
        live.state.table = mapped.table
        lane, row = self._take_row(live, live.lane)
        lane.put_back(row, live.state, live.swapped.row)
        live.swapped = None

    def leave(self, live: Live) -> None:
        """A request wants no more steps; those in flight still run it."""
        if live.row is not None and live.lane is not None and live.left:
            live.left = 0
            self._left[live.lane].add(live.row)

    def free(self, live: Live) -> None:
        """Nothing in flight runs a request: others may have its row."""
        if live.row is not None and live.lane is not None:
            self._rows[live.lane][live.row] = None
            live.row = None

    def step(self) -> None:
        """Dispatch a step of every lane that has anything to run."""
        for key, rows in self._rows.items():
            active = _active(rows)
            if not active:
                continue
            lane = self._lanes[key]
            block = self._block(key, [live for _, live in active])
            try:
                if left := self._left.pop(key, None):
                    lane.leave(left)
                new = lane.step(block)
            except Exception as error:
                raise Broken(error, [live for _, live in active]) from error
            told = []
            for row, live in active:
                count = min(block, live.left)
                live.left -= count
                live.flying += 1
                told.append((row, live, live.run, count))
            self._flying.append(_Ticket(new, told))

    def turn(self) -> None:
        """Dispatch the next steps, then read what was in flight before them."""
        before, self._flying = self._flying, []
        try:
            self.step()
        finally:
            flying, self._flying = self._flying, before
        self.deliver()
        self._flying = flying

    def deliver_blocks(self) -> None:
        """Read what is in flight, if it is blocks.

        Rows that ended in one would idle through the next, and nobody could join.
        """
        if any(ticket.new[0].shape[1] > 1 for ticket in self._flying):
            self.deliver()

    def deliver(self) -> None:
        """Read everything in flight."""
        firsts, self._first = self._first, []
        for live, run, first in firsts:
            if live.ended or run != live.run:
                continue
            try:
                token, chance = (to_host(x).reshape(-1).tolist() for x in first)
            except Exception as error:
                raise Broken(error, [live]) from error
            if live.first is None:
                live.first = self._state.clock()
            self._took(live, token, chance)
        tickets, self._flying = self._flying, []
        for ticket in tickets:
            try:
                ids, probability = (to_host(x) for x in ticket.new)
            except Exception as error:
                raise Broken(error, [live for _, live, _, _ in ticket.rows]) from error
            for row, live, run, count in ticket.rows:
                if run != live.run:
                    continue
                live.flying -= 1
                if not live.ended:
                    here = (row, slice(count))
                    self._took(live, ids[here].tolist(), probability[here].tolist())
                elif not live.flying:
                    self._release(live)

    def clear(self) -> None:
        """Nobody has a row; what the lanes hold on the device goes."""
        self._lanes.clear()
        self._rows.clear()
        self._left.clear()
        self._first.clear()
        self._flying.clear()

    def _take_row(self, live: Live, key: LaneKey) -> tuple[Lane, int]:
        """The lane of a request, made where it is the first, and the row that it was given."""
        if key not in self._lanes:
            self._lanes[key] = Lane(self._state.runner, key)
            self._rows[key] = [None] * key.rows
        row = self._state.scheduler.live[live.number].row
        assert row is not None and self._rows[key][row] is None
        self._left[key].discard(row)
        live.row, self._rows[key][row] = row, live
        return self._lanes[key], row

    def _block(self, key: LaneKey, here: Sequence[Live]) -> int:
        """Tokens of the next step: many where nobody watches and nobody could join before."""
        if any(live.request.watched for live in here) or max(live.left for live in here) == 1:
            return 1
        scheduler = self._state.scheduler
        soon = scheduler.counts[Status.LOADING] + scheduler.counts[Status.READY]
        return 1 if soon and not scheduler.full(key) else DECODE_BLOCK


def _active(rows: Sequence[Live | None]) -> list[tuple[int, Live]]:
    """Rows with tokens to run, and whose they are."""
    return [(row, live) for row, live in enumerate(rows) if live is not None and live.left]

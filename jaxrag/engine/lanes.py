"""The lanes of an engine, who has which row, and the steps in flight."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence

from jaxrag.base.sharding import to_host
from jaxrag.base.types import Array
from jaxrag.engine.decoding import Drawn, Lane, LaneKey, SamplingRows, sample_first
from jaxrag.engine.live import Live, Swapped
from jaxrag.engine.mapping import RequestState
from jaxrag.engine.request import DECODE_BLOCK
from jaxrag.engine.sampling import SamplingParams
from jaxrag.engine.scheduler import Status
from jaxrag.engine.state import Broken, State
from jaxrag.engine.swap import swap_in, swap_out
from jaxrag.reuse.decode import Decoding


@dataclasses.dataclass(frozen=True, eq=False)
class _Ticket:
    """A step in flight: new tokens of every row, and who is to have how many of which."""

    new: Drawn
    block: int
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
        self._first: list[
            tuple[list[tuple[int, Live, int]], Drawn]
        ] = []  # sampled tokens that were not read
        self._flying: list[_Ticket] = []

    @property
    def busy(self) -> bool:
        """Is anything in flight?"""
        return bool(self._flying or self._first)

    @property
    def running(self) -> bool:
        """Has any row tokens to run?"""
        return any(_active(rows) for rows in self._rows.values())

    def join(
        self, lives: Sequence[Live | None], logits: Array, decoding: Decoding | None = None
    ) -> None:
        """Requests of one lane are prefilled: their first tokens are sampled, and they have rows.

        Args:
          lives: in the order of ``logits``; None for one that does not join now.
          logits: [B', V] float32, B' at least their number.
          decoding: what the rule of the one that joins carries, if it carries anything.
        """
        joining = [live for live in lives if live is not None]
        if not joining:
            return
        key = joining[0].lane
        if key is None:
            sampling = [SamplingParams() if it is None else it.request.sampling for it in lives]
            sampling += [SamplingParams()] * (len(logits) - len(lives))
            first = sample_first(logits, SamplingRows.of(sampling))
        else:
            rows = [None if live is None else self._take_row(live, key) for live in lives]
            asked = [(it.request, it.state) for it in joining if it.state is not None]
            places = iter(asked)
            every = [next(places) if live is not None else asked[0] for live in lives]
            first = self._lanes[key].join(rows, every, logits, decoding)
        for live in joining:
            live.left = 0 if key is None else live.request.room
        told = [(at, live, live.run) for at, live in enumerate(lives) if live is not None]
        self._first.append((told, first))

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
        if live.state.choice is not None and live.state.choice.copied:
            mapped.use_copies()
        live.state.table = mapped.table
        row = self._take_row(live, live.lane)
        self._lanes[live.lane].put_back(row, live.state, live.swapped.row)
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
            self._flying.append(_Ticket(new, block, told))

    def turn(self) -> None:
        """Dispatch the next steps, then read what was in flight before them."""
        lanes = self._lanes.items()
        if any(not lane.compiled and _active(self._rows[key]) for key, lane in lanes):
            self._deliver_first()  # nobody is to wait for the program of the second token
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
        if any(ticket.block > 1 for ticket in self._flying):
            self.deliver()

    def deliver(self) -> None:
        """Read everything in flight."""
        self._deliver_first()
        self._deliver_steps()

    def _deliver_first(self) -> None:
        firsts, self._first = self._first, []
        for lives, first in firsts:
            try:
                tokens, chances = (to_host(x).tolist() for x in first)
            except Exception as error:
                raise Broken(error, [live for _, live, _ in lives]) from error
            for at, live, run in lives:
                if live.ended or run != live.run:
                    continue
                if live.first is None:
                    live.first = self._state.clock()
                self._took(live, [tokens[at]], [chances[at]])

    def _deliver_steps(self) -> None:
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

    def _take_row(self, live: Live, key: LaneKey) -> int:
        """The row that a request was given, in its lane, which is made where it is the first."""
        if key not in self._lanes:
            self._lanes[key] = Lane(self._state.runner, key)
            self._rows[key] = [None] * key.rows
        row = self._state.scheduler.live[live.number].row
        assert row is not None and self._rows[key][row] is None
        self._left[key].discard(row)
        live.row, self._rows[key][row] = row, live
        return row

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

"""One prefill for all decode rules: a prompt is in the pool once, and each rule answers from there.

The rules of one method and model differ in the generated tokens only, which lie behind the prompt
in pages of its own: each rule writes over those of the rule before it, and sees none of them. The
queries that rules learn from are kept of all tokens that are run, and each rule is given those that
it would have asked for.
"""

import dataclasses
import time
from collections import abc

import jax
import numpy as np

from jaxrag.base.errors import RequestError
from jaxrag.base.types import Array, HostArray
from jaxrag.engine.away import start_row
from jaxrag.engine.decoding import (
    Lane,
    SamplingRows,
    sample_first,
)
from jaxrag.engine.direct import map_request, prefill_observed, unmap
from jaxrag.engine.outcome import outcome_of
from jaxrag.engine.prefill import Prefilled
from jaxrag.engine.request import (
    DECODE_BLOCK,
    FAILED,
    LaneKey,
    Request,
    lane_of,
)
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.sampling_params import FinishReason
from jaxrag.engine.sequence import Sequence
from jaxrag.reuse.decode import DecodeRule, Observe, PromptQueries


@dataclasses.dataclass(frozen=True)
class Generated:
    """What one request was answered under one rule.

    Attributes:
      token_ids: without the one that ended the answer.
      seconds: of a decode step, of all rows together; None where each of them compiled something
        or there was none.
    """

    token_ids: list[int]
    finish_reason: FinishReason
    seconds: float | None
    notes: list[str]


class Asker:
    """Answers batches of requests, on the engine's thread (``Engine.call``)."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._compiled: set[LaneKey] = set()

    def ask(self, rules: abc.Sequence[abc.Sequence[Request]]) -> list[list[Generated]]:
        """Under every rule the answers to the same prompts.

        Args:
          rules: by rule the requests, which differ from one rule to the next in
            ``method.decode`` only.
        """
        runner, first = self._runner, rules[0]
        mapped: list[Sequence] = []
        try:
            for request in first:
                mapped.append(map_request(runner, request, request.room))
            asked = {one[0].method.decode.observe for one in rules if one[0].room} - {None}
            observe = next(iter(asked)) if len(asked) == 1 else None
            if len(asked) > 1:
                observe = Observe("strided", max(len(state.ids) for state in mapped))
            prefilled = prefill_observed(runner, mapped, observe)
            return [self._answer(requests, mapped, prefilled) for requests in rules]
        finally:
            for state in mapped:
                unmap(runner, state)

    def _answer(
        self, requests: abc.Sequence[Request], mapped: abc.Sequence[Sequence], prefilled: Prefilled
    ) -> list[Generated]:
        runner, rule = self._runner, requests[0].method.decode
        pages = max(len(state.table.pages) for state in mapped)
        key = lane_of(requests[0], pages, runner.model.placement)
        host = None if key is None else runner.searches(rule)
        numbers: list[int] = []
        try:
            if key is None:
                sampling = [request.sampling for request in requests]
                sampling += sampling[:1] * (len(prefilled.logits) - len(requests))
                drawn = sample_first(prefilled.logits, SamplingRows.of(sampling))
                ids, seconds = np.asarray(drawn.ids)[: len(requests), None], None
            else:
                numbers = [] if host is None else [host.admit() for _ in requests]
                lane = Lane(runner, key)
                first = self._join(lane, mapped, prefilled, numbers)
                ids, seconds = self._steps(lane, requests, first)
            if (ids == FAILED).any():
                raise RequestError(f"decode rule {rule.name!r}: the logits of a token hold a NaN")
            accounts = [None if host is None else host.account_of([n]) for n in numbers]
        finally:
            if host is not None:
                host.release(numbers)
        found = []
        for row, (request, state) in enumerate(zip(requests, mapped, strict=True)):
            state.moments |= {"added": 0.0, "first": 0.0}
            searched = accounts[row] if accounts else None
            outcome = outcome_of(
                runner.model, state, searched, now=0.0, compiling=lambda start, end: 0.0, looks=None
            )
            own = ids[row, : request.max_new_tokens].tolist()
            end = next((at for at, token in enumerate(own) if token in request.eos_ids), None)
            reason: FinishReason = "length" if end is None else "stop"
            found.append(Generated(own[:end], reason, seconds, outcome.notes))
        return found

    def _join(
        self,
        lane: Lane,
        mapped: abc.Sequence[Sequence],
        prefilled: Prefilled,
        numbers: abc.Sequence[int],
    ) -> HostArray:
        """Put every request into its row; returns the first tokens [B]."""
        rule, logits = lane.key.rule, prefilled.logits
        if not (rule.sparse or self._runner.model.placement.away):
            return np.asarray(lane.join(range(len(mapped)), mapped, logits)[0])[: len(mapped)]
        first = []
        for row, state in enumerate(mapped):
            bank = own_queries(prefilled.bank, row, state, rule)
            number = numbers[row] if numbers else None
            started = start_row(self._runner, lane.key, state, bank, number)
            rows = [*[None] * row, row]
            drawn = lane.join(rows, mapped[: row + 1], logits, started)[0]
            first.append(int(drawn[row]))
        return np.array(first, np.int32)

    def _steps(
        self, lane: Lane, requests: abc.Sequence[Request], first: HostArray
    ) -> tuple[HostArray, float | None]:
        """Token ids [B, <= max_new_tokens], and the seconds of a step that was compiled before."""
        ends = np.array(sorted(requests[0].eos_ids), np.int32)
        found, left = [first[:, None]], requests[0].room
        seconds, steps = 0.0, 0
        while left and not np.isin(np.concatenate(found, 1), ends).any(1).all():
            block = min(left, DECODE_BLOCK)
            start = time.perf_counter()
            new = np.asarray(lane.step(block)[0])[: len(requests), :block]
            if lane.key in self._compiled:
                seconds += time.perf_counter() - start
                steps += block
            self._compiled.add(lane.key)
            found.append(new)
            left -= block
        return np.concatenate(found, 1), seconds / steps if steps else None


def own_queries(bank: PromptQueries, row: int, state: Sequence, rule: DecodeRule) -> PromptQueries:
    """Of a request the queries that a rule would have asked its own prefill for; a batch of one.

    ``bank`` holds the queries of all tokens that were run, or just those of this rule.
    """
    observe, held = rule.observe, bank.positions[row]
    if observe is None:
        chosen = np.zeros(0, np.int64)
    else:
        there = int((np.asarray(held) >= 0).sum())
        chosen = observe.chosen(there)
        assert there in (len(state.ids), len(chosen))
    return _chosen(bank, np.int32(row), chosen)


@jax.jit
def _chosen(bank: PromptQueries, row: Array, chosen: Array) -> PromptQueries:
    queries, positions = bank.queries[:, row][:, None], bank.positions[row][None]
    return PromptQueries(queries=queries[:, :, chosen], positions=positions[:, chosen])

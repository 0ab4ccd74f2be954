"""Every key outside the static pattern scored in place: exact attention, and the exact best k."""

import abc
import functools
import time
from collections.abc import Sequence
from typing import override

import numpy as np

from jaxrag.base.types import HostArray
from jaxrag.reuse.decode.account import Account
from jaxrag.reuse.decode.far.layer import Answer, FarLayer, HostPrompt, Task
from jaxrag.reuse.decode.far.memory import Memory, Stretch, highest, merge, positions_of
from jaxrag.reuse.decode.far.tasks import gathered

_PART = 32  # blocks of keys that are one task

Pair = tuple[HostArray, HostArray]


class _Scan(FarLayer):
    """Scores all keys from ``sink`` on but for the ``recent`` newest ones."""

    def __init__(self, prompt: HostPrompt, sink: int, recent: int) -> None:
        """Nothing is built."""
        self.memory = Memory(prompt.config, prompt.layer)
        self.sink, self.recent = sink, recent
        self.account = Account(index_bytes=self.memory.nbytes)

    @override
    def work(self, position: int) -> int:
        return max(0, position - self.recent + 1 - self.sink) * self.memory.kv_heads

    @override
    def tasks(self, q: HostArray, position: int, answer: Answer, pieces: int) -> list[Task]:
        """Of every KV head parts of ``_PART`` blocks, whatever ``pieces`` are asked for.

        So the sums are the same whatever else is computed at the time.
        """
        stretches = self.memory.stretches(self.sink, position - self.recent + 1)
        asked = self.memory.ask(q, position) if stretches else q
        todo: list[Task] = []
        for head in range(self.memory.kv_heads if stretches else 0):
            parts = [
                functools.partial(
                    self._part, head, asked[:, head], stretches[at : at + _PART], answer
                )
                for at in range(0, len(stretches), _PART)
            ]
            todo += gathered(parts, functools.partial(self._end, head, answer))
        return todo

    @abc.abstractmethod
    def _part(
        self, head: int, asked: HostArray, stretches: Sequence[Stretch], answer: Answer
    ) -> Pair:
        """Of some of the keys of a KV head: two arrays [g, ...]."""

    @abc.abstractmethod
    def _end(self, head: int, answer: Answer, parts: Sequence[Pair]) -> None:
        """All parts of a KV head are there."""


class Everything(_Scan):
    """Attends to every key."""

    @override
    def _part(
        self, head: int, asked: HostArray, stretches: Sequence[Stretch], answer: Answer
    ) -> Pair:
        start = time.perf_counter()
        found = self.memory.attend(head, asked, stretches)
        answer.spent.append((0.0, time.perf_counter() - start))
        return found

    @override
    def _end(self, head: int, answer: Answer, parts: Sequence[Pair]) -> None:
        answer.out[head], answer.lse[head] = merge(parts)


class Best(_Scan):
    """Attends to the ``k`` keys with the highest scores of every query head."""

    def __init__(self, prompt: HostPrompt, sink: int, recent: int, k: int) -> None:
        """Nothing is built."""
        super().__init__(prompt, sink, recent)
        self.k = k

    @override
    def _part(
        self, head: int, asked: HostArray, stretches: Sequence[Stretch], answer: Answer
    ) -> Pair:
        start = time.perf_counter()
        found = best_of(self.memory, head, asked, stretches, self.k)
        answer.spent.append((time.perf_counter() - start, 0.0))
        return found

    @override
    def _end(self, head: int, answer: Answer, parts: Sequence[Pair]) -> None:
        start = time.perf_counter()
        scores, positions = (np.concatenate(each, axis=1) for each in zip(*parts, strict=True))
        if len(parts) > 1:
            scores, positions = best_pairs(scores, positions, self.k)
        answer.out[head], answer.lse[head] = self.memory.mix(head, *in_order(scores, positions))
        answer.spent.append((0.0, time.perf_counter() - start))


def best_of(
    memory: Memory, head: int, asked: HostArray, stretches: Sequence[Stretch], k: int
) -> Pair:
    """The ``k`` best keys of the stretches for ``asked`` [O, g, H], in any order.

    Their scores and positions, [g, k] each; fewer where there are fewer.
    """
    scores = memory.scan(head, asked, stretches)
    places = np.stack([highest(each, k) for each in scores])
    return np.take_along_axis(scores, places, 1), positions_of(stretches, places)


def in_order(scores: HostArray, positions: HostArray) -> Pair:
    """Both [g, n] by position: sums over them do not depend on how they were found."""
    order = np.argsort(positions, axis=1, kind="stable")
    return np.take_along_axis(scores, order, 1), np.take_along_axis(positions, order, 1)


def best_pairs(scores: HostArray, positions: HostArray, k: int) -> Pair:
    """The ``k`` best of scores [g, n] and their positions, in any order; all where n is less."""
    if scores.shape[1] <= k:
        return scores, positions
    at = np.argpartition(scores, scores.shape[1] - k, axis=1)[:, -k:]
    return np.take_along_axis(scores, at, 1), np.take_along_axis(positions, at, 1)

"""How the host goes through a layer: KV head by KV head, or over every key in blocks."""

import abc
import functools
from collections.abc import Sequence
from typing import override

import numpy as np

from jaxrag.base.types import HostArray
from jaxrag.reuse.decode.far.layer import FarAnswer, FarLayer, HostPrompt, HostTask, gathered
from jaxrag.reuse.decode.far.memory import HostMemory, Stretch, highest, positions_of
from jaxrag.reuse.decode.footprint import Account

_PART = 32  # blocks of keys that are one task

Pair = tuple[HostArray, HostArray]


class ByHead(FarLayer):
    """One task for every KV head."""

    memory: HostMemory

    @override
    def tasks(self, q: HostArray, position: int, answer: FarAnswer, pieces: int) -> list[HostTask]:
        """One of every KV head."""
        self.extend(position)
        asked = self.memory.ask(q, position)
        return [
            functools.partial(self.attend_head, head, asked[:, head], position, answer)
            for head in range(self.memory.kv_heads)
        ]

    def extend(self, position: int) -> None:
        """Take in the keys of tokens up to ``position``, before the tasks of that token."""

    @abc.abstractmethod
    def attend_head(self, head: int, asked: HostArray, position: int, answer: FarAnswer) -> None:
        """Fill the answer of a KV head; ``asked`` [O, G, H] as ``HostMemory.ask`` makes it."""


class Scan(FarLayer):
    """Scores all keys from ``sink`` on but for the ``recent`` newest ones."""

    def __init__(self, prompt: HostPrompt, sink: int, recent: int) -> None:
        self.memory = HostMemory(prompt.config, prompt.layer)
        self.sink, self.recent = sink, recent
        self.account = Account(index_bytes=self.memory.nbytes)

    @override
    def work(self, position: int) -> int:
        return max(0, position - self.recent + 1 - self.sink) * self.memory.kv_heads

    @override
    def tasks(self, q: HostArray, position: int, answer: FarAnswer, pieces: int) -> list[HostTask]:
        """Of every KV head parts of ``_PART`` blocks, whatever ``pieces`` are asked for.

        So the sums are the same whatever else is computed at the time.
        """
        stretches = self.memory.stretches(self.sink, position - self.recent + 1)
        asked = self.memory.ask(q, position) if stretches else q
        todo: list[HostTask] = []
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
        self, head: int, asked: HostArray, stretches: Sequence[Stretch], answer: FarAnswer
    ) -> Pair:
        """Of some of the keys of a KV head: two arrays [g, ...]."""

    @abc.abstractmethod
    def _end(self, head: int, answer: FarAnswer, parts: Sequence[Pair]) -> None:
        """All parts of a KV head are there."""


def best_of(
    memory: HostMemory, head: int, asked: HostArray, stretches: Sequence[Stretch], k: int
) -> Pair:
    """The ``k`` best keys of the stretches for ``asked`` [O, g, H], in any order.

    Their scores and positions, [g, k] each; fewer where there are fewer.
    """
    scores = memory.scan(head, asked, stretches)
    places = np.stack([highest(each, k) for each in scores])
    return np.take_along_axis(scores, places, 1), positions_of(stretches, places)

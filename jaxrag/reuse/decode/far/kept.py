"""SnapKV (arXiv:2404.14469) on the host: what the end of the prompt looks at, chosen once."""

import functools
import time
from typing import override

import numpy as np

from jaxrag.base.types import HostArray
from jaxrag.reuse.attention_index import rotated, turned
from jaxrag.reuse.decode.account import Account
from jaxrag.reuse.decode.far.layer import Answer, FarLayer, HostPrompt, Task
from jaxrag.reuse.decode.far.memory import Memory, merge, softmax


class Chosen(FarLayer):
    """The chosen tokens of the prompt, and those that left the window of ``window`` tokens."""

    def __init__(self, prompt: HostPrompt, capacity: int, window: int, kernel: int) -> None:
        """Choose by the attention of the prompt's last queries, as ``SnapKV.prepare`` does."""
        self.memory, self.window = Memory(prompt.config, prompt.layer), window
        self.start = prompt.position - window + 1  # of the window when the prompt ends
        chosen = []
        for head in range(self.memory.kv_heads):
            votes = _votes(self.memory, prompt, head, self.start)[:, : max(self.start, 0)]
            ranked = _average(votes, kernel)
            chosen.append([first_highest(one, capacity - window) for one in ranked])
        self.chosen = np.asarray(chosen, np.int32)  # [K, G, n]
        self.account = Account(index_bytes=int(self.chosen.nbytes) + self.memory.nbytes)

    @override
    def work(self, position: int) -> int:
        return self.chosen.size + max(0, position - self.window + 1 - self.start)

    @override
    def tasks(self, q: HostArray, position: int, answer: Answer, pieces: int) -> list[Task]:
        """One of every KV head."""
        asked = self.memory.ask(q, position)
        return [
            functools.partial(self._attend, head, asked[:, head], position, answer)
            for head in range(self.memory.kv_heads)
        ]

    def _attend(self, head: int, mine: HostArray, position: int, answer: Answer) -> None:
        start, memory = time.perf_counter(), self.memory
        chosen = self.chosen[head]
        scores = [
            memory.scores(head, mine[:, at], positions) for at, positions in enumerate(chosen)
        ]
        parts = [memory.mix(head, np.stack(scores), chosen)]
        left = memory.stretches(max(self.start, 0), position - self.window + 1)
        if left:
            parts.append(memory.attend(head, mine, left))
        answer.out[head], answer.lse[head] = merge(parts)
        answer.spent.append((0.0, time.perf_counter() - start))


def _votes(memory: Memory, prompt: HostPrompt, head: int, start: int) -> HostArray:
    """Softmax weights of every position, summed over queries from ``start`` on: [G, S] float32."""
    end, group = prompt.position + 1, memory.group
    stretches = memory.stretches(0, end)
    places = np.concatenate(
        [
            np.arange(each.positions.start, each.positions.stop)
            if isinstance(each.positions, slice)
            else each.positions
            for each in stretches
        ]
    )
    queries = prompt.queries[:, head * group : (head + 1) * group].swapaxes(0, 1)  # [G, W, H]
    placed = rotated(queries, np.maximum(prompt.positions, 0), memory.config.rope)
    total = np.zeros((group, end), np.float32)
    for number, position in enumerate(prompt.positions.tolist()):
        if position < max(start, 0):
            continue
        one = np.repeat(placed[:, number, None], len(memory.offsets), axis=1)
        asked = turned(one, -memory.offsets, memory.config.rope).swapaxes(0, 1)
        scores = memory.scan(head, asked * np.float32(memory.dim**-0.5), stretches)
        weights, _ = softmax(np.where(places <= position, scores, np.float32(-np.inf)))
        total[:, places] += weights
    return total


def _average(x: HostArray, kernel: int) -> HostArray:
    """Mean of every ``kernel`` neighbours of x [G, n], zeros beyond the ends."""
    side = kernel // 2
    wide = np.pad(x, ((0, 0), (side, side)))
    shifted = (wide[:, first : first + x.shape[1]] for first in range(kernel))
    return functools.reduce(np.add, shifted) / np.float32(kernel)


def first_highest(scores: HostArray, count: int) -> HostArray:
    """Where the ``count`` highest of scores [n] are, ascending; ties go to the earlier one."""
    if len(scores) <= count:
        return np.arange(len(scores))
    least = np.partition(scores, len(scores) - count)[len(scores) - count]
    above = np.flatnonzero(scores > least)
    equal = np.flatnonzero(scores == least)[: count - len(above)]
    return np.sort(np.concatenate([above, equal]))

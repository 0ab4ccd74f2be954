"""InfLLM (arXiv:2402.04617) on the host: blocks that a few representative keys stand for."""

import functools
import time
from collections.abc import Sequence
from typing import override

import numpy as np

from jaxrag.base.types import HostArray
from jaxrag.reuse.attention_index import turned
from jaxrag.reuse.decode.account import Account
from jaxrag.reuse.decode.far.kept import first_highest
from jaxrag.reuse.decode.far.layer import Answer, FarLayer, HostPrompt, Task
from jaxrag.reuse.decode.far.memory import Memory, Stretch
from jaxrag.reuse.decode.far.tasks import gathered


class Blocks(FarLayer):
    """The best ``blocks`` of ``block`` tokens behind ``sink``, the same for all heads.

    Representatives are held as copies, rotated to their positions.
    """

    def __init__(
        self,
        prompt: HostPrompt,
        *,
        block: int,
        blocks: int,
        representatives: int,
        sink: int,
        recent: int,
    ) -> None:
        """Choose the representatives, as ``InfLLM.prepare`` does."""
        self.memory = memory = Memory(prompt.config, prompt.layer)
        self.block, self.blocks, self.sink, self.recent = block, blocks, sink, recent
        count = max(0, -(-(len(prompt.layer.rows) - sink) // block))
        self.shown = np.zeros((memory.kv_heads, count, representatives), np.int32)
        known = np.full((memory.kv_heads, count * block), -np.inf, np.float32)
        end = prompt.position + 1
        if end > sink:
            known[:, : end - sink] = _shown(memory, prompt, recent, np.arange(sink, end))
        known = known.reshape(memory.kv_heads, count, block)
        best = np.argsort(-known, axis=-1, kind="stable")[..., :representatives]
        first = sink + np.arange(count) * block
        self.shown = (best + first[:, None]).astype(np.int32)
        self.keys = np.zeros((*self.shown.shape, memory.dim), np.float32)
        self.ready = 0  # blocks whose keys are copied
        self._copy(end - 1)
        held = int(self.shown.nbytes + self.keys.nbytes)
        self.account = Account(keys=self.shown.size, index_bytes=held + memory.nbytes)

    def _copy(self, edge: int) -> None:
        """Copy the representatives of blocks that end at ``edge`` or before."""
        whole = max(self.ready, (edge + 1 - self.sink) // self.block)
        for head, shown in enumerate(self.shown[:, self.ready : whole]):
            keys = self.memory.placed_keys(head, shown.ravel())
            self.keys[head, self.ready : whole] = keys.reshape(*shown.shape, self.memory.dim)
        self.ready = whole

    @override
    def work(self, position: int) -> int:
        if position - self.recent < self.sink:
            return 0
        read = min(self.blocks * self.block, position - self.recent + 1 - self.sink)
        return self.shown.size + self.memory.kv_heads * read

    @override
    def tasks(self, q: HostArray, position: int, answer: Answer, pieces: int) -> list[Task]:
        """Relevance of the blocks by KV head, then attention by KV head."""
        edge = position - self.recent
        if edge < self.sink:
            return []
        self._copy(edge)
        asked = self.memory.ask(q, position, [0])
        heads = range(self.memory.kv_heads)
        whole = (edge + 1 - self.sink) // self.block
        parts = [
            functools.partial(self._relevance, head, asked[-1, head], whole, answer)
            for head in heads
        ]
        return gathered(parts, functools.partial(self._choose, asked[:-1], edge, answer))

    def _relevance(self, head: int, asked: HostArray, whole: int, answer: Answer) -> HostArray:
        """Of the first ``whole`` blocks: [C] float32."""
        start = time.perf_counter()
        keys = self.keys[head, :whole]
        # The sum over heads of the scores is the score of their sum.
        scores = np.einsum("nh,h->n", keys.reshape(-1, keys.shape[-1]), asked.sum(0))
        answer.spent.append((time.perf_counter() - start, 0.0))
        return scores.reshape(keys.shape[:2]).mean(1)

    def _choose(
        self, asked: HostArray, edge: int, answer: Answer, parts: Sequence[HostArray]
    ) -> Sequence[Task]:
        start = time.perf_counter()
        relevance = np.sum(parts, axis=0)
        cut = (edge + 1 - self.sink) % self.block  # tokens of the block that the edge cuts
        best = first_highest(relevance, self.blocks - (cut > 0))
        best = np.append(best, len(relevance)) if cut else best
        where = (self.sink + best[:, None] * self.block + np.arange(self.block)).ravel()
        stretches = self.memory.gathered(where[where <= edge].astype(np.int32))
        answer.spent.append((time.perf_counter() - start, 0.0))
        return [
            functools.partial(self._attend, head, asked[:, head], stretches, answer)
            for head in range(self.memory.kv_heads)
        ]

    def _attend(
        self, head: int, asked: HostArray, stretches: Sequence[Stretch], answer: Answer
    ) -> None:
        start = time.perf_counter()
        answer.out[head], answer.lse[head] = self.memory.attend(head, asked, stretches)
        answer.spent.append((0.0, time.perf_counter() - start))


def _shown(memory: Memory, prompt: HostPrompt, recent: int, positions: HostArray) -> HostArray:
    """How well keys at positions [n] stand for others: [K, n] float32.

    Their product, before rotation, with the mean of the observed queries up to ``recent`` behind
    them, or of all behind them where there are none.
    """
    there = prompt.positions >= 0
    asked = prompt.queries[there].reshape(there.sum(), memory.kv_heads, -1, memory.dim).sum(2)
    sums = np.concatenate([np.zeros_like(asked[:1]), np.cumsum(asked, axis=0)])  # [W + 1, K, H]
    places = prompt.positions[there]
    first = np.searchsorted(places, positions, side="right")
    end = np.searchsorted(places, positions + recent, side="right")
    end = np.where(end > first, end, len(places))
    count = np.maximum(end - first, 1)[:, None]
    scores = np.empty((memory.kv_heads, len(positions)), np.float32)
    for head in range(memory.kv_heads):
        wanted = (sums[end, head] - sums[first, head]) / count
        keys = memory.keys(head, memory.layer.rows[positions])
        back = memory.layer.offsets[positions] - positions
        scores[head] = np.einsum("nh,nh->n", wanted, turned(keys, back, memory.config.rope))
    return scores

"""Quest (arXiv:2406.10774) on the host: pages whose keys could score highest."""

import functools
import time
from typing import override

import numpy as np

from jaxrag.base.types import HostArray
from jaxrag.kv.cache import PAGE
from jaxrag.reuse.decode.account import Account
from jaxrag.reuse.decode.far.kept import first_highest
from jaxrag.reuse.decode.far.layer import Answer, FarLayer, HostPrompt, Task
from jaxrag.reuse.decode.far.memory import Memory


class Pages(FarLayer):
    """Every token but the newest in the ``pages`` pages with the highest bounds, per query head.

    A page is ``PAGE`` rows of the memory, of which the request has some; the box around their keys
    lies in their own frame. The newest token's page is always read.
    """

    def __init__(self, prompt: HostPrompt, pages: int) -> None:
        """The boxes of the prompt's pages."""
        self.memory = memory = Memory(prompt.config, prompt.layer)
        self.pages = pages
        offsets = np.searchsorted(memory.offsets, prompt.layer.offsets)
        # Pages in the order of their offsets, those of one beside each other.
        name = offsets.astype(np.int64) << 32 | prompt.layer.rows // PAGE
        names, self._page_of = np.unique(name, return_inverse=True)
        self._ends = np.searchsorted(names >> 32, np.arange(len(memory.offsets) + 1))
        order = np.argsort(self._page_of, kind="stable")
        page = self._page_of[order]
        place = np.arange(len(order)) - np.searchsorted(page, page)
        self._members = np.full((len(names), PAGE), -1, np.int32)
        self._members[page, place] = order
        self._page_of = self._page_of.astype(np.int32)
        shape = (memory.kv_heads, len(names), memory.dim)
        self.low = np.full(shape, np.inf, np.float32)
        self.high = np.full(shape, -np.inf, np.float32)
        self._seen = -1  # the last position in a box
        self._add(prompt.position)
        held = (self.low, self.high, self._members, self._page_of)
        nbytes = sum(int(each.nbytes) for each in held)
        self.account = Account(index_bytes=nbytes + memory.nbytes)

    def _add(self, position: int) -> None:
        """Put the keys up to ``position`` into their boxes."""
        for at in range(self._seen + 1, position + 1, 1 << 14):
            positions = np.arange(at, min(at + (1 << 14), position + 1))
            positions = positions[np.argsort(self._page_of[positions], kind="stable")]
            pages, first = np.unique(self._page_of[positions], return_index=True)
            for head in range(self.memory.kv_heads):
                keys = self.memory.keys(head, self.memory.layer.rows[positions])
                low, high = self.low[head], self.high[head]
                low[pages] = np.minimum(low[pages], np.minimum.reduceat(keys, first))
                high[pages] = np.maximum(high[pages], np.maximum.reduceat(keys, first))
        self._seen = max(self._seen, position)

    @override
    def work(self, position: int) -> int:
        return self.low.shape[0] * (2 * self.low.shape[1] + self.memory.group * self.pages * PAGE)

    @override
    def tasks(self, q: HostArray, position: int, answer: Answer, pieces: int) -> list[Task]:
        """One of every KV head."""
        self._add(position)
        asked = self.memory.ask(q, position)
        return [
            functools.partial(self._attend, head, asked[:, head], position, answer)
            for head in range(self.memory.kv_heads)
        ]

    def _attend(self, head: int, asked: HostArray, position: int, answer: Answer) -> None:
        start = time.perf_counter()
        bounds = self._bounds(head, asked)
        bounds[:, self._page_of[position]] = np.inf
        width = min(self.pages, bounds.shape[1]) * PAGE
        scores = np.full((len(bounds), width), -np.inf, np.float32)
        where = np.zeros((len(bounds), width), np.int32)
        for at, bound in enumerate(bounds):
            some = self._members[first_highest(bound, self.pages)].ravel()
            some = some[(some >= 0) & (some < position)]
            where[at, : len(some)] = some
            scores[at, : len(some)] = self.memory.scores(head, asked[:, at], some)
        middle = time.perf_counter()
        answer.out[head], answer.lse[head] = self.memory.mix(head, scores, where)
        answer.spent.append((middle - start, time.perf_counter() - middle))

    def _bounds(self, head: int, asked: HostArray) -> HostArray:
        """No key of a page scores higher: [g, M] float32; -inf for pages that hold no key yet."""
        bounds = np.empty((asked.shape[1], self.low.shape[1]), np.float32)
        empty = np.isinf(self.low[head, :, 0])
        for number, q in enumerate(asked):
            above, below, end = np.maximum(q, 0), np.minimum(q, 0), int(self._ends[number + 1])
            for at in range(int(self._ends[number]), end, self.memory.block):
                here = slice(at, min(at + self.memory.block, end))
                low = np.where(empty[here, None], 0, self.low[head, here])
                high = np.where(empty[here, None], 0, self.high[head, here])
                bounds[:, here] = above @ high.T + below @ low.T
        bounds[:, empty] = -np.inf
        return bounds

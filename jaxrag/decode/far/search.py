"""The best keys that indexes find outside the static pattern, and those that left it later.

RetrievalAttention (sections 3.2 and 3.3, algorithm 1, arXiv:2409.10516).
"""

import abc
import functools
import time
from collections.abc import Sequence
from typing import override

import numpy as np

from jaxrag.attention_index import Exact, Found, QueryLists, open_index
from jaxrag.attention_index.index import AttentionIndex
from jaxrag.attention_index.lists import candidates
from jaxrag.attention_index.spec import effort_of
from jaxrag.decode.account import Account, recall_of
from jaxrag.decode.far.layer import Answer, FarLayer, Task
from jaxrag.decode.far.memory import Memory, Stretch, highest
from jaxrag.decode.far.scan import Pair, best_of
from jaxrag.decode.far.tasks import gathered
from jaxrag.decode.parts import Part
from jaxrag.types import HostArray


class Finder(abc.ABC):
    """What finds keys of one KV head.

    Attributes:
      offset: the query is turned to it; None: to those at which the keys lie in memory.
    """

    offset: int | None = None

    @abc.abstractmethod
    def find(self, asked: HostArray, own: HostArray, head: int, k: int, *, count: bool) -> Found:
        """At least ``k`` of the best keys for one query head, fewer where it finds no more.

        Args:
            asked: [O, H] the query turned to every offset of the memory.
            own: [H] the query turned to ``offset``.
            head: number in the group.
            k: keys wanted.
            count: say how many were scanned.

        Returns:
            Positions and scores [n] in any order, -1 where there is none.
        """

    @property
    @abc.abstractmethod
    def work(self) -> int:
        """About how many keys a search scores."""


class InPlace(Finder):
    """Lists of ``QueryLists`` over keys that are scored where they lie."""

    def __init__(
        self, memory: Memory, kv_head: int, index: AttentionIndex, positions: HostArray, offset: int
    ) -> None:
        """Keep the lists of an index, not its keys.

        ``positions`` [S] int32 are those of the index's rows; -1: not to be found.
        """
        assert isinstance(index.spec, QueryLists)
        self._memory, self._kv_head, self.offset = memory, kv_head, offset
        self._centroids = index.tables["centroids"]
        table, places = index.tables["table"], positions[index.wanted]
        self._table = np.where(table >= 0, places[table], np.int32(-1))
        self._probes = index.efforts or (effort_of(index.spec) or 1,) * memory.group

    @property
    def nbytes(self) -> int:
        """Of lists and centroids."""
        return int(self._table.nbytes + self._centroids.nbytes)

    @property
    @override
    def work(self) -> int:
        return max(self._probes) * self._table.shape[2]

    @override
    def find(self, asked: HostArray, own: HostArray, head: int, k: int, *, count: bool) -> Found:
        part = head if len(self._table) > 1 else 0
        centroids = self._centroids[part]
        some = candidates(own, centroids, self._table[part], self._probes[head])
        scores = self._memory.scores(self._kv_head, asked, some)
        best = highest(scores, k)
        return Found(some[best], scores[best], np.array(len(some) + len(centroids)))


class Scanned(Finder):
    """Every key at some positions."""

    def __init__(self, memory: Memory, kv_head: int, positions: HostArray) -> None:
        """``positions`` [S] int32 ascending."""
        self._memory, self._kv_head = memory, kv_head
        self._stretches = memory.runs(positions).between(0, len(memory.layer.rows))
        self._count = len(positions)

    @property
    @override
    def work(self) -> int:
        return self._count

    @override
    def find(self, asked: HostArray, own: HostArray, head: int, k: int, *, count: bool) -> Found:
        scores, found = best_of(self._memory, self._kv_head, asked[:, None], self._stretches, k)
        return Found(found[0], scores[0], np.array(self._count))


class Copied(Finder):
    """An index with keys of its own; the keys in memory score what it finds."""

    def __init__(self, memory: Memory, kv_head: int, part: Part, number: int) -> None:
        """Over the index of that number in a part."""
        self._memory, self._kv_head = memory, kv_head
        self._part, self._number = part, number
        self.offset = part.offset

    @property
    @override
    def work(self) -> int:
        return len(self._part.positions) // 16

    @override
    def find(self, asked: HostArray, own: HostArray, head: int, k: int, *, count: bool) -> Found:
        found = self._part.best(self._number, head, own, k, count=count)
        at = np.flatnonzero(found.ids >= 0)
        positions = found.ids[at].astype(np.int32)
        scores = self._memory.scores(self._kv_head, asked, positions)
        return Found(positions, scores, found.scanned)


def finder_of(
    memory: Memory, kv_head: int, index: AttentionIndex, positions: HostArray
) -> tuple[Finder, Account]:
    """What finds keys by an index of one KV head, in place where its kind can, and its account.

    ``positions`` [S] int32 ascending are those of its rows, where the keys stand.
    """
    note = (index.note,) if index.note else ()
    match index.spec:
        case Exact():
            return Scanned(memory, kv_head, positions), Account(keys=len(positions), notes=note)
        case QueryLists():
            lists = InPlace(memory, kv_head, index, positions, 0)
            return lists, Account(keys=len(positions), index_bytes=lists.nbytes, trained=1)
    part = Part([open_index(index)], positions)
    return Copied(memory, kv_head, part, 0), part.account()


class Searched(FarLayer):
    """The ``k`` best of what finders hold of each KV head, and of keys from ``end`` on."""

    def __init__(
        self,
        memory: Memory,
        finders: Sequence[Sequence[Finder]],
        account: Account,
        *,
        end: int,
        sink: int,
        recent: int,
        k: int,
    ) -> None:
        """``finders`` of every KV head, over keys from ``sink`` to ``end``."""
        self.memory, self.finders, self.account = memory, finders, account
        self.end, self.sink, self.recent, self.k = end, sink, recent, k
        offsets = {each.offset for one in finders for each in one if each.offset is not None}
        self._offsets = sorted(offsets)

    @override
    def work(self, position: int) -> int:
        tail = max(0, position - self.recent + 1 - self.end)
        finders = sum(each.work for one in self.finders for each in one)
        return self.memory.group * finders + tail * self.memory.kv_heads

    @override
    def tasks(self, q: HostArray, position: int, answer: Answer, pieces: int) -> list[Task]:
        """Of every KV head its query heads in groups; of a group one for each finder."""
        if position - self.recent < self.sink:
            return []
        asked = self.memory.ask(q, position, self._offsets)
        tail = self.memory.stretches(self.end, position - self.recent + 1)
        todo: list[Task] = []
        for kv_head, finders in enumerate(self.finders):
            for heads in np.array_split(np.arange(self.memory.group), pieces):
                if not len(heads):
                    continue
                parts = [
                    functools.partial(self._find, each, asked, kv_head, heads, answer)
                    for each in finders
                ]
                end = functools.partial(self._end, asked, kv_head, heads, tail, answer)
                todo += gathered(parts, end) if parts else [functools.partial(end, [])]
        return todo

    def _find(
        self, finder: Finder, asked: HostArray, kv_head: int, heads: HostArray, answer: Answer
    ) -> list[Found]:
        start = time.perf_counter()
        known = len(self.memory.offsets)
        own = 0 if finder.offset is None else known + self._offsets.index(finder.offset)
        count = answer.counted is not None
        found = []
        for head in heads.tolist():
            mine = asked[:, kv_head, head]
            found.append(finder.find(mine[:known], mine[own], head, self.k, count=count))
        answer.spent.append((time.perf_counter() - start, 0.0))
        return found

    def _end(
        self,
        asked: HostArray,
        kv_head: int,
        heads: HostArray,
        tail: Sequence[Stretch],
        answer: Answer,
        parts: Sequence[list[Found]],
    ) -> None:
        start = time.perf_counter()
        memory, k = self.memory, self.k
        mine = asked[: len(memory.offsets), kv_head, heads]
        found = [[(each[at].scores, each[at].ids) for each in parts] for at in range(len(heads))]
        if answer.counted is not None and parts:
            answer.counted.append(self._recall(kv_head, mine, found, parts))
        if tail:
            left = best_of(memory, kv_head, mine, tail, k)
            for at, each in enumerate(found):
                each.append((left[0][at], left[1][at]))
        scores = np.full((len(heads), k), -np.inf, np.float32)
        positions = np.zeros((len(heads), k), np.int32)
        for at, each in enumerate(found):
            some, where = _joined(each, k)
            scores[at, : len(some)], positions[at, : len(some)] = some, where
        middle = time.perf_counter()
        answer.out[kv_head, heads], answer.lse[kv_head, heads] = memory.mix(
            kv_head, scores, positions
        )
        answer.spent.append((middle - start, time.perf_counter() - middle))

    def _recall(
        self,
        kv_head: int,
        asked: HostArray,
        found: Sequence[Sequence[Pair]],
        parts: Sequence[Sequence[Found]],
    ) -> Account:
        """What finders found for some query heads, beside an exact search of the same keys."""
        stretches = self.memory.stretches(self.sink, self.end)
        _, wanted = best_of(self.memory, kv_head, asked, stretches, self.k)
        counts = Account()
        for at, each in enumerate(found):
            scanned = sum(int(part[at].scanned) for part in parts)
            counts += recall_of(_joined(each, self.k)[1], wanted[at], scanned)
        return counts


def _joined(pairs: Sequence[Pair], k: int) -> Pair:
    """The ``k`` best of scores and positions, pairs of [n]; all where there are fewer."""
    scores = np.concatenate([scores for scores, _ in pairs])
    positions = np.concatenate([positions for _, positions in pairs])
    best = highest(scores, k)
    return scores[best], positions[best]

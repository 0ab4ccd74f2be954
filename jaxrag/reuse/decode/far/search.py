"""The best keys that indexes find outside the static pattern, and those that left it later.

RetrievalAttention (sections 3.2 and 3.3, algorithm 1, arXiv:2409.10516).
"""

import abc
import functools
from collections.abc import Sequence
from typing import override

import numpy as np

from jaxrag.base.types import HostArray
from jaxrag.reuse.attention_index import Exact, FoundKeys, QueryLists, Searcher, open_index
from jaxrag.reuse.attention_index.index import AttentionIndex
from jaxrag.reuse.attention_index.lists import distinct, nearest_lists
from jaxrag.reuse.attention_index.spec import Trained, effort_of
from jaxrag.reuse.decode.checks import RecallChecks
from jaxrag.reuse.decode.far.layer import FarAnswer, FarLayer, HostTask, gathered
from jaxrag.reuse.decode.far.memory import HostMemory, highest
from jaxrag.reuse.decode.far.scan import Pair, best_of
from jaxrag.reuse.decode.footprint import Account, recall_of
from jaxrag.reuse.decode.parts import Part

HeadEffort = tuple[int, int]  # a query head's number in its group, and the times of its effort

_NOTHING = FoundKeys(np.zeros(0, np.int32), np.zeros(0, np.float32), np.array(0))


class Finder(abc.ABC):
    """What finds keys of one KV head.

    Attributes:
      offset: the query is turned to it; None: to those at which the keys lie in memory.
    """

    offset: int | None = None
    together = False  # are the heads of a group searched as one?

    def find(
        self, asked: HostArray, own: HostArray, heads: Sequence[HeadEffort], k: int, *, count: bool
    ) -> list[FoundKeys]:
        """At least ``k`` of the best keys for each of some query heads, fewer where it has no more.

        Args:
            asked: [O, g, H] the queries turned to every offset of the memory.
            own: [g, H] the queries turned to ``offset``.
            heads: [g] their numbers in the group, and what multiplies the effort of each; 0 asks
                for nothing.
            count: say how many were scanned.

        Returns:
            Positions and scores [n] of each, in any order.
        """
        return [
            self.find_head(asked[:, at], own[at], head, k, count=count) if head[1] else _NOTHING
            for at, head in enumerate(heads)
        ]

    def find_head(
        self, asked: HostArray, own: HostArray, head: HeadEffort, k: int, *, count: bool
    ) -> FoundKeys:
        """``find`` for one query head: ``asked`` [O, H] and ``own`` [H]."""
        raise NotImplementedError

    @property
    @abc.abstractmethod
    def work(self) -> int:
        """About how many keys a search scores."""


class InPlace(Finder):
    """Lists of ``QueryLists`` over keys that are scored where they lie."""

    def __init__(
        self,
        memory: HostMemory,
        kv_head: int,
        index: AttentionIndex,
        positions: HostArray,
        offset: int,
        *,
        shared: bool,
    ) -> None:
        """Keep the lists of an index without keys (``AttentionIndex.without_keys``).

        ``positions`` [S] int32 are those of the index's rows; -1: not to be found. Lists that are
        ``shared`` stay as they are, others are made lists of positions.
        """
        self._memory, self._kv_head, self.offset = memory, kv_head, offset
        self._centroids = index.tables["centroids"]
        members, self._starts = index.tables["members"], index.tables["starts"]
        places = positions[index.wanted]
        self._places = places if shared else None
        self._members = members if shared else places[members]
        self._probes = index.efforts or (effort_of(index.spec) or 1,) * memory.group

    @property
    def nbytes(self) -> int:
        """Of lists and centroids."""
        places = 0 if self._places is None else int(self._places.nbytes)
        held = (self._centroids, self._members, self._starts)
        return sum(int(each.nbytes) for each in held) + places

    @property
    @override
    def work(self) -> int:
        return max(self._probes) * len(self._members) // self._starts[:, 1:].size

    @override
    def find_head(
        self, asked: HostArray, own: HostArray, head: HeadEffort, k: int, *, count: bool
    ) -> FoundKeys:
        number, times = head
        part = number if len(self._centroids) > 1 else 0
        centroids, starts = self._centroids[part], self._starts[part]
        near = nearest_lists(own, centroids, self._probes[number] * times).tolist()
        some = distinct(
            np.concatenate([self._members[starts[each] : starts[each + 1]] for each in near])
        )
        if self._places is not None:
            some = self._places[some]
            some = some[some >= 0]
        scores = self._memory.scores(self._kv_head, asked, some)
        best = highest(scores, k)
        return FoundKeys(some[best], scores[best], np.array(len(some) + len(centroids)))


class Scanned(Finder):
    """Every key at some positions."""

    together = True

    def __init__(self, memory: HostMemory, kv_head: int, positions: HostArray) -> None:
        """``positions`` [S] int32 ascending."""
        self._memory, self._kv_head = memory, kv_head
        self._runs = memory.runs(positions)
        self._count = len(positions)

    @property
    def nbytes(self) -> int:
        """Of positions that are no runs."""
        return self._runs.nbytes

    @property
    @override
    def work(self) -> int:
        return self._count

    @override
    def find(
        self, asked: HostArray, own: HostArray, heads: Sequence[HeadEffort], k: int, *, count: bool
    ) -> list[FoundKeys]:
        stretches = self._runs.between(0, len(self._memory.layer.rows))
        pairs = best_of(self._memory, self._kv_head, asked, stretches, k)
        scanned = np.array(self._count)
        return [
            FoundKeys(positions, scores, scanned) for scores, positions in zip(*pairs, strict=True)
        ]


class Copied(Finder):
    """An index with keys of its own; the keys in memory score what it finds."""

    def __init__(self, memory: HostMemory, kv_head: int, part: Part) -> None:
        """Over a part with the index of this head alone."""
        self._memory, self._kv_head, self._part = memory, kv_head, part
        self.offset = part.offset

    @property
    @override
    def work(self) -> int:
        return len(self._part.positions) // 16

    @override
    def find_head(
        self, asked: HostArray, own: HostArray, head: HeadEffort, k: int, *, count: bool
    ) -> FoundKeys:
        number, times = head
        best = self._part.best(0, number, own, k, count=count, times=times)
        at = np.flatnonzero(best.ids >= 0)
        positions = best.ids[at].astype(np.int32)
        scores = self._memory.scores(self._kv_head, asked, positions)
        return FoundKeys(positions, scores, best.scanned)


def finder_of(
    memory: HostMemory,
    kv_head: int,
    index: AttentionIndex | Searcher,
    positions: HostArray,
    offset: int = 0,
    *,
    stored: bool = False,
) -> tuple[Finder, Account]:
    """What finds keys by an index of one KV head, in place where its kind can, and its account.

    Args:
        positions: [S] int32 of its rows, ascending; -1 where a key is not to be found.
        offset: a key at position p of the index is rotated to p less this.
        stored: the index was there already, and others may use it.
    """
    made = index.index if isinstance(index, Searcher) else index
    cost = Account(
        keys=len(positions),
        stored=len(positions) if stored else 0,
        trained=int(isinstance(made.spec, Trained) and not stored),
        notes=(made.note,) if made.note else (),
    )
    match made.spec:
        case Exact():
            scan = Scanned(memory, kv_head, positions[positions >= 0])
            return scan, cost + Account(index_bytes=scan.nbytes)
        case QueryLists():
            made = made.without_keys()
            lists = InPlace(memory, kv_head, made, positions, offset, shared=stored)
            return lists, cost + Account(index_bytes=lists.nbytes)
    searcher = open_index(index) if isinstance(index, AttentionIndex) else index
    part = Part([searcher], positions, offset)
    return Copied(memory, kv_head, part), cost + Account(index_bytes=searcher.nbytes)


class Searched(FarLayer):
    """The ``k`` best of what finders hold of each KV head, and of keys from ``end`` on."""

    def __init__(
        self,
        memory: HostMemory,
        finders: Sequence[Sequence[Finder]],
        account: Account,
        window: tuple[int, int],
        end: int,
        k: int,
        checks: RecallChecks | None = None,
    ) -> None:
        """``finders`` of every KV head, over keys from the window's sink to ``end``."""
        self.memory, self.finders, self.account, self.checks = memory, finders, account, checks
        (self.sink, self.recent), self.end, self.k = window, end, k
        offsets = {each.offset for one in finders for each in one if each.offset is not None}
        self._offsets = sorted(offsets)

    @override
    def work(self, position: int) -> int:
        tail = max(0, position - self.recent + 1 - self.end)
        finders = sum(each.work for one in self.finders for each in one)
        return self.memory.group * finders + tail * self.memory.kv_heads

    @override
    def tasks(self, q: HostArray, position: int, answer: FarAnswer, pieces: int) -> list[HostTask]:
        """Of every KV head its query heads in groups; of a group one for each finder.

        What a head gets does not depend on the groups.
        """
        if position - self.recent < self.sink:
            return []
        asked = self.memory.ask(q, position, self._offsets)
        tail = np.arange(self.end, position - self.recent + 1, dtype=np.int32)
        todo: list[HostTask] = []
        for kv_head, finders in enumerate(self.finders):
            groups = 1 if any(each.together for each in finders) else min(pieces, len(q[0]))
            for heads in np.array_split(np.arange(len(q[0])), groups):
                parts = [
                    functools.partial(self._find, each, asked, kv_head, heads, answer)
                    for each in finders
                ]
                at = (kv_head, heads, position)
                end = functools.partial(self._end, asked, at, tail, answer)
                todo += gathered(parts, end) if parts else [functools.partial(end, [])]
        return todo

    def _find(
        self, finder: Finder, asked: HostArray, kv_head: int, heads: HostArray, answer: FarAnswer
    ) -> list[FoundKeys]:
        known = len(self.memory.offsets)
        own = 0 if finder.offset is None else known + self._offsets.index(finder.offset)
        times = [1 if self.checks is None else int(self.checks.times[kv_head, at]) for at in heads]
        if not any(times):
            return [_NOTHING] * len(heads)
        mine, count = asked[:, kv_head, heads], answer.counted is not None
        asking = list(zip(heads.tolist(), times, strict=True))
        with answer.searching():
            return finder.find(mine[:known], mine[own], asking, self.k, count=count)

    def _end(
        self,
        asked: HostArray,
        where: tuple[int, HostArray, int],
        tail: HostArray,
        answer: FarAnswer,
        parts: Sequence[list[FoundKeys]],
    ) -> None:
        memory, k, checks, (kv_head, heads, position) = self.memory, self.k, self.checks, where
        with answer.searching():
            mine = asked[: len(memory.offsets), kv_head, heads]
            by_part = [
                [(each[at].scores, each[at].ids) for each in parts] for at in range(len(heads))
            ]
            scans = np.zeros(len(heads), bool)
            for at, head in enumerate(heads.tolist() if checks is not None and parts else ()):
                assert checks is not None
                place = (kv_head, head)
                if not checks.times[place] or checks.due(place, position):
                    scans[at] = True
                    best = self._scan(kv_head, mine[:, at])
                    if checks.times[place]:
                        note = checks.judge(place, position, _joined(by_part[at], k)[1], best[1])
                        answer.notes.extend([note] if note else [])
                    by_part[at] = [best]
            if answer.counted is not None and parts:
                answer.counted.append(self._recall(kv_head, mine, by_part, parts, scans))
            for at, each in enumerate(by_part if len(tail) else ()):
                each.append((memory.scores(kv_head, mine[:, at], tail), tail))
            scores = np.full((len(heads), k), -np.inf, np.float32)
            positions = np.zeros((len(heads), k), np.int32)
            for at, each in enumerate(by_part):
                some, places = _joined(each, k)
                scores[at, : len(some)], positions[at, : len(some)] = some, places
        with answer.attending():
            answer.out[kv_head, heads], answer.lse[kv_head, heads] = memory.mix(
                kv_head, scores, positions
            )

    def _scan(self, kv_head: int, asked: HostArray) -> Pair:
        """What an exact search finds for one query head: ``asked`` [O, H]."""
        stretches = self.memory.stretches(self.sink, self.end)
        scores, exact = best_of(self.memory, kv_head, asked[:, None], stretches, self.k)
        return scores[0], exact[0]

    def _recall(
        self,
        kv_head: int,
        asked: HostArray,
        found: Sequence[Sequence[Pair]],
        parts: Sequence[Sequence[FoundKeys]],
        scans: HostArray,
    ) -> Account:
        """What was found for some query heads, beside an exact search of the same keys.

        ``scans`` [g]: which of them were scanned beside what finders did.
        """
        stretches = self.memory.stretches(self.sink, self.end)
        _, exact = best_of(self.memory, kv_head, asked, stretches, self.k)
        counts = Account()
        for at, each in enumerate(found):
            scanned = sum(int(part[at].scanned) for part in parts)
            scanned += int(scans[at]) * (self.end - self.sink)
            counts += recall_of(_joined(each, self.k)[1], exact[at], scanned)
        return counts


def _joined(pairs: Sequence[Pair], k: int) -> Pair:
    """The ``k`` best of scores and positions, pairs of [n]; all where there are fewer."""
    scores = np.concatenate([scores for scores, _ in pairs])
    positions = np.concatenate([positions for _, positions in pairs])
    best = highest(scores, k)
    best = best[np.argsort(positions[best])]  # sums do not depend on the order of the parts
    return scores[best], positions[best]

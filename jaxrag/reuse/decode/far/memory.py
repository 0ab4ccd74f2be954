"""Reading K and V in host memory: runs of rows without a copy, single rows by gathering them."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from jaxrag.base.config import ModelConfig
from jaxrag.base.types import HostArray
from jaxrag.reuse.attention_index import rotated_unscaled
from jaxrag.reuse.attention_index.faiss_objects import faiss_module, halves
from jaxrag.reuse.decode.far.layer import HostLayer

_PRODUCT = 1 << 18  # multiply-adds above which BLAS starts threads of its own
_SHORT = 64  # rows; shorter runs are gathered together
_PICK = 8192  # scores from which on the best are looked for in two steps
_GROUP = 64
_FEW = 4  # offsets whose keys are scored one offset after the other


@dataclasses.dataclass(frozen=True, eq=False)
class Stretch:
    """Some positions whose keys stand at one offset.

    Attributes:
      positions: a slice, or [n] int32 ascending.
      offset: number of the offset among the layer's.
    """

    positions: slice | HostArray
    rows: slice | HostArray
    offset: int
    count: int


class Runs:
    """Positions of a layer as runs of rows, which are read without a copy, and what is scattered.

    A run is ascending rows at one offset, as short ones are gathered.
    """

    def __init__(
        self, positions: HostArray, rows: HostArray, which: HostArray | None, block: int
    ) -> None:
        """``positions`` [n] int32 ascending; ``rows`` and number of the offset ``which`` [S]."""
        self._rows, self._block = rows, block
        own_rows = rows[positions]
        cut = (np.diff(own_rows) != 1) | (np.diff(positions) != 1)
        which = np.zeros(len(rows), np.uint16) if which is None else which
        cut |= np.diff(which[positions]) != 0
        starts = np.concatenate([[0], np.flatnonzero(cut) + 1, [len(positions)]])
        length = np.diff(starts)
        long = length >= _SHORT
        self._runs = [
            (int(positions[at]), int(positions[at]) + int(count), int(own_rows[at]),
             int(which[positions[at]]))
            for at, count in zip(starts[:-1][long], length[long], strict=True)
        ]  # fmt: skip
        scattered = positions[np.repeat(~long, length)].astype(np.int32)
        self._scattered = [
            (number, scattered[which[scattered] == number])
            for number in np.unique(which[scattered]).tolist()
        ]

    @property
    def nbytes(self) -> int:
        """Of scattered positions."""
        return sum(int(some.nbytes) for _, some in self._scattered)

    def between(self, low: int, high: int) -> list[Stretch]:
        """The positions low <= p < high, in blocks; in no order."""
        found = []
        for start, end, row, offset in self._runs:
            first, last = max(start, low), min(end, high)
            for at in range(first, last, self._block):
                count = min(self._block, last - at)
                rows = slice(row + at - start, row + at - start + count)
                found.append(Stretch(slice(at, at + count), rows, offset, count))
        for offset, positions in self._scattered:
            first, last = np.searchsorted(positions, (low, high))
            for at in range(first, last, self._block):
                some = positions[at : min(at + self._block, last)]
                found.append(Stretch(some, self._rows[some], offset, len(some)))
        return found


class HostMemory:
    """One layer of one request, read by position.

    Scores are of queries turned to each offset, ``asked`` [O, g, H], as ``ask`` makes them.
    """

    def __init__(self, config: ModelConfig, layer: HostLayer) -> None:
        assert layer.k[0].flags.c_contiguous and layer.v[0].flags.c_contiguous
        self.config = config
        self.layer = layer
        self.kv_heads, _, self.dim = layer.k.shape
        self.group = config.group_size
        self.block = max(16, _PRODUCT // (self.dim * max(self.group, 2)))  # keys scored at once
        starts = np.concatenate([[0], np.flatnonzero(np.diff(layer.offsets)) + 1])
        self.offsets, which = np.unique(layer.offsets[starts], return_inverse=True)
        lengths = np.diff(np.append(starts, len(layer.offsets)))
        which = np.repeat(which.astype(np.uint16), lengths)
        self._which = None if len(self.offsets) == 1 else which
        self._all = self.runs(np.arange(len(layer.rows), dtype=np.int32))

    def runs(self, positions: HostArray) -> Runs:
        """Of positions [n] int32 ascending."""
        return Runs(positions, self.layer.rows, self._which, self.block)

    @property
    def nbytes(self) -> int:
        """Of what is held beside K, V, rows and offsets."""
        which = 0 if self._which is None else int(self._which.nbytes)
        return which + self._all.nbytes

    def ask(self, q: HostArray, position: int, more: Sequence[int] = ()) -> HostArray:
        """q [K, G, H] times the scale, turned to every offset and to ``more``: [O + m, K, G, H]."""
        offsets = np.concatenate([self.offsets, np.asarray(more, self.offsets.dtype)])
        heads = (q * np.float32(self.config.score_scale))[..., None, :]
        heads = np.repeat(heads, len(offsets), axis=-2)
        heads = rotated_unscaled(heads, position - offsets, self.config.rope)
        return np.ascontiguousarray(np.moveaxis(heads, -2, 0))

    def keys(self, head: int, rows: slice | HostArray) -> HostArray:
        """Keys of a KV head as they lie: [n, H] float32."""
        return self._rows(self.layer.k[head], rows)

    def values(self, head: int, rows: slice | HostArray) -> HostArray:
        """Values of a KV head: [n, H] float32."""
        return self._rows(self.layer.v[head], rows)

    def placed_keys(self, head: int, positions: HostArray) -> HostArray:
        """Keys of a KV head rotated to their positions: [n, H] float32."""
        keys = self.keys(head, self.layer.rows[positions])
        which = self.layer.offsets[positions]
        for offset in self.offsets[self.offsets != 0]:
            there = np.flatnonzero(which == offset)
            some = rotated_unscaled(keys[there][:, None], offset[None], self.config.rope)
            keys[there] = some[:, 0]
        return keys

    def stretches(self, low: int, high: int) -> list[Stretch]:
        """All positions low <= p < high, in blocks; in no order."""
        return self._all.between(low, high)

    def gathered(self, positions: HostArray) -> list[Stretch]:
        """Positions [n] int32 in blocks whose rows are gathered, whether they are runs or not."""
        which = np.zeros(len(positions), int) if self._which is None else self._which[positions]
        found = []
        for offset in np.unique(which).tolist():
            there = positions[which == offset]
            for at in range(0, len(there), self.block):
                some = there[at : at + self.block]
                found.append(Stretch(some, self.layer.rows[some], offset, len(some)))
        return found

    def scan(self, head: int, asked: HostArray, stretches: Sequence[Stretch]) -> HostArray:
        """Scores of every key of the stretches, one after the other: [g, n] float32."""
        group, asked = asked.shape[1], _paired(asked)
        scores = np.empty((asked.shape[1], sum(each.count for each in stretches)), np.float32)
        at = 0
        for each in stretches:
            keys = self.keys(head, each.rows)
            np.matmul(asked[each.offset], keys.T, out=scores[:, at : at + each.count])
            at += each.count
        return self._capped(scores[:group])

    def scores(self, head: int, asked: HostArray, positions: HostArray) -> HostArray:
        """Scores of the keys at positions [n] with one query, ``asked`` [O, H]: [n] float32."""
        return self._capped(self._products(head, asked, positions))

    def _products(self, head: int, asked: HostArray, positions: HostArray) -> HostArray:
        rows = self.layer.rows[positions]
        if self._which is None:
            return self._scores(head, asked[0], rows)
        which = self._which[positions]
        if len(self.offsets) > _FEW:  # one call for each would cost more than what it computes
            keys = self._rows(self.layer.k[head], rows)
            return np.einsum("nh,nh->n", keys, np.take(asked, which, axis=0))
        scores = np.empty(len(positions), np.float32)
        for offset in np.unique(which).tolist():
            there = which == offset
            scores[there] = self._scores(head, asked[offset], rows[there])
        return scores

    def _scores(self, head: int, query: HostArray, rows: HostArray) -> HostArray:
        keys = self.layer.k[head]
        faiss, scores = faiss_module(), np.empty(len(rows), np.float32)
        query = np.ascontiguousarray(query)
        if keys.dtype != np.float32:
            some = self._rows(keys, rows)
            faiss.fvec_inner_products_ny(
                faiss.swig_ptr(scores),
                faiss.swig_ptr(query),
                faiss.swig_ptr(some),
                self.dim,
                len(rows),
            )
            return scores
        at = rows.astype(np.int64)
        faiss.fvec_inner_products_by_idx(
            faiss.swig_ptr(scores),
            faiss.swig_ptr(query),
            faiss.swig_ptr(keys),
            faiss.swig_ptr(at),
            self.dim,
            1,
            len(rows),
        )
        return scores

    def _capped(self, scores: HostArray) -> HostArray:
        cap = self.config.score_cap
        return scores if cap is None else np.float32(cap) * np.tanh(scores / np.float32(cap))

    def mix(
        self, head: int, scores: HostArray, positions: HostArray
    ) -> tuple[HostArray, HostArray]:
        """Softmax over scores [g, n] and the mixture of the values at positions [g, n].

        Returns out [g, H] and lse [g] float32. A score of -inf is not seen.
        """
        if not scores.shape[1]:
            shape = (len(scores), self.dim)
            return np.zeros(shape, np.float32), np.full(len(scores), -np.inf, np.float32)
        weights, lse = softmax(scores)
        values = self.values(head, self.layer.rows[positions])
        # Head by head, so that the sums are the same whichever heads are mixed together.
        return np.stack(
            [np.einsum("n,nh->h", *one) for one in zip(weights, values, strict=True)]
        ), lse

    def attend(
        self, head: int, asked: HostArray, stretches: Iterable[Stretch]
    ) -> tuple[HostArray, HostArray]:
        """Attention to every key of the stretches: out [g, H] and lse [g] float32."""
        heads, asked = asked.shape[1], _paired(asked)
        group = asked.shape[1]
        most = np.full(group, -np.inf, np.float32)
        total = np.zeros(group, np.float32)
        out = np.zeros((group, self.dim), np.float32)
        for each in stretches:
            scores = self._capped(asked[each.offset] @ self.keys(head, each.rows).T)
            now = np.maximum(most, scores.max(1))
            weights = np.exp(scores - now[:, None])
            shrink = np.exp(most - now)
            total = total * shrink + weights.sum(1)
            out = out * shrink[:, None] + weights @ self.values(head, each.rows)
            most = now
        some = total > 0
        out /= np.where(some, total, 1)[:, None]
        return out[:heads], (most + np.log(np.where(some, total, 1)))[:heads]

    def _rows(self, memory: HostArray, rows: slice | HostArray) -> HostArray:
        """Rows of memory [R, H] as float32, a view where they are that already."""
        if isinstance(rows, slice):
            taken = memory[rows]
        elif memory.dtype == np.float32:
            return memory.take(rows, axis=0)
        else:  # numpy gathers numbers that it knows several times as fast
            taken = memory.view(np.uint16).take(rows, axis=0).view(memory.dtype)
        return halves(taken) if taken.dtype == np.float16 else taken.astype(np.float32, copy=False)


def _paired(asked: HostArray) -> HostArray:
    """Queries [O, g, H], one alone twice: BLAS takes threads for a product with a vector."""
    return np.concatenate([asked, asked], axis=1) if asked.shape[1] == 1 else asked


def softmax(scores: HostArray) -> tuple[HostArray, HostArray]:
    """Weights [g, n] and log-sum-exp [g]; zeros and -inf where every score is -inf."""
    most = scores.max(1)
    there = np.isfinite(most)
    weights = np.exp(scores - np.where(there, most, 0)[:, None])
    total = weights.sum(1)
    weights /= np.where(there, total, 1)[:, None]
    return weights, most + np.log(np.where(there, total, 1))


def merged(parts: Sequence[tuple[HostArray, HostArray]]) -> tuple[HostArray, HostArray]:
    """Attention to several sets of keys as one: pairs of out [g, H] and lse [g] (appendix B.1)."""
    if len(parts) == 1:
        return parts[0]
    weights, lse = softmax(np.stack([lse for _, lse in parts], axis=1))  # [g, n]
    return np.einsum("gn,ngh->gh", weights, np.stack([out for out, _ in parts])), lse


def highest(scores: HostArray, k: int) -> HostArray:
    """Where the k highest of scores [n] are, in any order; all where there are no more."""
    count = len(scores)
    if count <= k:
        return np.arange(count)
    if count < _PICK or count // _GROUP < k:
        return np.argpartition(scores, count - k)[count - k :]
    # The k-th highest maximum of some groups is a bar that at least k scores reach.
    width = count // _GROUP
    tops = scores[: width * _GROUP].reshape(_GROUP, width).max(0)
    bar = np.partition(tops, width - k)[width - k]
    some = np.flatnonzero(scores >= bar)
    return some[np.argpartition(scores[some], len(some) - k)[len(some) - k :]]


def first_highest(scores: HostArray, count: int) -> HostArray:
    """Where the ``count`` highest of scores [n] are, ascending; ties go to the earlier one."""
    if len(scores) <= count:
        return np.arange(len(scores))
    least = np.partition(scores, len(scores) - count)[len(scores) - count]
    above = np.flatnonzero(scores > least)
    equal = np.flatnonzero(scores == least)[: count - len(above)]
    return np.sort(np.concatenate([above, equal]))


def positions_of(stretches: Sequence[Stretch], chosen: HostArray) -> HostArray:
    """The positions [..] int32 of places [..] in the order of ``HostMemory.scan``."""
    counts = np.array([each.count for each in stretches])
    first = np.cumsum(counts) - counts
    which = np.searchsorted(first, chosen, side="right") - 1
    starts = np.array(
        [each.positions.start if isinstance(each.positions, slice) else 0 for each in stretches]
    )
    found = (starts[which] + chosen - first[which]).astype(np.int32)
    for number, each in enumerate(stretches):
        if not isinstance(each.positions, slice):
            there = which == number
            found[there] = each.positions[chosen[there] - first[number]]
    return found

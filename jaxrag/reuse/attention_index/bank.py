"""Training queries: kept before RoPE from prefill, and rotated to where decoding will ask from.

RetrievalAttention (section 3.2, arXiv:2409.10516) builds its index from the queries of prefill at
their own positions. A query of decode stands elsewhere, and what it wants moves with its position;
a bank rotated over the positions that will ask finds the same keys with a fraction of the scan.
"""

import dataclasses

import numpy as np

from jaxrag.base.config import RopeConfig
from jaxrag.base.errors import RequestError, RetrievalError
from jaxrag.base.rotary import attention_factor, frequencies
from jaxrag.base.types import HostArray

_RUNS = 8  # of queries that are held out


@dataclasses.dataclass(frozen=True, eq=False)
class QueryBank:
    """Queries of the heads that share one KV head, before RoPE.

    Attributes:
      queries: [G, m, H] float16, float32 or bfloat16; m strided tokens of each query head.
      positions: [m] int32, where those tokens stood.
    """

    queries: HostArray
    positions: HostArray

    def __post_init__(self) -> None:
        if self.queries.ndim != 3 or 0 in self.queries.shape:
            raise RetrievalError(
                f"a query bank of shape {list(self.queries.shape)}: expected [G, m, H], none empty"
            )
        if self.positions.shape != self.queries.shape[1:2]:
            raise RetrievalError(
                f"positions of shape {list(self.positions.shape)} for {self.queries.shape[1]} "
                "queries: expected one position for each"
            )

    def split(self) -> "tuple[QueryBank, QueryBank | None]":
        """Those to train on, and others to choose an effort by; None where there is only one.

        A sixteenth is held out, in runs from all over the text: what is asked later is as near to a
        trained query as the middle of a run is, not as two neighbours are.
        """
        count = len(self.positions)
        runs = min(_RUNS, count // 2)
        if not runs:
            return self, None
        length, each = max(1, count // (16 * runs)), count // runs
        first = np.arange(runs) * count // runs + (each - length) // 2
        trained = np.ones(count, bool)
        trained[first[:, None] + np.arange(length)] = False
        parts = (QueryBank(self.queries[:, at], self.positions[at]) for at in (trained, ~trained))
        return next(parts), next(parts)

    def apart(self, newest: int) -> "tuple[QueryBank, QueryBank | None]":
        """All but the ``newest`` ones, and these; where there are no more than that, None."""
        at = len(self.positions) - newest
        if newest < 1 or at < 1:
            return self, None
        older, newer = slice(at), slice(at, None)
        parts = (QueryBank(self.queries[:, it], self.positions[it]) for it in (older, newer))
        return next(parts), next(parts)

    def repeated(self, times: int) -> "QueryBank":
        """The same queries so many times over, to be asked from several places."""
        positions = np.tile(self.positions, times)
        return QueryBank(np.tile(self.queries, (1, times, 1)), positions)

    def lessons(
        self,
        rope: RopeConfig,
        start: int,
        end: int,
        *,
        own: bool = False,
        logarithmic: bool = False,
    ) -> tuple[HostArray, HostArray | None]:
        """What an index learns from where questions come from positions [start, end).

        Returns queries to train on, [G, m, H] float32, ``spread`` over these positions, or at
        their ``own`` if that is asked for; and others, [G, n, H], to choose the effort by. These
        are spread evenly, so that it is enough for distant questions as well.
        """
        trained, held = self.split()
        return (
            trained.own(rope) if own else trained.over(rope, start, end, logarithmic=logarithmic),
            None if held is None else held.over(rope, start, end),
        )

    def over(
        self, rope: RopeConfig, start: int, end: int, *, logarithmic: bool = False
    ) -> HostArray:
        """The queries ``spread`` over the positions [start, end): [G, m, H] float32."""
        places = spread(len(self.positions), start, end, logarithmic=logarithmic)
        return self.at(rope, places)

    def at(self, rope: RopeConfig, positions: HostArray | int) -> HostArray:
        """The queries rotated to one position or to one each: [G, m, H] float32.

        A YaRN attention factor is multiplied in, as ``rope.place`` does.
        """
        places = np.broadcast_to(np.asarray(positions, np.float64), self.positions.shape)
        return rotated(self.queries.astype(np.float32), places, rope)

    def own(self, rope: RopeConfig) -> HostArray:
        """The queries at their own positions, as RetrievalAttention trains: [G, m, H] float32."""
        return self.at(rope, self.positions)


def rotated(x: HostArray, positions: HostArray, rope: RopeConfig) -> HostArray:
    """Heads x [..., S, H] float32, before RoPE, placed at positions [S]; numpy's ``rope.place``."""
    return _rotated(x, positions, rope, attention_factor(rope))


def rotated_unscaled(x: HostArray, by: HostArray, rope: RopeConfig) -> HostArray:
    """Heads x [..., S, H] rotated by ``by`` [S] positions and nothing else: float32.

    Numpy's ``rope.rotate``: no attention factor is multiplied in.
    """
    return _rotated(x, by, rope, 1.0)


def _rotated(x: HostArray, by: HostArray, rope: RopeConfig, factor: float) -> HostArray:
    angles = np.asarray(by, np.float64)[:, None] * frequencies(rope)
    cos = (np.cos(angles) * factor).astype(np.float32)
    sin = (np.sin(angles) * factor).astype(np.float32)
    half = rope.rotary_dim // 2
    if rope.interleaved:
        first, second = slice(0, rope.rotary_dim, 2), slice(1, rope.rotary_dim, 2)
    else:
        first, second = slice(0, half), slice(half, rope.rotary_dim)
    out = np.array(x, np.float32)
    a, b = x[..., first], x[..., second]
    out[..., first] = a * cos - b * sin
    out[..., second] = b * cos + a * sin
    return out


def spread(count: int, start: int, end: int, *, logarithmic: bool = False) -> HostArray:
    """``count`` positions over [start, end), for a bank that must serve all of them: [count] int32.

    Neighbouring queries of a bank get distant positions, so that every part of the document is
    asked for from everywhere. ``logarithmic`` puts as many positions into every doubling of the
    distance from ``start``.
    """
    if not 0 <= start < end or count < 1:
        raise RequestError(f"{count} positions from {start} to {end}: expected 0 <= start < end")
    golden = (np.arange(count) * 0.6180339887498949) % 1.0  # low discrepancy in any order
    width = end - start
    steps = np.exp2(golden * np.log2(width)) if logarithmic else 1 + golden * (width - 1)
    return (start - 1 + np.round(steps)).astype(np.int32)

"""The few types that every part shares. Fields carry their shape as a comment.

Shape letters: B batch, T tokens in this call, S cache slots, M pages of one request, P pages in the
pool, L layers, D model, N query heads, K KV heads, H head dim.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxrag.base import struct
from pallas_kernels.visibility import EMPTY, FINAL, PREFIX

__all__ = [
    "EMPTY",
    "FINAL",
    "FIRST_CHUNK",
    "HIDDEN",
    "PREFIX",
    "Array",
    "Connection",
    "HostArray",
    "Partial",
    "Rows",
    "Step",
    "TokenRun",
    "Tokens",
    "on_host",
]

Array = jax.Array
HostArray = np.ndarray[Any, Any]
# Row, place, ids, and whether logits are wanted behind them.
TokenRun = tuple[int, int, HostArray, bool]

# Segment ids: EMPTY 0 no token here; PREFIX 1 the system text before the chunks; FINAL 2 question
# and answer, which see everything before them; 3, 4, ... the chunks.
FIRST_CHUNK = 3

HIDDEN = np.int32(np.iinfo(np.int32).max)  # slot_position of a slot that no query may see


class Tokens(struct.PyTreeNode):
    """Tokens with everything that decides who sees whom; int32 arrays in this order."""

    ids: Array  # [B, T]
    positions: Array  # [B, T] the integer RoPE sees
    segments: Array  # [B, T] EMPTY, PREFIX, FINAL or a chunk
    examples: Array | None = None  # [B, T] packed example and question; None = one per row


class Step(struct.PyTreeNode):
    """New tokens that run against the pool; int32 arrays in this order.

    Padding has position -1 and a slot beyond the page table.
    """

    ids: Array  # [B, T]
    positions: Array  # [B, T] the integer RoPE sees
    slots: Array  # [B, T] where in the request's pages their KV is written

    @property
    def tokens(self) -> Tokens:
        """For the decoder: on the cached path every token is of the final block."""
        segments = jnp.full_like(self.ids, FINAL)
        return Tokens(ids=self.ids, positions=self.positions, segments=segments)


def on_host[Node](kind: Callable[..., Node], *arrays: Any) -> Node:
    """A node of arrays that are not on the device yet; compiled functions take it as it is."""
    return kind(*arrays)


class Partial(struct.PyTreeNode):
    """Attention over some of the keys, in a form that ``attention.merge`` can combine."""

    out: Array  # [B, T, N, H] normalised over these keys; 0 where a query sees none of them
    lse: Array  # [B, T, N] float32 log-sum-exp of the scores; -inf where a query sees none


class Rows(Protocol):
    """The rows that an SQL statement gives, each a tuple."""

    def fetchone(self) -> Any:
        """The next row, or None."""

    def fetchall(self) -> list[Any]:
        """All rows that are left."""

    def __iter__(self) -> Iterator[Any]: ...


class Connection(Protocol):
    """What is asked of an open SQLite database, whichever library opened it."""

    def execute(self, statement: str, values: Sequence[Any] = ..., /) -> Rows:
        """Run one statement."""

    def executemany(self, statement: str, values: Iterable[Sequence[Any]], /) -> Rows:
        """Run one statement for each of the values."""

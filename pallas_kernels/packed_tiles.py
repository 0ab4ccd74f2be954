"""Packed rows as their bodies see them, and which pairs of tiles have anything to compute."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.operands import Rows
from pallas_kernels.visibility import (
    EMPTY,
    EXAMPLE_MASK,
    FINAL,
    PREFIX,
    overlaps,
    tile_range,
)

Array = jax.Array
Rule = tuple[Rows, Array | int | None]  # who sees whom: the rows, and the window in tokens


class Residuals(NamedTuple):
    """What the gradient of packed attention is computed from.

    Attributes:
      q: [B, T, N, H].
      k: [B, T, K, H].
      v: [B, T, K, H].
      out: [B, T, N, H] as attention gave it.
      lse: [B, T, N] float32.
      rule: who sees whom.
    """

    q: Array
    k: Array
    v: Array
    out: Array
    lse: Array
    rule: Rule


def classify_tiles(
    segments: Array, examples: Array | None, tile: int, prefix_visible: bool
) -> tuple[Array, Array]:
    """Which tile pairs of rows [B, T] matter, and which need no mask: two of [I, J] bool.

    The first never misses a pair in which some query of some row sees some key; the second claims
    only pairs in which every query of every row sees every key.
    """
    used = segments != EMPTY
    low, high = tile_range(segments, tile, used)
    tiled = (*segments.shape[:-1], -1, tile)
    full = _every(used.reshape(tiled))
    final = (segments == FINAL).reshape(tiled)
    q_low, q_high, k_low, k_high = low[:, :, None], high[:, :, None], low[:, None, :], high[:, None]
    some = overlaps(q_low, q_high, k_low, k_high)
    some |= ~_every(~final)[:, :, None] & (k_high >= k_low)
    every = _every(final)[:, :, None] | ((q_low == k_low) & (q_high == k_high) & (q_low == q_high))
    every &= full[:, :, None] & full[:, None, :]
    if prefix_visible:
        some |= (k_low == PREFIX) & (q_high >= q_low)
    if examples is not None:
        low, high = tile_range(examples & EXAMPLE_MASK, tile, used)
        some &= overlaps(low[:, :, None], high[:, :, None], low[:, None, :], high[:, None, :])
        low, high = tile_range(examples, tile)
        every &= (low == high)[:, :, None] & (low[:, :, None] == low[:, None, :])
        every &= (low == high)[:, None, :]
    order = jnp.arange(segments.shape[-1] // tile)
    earlier = order[None, :] < order[:, None]
    return some.any(0) & (order[None, :] <= order[:, None]), every.all(0) & earlier


def _every(x: Array) -> Array:
    """``x.all(-1)``, by integers: LLVM ends a process that broadcasts eight bools (AVX-512)."""
    return x.astype(jnp.int32).min(-1) == 1

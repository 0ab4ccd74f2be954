"""What the ops share: the pool, the page table over it, the rotation; and packed rows."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.bodies import KernelError
from pallas_kernels.rotation import rotate

Array = jax.Array


class Capped(NamedTuple):
    """In the place of a scale: what is scaled is then held within ``cap``, softly (Gemma 2).

    A score is cap * tanh(scale * product / cap).
    """

    scale: float
    cap: float

    def __truediv__(self, by: float) -> "Capped":
        """Of scores that are divided by a number."""
        return Capped(self.scale / by, self.cap / by)


Scale = float | Capped


def scored(products: Array, scale: Scale) -> Array:
    """Scores of products of queries and keys."""
    if isinstance(scale, Capped):
        return scale.cap * jnp.tanh(products * (scale.scale / scale.cap))
    return products if scale == 1.0 else products * scale


def slope(scores: Array, scale: Scale) -> Array | float:
    """By how much scores grow with their products."""
    if isinstance(scale, Capped):
        return scale.scale * (1 - (scores / scale.cap) ** 2)
    return scale


def uncapped(scale: Scale, impl: str) -> float:
    """The scale of a body that has no cap. Raises KernelError for one with a cap."""
    if isinstance(scale, Capped):
        raise KernelError(f"the body {impl!r} does not cap scores; choose 'xla'")
    return scale


def in_two(scale: Scale) -> tuple[Scale, float]:
    """What makes a softmax's exponents in two steps: of products at once, of differences later."""
    return (scale, 1.0) if isinstance(scale, Capped) else (1.0, scale)


class Pool(NamedTuple):
    """Keys and values in pages; keys are rotated to their place inside their chunk.

    Attributes:
      k: [pages, page, K, H].
      v: [pages, page, K, H].
    """

    k: Array
    v: Array


class Pages(NamedTuple):
    """The page tables of a batch of requests over a pool.

    Attributes:
      pages: [B, M] int32 page of the pool (any valid index where every slot is hidden).
      offsets: [B, M] int32 position of each page's chunk in this request's prompt.
      slot_position: [B, M * page] int32 absolute position; INT32_MAX hides a slot, and what it
        holds, NaN included, is unused.
    """

    pages: Array
    offsets: Array
    slot_position: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotation by position; a tree of two arrays, how dimensions pair is static.

    Attributes:
      cos: [S, R/2] float32, S beyond every position and offset.
      sin: [S, R/2] float32.
      interleaved: pairs are (0, 1), (2, 3), ...; else (0, R/2), (1, R/2 + 1), ...
    """

    cos: Array
    sin: Array
    interleaved: bool = dataclasses.field(metadata={"static": True})

    def rotate_by(self, x: Array, by: Array) -> Array:
        """Rotate x [..., H] by ``by`` >= 0, int32 of x's leading dimensions."""
        axes = tuple(range(by.ndim, x.ndim - 1))
        cos, sin = (jnp.expand_dims(table[by], axes) for table in (self.cos, self.sin))
        return rotate(x, cos, sin, interleaved=self.interleaved)

    def rotate_either_way(self, x: Array, by: Array) -> Array:
        """Rotate x [..., H] by ``by``, int32 broadcastable to x's dimensions but the last."""
        angle = jnp.abs(by)
        cos, sin = self.cos[angle], jnp.sign(by)[..., None] * self.sin[angle]
        return rotate(x, cos, sin, interleaved=self.interleaved)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Placed:
    """In the place of ``Rotary``: queries and keys that stand where they belong are not turned."""

    def rotate_by(self, x: Array, by: Array) -> Array:
        """x itself."""
        return x


class Rows(NamedTuple):
    """Packed rows, by what decides who sees whom (visibility.py).

    Attributes:
      positions: [B, T] int32, read by a window only.
      segments: [B, T] int32.
      examples: [B, T] int32 (example | question << 16), or None for one example a row.
    """

    positions: Array
    segments: Array
    examples: Array | None = None

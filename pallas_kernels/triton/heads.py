"""The dimensions of a head as a Triton kernel reads them: powers of two, rotary halves apart.

Scores of a rotated head are sums of three products, those of the first and second members of the
rotary pairs and those of the dimensions that are not rotated, so that no kernel joins two halves.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array

LOG2_E = 1.4426950408889634
_LEAST = 16  # depth of a product on tensor cores


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least n and ``least``."""
    return max(least, 1 << (n - 1).bit_length())


@dataclasses.dataclass(frozen=True)
class HeadParts:
    """How a head falls into parts.

    Attributes:
      dim: dimensions of the head.
      pairs: rotary pairs; 2 * pairs dimensions are rotated.
      interleaved: how dimensions pair, as in ``Rotary``.
    """

    dim: int
    pairs: int
    interleaved: bool

    @property
    def padded(self) -> int:
        """Dimensions of a value as stored by a kernel."""
        return power_of_two(self.dim, _LEAST)

    @property
    def num_rest(self) -> int:
        """Dimensions that are not rotated."""
        return self.dim - 2 * self.pairs

    def part(self, which: int) -> tuple[Array, Array | None]:
        """Columns of a part, and which of them are real (None: all of them).

        Parts 0 and 1 are the members of the rotary pairs, 2 the rest, 3 the whole head. Padding
        repeats the last column.
        """
        step = 2 if self.interleaved and which < 2 else 1
        first = (0, 1 if self.interleaved else self.pairs, 2 * self.pairs, 0)[which]
        count = (self.pairs, self.pairs, self.num_rest, self.dim)[which]
        at, real = columns(count)
        return first + step * at, real


def columns(count: int) -> tuple[Array, Array | None]:
    """0 .. count - 1, padded to a power of two with the last one, and which are real."""
    size = power_of_two(count, _LEAST)
    at = lax.iota(jnp.int32, size)
    if size == count:
        return at, None
    return jnp.minimum(at, count - 1), at < count


def zero_padding(x: Array, real: Array | None) -> Array:
    """x [R, columns] with zeros in the columns that are not real."""
    return x if real is None else jnp.where(real[None, :], x, 0)

"""Rotary position embedding: tables of cosines and sines, and rotation.

Angles are computed in float64 and stored as float32 cosine and sine tables. Rotation itself is pure
and composes: ``rotate`` by a then by b is ``rotate`` by a + b. A YaRN attention factor is no
rotation; ``place`` multiplies it in once, when a query or key first receives its position.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrag.base import struct
from jaxrag.base.config import RopeConfig
from jaxrag.base.rotary import attention_factor, frequencies
from jaxrag.base.types import Array, HostArray
from pallas_kernels.rotation import rotate

__all__ = [
    "Rope",
    "RopeFactors",
    "RopeTable",
    "place",
    "rope_factors",
    "rope_table",
    "rotate",
]

FINE = 1024  # positions of the fine table


class RopeTable(struct.PyTreeNode):
    """cos and sin of every position; S positions, R rotary dims."""

    cos: Array  # [S, R/2] float32
    sin: Array  # [S, R/2] float32

    def at(self, positions: Array) -> tuple[Array, Array]:
        """Cosine and sine [..., R/2] of positions [...]."""
        return self.cos[positions], self.sin[positions]


class RopeFactors(struct.PyTreeNode):
    """The same of any position in the memory of two short tables: p = fine + FINE * coarse.

    cos(a + b) = cos a cos b - sin a sin b, rounded once more than in a ``RopeTable``.
    """

    fine: RopeTable  # of positions 0 .. FINE - 1
    coarse: RopeTable  # of positions 0, FINE, 2 FINE, ...

    def at(self, positions: Array) -> tuple[Array, Array]:
        """Cosine and sine [..., R/2] of positions [...]."""
        (cos, sin), (dcos, dsin) = self.coarse.at(positions // FINE), self.fine.at(positions % FINE)
        return cos * dcos - sin * dsin, sin * dcos + cos * dsin


Rope = RopeTable | RopeFactors


def rope_table(rope: RopeConfig, num_positions: int) -> RopeTable:
    """Tables for positions 0 .. num_positions - 1."""
    return _table(rope, np.arange(num_positions))


def rope_factors(rope: RopeConfig, num_positions: int) -> RopeFactors:
    """Factors for positions 0 .. num_positions - 1 and some more."""
    coarse = np.arange(0, max(num_positions, 1), FINE)
    return RopeFactors(fine=_table(rope, np.arange(FINE)), coarse=_table(rope, coarse))


def _table(rope: RopeConfig, positions: HostArray) -> RopeTable:
    angles = positions.astype(np.float64)[:, None] * frequencies(rope)
    both = (np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))
    cos, sin = jax.device_put(both)  # jnp.asarray would compile a program for each shape
    return RopeTable(cos=cos, sin=sin)


def scale_rotary(x: Array, rope: RopeConfig) -> Array:
    """Multiply the rotary dims of x [..., H] by the attention factor; x itself when it is 1."""
    factor = attention_factor(rope)
    if factor == 1.0:
        return x
    rotary = jnp.arange(x.shape[-1]) < rope.rotary_dim
    return (x.astype(jnp.float32) * jnp.where(rotary, factor, 1.0)).astype(x.dtype)


def place(x: Array, positions: Array, table: Rope, rope: RopeConfig) -> Array:
    """Give heads x [..., T, heads, H] their positions [..., T]: rotation and attention factor."""
    return turn(scale_rotary(x, rope), positions, table, rope)


def turn(x: Array, by: Array, table: Rope, rope: RopeConfig) -> Array:
    """Rotate heads x [..., T, heads, H] by ``by`` [..., T] >= 0 positions more."""
    cos, sin = (part[..., None, :] for part in table.at(by))
    return rotate(x, cos, sin, interleaved=rope.interleaved)

"""Rotary position embedding: tables of cosines and sines, and rotation.

Angles are computed in float64 and stored as float32 cosine and sine tables. Rotation itself is pure
and composes: ``rotate`` by a then by b is ``rotate`` by a + b. A YaRN attention factor is no
rotation; ``place`` multiplies it in once, when a query or key first receives its position.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrag.base import struct
from jaxrag.base.config import ModelConfig, RopeConfig
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
    "rope_tables",
    "rotate",
]

FINE = 1024  # positions of the fine table


class RopeTable(struct.PyTreeNode):
    """cos and sin of every position; S positions, R rotary dims.

    Where layers are of several kinds, of each kind: then ``of_layer`` is what tokens are placed by.
    """

    cos: Array  # [S, R/2] float32, or [kinds, S, R/2]
    sin: Array  # the same
    kinds: tuple[int, ...] | None = struct.static(default=None)  # [L] of each layer, where several
    factor: Any = None  # [kinds] float32, or of one: the attention factor, where kinds differ in it

    def of_layer(self, layer: Array | int) -> "RopeTable":
        """The table of one layer: [S, R/2]."""
        if self.kinds is None:
            return self
        kind = jnp.asarray(self.kinds, jnp.int32)[layer]
        factor = None if self.factor is None else self.factor[kind]
        return RopeTable(self.cos[kind], self.sin[kind], factor=factor)

    def at(self, positions: Array) -> tuple[Array, Array]:
        """Cosine and sine [..., R/2] of positions [...]."""
        return self.cos[positions], self.sin[positions]


class RopeFactors(struct.PyTreeNode):
    """The same of any position in the memory of two short tables: p = fine + FINE * coarse.

    cos(a + b) = cos a cos b - sin a sin b, rounded once more than in a ``RopeTable``.
    """

    fine: RopeTable  # of positions 0 .. FINE - 1
    coarse: RopeTable  # of positions 0, FINE, 2 FINE, ...

    @property
    def factor(self) -> Any:
        """As that of a ``RopeTable``."""
        return self.fine.factor

    def of_layer(self, layer: Array | int) -> "RopeFactors":
        """The factors of one layer."""
        return RopeFactors(self.fine.of_layer(layer), self.coarse.of_layer(layer))

    def at(self, positions: Array) -> tuple[Array, Array]:
        """Cosine and sine [..., R/2] of positions [...]."""
        (cos, sin), (dcos, dsin) = self.coarse.at(positions // FINE), self.fine.at(positions % FINE)
        return cos * dcos - sin * dsin, sin * dcos + cos * dsin


Rope = RopeTable | RopeFactors


def rope_table(rope: RopeConfig, num_positions: int) -> RopeTable:
    """Tables for positions 0 .. num_positions - 1."""
    return _table((rope,), None, np.arange(num_positions))


def rope_tables(config: ModelConfig, num_positions: int) -> RopeTable:
    """The same for the layers of a model, which may be of several kinds."""
    return _table(config.ropes, config.rope_layers, np.arange(num_positions))


def rope_factors(config: ModelConfig, num_positions: int) -> RopeFactors:
    """Factors for positions 0 .. num_positions - 1 and some more."""
    coarse, of = np.arange(0, max(num_positions, 1), FINE), (config.ropes, config.rope_layers)
    return RopeFactors(fine=_table(*of, np.arange(FINE)), coarse=_table(*of, coarse))


def _table(
    ropes: tuple[RopeConfig, ...], kinds: tuple[int, ...] | None, positions: HostArray
) -> RopeTable:
    angles = [positions.astype(np.float64)[:, None] * frequencies(rope) for rope in ropes]
    angle = angles[0] if kinds is None else np.stack(angles)
    both = (np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32))
    cos, sin = jax.device_put(both)  # jnp.asarray would compile a program for each shape
    factors = [attention_factor(rope) for rope in ropes]
    differ = jax.device_put(np.array(factors, np.float32)) if len(set(factors)) > 1 else None
    return RopeTable(cos=cos, sin=sin, kinds=kinds, factor=differ)


def scale_rotary(x: Array, table: Rope, rope: RopeConfig) -> Array:
    """Multiply the rotary dims of x [..., H] by the attention factor; x itself when it is 1.

    ``table`` is of the layer, of which ``rope`` is where layers do not differ in their factor.
    """
    factor = attention_factor(rope)
    if table.factor is not None:
        factor = table.factor
    elif factor == 1.0:
        return x
    rotary = jnp.arange(x.shape[-1]) < rope.rotary_dim
    return (x.astype(jnp.float32) * jnp.where(rotary, factor, 1.0)).astype(x.dtype)


def place(x: Array, positions: Array, table: Rope, rope: RopeConfig) -> Array:
    """Give heads x [..., T, heads, H] their positions [..., T]: rotation and attention factor."""
    return rotate_by(scale_rotary(x, table, rope), positions, table, rope)


def rotate_by(x: Array, by: Array, table: Rope, rope: RopeConfig) -> Array:
    """Rotate heads x [..., T, heads, H] by ``by`` [..., T] >= 0 positions more."""
    cos, sin = (part[..., None, :] for part in table.at(by))
    return rotate(x, cos, sin, interleaved=rope.interleaved)

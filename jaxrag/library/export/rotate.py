"""Keys as an engine keeps them: rotated once, in float32, to the positions of their tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrag.base.config import RopeConfig
from jaxrag.base.shapes import bucket
from jaxrag.base.types import Array, HostArray
from jaxrag.models.rope import RopeTable, place, rope_table

_SMALLEST_SHAPE = 256  # tokens and positions are padded to powers of two from here on


def place_keys(keys: HostArray, first_position: int, rope: RopeConfig) -> HostArray:
    """Give keys [L, T, K, H] the positions first_position, first_position + 1, ...

    A YaRN attention factor is multiplied in. Computed in float32 and rounded once, to the dtype of
    ``keys``. Runs on the CPU, whatever accelerators there are.
    """
    layers, tokens, heads, dim = keys.shape
    padded = np.zeros((layers, bucket(tokens, _SMALLEST_SHAPE), heads, dim), keys.dtype)
    padded[:, :tokens] = keys
    last = first_position + padded.shape[1]
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        table = rope_table(rope, bucket(last, _SMALLEST_SHAPE))
        return np.asarray(_place(padded, np.int32(first_position), table, rope))[:, :tokens]


@functools.partial(jax.jit, static_argnames=("rope",))
def _place(keys: Array, first_position: Array, table: RopeTable, rope: RopeConfig) -> Array:
    positions = first_position + jnp.arange(keys.shape[1])

    def layer(k: Array) -> Array:
        return place(k.astype(jnp.float32), positions, table, rope).astype(k.dtype)

    return lax.map(layer, keys)

"""Maps of recurrent layers as bytes: rows behind the KV of a chunk's tokens.

A chunk's are a fixed number of bytes, however many tokens it has: of each value head of a layer the
map S -> A S + B, and the last inputs of the convolution. int8 keeps A without its diagonal: what is
left of a state without a new token is a multiple of I, beside which the rest of a row is small.
"""

import math
from typing import Literal

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxrag.base import struct
from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import StoreError
from jaxrag.base.types import Array, HostArray
from jaxrag.kv.store.layout import KVLayout
from jaxrag.kv.store.quantise import quantise
from jaxrag.models.recurrent import StateMap

MapForm = Literal["float32", "bfloat16", "int8"]
MAP_FORMS: dict[str, MapForm] = {
    "jax": "float32",
    "jax:bfloat16": "bfloat16",
    "jax:int8": "int8",
}  # by the engine that stores them so
_WIDTH: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int8": np.dtype(np.int8),
}


class StoredMaps(struct.PyTreeNode):
    """What a chunk does to the memory of recurrent layers, in the form in which it is stored."""

    tail: Array | HostArray  # [Lr, W - 1, C] float32
    a: Array | HostArray  # [Lr, Hv, Dk, Dk]
    b: Array | HostArray  # [Lr, Hv, Dk, Dv]
    a_scale: Array | HostArray | None = None  # [Lr, Hv, Dk] float32 of int8
    b_scale: Array | HostArray | None = None
    diagonal: Array | HostArray | None = None  # [Lr, Hv, Dk] float32, of A

    def wide(self) -> StateMap:
        """The maps in float32."""
        a, b = (jnp.asarray(x, jnp.float32) for x in (self.a, self.b))
        if self.a_scale is None or self.b_scale is None or self.diagonal is None:
            return StateMap(a, b)
        own = jnp.asarray(self.diagonal)[..., None] * jnp.eye(a.shape[-1])
        return StateMap(
            a * jnp.asarray(self.a_scale)[..., None] + own,
            b * jnp.asarray(self.b_scale)[..., None],
        )


def map_layout(config: ModelConfig, form: MapForm) -> KVLayout:
    """Of chunks of a model with recurrent layers: KV of those that attend, and rows of maps."""
    plain = KVLayout(config.num_kv_layers, config.num_kv_heads, config.head_dim, config.dtype)
    sizes = (math.prod(shape) * dtype.itemsize for _, shape, dtype in _arrays(config, form))
    return KVLayout(
        plain.num_layers,
        plain.num_kv_heads,
        plain.head_dim,
        plain.dtype,
        rows=-(-sum(sizes) // plain.nbytes(1)),
    )


def stored_maps(maps: StateMap, tail: HostArray, form: MapForm) -> StoredMaps:
    """Maps and tail of a chunk, float32 on the host, as they are stored.

    Raises StoreError for NaN and infinity: no answer could be made from them.
    """
    a, b = np.asarray(maps.a), np.asarray(maps.b)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise StoreError("maps hold NaN or infinity; load the model in a wider dtype")
    if form != "int8":
        return StoredMaps(tail, a.astype(_WIDTH[form]), b.astype(_WIDTH[form]))
    diagonal = a.diagonal(axis1=-2, axis2=-1).copy()
    rest = a * (1 - np.eye(a.shape[-1], dtype=np.float32))
    (a, a_scale), (b, b_scale) = quantise(rest), quantise(b)
    return StoredMaps(tail, a, b, a_scale, b_scale, diagonal)


def with_maps(kv: HostArray, stored: StoredMaps, layout: KVLayout) -> HostArray:
    """KV [L, 2, T, K, H] with maps behind its tokens, [L, 2, T + rows, K, H]."""
    shape = layout.shape(0)
    room = np.zeros(layout.nbytes(0), np.uint8)
    arrays = (stored.tail, stored.a, stored.b, stored.a_scale, stored.b_scale, stored.diagonal)
    start = 0
    for x in (np.ascontiguousarray(x) for x in arrays if x is not None):
        room[start : start + x.nbytes] = x.reshape(-1).view(np.uint8)
        start += x.nbytes
    return np.concatenate([kv, room.view(layout.numpy_dtype).reshape(shape)], axis=2)


def maps_behind(kv: HostArray, config: ModelConfig, form: MapForm, layout: KVLayout) -> StoredMaps:
    """Inverse of ``with_maps``."""
    bits = np.ascontiguousarray(kv[:, :, kv.shape[2] - layout.rows :]).reshape(-1).view(np.uint8)
    found, start = {}, 0
    for name, shape, dtype in _arrays(config, form):
        end = start + math.prod(shape) * dtype.itemsize
        found[name] = bits[start:end].view(dtype).reshape(shape)
        start = end
    return StoredMaps(**found)


def _arrays(config: ModelConfig, form: MapForm) -> list[tuple[str, tuple[int, ...], np.dtype]]:
    """Name, shape and dtype of everything that is stored, in order."""
    r = config.recurrent
    assert r is not None
    layers, wide, kept = r.layers.count(True), _WIDTH["float32"], _WIDTH[form]
    of = (layers, r.value_heads, r.key_dim)
    found = [
        ("tail", (layers, r.width - 1, r.channels), wide),
        ("a", (*of, r.key_dim), kept),
        ("b", (*of, r.value_dim), kept),
    ]
    scales = ("a_scale", "b_scale", "diagonal") if form == "int8" else ()
    return found + [(name, of, wide) for name in scales]

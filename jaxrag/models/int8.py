"""Weights as int8, for decode steps on a CPU, which hardly do anything but read them.

A weight has one scale for each of its outputs. A row of activations is split into two rows of int8,
the second of what the first rounded off, so that it is exact to 15 bits and only the weights lose
precision. The weight is the left operand: XLA:CPU's library reads that as it lies, and packs the
right one first.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrag.base import struct
from jaxrag.base.types import Array, HostArray
from jaxrag.models.spec import LayerParams, Params

_MOST = 127
_INNER = {"q": 1, "k": 1, "v": 1, "o": 2, "gate": 1, "up": 1, "down": 1}  # axes that are summed


class Int8Weight(struct.PyTreeNode):
    """A weight [*I, *O] as integers times the scale of each output.

    Attributes:
      values: [O, I] int8, both flat.
      scale: [O] float32.
      outer: the shape *O.
    """

    values: Array
    scale: Array
    outer: tuple[int, ...] = struct.static()


def quantised(weight: HostArray, inner: int) -> Int8Weight:
    """A weight [*I, *O], I its first ``inner`` axes, rounded to the nearest integers."""
    outer = weight.shape[inner:]
    rows = weight.astype(np.float32).reshape(-1, math.prod(outer)).T
    scale = np.maximum(np.abs(rows).max(1), np.finfo(np.float32).tiny) / _MOST
    values = np.rint(rows / scale[:, None]).astype(np.int8)
    return Int8Weight(jnp.asarray(values), jnp.asarray(scale), outer)


def int8_product(x: Array, weight: Int8Weight) -> Array:
    """Rows [R, I] times a weight -> [R, O] float32."""
    wide = x.astype(jnp.float32)
    step = jnp.maximum(jnp.abs(wide).max(1, keepdims=True), jnp.finfo(jnp.float32).tiny) / _MOST
    exact = wide / step
    coarse = jnp.round(exact)
    fine = jnp.round((exact - coarse) * (2 * _MOST))
    pairs = jnp.stack([coarse.T, fine.T], -1).astype(jnp.int8).reshape(x.shape[1], -1)  # [I, 2 R]
    sums = lax.dot_general(
        weight.values,
        lax.optimization_barrier(pairs),
        (((1,), (0,)), ((), ())),
        preferred_element_type=jnp.int32,
    )
    # Without the barriers the compiler would transpose the product, and pack the weight.
    sums = lax.optimization_barrier(sums).astype(jnp.float32).reshape(-1, len(x), 2)
    return (sums[..., 0] + sums[..., 1] / (2 * _MOST)).T * step * weight.scale


def with_int8_weights(params: Params) -> Params:
    """Weights on a CPU with layers apart, their matrices and the output's table as int8.

    What is not a matrix, and the table of the inputs, stay as they are, and keep their memory.
    """

    def layer(stacked: dict[str, np.ndarray], index: int) -> LayerParams:
        own = {name: leaf[index] for name, leaf in stacked.items()}
        small = {name: jnp.asarray(it) for name, it in own.items() if name not in _INNER}
        large = {name: quantised(own[name], it) for name, it in _INNER.items() if name in own}
        return LayerParams(**small, **large)

    parts = [
        {name: np.asarray(leaf) for name, leaf in vars(part).items() if leaf is not None}
        for part in (params.layers, params.sharing)
        if part is not None
    ]
    head = np.asarray(params.embed).T if params.lm_head is None else np.asarray(params.lm_head)
    layers = [layer(part, index) for part in parts for index in range(len(part["q"]))]
    return params.replace(layers=layers, sharing=None, lm_head=quantised(head, 1))

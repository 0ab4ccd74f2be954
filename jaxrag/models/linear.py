"""The products of activations and weights, with gradients that are fast on the CPU as well.

This is the one place that says what is particular to the CPU about them. A product whose left
operand is read transposed is slow there where that operand is the wider one. One of several axes
copies the weight first. A single row of float32 is multiplied by one core, as a batch of parts of
the weight by all: 20 and 30 GB/s on two. A single row of bfloat16 is multiplied with a weight that
was made float32 before, two rows by a library that reads it as it is: 2 and 22 GB/s.

A scan over stacked weights copies those of a layer before XLA:CPU multiplies with them. For a chunk
that is a few percent; a decode step does hardly anything but read weights. There layers are held
apart (``by_layer``), and a program has a few of them, or one for a prompt, and is called for each.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.sharding import Mesh

from jaxrag.base.config import Activation
from jaxrag.base.types import Array
from jaxrag.models.compiled import processors
from jaxrag.models.int8 import Int8Weight, int8_product
from jaxrag.models.spec import LayerParams, Params
from pallas_kernels.forms import forms

PRODUCT = "linear"  # checkpoint_name of what ``linear`` returns, for rematerialisation policies

_Kept = tuple[Array | None, Array | None]  # x and weight, each None where the gradient needs none
IN_CACHE = 64 << 20  # bytes of layers; a copy of what the processor's caches hold costs little
_SHARED = 1 << 18  # bytes of a weight from which cores share a row's product with it
_IN_PLACE = 64  # bytes; XLA:CPU reads host memory in place from such an address on


def linear(x: Array, weight: Array | Int8Weight) -> Array:
    """x [B, T, *I] @ weight [*I, *O], of one dtype or int8 -> [B, T, *O]; reverse mode only."""
    if isinstance(weight, Int8Weight):
        out = int8_product(x.reshape(math.prod(x.shape[:2]), -1), weight)
        return out.astype(x.dtype).reshape(*x.shape[:2], *weight.outer)
    return _linear(x, weight)


@jax.custom_vjp
def _linear(x: Array, weight: Array) -> Array:
    inner = math.prod(x.shape[2:])
    rows = x.reshape(*x.shape[:2], inner)  # of no token too, so not -1
    return product(rows, weight.reshape(inner, *weight.shape[x.ndim - 2 :]))


def activated(gate: Array, activation: Activation) -> Array:
    """The gate of an MLP, in its dtype."""
    if activation == "silu":
        return jax.nn.silu(gate)
    # In float32, as torch has it.
    return jax.nn.gelu(gate.astype(jnp.float32), approximate=True).astype(gate.dtype)


def product(x: Array, weight: Array, axis: int = 0, dtype: Any = None) -> Array:
    """x [..., I] times a weight of which ``axis`` is I, accumulated in ``dtype``."""

    def plain(x: Array) -> Array:
        over = (((x.ndim - 1,), (axis,)), ((), ()))
        return lax.dot_general(x, weight, over, preferred_element_type=dtype)

    single = x.size == x.shape[-1] and jax.default_backend() == "cpu"
    if single and x.dtype == jnp.float32 and weight.nbytes >= _SHARED:
        return _by_all_cores(x, weight, axis)
    if single and x.dtype == jnp.bfloat16 and forms().doubled_row:
        # Without the barrier the compiler would see that the rows are one.
        return plain(lax.optimization_barrier(jnp.concatenate([x, x])))[:1]
    return plain(x)


def _by_all_cores(x: Array, weight: Array, axis: int) -> Array:
    """``product`` of a single row, the first axis of the weight in a part for every core."""
    parts = math.gcd(weight.shape[0], 1 << (processors().bit_length() - 1))
    each = weight.reshape(parts, -1, math.prod(weight.shape[1:]))
    if axis == 0:
        row, over = x.reshape(parts, 1, -1), (((2,), (1,)), ((0,), (0,)))
        out = lax.dot_general(row, each, over).sum(0)
    else:
        row = jnp.broadcast_to(x.reshape(1, 1, -1), (parts, 1, x.size))
        out = lax.dot_general(row, each, (((2,), (2,)), ((0,), (0,))))
    return out.reshape(*x.shape[:-1], *weight.shape[:axis], *weight.shape[axis + 1 :])


def _forward(x: Any, weight: Any) -> tuple[Array, _Kept]:
    kept = x.value if weight.perturbed else None, weight.value if x.perturbed else None
    return checkpoint_name(_linear(x.value, weight.value), PRODUCT), kept


def _backward(kept: _Kept, d_out: Array | SymbolicZero) -> tuple[Array | None, Array | None]:
    if isinstance(d_out, SymbolicZero):
        return None, None
    x, weight = kept
    outer = d_out.shape[2:]
    rows = d_out.reshape(-1, math.prod(outer))
    d_x = d_weight = None
    if weight is not None:
        inner = weight.shape[: weight.ndim - len(outer)]
        d_x = rows @ weight.reshape(-1, math.prod(outer)).T
        d_x = d_x.reshape(*d_out.shape[:2], *inner)
    if x is not None:
        inner = x.shape[2:]
        d_weight = over_rows(x.reshape(-1, math.prod(inner)), rows).reshape(*inner, *outer)
    return d_x, d_weight


_linear.defvjp(_forward, _backward, symbolic_zeros=True)


def over_rows(a: Array, b: Array, dtype: Any = None) -> Array:
    """a [M, I] and b [M, O], summed over M: a.T @ b [I, O] in ``dtype``, by default theirs."""

    def product(a: Array, b: Array) -> Array:
        return lax.dot_general(a, b, (((0,), (0,)), ((), ())), preferred_element_type=dtype)

    def swapped(a: Array, b: Array) -> Array:
        # Without the barrier the compiler would swap them back.
        return lax.optimization_barrier(product(b, a)).T

    if a.shape[1] <= b.shape[1]:
        return product(a, b)
    return lax.platform_dependent(a, b, cpu=swapped, default=product)


def gains_by_layer(params: Params, mesh: Mesh | None) -> bool:
    """Would ``by_layer`` make decoding faster, and hold no weight twice?"""
    if mesh is not None or jax.default_backend() != "cpu" or not forms().layers_apart:
        return False
    leaves = jax.tree.leaves((params.layers, params.sharing, params.recurrent))
    large = [leaf for leaf in leaves if leaf.ndim > 2]  # the others are vectors of a layer
    in_place = all(leaf.nbytes // len(leaf) % _IN_PLACE == 0 for leaf in large)
    return in_place and sum(leaf.nbytes for leaf in leaves) > IN_CACHE


def by_layer(params: Params, stacks: Mapping[str, Sequence[int]]) -> Params:
    """The same weights, ``layers`` a list of one LayerParams a layer, without the leading L.

    Of weights on a CPU; the arrays lie in the memory of ``params``, and keep it. ``stacks`` are
    those of the config.
    """
    layers: dict[int, LayerParams] = {}
    for name, numbers in stacks.items():
        leaves, tree = jax.tree.flatten(getattr(params, name))
        apart = [[_in_place(layer) for layer in np.asarray(leaf)] for leaf in leaves]
        its = (jax.tree.unflatten(tree, weights) for weights in zip(*apart, strict=True))
        layers |= zip(numbers, its, strict=True)
    found = [layers[number] for number in sorted(layers)]
    return params.replace(layers=found, sharing=None, recurrent=None)


def _in_place(view: np.ndarray) -> Array:
    return jax.device_put(view, may_alias=True)

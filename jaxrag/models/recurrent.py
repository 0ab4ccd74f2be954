"""A layer of Gated DeltaNet: projections, a short convolution, the delta rule, a gated norm.

Its memory of the tokens is of one size, however many they are: the state of each value head, and
the last inputs of the convolution. ``Recurrent`` is that of rows that go on from it; of packed rows
there are ``Paths``, along which every part begins with the memory that it is to have.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxrag.base import struct
from jaxrag.base.config import ModelConfig
from jaxrag.base.recurrent import RecurrentConfig
from jaxrag.base.types import EMPTY, Array, Tokens
from jaxrag.models.delta_rule import (
    Paths,
    StateMap,
    Writes,
    by_paths,
    by_steps,
    by_tiles,
    chunk_map,
    paths,
)
from jaxrag.models.linear import linear
from jaxrag.models.spec import LayerParams

__all__ = ["Paths", "Recurrent", "RowMemory", "StateMap", "no_memory", "packed", "recurrent_out"]

_EPS = 1e-6  # of the norms of queries and keys, whatever that of the model


class Recurrent(struct.PyTreeNode):
    """What recurrent layers know of the tokens before, of each row; without Lr: of one layer.

    Attributes:
      state: [Lr, B, Hv, Dk, Dv] float32.
      tail: [Lr, B, W - 1, C], the last inputs of the convolution, zeros before a row's first.
      map: what the tokens just run make of any state, a and b of [Lr, B, Hv, ...]; None: not asked.
      wants_map: is it to come back with the next tokens?
    """

    state: Array
    tail: Array
    map: StateMap | None = None
    wants_map: bool = struct.static(default=False)


RowMemory = Recurrent | Paths | None


def no_memory(config: ModelConfig, batch: int) -> Recurrent:
    """That of so many rows before their first token."""
    r = config.recurrent
    assert r is not None
    of = (r.layers.count(True), batch)
    state = jnp.zeros((*of, r.value_heads, r.key_dim, r.value_dim), jnp.float32)
    return Recurrent(state, jnp.zeros((*of, r.width - 1, r.channels), config.dtype))


def packed(config: ModelConfig, tokens: Tokens, prefix_visible: bool) -> Paths | None:
    """What recurrent layers read packed rows by; None where the model has none."""
    if config.recurrent is None:
        return None
    return paths(tokens, prefix_visible, config.recurrent.width)


def recurrent_out(
    x: Array, p: LayerParams, config: ModelConfig, tokens: Tokens, memory: Recurrent | Paths
) -> tuple[Array, Recurrent | None]:
    """What one layer makes of its normed input x [B, T, D], and its memory behind the tokens.

    Tokens of no segment at the end of a row are padding. ``memory`` is that of this layer.
    """
    r = config.recurrent
    assert r is not None
    mixed, gate = _projected(x, p, r)
    seen, tail = _convolved(mixed, p.conv[:, 0], tokens, memory)
    rows, heads = x.shape[:2], r.value_heads // r.key_heads
    q, k, v = jnp.split(seen, [r.key_heads * r.key_dim, 2 * r.key_heads * r.key_dim], -1)
    q, k = (
        jnp.repeat(_unit(it.reshape(*rows, r.key_heads, r.key_dim)), heads, axis=2) for it in (q, k)
    )
    rate = jax.nn.sigmoid(linear(x, p.rate)).reshape(*rows, -1)
    step = linear(x, p.decay).reshape(*rows, -1).astype(jnp.float32)
    step = jax.nn.softplus(step + p.decay_bias.astype(jnp.float32))
    writes = Writes(
        k=k,
        v=v.reshape(*rows, r.value_heads, r.value_dim).astype(jnp.float32),
        decay=-jnp.exp(p.decay_log.astype(jnp.float32)) * step,
        beta=rate.astype(jnp.float32),
    )
    q = q * r.key_dim**-0.5
    behind = None
    if isinstance(memory, Paths):
        out = by_paths(q, writes, memory)
    else:
        writes = writes.of(tokens.segments != EMPTY)
        run = by_steps if rows[1] == 1 else by_tiles
        out, state = run(q, writes, memory.state)
        map_ = chunk_map(writes) if memory.wants_map else None
        behind = memory.replace(state=state, tail=tail, map=map_)
    return linear(_gated_norm(out.astype(x.dtype), gate, p, config), p.out), behind


def _projected(x: Array, p: LayerParams, r: RecurrentConfig) -> tuple[Array, Array]:
    """Queries, keys and values [B, T, C] before the convolution, and the gate [B, T, Hv, Dv]."""
    if p.mixed is None:
        return linear(x, p.qkv), linear(x, p.out_gate)
    values = r.value_heads // r.key_heads * r.value_dim
    at = [r.key_dim, 2 * r.key_dim, 2 * r.key_dim + values]
    *qkv, gate = jnp.split(linear(x, p.mixed), at, -1)
    rows = x.shape[:2]
    mixed = jnp.concatenate([it.reshape(*rows, -1) for it in qkv], -1)
    return mixed, gate.reshape(*rows, r.value_heads, r.value_dim)


def _convolved(
    x: Array, weight: Array, tokens: Tokens, memory: Recurrent | Paths
) -> tuple[Array, Array | None]:
    """x [B, T, C] and the tokens before it through ``weight`` [C, W], and the new tail."""
    width, length = weight.shape[1], x.shape[1]
    if isinstance(memory, Paths):
        at = memory.before
        tail, before = None, [
            jnp.where(
                at[..., i, None] >= 0,
                jnp.take_along_axis(x, jnp.maximum(at[..., i, None], 0), 1),
                0,
            )
            for i in range(width - 1)
        ]  # fmt: skip
    else:
        known = jnp.concatenate([memory.tail.astype(x.dtype), x], 1)
        before = [known[:, i : i + length] for i in range(width - 1)]
        last = (tokens.segments != EMPTY).sum(1)[:, None] + jnp.arange(width - 1)
        tail = jnp.take_along_axis(known, last[..., None], 1)
    taps = weight.astype(jnp.float32)
    products = [it.astype(jnp.float32) * taps[:, i] for i, it in enumerate([*before, x])]
    out = functools.reduce(operator.add, products)
    return jax.nn.silu(out.astype(x.dtype)), tail


def _unit(x: Array) -> Array:
    wide = x.astype(jnp.float32)
    return wide * lax.rsqrt((wide * wide).sum(-1, keepdims=True) + _EPS)


def _gated_norm(x: Array, gate: Array, p: LayerParams, config: ModelConfig) -> Array:
    """RMSNorm of x [B, T, Hv, Dv] over Dv, by its weight itself, times the SiLU of the gate."""
    wide: Any = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + config.norm_eps)
    wide = (p.out_norm * wide.astype(x.dtype)).astype(jnp.float32)
    return (wide * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)

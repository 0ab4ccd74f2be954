"""The gradient of packed attention as two Triton kernels, one over query and one over key tiles.

Both compute the scores of a tile pair again from ``lse`` (FlashAttention-2, algorithm 2,
arXiv:2307.08691) and visit the pairs that the forward kernel visits: the first sums the gradient of
its queries over key tiles, the second those of its keys and values over query tiles and the query
heads of the KV head. Nothing is added to from two programs, so the sums have one order.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.packed_tiles import Residuals
from pallas_kernels.tiles import pad_to
from pallas_kernels.triton.heads import LOG2_E, power_of_two
from pallas_kernels.triton.segment import (
    SegmentTiling,
    Sight,
    chosen_tiles,
    listed,
    rows_of,
    rule_specs,
    segment_tiling,
)

Array = jax.Array
Ref = Any  # what a kernel reads and writes through

_FLOOR = -1e30


def segment_gradient_kernel(
    residuals: Residuals,
    cotangents: tuple[Array, Array],
    *,
    scale: float,
    prefix_visible: bool,
    interpret: bool,
    tiling: SegmentTiling | None = None,
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v, in their dtypes, from those of ``out`` and ``lse``."""
    q, k, v, out, lse, rule = residuals
    d_out, d_lse = cotangents
    _, length, num_heads, dim = q.shape
    num_kv_heads = k.shape[2]
    group = num_heads // num_kv_heads
    tiling = tiling or segment_tiling(length, group)
    tile, heads = tiling.tile, tiling.heads
    width = power_of_two(dim, 16)
    # Rows that see nothing have lse = -inf; their weights are masked, so any finite number does.
    base = jnp.where(jnp.isfinite(lse), lse, 0.0) * LOG2_E
    shift = jnp.einsum("btnh,btnh->btn", d_out, out, preferred_element_type=jnp.float32) - d_lse
    base, shift = pad_to(base, 1, tile), pad_to(shift, 1, tile)
    q, k, v, d_out = (pad_to(pad_to(x, 1, tile), 3, width) for x in (q, k, v, d_out))
    rows, sight = rows_of(rule, tile, prefix_visible)
    batch, padded = rows[0].shape
    num_tiles = padded // tile
    chosen = chosen_tiles(rows, sight, tile)
    static: dict[str, Any] = {"scale": scale, "sight": sight}
    options: dict[str, Any] = {
        "compiler_params": plt.CompilerParams(num_warps=8, num_stages=2),
        "interpret": interpret,
    }

    def lists(size: int) -> list[pl.BlockSpec]:
        return [
            pl.BlockSpec((None, None, 2), lambda i, n, b: (b, i, 0)),
            pl.BlockSpec((None, None, 2, size), lambda i, n, b: (b, i, 0, 0)),
        ]

    def side_by_side(x: Array) -> Array:  # [B, T, N, ...] -> [B, T, N / heads, heads, ...]
        return x.reshape(batch, padded, num_heads // heads, heads, *x.shape[3:])

    wide = pl.BlockSpec((None, tile, None, heads, width), lambda i, n, b: (b, i, n, 0, 0))
    thin = pl.BlockSpec((None, tile, None, heads), lambda i, n, b: (b, i, n, 0))
    keys = pl.BlockSpec(
        (None, padded, None, width), lambda i, n, b: (b, 0, lax.div(n * heads, group), 0)
    )
    visit, count = listed(chosen)
    split = side_by_side(q)
    d_q = pl.pallas_call(
        functools.partial(_queries, **static),
        grid=(num_tiles, num_heads // heads, batch),
        in_specs=[*lists(num_tiles), *rule_specs(padded), wide, wide, thin, thin, keys, keys],
        out_specs=wide,
        out_shape=jax.ShapeDtypeStruct(split.shape, q.dtype),
        name="segment_gradient_q",
        **options,
    )(count, visit, *rows, split, side_by_side(d_out), side_by_side(base), side_by_side(shift),
      k, v)  # fmt: skip

    # [B, I, 2, J] -> the query tiles of every key tile.
    visit, count = listed(chosen.transpose(0, 3, 2, 1))
    own = pl.BlockSpec((None, tile, None, width), lambda j, n, b: (b, j, n, 0))
    queries = pl.BlockSpec((None, padded, group, width), lambda j, n, b: (b, 0, n, 0))
    numbers = pl.BlockSpec((None, padded, group), lambda j, n, b: (b, 0, n))
    d_k, d_v = pl.pallas_call(
        functools.partial(_keys, **static),
        grid=(num_tiles, num_kv_heads, batch),
        in_specs=[
            *lists(num_tiles), *rule_specs(padded), own, own, queries, queries, numbers, numbers,
        ],
        out_specs=[own, own],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)],
        name="segment_gradient_kv",
        **options,
    )(count, visit, *rows, k, v, q, d_out, base, shift)  # fmt: skip
    d_q = d_q.reshape(batch, padded, num_heads, width)
    return d_q[:, :length, :, :dim], d_k[:, :length, :, :dim], d_v[:, :length, :, :dim]


def _dot(a: Array, b: Array) -> Array:
    """Product of a pair of tiles in their dtype, summed in float32."""
    precision = lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    return plt.dot(a, b, precision=precision)


def _queries(
    count_ref: Ref,
    visit_ref: Ref,
    position_ref: Ref,
    segment_ref: Ref,
    example_ref: Ref,
    window_ref: Ref,
    q_ref: Ref,
    d_out_ref: Ref,
    base_ref: Ref,
    shift_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    d_q_ref: Ref,
    *,
    scale: float,
    sight: Sight,
) -> None:
    """One tile of queries of neighbouring heads."""
    rule = (position_ref, segment_ref, example_ref, window_ref)
    tile, heads, width = q_ref.shape
    num_rows = tile * heads
    q, d_out = (x[...].reshape(num_rows, width) for x in (q_ref, d_out_ref))
    base, shift = (x[...].reshape(num_rows)[:, None] for x in (base_ref, shift_ref))
    q_order = pl.program_id(0) * tile + lax.div(lax.iota(jnp.int32, num_rows), heads)

    def update(number: Array, d_q: Array, *, masked: bool) -> Array:
        first = visit_ref[1 if masked else 0, number] * tile
        key, value = k_ref[pl.ds(first, tile), :], v_ref[pl.ds(first, tile), :]
        scores = _dot(q, key.T) * (scale * LOG2_E)
        if masked:
            see = sight.sees(rule, q_order, first + lax.iota(jnp.int32, tile))
            scores = jnp.where(see, scores, _FLOOR)
        weights = jnp.exp2(scores - base)
        d_scores = weights * (_dot(d_out, value.T) - shift) * scale
        return d_q + _dot(d_scores.astype(key.dtype), key)

    d_q = jnp.zeros((num_rows, width), jnp.float32)
    for which, masked in enumerate((False, True)):
        step = functools.partial(update, masked=masked)
        d_q = lax.fori_loop(0, count_ref[which], step, d_q)
    d_q_ref[...] = d_q.astype(d_q_ref.dtype).reshape(tile, heads, width)


def _keys(
    count_ref: Ref,
    visit_ref: Ref,
    position_ref: Ref,
    segment_ref: Ref,
    example_ref: Ref,
    window_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    q_ref: Ref,
    d_out_ref: Ref,
    base_ref: Ref,
    shift_ref: Ref,
    d_k_ref: Ref,
    d_v_ref: Ref,
    *,
    scale: float,
    sight: Sight,
) -> None:
    """One tile of keys and values of one KV head; products stand with the keys first."""
    rule = (position_ref, segment_ref, example_ref, window_ref)
    tile, width = k_ref.shape
    key, value = k_ref[...], v_ref[...]
    k_order = pl.program_id(0) * tile + lax.iota(jnp.int32, tile)

    def update(
        number: Array, state: tuple[Array, Array], *, head: Array, masked: bool
    ) -> tuple[Array, Array]:
        d_k, d_v = state
        first = visit_ref[1 if masked else 0, number] * tile
        here = pl.ds(first, tile)
        q, d_out = q_ref[here, head, :], d_out_ref[here, head, :]
        base, shift = base_ref[here, head][None, :], shift_ref[here, head][None, :]
        scores = _dot(key, q.T) * (scale * LOG2_E)
        if masked:
            q_order = first + lax.iota(jnp.int32, tile)
            see = sight.sees(rule, q_order, k_order, keys_first=True)
            scores = jnp.where(see, scores, _FLOOR)
        weights = jnp.exp2(scores - base)
        d_scores = weights * (_dot(value, d_out.T) - shift) * scale
        d_v += _dot(weights.astype(d_out.dtype), d_out)
        return d_k + _dot(d_scores.astype(q.dtype), q), d_v

    def of_head(head: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        for which, masked in enumerate((False, True)):
            step = functools.partial(update, head=head, masked=masked)
            state = lax.fori_loop(0, count_ref[which], step, state)
        return state

    zeros = jnp.zeros((tile, width), jnp.float32)
    d_k, d_v = lax.fori_loop(0, q_ref.shape[1], of_head, (zeros, zeros))
    d_k_ref[...], d_v_ref[...] = d_k.astype(d_k_ref.dtype), d_v.astype(d_v_ref.dtype)

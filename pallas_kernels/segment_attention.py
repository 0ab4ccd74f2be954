"""Packed attention under the block mask: no cache, one row holds whole prompts or many chunks.

TurboRAG (arXiv:2410.07590) Fig. 2 (a), (b), (c) and Block-Attention (arXiv:2409.15355) Fig. 1 are
data for this op: the mask follows from order, segments and examples (visibility.py), positions are
already in the rotated q and k.

Differentiable in q, k and v (reverse mode), once.
``out`` and ``lse`` carry the name ``SAVED``, so that a rematerialisation policy can keep them and
spare the backward pass a second attention.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.bodies import Impl, check_impl
from pallas_kernels.operands import Rows, Scale, uncapped
from pallas_kernels.packed_tiles import Residuals, Rule, classify_tiles
from pallas_kernels.tiles import (
    Mix,
    Tiles,
    join_queries,
    mix,
    pad_to,
    split_queries,
    tiled_attention,
    tiled_gradient,
)
from pallas_kernels.visibility import EMPTY, packed_visible, within_window

Array = jax.Array

PACKED_TILE = 128  # queries and keys; measured best of 64..256 on CPU for chunks of 16..512 tokens
SAVED = "segment_attention"  # checkpoint_name of out and lse


def segment_attention(
    q: Array,
    k: Array,
    v: Array,
    rows: Rows,
    *,
    scale: Scale,
    prefix_visible: bool,
    window: Array | int | None = None,
    impl: Impl = "xla",
) -> tuple[Array, Array]:
    """Attention of packed rows to themselves.

    Args:
      q: [B, T, N, H] rotated queries.
      k: [B, T, K, H] rotated keys; N is a multiple of K.
      v: [B, T, K, H] values.
      rows: who sees whom.
      scale: factor on the scores, which the `xla` body may cap.
      prefix_visible: may chunks see the prefix?
      window: sliding window in tokens, the query included; None for none.
      impl: the body, one of ``bodies.BODIES``.

    Returns:
      out [B, T, N, H] in q's dtype, lse [B, T, N] float32; 0 and -inf where nothing is visible.

    Raises:
      KernelError: no such body, or it cannot run on this backend.
    """
    check_impl("segment_attention", impl)
    length = q.shape[1]
    tile = min(PACKED_TILE, length)
    q, k, v = (pad_to(x, 1, tile) for x in (q, k, v))
    rows = Rows(
        pad_to(rows.positions, 1, tile),
        pad_to(rows.segments, 1, tile, EMPTY),
        None if rows.examples is None else pad_to(rows.examples, 1, tile),
    )
    out, lse = _attend(scale, prefix_visible, tile, impl, q, k, v, (rows, window))
    return out[:, :length], lse[:, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _attend(
    scale: Scale,
    prefix_visible: bool,
    tile: int,
    impl: Impl,
    q: Array,
    k: Array,
    v: Array,
    rule: Rule,
) -> tuple[Array, Array]:
    """The op on rows that are a multiple of ``tile`` long."""
    if impl != "xla":
        from pallas_kernels.triton.segment import segment_kernel

        return segment_kernel(
            q,
            k,
            v,
            rule,
            scale=uncapped(scale, impl),
            prefix_visible=prefix_visible,
            interpret=impl == "pallas_interpret",
        )
    group, num_kv_heads = q.shape[2] // k.shape[2], k.shape[2]
    q_tiles = split_queries(q, num_kv_heads, tile)  # [B, K, I, R, H]
    k_heads, v_heads = _heads_first(k), _heads_first(v)

    def score_tile(i: Array, j: Array) -> tuple[Array, Mix]:
        q_i = lax.dynamic_index_in_dim(q_tiles, i, 2, keepdims=False)
        k_j, v_j = (lax.dynamic_slice_in_dim(x, j * tile, tile, 2) for x in (k_heads, v_heads))
        scores = jnp.einsum("bkrh,bksh->bkrs", q_i, k_j, preferred_element_type=jnp.float32)
        return scores, functools.partial(mix, values=v_j)

    tiles = _tiles(rule, prefix_visible, tile, group)
    shape = (q.shape[0], num_kv_heads, group * tile, q.shape[3])
    out, lse = tiled_attention(tiles, score_tile, shape, scale, q.dtype)
    return join_queries(out, group, tile), join_queries(lse, group, tile)


def _attend_forward(
    scale: Scale,
    prefix_visible: bool,
    tile: int,
    impl: Impl,
    q: Array,
    k: Array,
    v: Array,
    rule: Rule,
) -> tuple[tuple[Array, Array], Residuals]:
    out, lse = _attend(scale, prefix_visible, tile, impl, q, k, v, rule)
    out, lse = checkpoint_name(out, SAVED), checkpoint_name(lse, SAVED)
    return (out, lse), Residuals(q, k, v, out, lse, rule)


def _attend_backward(
    scale: Scale,
    prefix_visible: bool,
    tile: int,
    impl: Impl,
    residuals: Residuals,
    cotangents: tuple[Array, Array],
) -> tuple[Array, Array, Array, None]:
    if impl != "xla":
        from pallas_kernels.triton.segment_gradient import segment_gradient_kernel

        d_q, d_k, d_v = segment_gradient_kernel(
            residuals,
            cotangents,
            scale=uncapped(scale, impl),
            prefix_visible=prefix_visible,
            interpret=impl == "pallas_interpret",
        )
        return d_q, d_k, d_v, None
    q, k, v, out, lse, rule = residuals
    group, num_kv_heads = q.shape[2] // k.shape[2], k.shape[2]

    def split(x: Array) -> Array:
        return split_queries(x, num_kv_heads, tile)

    d_out, d_lse = cotangents
    d_q, d_k, d_v = tiled_gradient(
        _tiles(rule, prefix_visible, tile, group),
        scale,
        split(q),
        _heads_first(k),
        _heads_first(v),
        (split(out), split(lse[..., None])[..., 0]),
        (split(d_out), split(d_lse[..., None])[..., 0]),
    )
    d_q = join_queries(d_q, group, tile).astype(q.dtype)
    return d_q, _heads_first(d_k).astype(k.dtype), _heads_first(d_v).astype(v.dtype), None


_attend.defvjp(_attend_forward, _attend_backward)


def _heads_first(x: Array) -> Array:
    """[B, T, K, H] -> [B, K, T, H], and back."""
    return x.transpose(0, 2, 1, 3)


def _tiles(rule: Rule, prefix_visible: bool, tile: int, group: int) -> Tiles:
    """What ``tiled_attention`` wants to know of the rule."""
    (positions, segments, examples), window = rule

    def cut(x: Array, i: Array) -> Array:
        return lax.dynamic_slice_in_dim(x, i * tile, tile, 1)

    def visible(i: Array, j: Array) -> Array:
        order = jnp.arange(tile, dtype=jnp.int32)
        see = packed_visible(
            (order + i * tile)[None, :, None],
            (order + j * tile)[None, None, :],
            cut(segments, i)[:, :, None],
            cut(segments, j)[:, None, :],
            None if examples is None else cut(examples, i)[:, :, None],
            None if examples is None else cut(examples, j)[:, None, :],
            prefix_visible,
        )
        see &= within_window(cut(positions, i)[:, :, None], cut(positions, j)[:, None, :], window)
        return jnp.tile(see, (1, group, 1))[:, None]

    live, whole = classify_tiles(segments, examples, tile, prefix_visible)
    return Tiles(live, jnp.zeros_like(whole) if window is not None else whole, visible)

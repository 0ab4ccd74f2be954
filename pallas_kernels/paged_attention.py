"""Attention of new tokens to a paged pool in which every page may stand anywhere in the prompt.

A page holds keys rotated to their place inside their chunk; the request's table gives the page's
position offset. Scores depend on position differences only, so either the query is rotated by
(query position - page offset), or the gathered keys by the offset: the same numbers. One physical
copy of a chunk therefore serves every request, wherever it stands (Block-Attention section 2.3,
arXiv:2409.15355, without rewriting the keys).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.bodies import platform
from pallas_kernels.forms import forms
from pallas_kernels.operands import Pages, Placed, Pool, Rotary, Scale
from pallas_kernels.tiles import (
    Mix,
    Tiles,
    join_queries,
    mix,
    pad_to,
    query_tile,
    split_queries,
    tiled_attention,
)
from pallas_kernels.visibility import cached_visible, tile_range, within_window

Array = jax.Array

_HIDDEN = jnp.iinfo(jnp.int32).max
LONG = 128  # queries; measured: on a CPU rows of fewer are faster together
_MOST_APART = 16  # KV heads; as many products are written into the program


def paged_attention(
    q: Array,
    pool: Pool,
    table: Pages,
    query_position: Array,
    rotary: Rotary | Placed,
    *,
    scale: Scale,
    window: Array | int | None = None,
    rotate_side: str | None = None,
    beside: Array | None = None,
    out_dtype: Any = None,
) -> tuple[Array, Array]:
    """Attention through a page table (the `xla` body).

    Args:
      q: [B, T, N, H] queries before rotation.
      pool: keys and values.
      table: where the keys stand.
      query_position: [B, T] int32; -1 for padding rows.
      rotary: of positions; ``Placed`` with ``rotate_side="keys"`` for queries, and keys whose
        offsets are all 0, that stand at their positions.
      scale: factor on the scores.
      window: sliding window in tokens, or None.
      rotate_side: "query" or "keys"; None chooses.
      beside: [B, M * page, C] values of slots that are mixed as those of the pool are, and stand
        behind these in ``out``, [B, T, N, H + C]; None for C = 0. Not of "query".
      out_dtype: of ``out``, None for q's.

    Returns:
      out [B, T, N, H] in ``out_dtype``, lse [B, T, N] float32; 0 and -inf where nothing is visible.
    """
    pages, offsets, slot_position = table
    batch, length, num_heads, _ = q.shape
    _, page, num_kv_heads, dim = pool.k.shape
    group = num_heads // num_kv_heads
    if rotate_side is None:
        # A query turned to every page makes a product of its own of each; keys of a page have few
        # rows.
        rotate_side = "keys" if beside is not None or length > 1 else "query"
    assert beside is None or rotate_side == "keys"
    pages_per_tile = max(1, forms().key_tile // page)
    kv_size = pages_per_tile * page
    pages, offsets = pad_to(pages, 1, pages_per_tile), pad_to(offsets, 1, pages_per_tile)
    slot_position = pad_to(slot_position, 1, kv_size, _HIDDEN)
    tile = query_tile(length)
    q = pad_to(q, 1, tile)
    query_position = pad_to(query_position, 1, tile, -1)
    num_kv_tiles = pages.shape[1] // pages_per_tile

    q_low, q_high = tile_range(query_position, tile, query_position >= 0)
    k_low, k_high = tile_range(slot_position, kv_size, slot_position != _HIDDEN)
    live = k_low[:, None, :] <= q_high[:, :, None]
    live &= within_window(q_low[:, :, None], k_high[:, None, :], window)
    # Whole: every real query is behind every slot of the tile, and within its window.
    whole = slot_position.reshape(batch, num_kv_tiles, kv_size).max(-1)[:, None, :]
    whole = whole <= q_low[:, :, None]
    whole &= within_window(q_high[:, :, None], k_low[:, None, :], window)
    # Rows without any query in a tile (padding) do not decide.
    idle = (q_high < q_low)[:, :, None]
    live, whole = (live & ~idle).any(0), (whole | idle).all(0)

    def cut(x: Array, j: Array, size: int) -> Array:
        return lax.dynamic_slice_in_dim(x, j * size, size, 1)

    def gather(j: Array) -> tuple[Array, Array, Array]:
        ids = cut(pages, j, pages_per_tile)
        seen = cut(slot_position, j, kv_size).reshape(batch, pages_per_tile, page, 1, 1)
        # A hidden slot may hold anything, NaN included; weight 0 times NaN would still be NaN.
        values = jnp.where(seen != _HIDDEN, pool.v[ids], 0)
        return pool.k[ids], values, cut(offsets, j, pages_per_tile)

    def heads_first(x: Array) -> Array:
        return x.reshape(batch, kv_size, num_kv_heads, dim).transpose(0, 2, 1, 3)

    def keys_in_place(j: Array) -> tuple[Array, Array]:
        keys, values, at = gather(j)  # [B, pages_per_tile, page, K, H] twice, offsets
        keys = lax.cond((at != 0).any(), lambda x: rotary.rotate_by(x, at), lambda x: x, keys)
        return keys, values

    def rotated_queries(turn: Array) -> Array:
        """Queries [B, T, N, H] turned by [B, T] positions, as tiles [B, K, I, R, H]."""
        return split_queries(rotary.rotate_by(q, jnp.maximum(turn, 0)), num_kv_heads, tile)

    def visible(i: Array, j: Array) -> Array:
        q_pos = lax.dynamic_slice_in_dim(query_position, i * tile, tile, 1)[:, :, None]
        k_pos = cut(slot_position, j, kv_size)[:, None, :]
        see = cached_visible(q_pos, k_pos) & within_window(q_pos, k_pos, window)
        return jnp.tile(see, (1, group, 1))[:, None]

    if rotate_side == "query":

        def score_tile(i: Array, j: Array) -> tuple[Array, Mix]:
            keys, values, at = gather(j)
            per_page = jax.vmap(lambda a: rotated_queries(query_position - a[:, None]), 1, 1)(at)
            q_i = lax.dynamic_index_in_dim(per_page, i, 3, keepdims=False)  # [B, p, K, R, H]
            scores = jnp.einsum("bpkrh,bpskh->bkrps", q_i, keys, preferred_element_type=jnp.float32)
            scores = scores.reshape(*scores.shape[:3], kv_size)
            return scores, functools.partial(mix, values=heads_first(values))

    else:
        q_tiles = rotated_queries(query_position)
        apart = batch == 1 and length >= LONG and num_kv_heads <= _MOST_APART
        apart &= str(q.dtype) in forms().heads_apart and platform() == "cpu"

        def score_tile(i: Array, j: Array) -> tuple[Array, Mix]:
            keys, values = map(heads_first, keys_in_place(j))
            if beside is not None:
                more = cut(pad_to(beside, 1, kv_size), j, kv_size)[:, None].astype(values.dtype)
                more = jnp.broadcast_to(more, (*values.shape[:3], more.shape[-1]))
                values = jnp.concatenate((values, more), -1)
            q_i = lax.dynamic_index_in_dim(q_tiles, i, 2, keepdims=False)
            if not apart:
                scores = jnp.einsum(
                    "bkrh,bksh->bkrs", q_i, keys, preferred_element_type=jnp.float32
                )
                return scores, functools.partial(mix, values=values)
            return _scores_apart(q_i, keys), functools.partial(_mix_apart, values=values)

    width = dim if beside is None else dim + beside.shape[-1]
    tiles, shape = Tiles(live, whole, visible), (batch, num_kv_heads, group * tile, width)
    out, lse = tiled_attention(tiles, score_tile, shape, scale, out_dtype or q.dtype)
    out = join_queries(out, group, tile)[:, :length]
    lse = join_queries(lse, group, tile)[:, :length]
    real = (query_position >= 0)[:, :length, None]
    return jnp.where(real[..., None], out, 0), jnp.where(real, lse, -jnp.inf)


def _scores_apart(q: Array, keys: Array) -> Array:
    """Products [1, K, R, S] float32 of q [1, K, R, H] and keys [1, K, S, H], head by head."""
    return _by_head("rh,sh->rs", q, keys)


def _mix_apart(weights: Array, values: Array) -> Array:
    """As ``mix``, of one row, head by head."""
    return _by_head("rs,sh->rh", weights.astype(values.dtype), values)


def _by_head(terms: str, a: Array, b: Array) -> Array:
    pairs = zip(a[0], b[0], strict=True)
    products = [jnp.einsum(terms, x, y, preferred_element_type=jnp.float32) for x, y in pairs]
    return jnp.stack(products)[None]


def paged_attention_by_row(
    q: Array,
    pool: Pool,
    table: Pages,
    query_position: Array,
    rotary: Rotary,
    *,
    scale: Scale,
    window: Array | int | None = None,
) -> tuple[Array, Array]:
    """As ``paged_attention``, one row of the batch after the other: for one CPU.

    Its caches hold the scores of one row's tiles, not of all, which is a quarter faster with four
    rows of 512 tokens.
    """
    if q.shape[0] == 1:
        return paged_attention(q, pool, table, query_position, rotary, scale=scale, window=window)

    def one_row(row: tuple[Array, Pages, Array]) -> tuple[Array, Array]:
        q, table, query_position = jax.tree.map(lambda x: x[None], row)
        out, lse = paged_attention(
            q, pool, table, query_position, rotary, scale=scale, window=window
        )
        return out[0], lse[0]

    return lax.map(one_row, (q, table, query_position))

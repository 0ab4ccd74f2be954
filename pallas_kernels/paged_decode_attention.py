"""One new token a row over a paged pool: what a decode step attends with. Bound by memory.

The contract of ``sparse_attention`` with T = 1, and everything returned in float32, so that parts
over disjoint keys can be merged without a loss.

On a CPU the rows have no program of the same length. Tiles of keys of all rows that hold a visible
key are listed, and visited some at a time, so that a batch costs what its rows hold: one row of
eight takes a seventh of the time of eight. A tile's part does not depend on its neighbours.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.bodies import Impl, check_impl, platform
from pallas_kernels.forms import forms
from pallas_kernels.operands import Pages, Pool, Rotary, Scale, in_two, scored, uncapped
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.tiles import pad_to
from pallas_kernels.visibility import cached_visible, within_window

Array = jax.Array

_HIDDEN = jnp.iinfo(jnp.int32).max
_KEYS = 256  # of a tile
_APART = 512  # numbers that a key has, of all KV heads, from which these are apart
_FLOOR = -1e30  # of scores; finite, so that differences stay finite


def paged_decode_attention(
    q: Array,
    pool: Pool,
    table: Pages,
    query_position: Array,
    rotary: Rotary,
    *,
    scale: Scale,
    window: Array | int | None = None,
    impl: Impl = "xla",
) -> tuple[Array, Array]:
    """Attention of one query a row through a page table.

    Args:
      q: [B, N, H] queries before rotation.
      pool: of q's dtype.
      table: where the keys stand.
      query_position: [B] int32; -1 for padding rows.
      rotary: of positions and offsets.
      scale: factor on the scores, which the `xla` body may cap.
      window: sliding window in tokens, or None.
      impl: the body, one of ``bodies.BODIES``.

    Returns:
      out [B, N, H] and lse [B, N], both float32; 0 and -inf where nothing is visible.

    Raises:
      KernelError: no such body, or it cannot run on this backend.
    """
    check_impl("paged_decode_attention", impl)
    operands = (q[:, None], pool, table, query_position[:, None], rotary)
    if impl == "xla" and platform() == "cpu":
        return _attend_live(q, pool, table, query_position, rotary, scale, window)
    if impl == "xla":
        out, lse = paged_attention(*operands, scale=scale, window=window, out_dtype=jnp.float32)
    else:
        from pallas_kernels.triton.paged import paged_kernel

        interpret = impl == "pallas_interpret"
        out, lse = paged_kernel(
            *operands, scale=uncapped(scale, impl), window=window, interpret=interpret
        )
    return out[:, 0], lse[:, 0]


def _attend_live(
    q: Array,
    pool: Pool,
    table: Pages,
    query_position: Array,
    rotary: Rotary,
    scale: Scale,
    window: Array | int | None,
) -> tuple[Array, Array]:
    """As ``paged_decode_attention``, by the tiles in which somebody sees a key."""
    batch, heads, dim = q.shape
    _, page, kv_heads, _ = pool.k.shape
    group = heads // kv_heads
    per_tile = max(1, _KEYS // page)
    size = per_tile * page
    slot_position = pad_to(table.slot_position, 1, size, _HIDDEN)
    see = cached_visible(query_position[:, None], slot_position)
    see &= within_window(query_position[:, None], slot_position, window)
    see &= (query_position >= 0)[:, None]

    # Of all rows, one after the other.
    see = see.reshape(-1, size)
    pages, offsets = (
        pad_to(x, 1, per_tile).reshape(-1, per_tile) for x in (table.pages, table.offsets)
    )
    live = see.any(-1)
    count = len(live)
    together = min(forms().decode_tiles, count)
    per_row = count // batch
    visit = jnp.argsort(~live, stable=True).astype(jnp.int32)
    visit = pad_to(visit, 0, together, count)

    # Where a KV head's keys are short, those of all heads are read as they lie, by queries
    # [B, 1, N, K * H] that are zero but for the columns of their own: the zeros cost less.
    apart = kv_heads * dim >= _APART
    at_once, by = in_two(scale)
    placed = rotary.rotate_by(q, jnp.maximum(query_position, 0))
    placed = placed.reshape(batch, kv_heads, group, dim)
    if not apart:
        own = jnp.eye(kv_heads, dtype=q.dtype)[:, None, :, None]
        placed = (placed[:, :, :, None] * own).reshape(batch, 1, heads, kv_heads * dim)

    def product(terms: str, a: Array, b: Array) -> Array:
        return jnp.einsum(terms, a, b, preferred_element_type=jnp.float32)

    def some(step: Array, parts: tuple[Array, Array, Array]) -> tuple[Array, ...]:
        at = lax.dynamic_slice_in_dim(visit, step * together, together)
        which, turn, shown = pages[at], offsets[at], see[at]  # [V, pages] twice, [V, S]
        if apart:  # [V, K, pages, page, H], else [V, pages, page, K, H]
            each = jnp.arange(kv_heads)[:, None]
            keys, values = (x[which[:, None], :, each] for x in (pool.k, pool.v))
            turn = jnp.broadcast_to(turn[:, None], keys.shape[:3])
            valid = shown.reshape(-1, 1, per_tile, page, 1)
        else:
            keys, values = pool.k[which], pool.v[which]
            valid = shown.reshape(-1, per_tile, page, 1, 1)
        keys = lax.cond((turn != 0).any(), lambda x: rotary.rotate_by(x, turn), lambda x: x, keys)
        # A hidden slot may hold anything, NaN included; weight 0 times NaN would still be NaN.
        values = jnp.where(valid, values, 0)
        keys, values = (
            x.reshape(together, placed.shape[1], size, placed.shape[3]) for x in (keys, values)
        )

        visible = shown[:, None, None]
        scores = product("vkgh,vksh->vkgs", placed[at // per_row], keys)
        scores = jnp.where(visible, scored(scores, at_once), _FLOOR)
        top = scores.max(-1)
        weights = jnp.where(visible, jnp.exp((scores - top[..., None]) * by), 0.0)
        out = product("vkgs,vksh->vkgh", weights.astype(values.dtype), values)
        if not apart:
            out = out.reshape(together, kv_heads, group, kv_heads, dim)
            out = jnp.stack([out[:, head, :, head] for head in range(kv_heads)], axis=1)
        of_head = (x.reshape(together, heads) for x in (top, weights.sum(-1)))
        new = out.reshape(together, heads, dim), *of_head
        return tuple(
            whole.at[at].set(part, mode="drop") for whole, part in zip(parts, new, strict=True)
        )

    shape, dtype = (count, heads), jnp.float32
    empty = jnp.zeros((*shape, dim), dtype), jnp.full(shape, _FLOOR, dtype), jnp.zeros(shape, dtype)
    parts = lax.fori_loop(0, -(-live.sum() // together), some, empty)
    out, top, total = (x.reshape(batch, per_row, *x.shape[1:]) for x in parts)
    best = top.max(1)
    share = jnp.exp((top - best[:, None]) * by)
    total, out = (total * share).sum(1), (out * share[..., None]).sum(1)
    seen = total > 0
    total = jnp.where(seen, total, 1.0)
    lse = jnp.where(seen, best * by + jnp.log(total), -jnp.inf)
    return out / total[..., None], lse

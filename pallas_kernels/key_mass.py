"""How much attention each key of a paged pool receives from a few queries.

The other side of ``paged_attention``: not what the queries read, but how often they look where.
Two passes over the keys by tiles, the first for the softmax sums; scores are never stored.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.operands import Pages, Rotary, Scale, scored
from pallas_kernels.tiles import TILE, pad_to
from pallas_kernels.visibility import cached_visible, within_window

Array = jax.Array

QUERIES = 64  # of one pass over the keys
_HIDDEN = jnp.iinfo(jnp.int32).max
_FLOOR = -1e30


def key_mass(
    q: Array,
    k_pool: Array,
    table: Pages,
    query_position: Array,
    groups: Array,
    rotary: Rotary,
    *,
    scale: Scale,
    causal: bool,
    window: Array | int | None = None,
    sink_logits: Array | None = None,
) -> Array:
    """Sum of softmax weights over all queries and heads, for every slot (the `xla` body).

    Args:
      q: [B, T, N, H] queries before rotation.
      k_pool: [pages, page, K, H].
      table: offsets, by which a page's keys are turned, may be negative; positions are read by
        ``causal`` only.
      query_position: [B, T] int32; -1 for padding rows, which count nothing.
      groups: [B, M] int32 label of each page, 0..M-1: a softmax runs over the pages of one label.
      rotary: of positions and offsets.
      scale: factor on the scores.
      causal: does a query see only slots up to its position? Else it sees every slot not hidden.
      window: sliding window in tokens (with ``causal``), or None.
      sink_logits: [N], of each head one that takes weight in every softmax, or None.

    Returns:
      [B, M * page] float32; 0 in hidden slots.
    """
    pages, offsets, slot_position = table
    batch, _, num_heads, _ = q.shape
    _, page, num_kv_heads, dim = k_pool.shape
    group_size = num_heads // num_kv_heads
    num_slots = slot_position.shape[1]
    pages_per_tile = max(1, TILE // page)
    size = pages_per_tile * page
    pages, offsets, groups = (pad_to(x, 1, pages_per_tile) for x in (pages, offsets, groups))
    slot_position = pad_to(slot_position, 1, size, _HIDDEN)
    num_pages = pages.shape[1]
    tiles = jnp.arange(num_pages // pages_per_tile)
    live = (slot_position != _HIDDEN).reshape(batch, -1, size).any((0, 2))

    at = jnp.maximum(query_position, 0)
    q = rotary.rotate_by(q, at)
    block = min(QUERIES, q.shape[1])
    q = pad_to(q, 1, block).reshape(batch, -1, block, num_kv_heads, group_size, dim)
    q = q.transpose(1, 0, 3, 4, 2, 5).reshape(q.shape[1], batch, num_kv_heads, -1, dim)
    query_position = pad_to(query_position, 1, block, -1).reshape(batch, -1, block)
    query_position = jnp.tile(query_position.transpose(1, 0, 2), (1, 1, group_size))

    def part(x: Array, j: Array, width: int) -> Array:
        return lax.dynamic_slice_in_dim(x, j * width, width, 1)

    def scores_of(q_i: Array, q_pos: Array, j: Array) -> tuple[Array, Array]:
        """Scores [B, K, R, p, page] of a query block with a tile of p pages, and who is seen."""
        turn = part(offsets, j, pages_per_tile)[:, :, None, None]
        keys = rotary.rotate_either_way(k_pool[part(pages, j, pages_per_tile)], turn)
        slots = part(slot_position, j, size).reshape(batch, 1, 1, pages_per_tile, page)
        q_pos = q_pos[:, None, :, None, None]
        see = (slots != _HIDDEN) & (q_pos >= 0)
        if causal:
            see &= cached_visible(q_pos, slots) & within_window(q_pos, slots, window)
        scores = jnp.einsum("bkrh,bpskh->bkrps", q_i, keys, preferred_element_type=jnp.float32)
        return scored(scores, scale), see

    def one_block(total: Array, queries: tuple[Array, Array]) -> tuple[Array, None]:
        rows = (batch, num_kv_heads, queries[0].shape[2])

        def sums(j: Array) -> tuple[Array, Array]:
            scores, see = scores_of(*queries, j)
            top = jnp.where(see, scores, _FLOOR).max(-1)
            return top, jnp.where(see, jnp.exp(scores - top[..., None]), 0.0).sum(-1)

        def no_sums(_: Array) -> tuple[Array, Array]:
            shape = (*rows, pages_per_tile)
            return jnp.full(shape, _FLOOR), jnp.zeros(shape)

        def by_page(x: Array) -> Array:  # [tiles, B, K, R, p] -> [B, M, K, R]
            return x.transpose(1, 0, 4, 2, 3).reshape(batch, num_pages, *rows[1:])

        top, weight = map(by_page, lax.map(lambda j: lax.cond(live[j], sums, no_sums, j), tiles))
        lse = jax.vmap(_grouped_lse)(top, weight, groups)
        if sink_logits is not None:
            sinks = sink_logits.astype(jnp.float32).reshape(num_kv_heads, group_size)
            lse = jnp.logaddexp(lse, jnp.repeat(sinks, block, axis=1))

        def mass(j: Array) -> Array:
            scores, see = scores_of(*queries, j)
            below = part(lse, j, pages_per_tile).transpose(0, 2, 3, 1)[..., None]
            weights = jnp.where(see, jnp.exp(scores - below), 0.0)
            return weights.sum((1, 2)).reshape(batch, size)

        def no_mass(_: Array) -> Array:
            return jnp.zeros((batch, size))

        new = lax.map(lambda j: lax.cond(live[j], mass, no_mass, j), tiles)
        return total + new.transpose(1, 0, 2).reshape(batch, -1), None

    total, _ = lax.scan(one_block, jnp.zeros(slot_position.shape), (q, query_position))
    return total[:, :num_slots]


def _grouped_lse(top: Array, weight: Array, groups: Array) -> Array:
    """Log-sum-exp over the pages of each page's group: [M, K, R]; +inf where nothing is seen."""
    count = groups.shape[0]
    highest = jax.ops.segment_max(top, groups, count)[groups]
    total = jax.ops.segment_sum(weight * jnp.exp(top - highest), groups, count)[groups]
    return jnp.where(total > 0, highest + jnp.log(jnp.where(total > 0, total, 1.0)), jnp.inf)

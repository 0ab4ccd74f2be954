"""Scores of one query a row with every key of a paged pool.

For rules that choose among all keys before they read any value: exact top-k and top-N. The keys are
read as ``paged_attention`` reads them, the query rotated to every page's own frame.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.operands import Pages, Rotary, Scale, scored
from pallas_kernels.tiles import pad_to
from pallas_kernels.visibility import cached_visible

Array = jax.Array

SLOTS = 1024  # of one tile
_HIDDEN = jnp.iinfo(jnp.int32).max


def paged_scores(
    q: Array,
    k_pool: Array,
    table: Pages,
    query_position: Array,
    rotary: Rotary,
    *,
    scale: Scale,
) -> Array:
    """Scaled scores of every slot that the query sees (the `xla` body).

    Args:
      q: [B, N, H] one query a row, before rotation.
      k_pool: [pages, page, K, H].
      table: where the keys stand.
      query_position: [B] int32; -1 for padding rows.
      rotary: of positions.
      scale: factor on the scores.

    Returns:
      [B, K, G, M * page] float32, -inf where a slot is not seen, whatever it holds. Tiles that
      nobody sees are not read.
    """
    pages, offsets, slot_position = table
    batch, num_heads, _ = q.shape
    _, page, num_kv_heads, dim = k_pool.shape
    group, num_slots = num_heads // num_kv_heads, slot_position.shape[1]
    pages_per_tile = max(1, SLOTS // page)
    size = pages_per_tile * page
    pages, offsets = pad_to(pages, 1, pages_per_tile), pad_to(offsets, 1, pages_per_tile)
    see = cached_visible(query_position[:, None], pad_to(slot_position, 1, size, _HIDDEN))
    live = see.reshape(batch, -1, size).any((0, 2))

    def part(x: Array, j: Array, width: int) -> Array:
        return lax.dynamic_slice_in_dim(x, j * width, width, 1)

    def tile(j: Array) -> Array:
        turn = jnp.maximum(query_position[:, None] - part(offsets, j, pages_per_tile), 0)
        every = jnp.broadcast_to(q[:, None], (batch, pages_per_tile, num_heads, dim))
        turned = rotary.rotate_by(every, turn)
        turned = turned.reshape(batch, pages_per_tile, num_kv_heads, group, dim)
        keys = k_pool[part(pages, j, pages_per_tile)]
        scores = jnp.einsum("bpkgh,bpskh->bkgps", turned, keys, preferred_element_type=jnp.float32)
        scores = scored(scores.reshape(batch, num_kv_heads, group, size), scale)
        return jnp.where(part(see, j, size)[:, None, None], scores, -jnp.inf)

    def nothing(_: Array) -> Array:
        return jnp.full((batch, num_kv_heads, group, size), -jnp.inf)

    tiles = jnp.arange(live.shape[0])
    scores = lax.map(lambda j: lax.cond(live[j], tile, nothing, j), tiles)
    scores = jnp.moveaxis(scores, 0, 3).reshape(batch, num_kv_heads, group, -1)
    return scores[..., :num_slots]

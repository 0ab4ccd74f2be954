"""Attention of one query a row to a fixed number of chosen slots of a paged pool.

The sparse counterpart of ``paged_attention``: what is chosen is gathered, row by row of the pool,
and nothing else is read. Slots may be chosen once for all heads, per KV head or per query head.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.operands import Rotary, Scale, scored

Array = jax.Array


def slot_scores(
    q: Array,
    k_pool: Array,
    pages: Array,
    slots: Array,
    see: Array,
    query_turn: Array,
    key_turn: Array,
    rotary: Rotary,
    *,
    scale: Scale,
) -> Array:
    """Scaled scores of one query a row with the chosen slots (the `xla` body).

    Args:
      q: [B, N, H] before rotation.
      k_pool: [pages, page, K, H].
      pages: [B, M] int32 of the table.
      slots: [B, K', G', n] int32 of the table, any valid one where nothing is chosen; K' is K or 1,
        G' is G or 1.
      see: bool, which of them count; broadcastable to slots.
      query_turn: [B] int32, by which the query is rotated; at least 0.
      key_turn: int32, broadcastable to slots, by which the keys are rotated on top of what they
        are; may be negative.
      rotary: of turns.
      scale: factor on the scores.

    Returns:
      [B, K, G, n] float32, -inf where ``see`` is false. Rotated and multiplied in float32.
    """
    num_kv_heads = k_pool.shape[2]
    turned = rotary.rotate_by(q.astype(jnp.float32), query_turn)
    turned = turned.reshape(q.shape[0], num_kv_heads, -1, q.shape[-1])  # [B, K, G, H]
    keys = _rows(k_pool, pages, slots).astype(jnp.float32)  # [B, K, G', n, H]
    keys = rotary.rotate_either_way(keys, jnp.broadcast_to(key_turn, slots.shape))
    if keys.shape[2] == 1:
        scores = jnp.einsum("bkgh,bknh->bkgn", turned, keys[:, :, 0])
    else:
        scores = jnp.einsum("bkgh,bkgnh->bkgn", turned, keys)
    return jnp.where(see, scored(scores, scale), -jnp.inf)


def slot_values(scores: Array, v_pool: Array, pages: Array, slots: Array) -> tuple[Array, Array]:
    """The softmax mixture of the chosen slots' values (the `xla` body).

    Args:
      scores: [B, K, G, n] float32, -inf where a slot does not count.
      v_pool: [pages, page, K, H].
      pages: [B, M] int32 of the table.
      slots: [B, K', G', n] int32 of the table.

    Returns as ``slot_mixture``.
    """
    return slot_mixture(scores, _rows(v_pool, pages, slots))


def slot_mixture(scores: Array, values: Array) -> tuple[Array, Array]:
    """The softmax mixture of values that were gathered already (the `xla` body).

    Args:
      scores: [B, K, G, n] float32, -inf where a value does not count.
      values: [B, K, G', n, H]; G' is G or 1.

    Returns:
      out [B, N, H] and lse [B, N], float32; 0 and -inf where no slot counts. What slots that do not
      count hold, NaN included, is unused.
    """
    batch, _, _, _ = scores.shape
    top = scores.max(-1, keepdims=True, initial=-jnp.inf)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weights = jnp.exp(scores - top)
    total = weights.sum(-1)
    values = values.astype(jnp.float32)
    if values.shape[2] == 1:
        counts = (scores > -jnp.inf).any(2)[..., None]
        out = jnp.einsum("bkgn,bknh->bkgh", weights, jnp.where(counts, values[:, :, 0], 0.0))
    else:
        counts = (scores > -jnp.inf)[..., None]
        out = jnp.einsum("bkgn,bkgnh->bkgh", weights, jnp.where(counts, values, 0.0))
    seen = total > 0
    out = out / jnp.where(seen, total, 1.0)[..., None]
    lse = jnp.where(seen, top[..., 0] + jnp.log(jnp.where(seen, total, 1.0)), -jnp.inf)
    return out.reshape(batch, -1, out.shape[-1]), lse.reshape(batch, -1)


def _rows(pool: Array, pages: Array, slots: Array) -> Array:
    """The pool's rows at slots [B, K', G', n], one KV head each: [B, K, G', n, H]."""
    page, num_kv_heads = pool.shape[1:3]
    batch = jnp.arange(slots.shape[0])[:, None, None, None]
    which, at = pages[batch, slots // page], slots % page
    if slots.shape[1] == 1:  # all heads of a slot lie together
        return jnp.moveaxis(pool[which[:, 0], at[:, 0]], -2, 1)
    heads = jnp.arange(num_kv_heads)[None, :, None, None]
    return pool[which, at, heads]

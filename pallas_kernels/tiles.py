"""Attention by tiles with an online softmax: the jnp engine of the `xla` bodies.

Only tiles marked live are computed, so hidden halves and foreign chunks cost nothing; scores exist
one tile at a time, so no T x S array is ever stored. Scores and sums are float32.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.operands import Scale, in_two, scored, slope

Array = jax.Array
_State = tuple[Array, Array, Array]  # what a loop over key tiles carries
Mix = Callable[[Array], Array]  # weights [B, K, R, S] of a key tile -> [B, K, R, H] float32

TILE = 256  # queries and keys; measured best of 128..1024 on CPU, and a sane GPU size
_FLOOR = -1e30  # running maximum before any key was seen; finite, so that differences stay finite


def query_tile(length: int) -> int:
    """Queries of one tile: at most TILE, evenly over the tiles, so that little is padding."""
    tiles = -(-length // TILE)
    return length if tiles == 1 else -(-length // (16 * tiles)) * 16


def pad_to(x: Array, axis: int, multiple: int, value: float = 0) -> Array:
    """Pad ``axis`` at its end with ``value`` up to a multiple."""
    short = -x.shape[axis] % multiple
    if not short:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, short)
    return jnp.pad(x, widths, constant_values=value)


class Tiles(NamedTuple):
    """Which pairs of a query tile and a key tile are visited, and who sees whom in them.

    Attributes:
      live: [I, J] bool, which key tiles a query tile has to visit.
      whole: [I, J] bool, where every query that is no padding sees every key: no mask is applied.
      visible: (i, j) -> bool, broadcastable to the scores of a pair; called where it is not whole.
    """

    live: Array
    whole: Array
    visible: Callable[[Array, Array], Array]


def mix(weights: Array, values: Array) -> Array:
    """Weights [B, K, R, S], rounded to values' dtype, times values [B, K, S, H], in float32."""
    return jnp.einsum(
        "bkrs,bksh->bkrh",
        weights.astype(values.dtype),
        values,
        preferred_element_type=jnp.float32,
    )


def tiled_attention(
    tiles: Tiles,
    score_tile: Callable[[Array, Array], tuple[Array, Mix]],
    shape: tuple[int, int, int, int],
    scale: Scale,
    dtype: jnp.dtype,
) -> tuple[Array, Array]:
    """Attend every query tile to its live key tiles.

    Args:
      tiles: what is visited.
      score_tile: (i, j) -> products [B, K, R, S] float32 of query tile i and key tile j, and how
        weights of the same shape mix the values of the key tile to [B, K, R, H] float32.
      shape: (B, K, R, H); R rows of a query tile are G query heads times queries.
      scale: positive factor on the products, which makes them scores, or with a cap.
      dtype: of the returned ``out``.

    Returns:
      out [B, K, I, R, H] (0 where nothing is visible) and lse [B, K, I, R] float32 (-inf there).
      Padding queries hold anything where a tile was whole.
    """
    live, whole, visible = tiles
    batch, heads, rows, dim = shape
    at_once, by = in_two(scale)
    unmasked, masked = _listed(live & whole), _listed(live & ~whole)

    def query_tile(_: None, i: Array) -> tuple[None, tuple[Array, Array]]:
        def update(j: Array, state: _State, *, mask: bool) -> _State:
            out, top, total = state
            scores, mix_values = score_tile(i, j)
            scores = scored(scores, at_once)
            if mask:
                see = visible(i, j)
                scores = jnp.where(see, scores, _FLOOR)
            new_top = jnp.maximum(top, scores.max(-1))
            # Scaled within the exponential's own pass over the tile.
            weights = jnp.exp((scores - new_top[..., None]) * by)
            if mask:
                weights = jnp.where(see, weights, 0.0)
            shrink = jnp.exp((top - new_top) * by)
            part = mix_values(weights)
            return out * shrink[..., None] + part, new_top, total * shrink + weights.sum(-1)

        state = (
            jnp.zeros((batch, heads, rows, dim), jnp.float32),
            jnp.full((batch, heads, rows), _FLOOR, jnp.float32),
            jnp.zeros((batch, heads, rows), jnp.float32),
        )
        for (visit, count), mask in ((unmasked, False), (masked, True)):
            state = _each_tile(functools.partial(update, mask=mask), visit[i], count[i], state)
        out, top, total = state
        seen = total > 0
        out = out / jnp.where(seen, total, 1.0)[..., None]
        lse = top * by + jnp.log(jnp.where(seen, total, 1.0))
        lse = jnp.where(seen, lse, -jnp.inf)
        return None, (out.astype(dtype), lse)

    if live.shape[0] == 1:
        _, (out, lse) = query_tile(None, jnp.int32(0))
        return out[:, :, None], lse[:, :, None]
    _, (out, lse) = lax.scan(query_tile, None, jnp.arange(live.shape[0], dtype=jnp.int32))
    return jnp.moveaxis(out, 0, 2), jnp.moveaxis(lse, 0, 2)


def tiled_gradient(
    tiles: Tiles,
    scale: Scale,
    q: Array,
    k: Array,
    v: Array,
    results: tuple[Array, Array],
    cotangents: tuple[Array, Array],
) -> tuple[Array, Array, Array]:
    """Gradient of ``tiled_attention`` for scores ``scale * q @ k``, visiting the same tiles.

    The scores of a tile are computed again from ``lse`` (FlashAttention-2, algorithm 2,
    arXiv:2307.08691), so memory is O(T). Products take the inputs' dtype and accumulate in float32.

    Args:
      tiles: as in ``tiled_attention``; here whole tiles hold no padding query.
      scale: factor on the scores.
      q: [B, K, I, R, H].
      k: [B, K, J * S, H], J key tiles.
      v: [B, K, J * S, H].
      results: ``out`` [B, K, I, R, H] and ``lse`` [B, K, I, R] float32 of ``tiled_attention``.
      cotangents: of both, in their shapes.

    Returns:
      Gradients of q, k and v, float32; 0 for queries and keys that no visible pair holds.
    """
    live, whole, visible = tiles
    (out, lse), (d_out, d_lse) = results, cotangents
    size = k.shape[2] // live.shape[1]
    # Rows that see nothing have lse = -inf; their weights are masked, so any finite number does.
    lse = jnp.where(jnp.isfinite(lse), lse, 0.0)
    shift = jnp.einsum("bkirh,bkirh->bkir", d_out, out, preferred_element_type=jnp.float32) - d_lse
    unmasked, masked = _listed(live & whole), _listed(live & ~whole)

    def product(terms: str, a: Array, b: Array) -> Array:
        return jnp.einsum(terms, a, b, preferred_element_type=jnp.float32)

    def add(total: Array, j: Array, part: Array) -> Array:
        old = lax.dynamic_slice_in_dim(total, j * size, size, 2)
        return lax.dynamic_update_slice_in_dim(total, old + part, j * size, 2)

    def query_tile(totals: tuple[Array, Array], i: Array) -> tuple[tuple[Array, Array], Array]:
        q_i, d_out_i, lse_i, shift_i = (
            lax.dynamic_index_in_dim(x, i, 2, keepdims=False) for x in (q, d_out, lse, shift)
        )

        def update(j: Array, state: _State, *, mask: bool) -> _State:
            d_q, d_k, d_v = state
            k_j, v_j = (lax.dynamic_slice_in_dim(x, j * size, size, 2) for x in (k, v))
            scores = scored(product("bkrh,bksh->bkrs", q_i, k_j), scale)
            by = slope(scores, scale)
            if mask:
                see = visible(i, j)
                scores = jnp.where(see, scores, _FLOOR)
            weights = jnp.exp(scores - lse_i[..., None])
            d_weights = product("bkrh,bksh->bkrs", d_out_i, v_j)
            d_scores = (weights * (d_weights - shift_i[..., None]) * by).astype(q.dtype)
            d_k = add(d_k, j, product("bkrs,bkrh->bksh", d_scores, q_i))
            d_v = add(d_v, j, product("bkrs,bkrh->bksh", weights.astype(q.dtype), d_out_i))
            return d_q + product("bkrs,bksh->bkrh", d_scores, k_j), d_k, d_v

        state = (jnp.zeros(q_i.shape, jnp.float32), *totals)
        for (visit, count), mask in ((unmasked, False), (masked, True)):
            state = _each_tile(functools.partial(update, mask=mask), visit[i], count[i], state)
        return state[1:], state[0]

    totals = (jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32))
    (d_k, d_v), d_q = lax.scan(query_tile, totals, jnp.arange(live.shape[0], dtype=jnp.int32))
    return jnp.moveaxis(d_q, 0, 2), d_k, d_v


def _listed(chosen: Array) -> tuple[Array, Array]:
    """The chosen key tiles of every query tile first, in order, and their number: [I, J], [I].

    Loops over them have dynamic lengths and no dead iterations.
    """
    return jnp.argsort(~chosen, axis=1, stable=True), chosen.sum(axis=1)


def _each_tile(
    update: Callable[[Array, _State], _State], visit: Array, count: Array, state: _State
) -> _State:
    return lax.fori_loop(0, count, lambda step, state: update(visit[step], state), state)


def split_queries(q: Array, num_kv_heads: int, tile: int) -> Array:
    """[B, T, N, H] -> [B, K, I, G * tile, H]: the query heads of one KV head share a tile."""
    batch, length, heads, dim = q.shape
    group = heads // num_kv_heads
    q = q.reshape(batch, length // tile, tile, num_kv_heads, group, dim)
    return q.transpose(0, 3, 1, 4, 2, 5).reshape(batch, num_kv_heads, -1, group * tile, dim)


def join_queries(x: Array, group: int, tile: int) -> Array:
    """Inverse of split_queries for [B, K, I, G * tile, ...] -> [B, T, N, ...]."""
    batch, kv_heads, num_tiles = x.shape[:3]
    x = x.reshape(batch, kv_heads, num_tiles, group, tile, *x.shape[4:])
    x = jnp.moveaxis(x, (2, 4), (1, 2))  # [B, I, tile, K, G, ...]
    return x.reshape(batch, num_tiles * tile, kv_heads * group, *x.shape[5:])

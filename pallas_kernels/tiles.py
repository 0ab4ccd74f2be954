"""Attention by tiles with an online softmax: the jnp engine of the `xla` bodies.

Only tiles marked live are computed, so hidden halves and foreign chunks cost nothing; scores exist
one tile at a time, so no T x S array is ever stored. Scores and sums are float32.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array
_State = tuple[Array, Array, Array]  # running out, maximum and sum

TILE = 256  # queries and keys of one tile; measured best of 128..1024 on CPU, and a sane GPU size
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


def tiled_attention(
    live: Array,
    whole: Array,
    score_tile: Callable[[Array, Array], tuple[Array, Array]],
    visible_tile: Callable[[Array, Array], Array],
    shape: tuple[int, int, int, int],
    dtype: jnp.dtype,
) -> tuple[Array, Array]:
    """Attend every query tile to its live key tiles.

    Args:
      live: [I, J] bool, which key tiles a query tile has to visit.
      whole: [I, J] bool, where every query that is no padding sees every key: no mask is applied.
      score_tile: (i, j) -> scaled scores [B, K, R, S] float32 and values [B, K, S, H] of query tile
        i and key tile j.
      visible_tile: (i, j) -> bool, broadcastable to the scores; called where a tile is not whole.
      shape: (B, K, R, H); R rows of a query tile are G query heads times queries.
      dtype: of the returned ``out``.

    Returns:
      out [B, K, I, R, H] (0 where nothing is visible) and lse [B, K, I, R] float32 (-inf there).
      Padding queries hold anything where a tile was whole.
    """
    batch, heads, rows, dim = shape

    # Live tiles first, in order: the loops below have dynamic lengths and no dead iterations.
    def listed(chosen: Array) -> tuple[Array, Array]:
        return jnp.argsort(~chosen, axis=1, stable=True), chosen.sum(axis=1)

    unmasked, masked = listed(live & whole), listed(live & ~whole)

    def query_tile(_: None, i: Array) -> tuple[None, tuple[Array, Array]]:
        def update(j: Array, state: _State, mask: bool) -> _State:
            out, top, total = state
            scores, values = score_tile(i, j)
            if mask:
                see = visible_tile(i, j)
                scores = jnp.where(see, scores, _FLOOR)
            new_top = jnp.maximum(top, scores.max(-1))
            weights = jnp.exp(scores - new_top[..., None])
            if mask:
                weights = jnp.where(see, weights, 0.0)
            shrink = jnp.exp(top - new_top)
            part = jnp.einsum(
                "bkrs,bksh->bkrh",
                weights.astype(values.dtype),
                values,
                preferred_element_type=jnp.float32,
            )
            return out * shrink[..., None] + part, new_top, total * shrink + weights.sum(-1)

        state = (
            jnp.zeros((batch, heads, rows, dim), jnp.float32),
            jnp.full((batch, heads, rows), _FLOOR, jnp.float32),
            jnp.zeros((batch, heads, rows), jnp.float32),
        )
        for (visit, count), mask in ((unmasked, False), (masked, True)):
            step = functools.partial(_visit, update=update, visit=visit[i], mask=mask)
            state = lax.fori_loop(0, count[i], step, state)
        out, top, total = state
        seen = total > 0
        out = out / jnp.where(seen, total, 1.0)[..., None]
        lse = jnp.where(seen, top + jnp.log(jnp.where(seen, total, 1.0)), -jnp.inf)
        return None, (out.astype(dtype), lse)

    if live.shape[0] == 1:
        _, (out, lse) = query_tile(None, jnp.int32(0))
        return out[:, :, None], lse[:, :, None]
    _, (out, lse) = lax.scan(query_tile, None, jnp.arange(live.shape[0], dtype=jnp.int32))
    return jnp.moveaxis(out, 0, 2), jnp.moveaxis(lse, 0, 2)


def _visit(
    step: Array,
    state: _State,
    *,
    update: Callable[[Array, _State, bool], _State],
    visit: Array,
    mask: bool,
) -> _State:
    return update(visit[step], state, mask)


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

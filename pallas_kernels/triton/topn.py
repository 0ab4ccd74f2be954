"""Top-N attention in three kernels: score every key, select the N best of a head, mix their values.

The query is turned to the frame of every page, as in paged.py. The selection bisects on the
order-preserving integer image of the scores, in blocks and then among the winners of the blocks:
XLA sorts for it, and Triton has neither a sort nor a top-k. Values are read in the last kernel
only, and only the chosen rows, so that their pool may lie in pinned host memory (KCache section
3.1, arXiv:2404.18057).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.operands import Pages, Pool, Rotary
from pallas_kernels.tiles import pad_to
from pallas_kernels.triton.heads import HeadParts, columns, power_of_two, zero_padding
from pallas_kernels.visibility import cached_visible

Array = jax.Array
Ref = Any  # what a kernel reads and writes through
Mix = Callable[[Array, Array, Array, Array], tuple[Array, Array]]

_HIDDEN = jnp.iinfo(jnp.int32).max
_ROWS = 16  # of a product on tensor cores; the G heads of a KV head, the last one repeated


@dataclasses.dataclass(frozen=True)
class TopnTiling:
    """Sizes of the three kernels; powers of two.

    Attributes:
      keys: scored at a time.
      block: scores selected from at a time; above 8,192 registers spill.
      values: mixed at a time.
    """

    keys: int = 64
    block: int = 8_192
    values: int = 32


def topn_kernel(
    q: Array,
    pool: Pool,
    table: Pages,
    query_position: Array,
    rotary: Rotary,
    *,
    n: int,
    scale: float,
    interpret: bool,
    tiling: TopnTiling | None = None,
    mix: Mix | None = None,
) -> tuple[Array, Array, Array]:
    """Arguments of ``topn_attention``, ``n`` at most the number of slots.

    ``mix`` takes the place of ``mix_kernel``: of (best, slots, v_pool, pages).

    Returns:
      out [B, N, H], the renormalised mixture; lse [B, N] over the chosen keys and over all visible
      ones. All float32.
    """
    tiling = tiling or TopnTiling()
    num_slots = table.slot_position.shape[1]
    scores, total = score_kernel(
        q, pool.k, table, query_position, rotary, scale=scale, interpret=interpret, keys=tiling.keys
    )
    best, slots = select_kernel(scores, n, block=tiling.block, interpret=interpret)
    slots = jnp.minimum(slots, num_slots - 1)  # of padding: its score is -inf
    mix = mix or functools.partial(mix_kernel, values=tiling.values, interpret=interpret)
    out, lse = mix(best, slots, pool.v, table.pages)
    return out, lse, total


def score_kernel(
    q: Array,
    k_pool: Array,
    table: Pages,
    query_position: Array,
    rotary: Rotary,
    *,
    scale: float,
    interpret: bool,
    keys: int,
) -> tuple[Array, Array]:
    """Scaled scores [B, N, S'], -inf where a slot is not seen, and their lse [B, N]; float32.

    S' is the number of slots, padded to whole tiles of ``keys``.
    """
    batch, num_heads, dim = q.shape
    num_pool_pages, page, num_kv_heads, _ = k_pool.shape
    group = num_heads // num_kv_heads
    parts = HeadParts(dim, rotary.cos.shape[-1], rotary.interleaved)
    turned = rotary.rotate_by(q.astype(jnp.float32), jnp.maximum(query_position, 0))
    num_rows = power_of_two(group, _ROWS)
    alike = jnp.minimum(jnp.arange(num_rows), group - 1)
    turned = (turned * scale).reshape(batch, num_kv_heads, group, dim)[:, :, alike]
    slot_position = pad_to(table.slot_position, 1, keys, _HIDDEN)
    num_slots = slot_position.shape[1]
    short = -(-num_slots // page) - table.pages.shape[1]
    pages, offsets = (jnp.pad(x, ((0, 0), (0, short))) for x in (table.pages, table.offsets))
    num_tiles = num_slots // keys

    def whole(x: Array) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda j, k, b: (0,) * x.ndim)

    def of_row(x: Array) -> pl.BlockSpec:
        return pl.BlockSpec((None, *x.shape[1:]), lambda j, k, b: (b, *(0,) * (x.ndim - 1)))

    pool = k_pool.reshape(num_pool_pages * page, num_kv_heads, dim)
    rows = query_position.reshape(batch, 1)
    scores, lse = pl.pallas_call(
        functools.partial(_score, parts=parts, page=page, group=group),
        grid=(num_tiles, num_kv_heads, batch),
        in_specs=[
            *map(of_row, (pages, offsets, slot_position, rows)),
            *map(whole, (rotary.cos, rotary.sin)),
            pl.BlockSpec((None, None, num_rows, dim), lambda j, k, b: (b, k, 0, 0)),
            whole(pool),
        ],
        out_specs=[
            pl.BlockSpec((None, None, group, keys), lambda j, k, b: (b, k, 0, j)),
            pl.BlockSpec((None, None, None, group), lambda j, k, b: (b, k, j, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch, num_kv_heads, group, num_slots), jnp.float32),
            jax.ShapeDtypeStruct((batch, num_kv_heads, num_tiles, group), jnp.float32),
        ],
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="topn_score",
    )(pages, offsets, slot_position, rows, rotary.cos, rotary.sin, turned, pool)
    lse = jax.nn.logsumexp(lse, axis=2)
    return scores.reshape(batch, num_heads, num_slots), lse.reshape(batch, num_heads)


def _score(
    page_ref: Ref,
    offset_ref: Ref,
    slot_ref: Ref,
    position_ref: Ref,
    cos_ref: Ref,
    sin_ref: Ref,
    q_ref: Ref,
    k_ref: Ref,
    score_ref: Ref,
    lse_ref: Ref,
    *,
    parts: HeadParts,
    page: int,
    group: int,
) -> None:
    """One tile of keys of one KV head with all its query heads."""
    keys, head = score_ref.shape[1], pl.program_id(1)
    start = pl.program_id(0) * keys  # the interpreter knows no program inside a branch
    num_rows = q_ref.shape[0]
    precision = lax.Precision.HIGHEST if k_ref.dtype == jnp.float32 else None
    slot = start + lax.iota(jnp.int32, keys)
    number = lax.div(slot, page)
    see = cached_visible(position_ref[0], slot_ref[slot])
    rows = lax.iota(jnp.int32, num_rows)
    cut = [parts.part(which) for which in range(3)]
    pair, _ = columns(parts.pairs)
    used = (0, 1, 2) if parts.num_rest else (0, 1)

    def visible_scores() -> Array:
        row = (page_ref[number] * page + lax.rem(slot, page))[:, None]
        # What hidden slots hold stays in their own columns, which are masked.
        key = [k_ref[row, head, cut[which][0][None, :]] for which in used]
        query = [
            zero_padding(q_ref[rows[:, None], cut[which][0][None, :]], cut[which][1])
            for which in used
        ]
        first = lax.div(start, page)

        def of_page(m: Array, scores: Array) -> Array:
            offset = offset_ref[m]

            def from_here() -> Array:
                turn = jnp.abs(offset)
                cosine = cos_ref[turn, pair][None, :]
                sign = lax.max(lax.min(offset, 1), -1).astype(jnp.float32)
                sine = (sin_ref[turn, pair] * sign)[None, :]
                # By minus the offset: the keys stand inside their chunk.
                one, two = query[:2]
                turned = [one * cosine + two * sine, two * cosine - one * sine, *query[2:]]
                found = jnp.zeros((num_rows, keys), jnp.float32)
                for x, y in zip(turned, key, strict=True):
                    found += plt.dot(x.astype(y.dtype), y.T, precision=precision)
                return jnp.where((number >= m)[None, :], found, scores)

            moved = offset != offset_ref[jnp.maximum(m - 1, 0)]
            return lax.cond((m == first) | moved, from_here, lambda: scores)

        last = lax.div(start + keys - 1, page)
        scores = jnp.zeros((num_rows, keys), jnp.float32)
        scores = lax.fori_loop(first, last + 1, of_page, scores)
        return jnp.where(see[None, :], scores, -jnp.inf)

    def nothing() -> Array:
        return jnp.full((num_rows, keys), -jnp.inf, jnp.float32)

    scores = lax.cond(slot_ref[slot].min() <= position_ref[0], visible_scores, nothing)
    top = scores.max(1)
    safe = jnp.where(top > -jnp.inf, top, 0.0)
    total = jnp.exp(scores - safe[:, None]).sum(1)
    to = jnp.minimum(rows, group - 1)  # the rows of padding repeat the last head
    score_ref[to[:, None], lax.iota(jnp.int32, keys)[None, :]] = scores
    lse_ref[to] = jnp.where(total > 0, safe + jnp.log(jnp.maximum(total, 1e-30)), -jnp.inf)


def select_kernel(scores: Array, n: int, *, block: int, interpret: bool) -> tuple[Array, Array]:
    """The ``n`` highest of scores [B, N, S] and where they are, in no order; two of [B, N, n].

    Of equal scores the earlier ones. Blocks of ``block`` scores give their n best, and those are
    selected from again.
    """
    found: Array | None = None
    while n < scores.shape[-1]:
        size = min(power_of_two(scores.shape[-1]), max(block, power_of_two(2 * n)))
        scores, at = _select_level(scores, n, size, interpret)
        found = at if found is None else jnp.take_along_axis(found, at, axis=-1)
    if found is None:
        found = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), scores.shape)
    return scores, found


def _select_level(scores: Array, n: int, size: int, interpret: bool) -> tuple[Array, Array]:
    """The n best of every block of ``size`` scores: scores and places, [B, N, blocks * n]."""
    last = scores.shape[-1] - 1
    scores = pad_to(scores, 2, size, -jnp.inf)
    batch, heads, length = scores.shape
    blocks, wide = length // size, n + 1  # one place more, for those that are not selected
    shape = (batch, heads, blocks, wide)
    spec = pl.BlockSpec((None, None, None, wide), lambda j, h, b: (b, h, j, 0))
    best, at = pl.pallas_call(
        functools.partial(_select, n=n),
        grid=(blocks, heads, batch),
        in_specs=[pl.BlockSpec((None, None, size), lambda j, h, b: (b, h, j))],
        out_specs=[spec, spec],
        out_shape=[
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.int32),
        ],
        compiler_params=plt.CompilerParams(num_warps=16 if size > 2_048 else 4, num_stages=1),
        interpret=interpret,
        name="topn_select",
    )(scores)
    best, at = (x[..., :n].reshape(batch, heads, blocks * n) for x in (best, at))
    return best, jnp.minimum(at, last)


def _select(score_ref: Ref, best_ref: Ref, at_ref: Ref, *, n: int) -> None:
    """One block of scores of one head."""
    scores = score_ref[...]
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    rank = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)  # ordered as the scores are

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # at least n are above low, fewer than n above high
        middle = (low & high) + ((low ^ high) >> 1)
        enough = (rank > middle).astype(jnp.int32).sum() >= n
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    bounds = (jnp.int32(-(2**31)), jnp.int32(2**31 - 1))
    _, nth = lax.fori_loop(0, 32, halve, bounds)
    above, equal = rank > nth, rank == nth
    number = above.astype(jnp.int32).sum()
    of_above = jnp.cumsum(above.astype(jnp.int32)) - 1
    of_equal = number + jnp.cumsum(equal.astype(jnp.int32)) - 1
    to = jnp.where(above, of_above, jnp.where(equal & (of_equal < n), of_equal, n))
    size = scores.shape[0]
    best_ref[to] = scores
    at_ref[to] = pl.program_id(0) * size + lax.iota(jnp.int32, size)


def mix_kernel(
    best: Array, slots: Array, v_pool: Array, pages: Array, *, values: int, interpret: bool
) -> tuple[Array, Array]:
    """Softmax mixture of the values at slots [B, N, n] with scores ``best`` [B, N, n].

    Returns:
      out [B, N, H] and lse [B, N], float32; 0 and -inf where every score is -inf.
    """
    batch, num_heads, n = best.shape
    _, page, num_kv_heads, dim = v_pool.shape
    count = power_of_two(n, values)
    fill = ((0, 0), (0, 0), (0, count - n))
    best = jnp.pad(best, fill, constant_values=-jnp.inf)
    slots = jnp.pad(slots, fill)
    parts = HeadParts(dim, dim // 2, False)
    listed = pl.BlockSpec((None, None, count), lambda h, b: (b, h, 0))
    out, lse = pl.pallas_call(
        functools.partial(
            _mix, parts=parts, page=page, group=num_heads // num_kv_heads, values=values
        ),
        grid=(num_heads, batch),
        in_specs=[
            listed,
            listed,
            pl.BlockSpec((None, pages.shape[1]), lambda h, b: (b, 0)),
            pl.BlockSpec(v_pool.shape, lambda h, b: (0, 0, 0, 0)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, parts.padded), lambda h, b: (b, h, 0)),
            pl.BlockSpec((None, None, 1), lambda h, b: (b, h, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch, num_heads, parts.padded), jnp.float32),
            jax.ShapeDtypeStruct((batch, num_heads, 1), jnp.float32),
        ],
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="topn_mix",
    )(best, slots, pages, v_pool)
    return out[..., :dim], lse[..., 0]


def _mix(
    best_ref: Ref,
    slot_ref: Ref,
    page_ref: Ref,
    v_ref: Ref,
    out_ref: Ref,
    lse_ref: Ref,
    *,
    parts: HeadParts,
    page: int,
    group: int,
    values: int,
) -> None:
    """The chosen values of one query head."""
    head = lax.div(pl.program_id(0), group)
    top = best_ref[...].max()
    top = jnp.where(top > -jnp.inf, top, 0.0)
    column, _ = parts.part(3)

    def add(number: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        out, total = state
        here = number * values + lax.iota(jnp.int32, values)
        score, slot = best_ref[here], slot_ref[here]
        weight = jnp.exp(score - top)
        row = page_ref[lax.div(slot, page)]
        value = v_ref[row[:, None], lax.rem(slot, page)[:, None], head, column[None, :]]
        # A slot that does not count may hold NaN.
        value = jnp.where((score > -jnp.inf)[:, None], value.astype(jnp.float32), 0.0)
        return out + (weight[:, None] * value).sum(0), total + weight.sum()

    state = (jnp.zeros((parts.padded,), jnp.float32), jnp.float32(0))
    out, total = lax.fori_loop(0, best_ref.shape[0] // values, add, state)
    out_ref[...] = out / jnp.where(total > 0, total, 1.0)
    lse = jnp.where(total > 0, top + jnp.log(jnp.maximum(total, 1e-30)), -jnp.inf)
    lse_ref[0] = lse

"""Attention of scattered query rows to a paged pool: FusionRAG's Q-Sparse-Attn, and decoding.

One program holds a tile of rows, a row being one query of one head; the G query heads of a KV head
lie side by side, so that a key tile is read once for all of them. It walks over the segments of
its page list (work.py), turns the queries by minus the segment's offset, and visits the keys of
the segment tile by tile with an online softmax. With ``splits`` > 1 several programs share the
pages of one row tile and their parts are merged outside (FusionRAG section 4.3, arXiv:2601.12904;
the split is that of Flash-Decoding).
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.operands import Pages, Pool, Rotary
from pallas_kernels.tiles import pad_to
from pallas_kernels.triton.heads import LOG2_E, HeadParts, columns, power_of_two, zero_padding
from pallas_kernels.triton.work import live_pages, segments_of
from pallas_kernels.visibility import cached_visible, tile_range, within_window

Array = jax.Array
Ref = Any  # what a kernel reads and writes through

_HIDDEN = jnp.iinfo(jnp.int32).max
_FLOOR = -1e30
_PROGRAMS = 264  # two for each of an H200's 132 multiprocessors: below that, pages are split
_MOST_SPLITS = 64


@dataclasses.dataclass(frozen=True)
class PagedTiling:
    """Sizes of one program.

    Attributes:
      rows: of a tile; a row is one query of one head.
      keys: of a tile, a multiple of the page.
      warps: of a program.
      stages: of Triton's pipeline.
      splits: programs that share the pages of a row tile; None chooses.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    splits: int | None = None


def paged_tiling(num_rows: int, page: int, dim: int) -> PagedTiling:
    """The sizes for ``num_rows`` = queries x heads of a KV head: few rows read, many compute."""
    keys = max(64, page) if dim <= 128 else max(32, page)
    if num_rows <= 16:
        return PagedTiling(rows=16, keys=keys, warps=4, stages=3)
    rows = min(128, power_of_two(num_rows))
    return PagedTiling(rows=rows, keys=keys, warps=8 if rows == 128 else 4, stages=2)


def paged_kernel(
    q: Array,
    pool: Pool,
    table: Pages,
    query_position: Array,
    rotary: Rotary,
    *,
    scale: float,
    window: Array | int | None,
    interpret: bool,
    tiling: PagedTiling | None = None,
) -> tuple[Array, Array]:
    """Arguments of ``sparse_attention``; out [B, T, N, H] and lse [B, T, N], both float32."""
    batch, length, num_heads, dim = q.shape
    pages, offsets, slot_position = table
    num_pool_pages, page, num_kv_heads, _ = pool.k.shape
    group = num_heads // num_kv_heads
    parts = HeadParts(dim, rotary.cos.shape[-1], rotary.interleaved)
    tiling = tiling or paged_tiling(length * group, page, dim)
    turned = rotary.rotate_by(q.astype(jnp.float32), jnp.maximum(query_position, 0))
    turned *= scale * LOG2_E
    # [B, T, K, G, H] -> [B, K, T * G, H]: the heads of one query are neighbouring rows.
    turned = turned.reshape(batch, length, num_kv_heads, group, dim).transpose(0, 2, 1, 3, 4)
    turned = pad_to(turned.reshape(batch, num_kv_heads, -1, dim), 2, tiling.rows)
    row_position = pad_to(jnp.repeat(query_position, group, axis=1), 1, tiling.rows, -1)
    num_tiles = row_position.shape[1] // tiling.rows
    splits = tiling.splits or splits_for(batch * num_kv_heads * num_tiles, pages.shape[1], page)

    low, high = tile_range(row_position, tiling.rows, row_position >= 0)
    live = live_pages(slot_position, page, low, jnp.maximum(high, -1), window)
    segments = segments_of(live, offsets, splits, max(1, tiling.keys // page))
    # A slot of every page that somebody may see: what it holds is a number.
    anchor = slot_position.reshape(batch, -1, page).argmin(-1).astype(jnp.int32)
    anchor = anchor + pages * page
    bound = jnp.asarray(0 if window is None else window, jnp.int32).reshape(1)

    def whole(x: Array) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda i, h, b: (0,) * x.ndim)

    def of_row(x: Array) -> pl.BlockSpec:
        return pl.BlockSpec((None, *x.shape[1:]), lambda i, h, b: (b, *(0,) * (x.ndim - 1)))

    def of_tile(x: Array) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, x.shape[2]), lambda i, h, b: (b, num_tiles - 1 - i, 0))

    def of_part(*last: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, None, None, tiling.rows, *last),
            lambda i, h, b: (
                (b, h // num_kv_heads, h % num_kv_heads, num_tiles - 1 - i) + (0,) * len(last)
            ),
        )

    pool_rows = (num_pool_pages * page, num_kv_heads, dim)
    tables = (segments.first, segments.start, segments.stop)
    operands = (offsets, anchor, pages, slot_position)
    constants = (bound, rotary.cos, rotary.sin)
    pools = (pool.k.reshape(pool_rows), pool.v.reshape(pool_rows))
    shape = (batch, splits, num_kv_heads, num_tiles * tiling.rows)
    out, lse = pl.pallas_call(
        functools.partial(
            _kernel,
            parts=parts,
            page=page,
            keys=tiling.keys,
            num_kv_heads=num_kv_heads,
            windowed=window is not None,
        ),
        # The last tiles see most keys; they come first, so that no long one is left over.
        grid=(num_tiles, splits * num_kv_heads, batch),
        in_specs=[
            *map(of_tile, tables),
            *map(of_row, operands),
            pl.BlockSpec((None, tiling.rows), lambda i, h, b: (b, num_tiles - 1 - i)),
            *map(whole, constants),
            pl.BlockSpec(
                (None, None, tiling.rows, dim),
                lambda i, h, b: (b, h % num_kv_heads, num_tiles - 1 - i, 0),
            ),
            *map(whole, pools),
        ],
        out_specs=[of_part(parts.padded), of_part()],
        out_shape=[
            jax.ShapeDtypeStruct((*shape, parts.padded), jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ],
        compiler_params=plt.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
        interpret=interpret,
        name="paged_attention",
    )(*tables, *operands, row_position, *constants, turned, *pools)
    out, lse = merge_splits(out[..., :dim], lse)
    out, lse = out[:, :, : length * group], lse[:, :, : length * group]
    out = out.reshape(batch, num_kv_heads, length, group, dim).transpose(0, 2, 1, 3, 4)
    lse = lse.reshape(batch, num_kv_heads, length, group).transpose(0, 2, 1, 3)
    return out.reshape(q.shape), lse.reshape(batch, length, num_heads)


def merge_splits(out: Array, lse: Array) -> tuple[Array, Array]:
    """Join parts over disjoint keys, out [B, S, ..., H] and lse [B, S, ...], along axis 1."""
    if out.shape[1] == 1:
        return out[:, 0], lse[:, 0]
    top = lse.max(1, keepdims=True)
    weights = jnp.exp(lse - jnp.where(jnp.isfinite(top), top, 0.0))
    total = weights.sum(1)
    mixed = (weights[..., None] * out).sum(1) / jnp.where(total > 0, total, 1.0)[..., None]
    return mixed, jnp.where(total > 0, top[:, 0] + jnp.log(total), -jnp.inf)


def splits_for(programs: int, num_pages: int, page: int) -> int:
    """Into how many programs the pages of a row tile are split; each keeps 256 slots or more."""
    wanted = -(-_PROGRAMS // programs)
    return max(1, min(wanted, num_pages * page // 256, _MOST_SPLITS))


def _kernel(
    first_ref: Ref,
    start_ref: Ref,
    stop_ref: Ref,
    offset_ref: Ref,
    anchor_ref: Ref,
    page_ref: Ref,
    slot_ref: Ref,
    position_ref: Ref,
    window_ref: Ref,
    cos_ref: Ref,
    sin_ref: Ref,
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    out_ref: Ref,
    lse_ref: Ref,
    *,
    parts: HeadParts,
    page: int,
    keys: int,
    num_kv_heads: int,
    windowed: bool,
) -> None:
    """One row tile, one KV head, one split of the pages."""
    split, head = lax.div(pl.program_id(1), num_kv_heads), lax.rem(pl.program_id(1), num_kv_heads)
    num_rows, num_slots = position_ref.shape[0], slot_ref.shape[0]
    precision = lax.Precision.HIGHEST if k_ref.dtype == jnp.float32 else None
    rows = lax.iota(jnp.int32, num_rows)
    position = position_ref[...]
    cut = [parts.part(which) for which in range(4)]
    pair, _ = columns(parts.pairs)
    used = (0, 1, 2) if parts.num_rest else (0, 1)

    def queries(which: int) -> Array:
        at, real = cut[which]
        return zero_padding(q_ref[rows[:, None], at[None, :]], real)

    def segment(number: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        start, stop = start_ref[number], stop_ref[number]
        offset, anchor = offset_ref[start], anchor_ref[start]
        turn = jnp.abs(offset)
        cosine = cos_ref[turn, pair][None, :]
        sign = lax.max(lax.min(offset, 1), -1).astype(jnp.float32)
        sine = (sin_ref[turn, pair] * sign)[None, :]
        one, two = queries(0), queries(1)
        # By minus the offset: the keys stand inside their chunk.
        turned = [one * cosine + two * sine, two * cosine - one * sine]
        if parts.num_rest:
            turned.append(queries(2))
        turned = [x.astype(k_ref.dtype) for x in turned]

        def tile(number: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            out, top, total = state
            slot = start * page + number * keys + lax.iota(jnp.int32, keys)
            inside = slot < stop * page
            slot = jnp.minimum(slot, num_slots - 1)
            key_position = jnp.where(inside, slot_ref[slot], _HIDDEN)
            # Hidden slots may hold NaN: read one that holds a number in their place, for a weight
            # of 0 would not silence them and a mask on the loaded values would break pipelining.
            row = page_ref[lax.div(slot, page)] * page + lax.rem(slot, page)
            row = jnp.where(key_position == _HIDDEN, anchor, row)[:, None]
            scores = jnp.zeros((num_rows, keys), jnp.float32)
            for which in used:
                key = k_ref[row, head, cut[which][0][None, :]]
                scores += plt.dot(turned[which], key.T, precision=precision)
            see = cached_visible(position[:, None], key_position[None, :])
            if windowed:
                see &= within_window(position[:, None], key_position[None, :], window_ref[0])
            scores = jnp.where(see, scores, _FLOOR)
            new_top = jnp.maximum(top, scores.max(1))
            weights = jnp.where(see, jnp.exp2(scores - new_top[:, None]), 0.0)
            shrink = jnp.exp2(top - new_top)
            value = v_ref[row, head, cut[3][0][None, :]]
            part = plt.dot(weights.astype(value.dtype), value, precision=precision)
            return out * shrink[:, None] + part, new_top, total * shrink + weights.sum(1)

        return lax.fori_loop(0, lax.div((stop - start) * page + keys - 1, keys), tile, state)

    state = (
        jnp.zeros((num_rows, parts.padded), jnp.float32),
        jnp.full((num_rows,), _FLOOR, jnp.float32),
        jnp.zeros((num_rows,), jnp.float32),
    )
    out, top, total = lax.fori_loop(first_ref[split], first_ref[split + 1], segment, state)
    seen = total > 0
    safe = jnp.where(seen, total, 1.0)
    out_ref[...] = out / safe[:, None]
    lse_ref[...] = jnp.where(seen, top * math.log(2) + jnp.log(safe), -jnp.inf)

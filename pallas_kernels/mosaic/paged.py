"""Q-Sparse-Attn for Hopper: wgmma and TMA, a producer and two computing warp groups a program.

FusionRAG section 4.3, arXiv:2601.12904. What triton/paged.py computes, at 64 keys a step: a program
holds 128 rows, a row being one query of one head, and walks over a list of key tiles made before it
starts, each a few neighbouring pages of one offset. The producer copies pages by TMA; a computing
warp group turns its 64 queries where the offset changes. TMA brings whole pages, so the values of
hidden slots, which may be NaN, are set to zero in shared memory in tiles that have any: both groups
write the same bytes.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.bodies import KernelError
from pallas_kernels.operands import Pages, Pool, Rotary
from pallas_kernels.tiles import pad_to
from pallas_kernels.triton.heads import LOG2_E
from pallas_kernels.triton.paged import merge_splits, splits_for
from pallas_kernels.triton.work import live_pages, tiles_of
from pallas_kernels.visibility import tile_range

Array = jax.Array
Ref = Any  # what a kernel reads and writes through

KEYS = 64  # of one step, and rows of one warp group
_STAGES = 2
_DIM = 128
_HALF = _DIM // 2
_HIDDEN = jnp.iinfo(jnp.int32).max
_FLOOR = -1e30

_MATRIX = plgpu.Layout.WGMMA
_BY_ROW, _BY_COLUMN = _MATRIX.reduce(1), _MATRIX.reduce(0)


def check_shapes(dim: int, rotary: int, interleaved: bool, page: int, dtype: Any) -> None:
    """KernelError unless the kernel takes such heads and pages."""
    fits = dim == rotary == _DIM and not interleaved and KEYS % page == 0 and page >= 8
    if not fits or jnp.dtype(dtype).itemsize != 2:
        raise KernelError(
            f"sparse_attention: the body 'pallas_mosaic' takes 16-bit heads of {_DIM} dimensions, "
            f"all rotated by halves, in pages of 8 to {KEYS} slots, not {dim} dimensions, {rotary} "
            f"rotated, interleaved={interleaved}, pages of {page}, {jnp.dtype(dtype).name}; choose "
            f"'pallas_triton'"
        )


def paged_mosaic_kernel(
    q: Array,
    pool: Pool,
    table: Pages,
    query_position: Array,
    rotary: Rotary,
    *,
    scale: float,
    window: Array | int | None,
    splits: int | None = None,
) -> tuple[Array, Array]:
    """Arguments of ``sparse_attention``; out [B, T, N, H] and lse [B, T, N], both float32.

    Raises:
      KernelError: heads or pages that the kernel does not take.
    """
    batch, length, num_heads, dim = q.shape
    pages, offsets, slot_position = table
    _, page, num_kv_heads, _ = pool.k.shape
    check_shapes(dim, 2 * rotary.cos.shape[-1], rotary.interleaved, page, pool.k.dtype)
    group = num_heads // num_kv_heads
    turned = rotary.rotate_by(q.astype(jnp.float32), jnp.maximum(query_position, 0))
    turned *= scale * LOG2_E
    # [B, T, K, G, H] -> [B, K, T * G, H]: the heads of one query are neighbouring rows.
    turned = turned.reshape(batch, length, num_kv_heads, group, dim).transpose(0, 2, 1, 3, 4)
    turned = pad_to(turned.reshape(batch, num_kv_heads, -1, dim), 2, 2 * KEYS)
    row_position = pad_to(jnp.repeat(query_position, group, axis=1), 1, 2 * KEYS, -1)
    num_rows = row_position.shape[1]
    num_tiles = num_rows // (2 * KEYS)
    splits = splits or splits_for(batch * num_kv_heads * num_tiles, pages.shape[1], page)

    low, high = tile_range(row_position, 2 * KEYS, row_position >= 0)
    live = live_pages(slot_position, page, low, jnp.maximum(high, -1), window)
    tiles = tiles_of(live, offsets, splits, KEYS // page)
    hides = (slot_position.reshape(batch, -1, page) == _HIDDEN).any(-1)
    before = jnp.pad(jnp.cumsum(hides, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
    row = jnp.arange(batch)[:, None, None]
    dirty = before[row, tiles.stop] - before[row, tiles.start]
    turn = offsets[row, jnp.minimum(tiles.start, offsets.shape[1] - 1)]
    slots = jnp.pad(slot_position, ((0, 0), (0, KEYS)), constant_values=_HIDDEN)
    bound = jnp.asarray(0 if window is None else window, jnp.int32).reshape(1)

    shape = (batch, splits, num_kv_heads, num_rows)
    out, lse = plgpu.kernel(
        functools.partial(
            _kernel, page=page, num_kv_heads=num_kv_heads, windowed=window is not None
        ),
        out_type=(
            jax.ShapeDtypeStruct((*shape, dim), jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        grid=(num_tiles, splits * num_kv_heads, batch),
        grid_names=("tile", "head", "batch"),
        num_threads=3,
        thread_name="group",
        scratch_types=_scratch(page, pool.k.dtype),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )(
        *tiles, turn, dirty, pages, slots, row_position, bound, rotary.cos, rotary.sin,
        turned[..., :_HALF], turned[..., _HALF:], pool.k, pool.v,
    )  # fmt: skip
    out, lse = merge_splits(out, lse)
    out, lse = out[:, :, : length * group], lse[:, :, : length * group]
    out = out.reshape(batch, num_kv_heads, length, group, dim).transpose(0, 2, 1, 3, 4)
    lse = lse.reshape(batch, num_kv_heads, length, group).transpose(0, 2, 1, 3)
    return out.reshape(q.shape), lse.reshape(batch, length, num_heads)


def _shared(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the tiles and swizzle that wgmma and TMA want."""
    bits = jnp.dtype(dtype).itemsize * 8
    swizzle = plgpu.find_swizzle(shape[-1] * bits)
    # Abstract to a type checker: their base class leaves a method empty.
    tiling: Any = plgpu.TilingTransform
    swizzling: Any = plgpu.SwizzleTransform
    return plgpu.SMEM(
        shape, dtype, transforms=(tiling((8, 8 * swizzle // bits)), swizzling(swizzle))
    )


def _scratch(page: int, dtype: Any) -> list[Any]:
    """Shared memory of a program, as ``_kernel`` takes it."""
    per_tile = KEYS // page
    filled = functools.partial(plgpu.Barrier, num_barriers=_STAGES)
    return [
        *(_shared((2, KEYS, _HALF), dtype) for _ in range(2)),  # the halves of the queries
        *(_shared((_STAGES, KEYS, _HALF), dtype) for _ in range(2)),  # of the keys
        _shared((_STAGES, KEYS, _DIM), dtype),
        _shared((2, KEYS, _DIM), jnp.float32),
        plgpu.SMEM((2, KEYS), jnp.float32),
        filled(num_arrivals=2 * per_tile),
        filled(num_arrivals=per_tile),
        filled(num_arrivals=2),
        filled(num_arrivals=2),
    ]


def _load(ref: Ref, layout: Any) -> Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def _kernel(
    start_g: Ref,
    stop_g: Ref,
    first_g: Ref,
    turn_g: Ref,
    dirty_g: Ref,
    page_g: Ref,
    slot_g: Ref,
    position_g: Ref,
    window_g: Ref,
    cos_g: Ref,
    sin_g: Ref,
    one_g: Ref,
    two_g: Ref,
    k_g: Ref,
    v_g: Ref,
    out_g: Ref,
    lse_g: Ref,
    one_s: Ref,
    two_s: Ref,
    k_one_s: Ref,
    k_two_s: Ref,
    v_s: Ref,
    out_s: Ref,
    lse_s: Ref,
    k_full: Ref,
    v_full: Ref,
    k_free: Ref,
    v_free: Ref,
    *,
    page: int,
    num_kv_heads: int,
    windowed: bool,
) -> None:
    """One tile of 128 rows, one KV head, one split of the key tiles."""
    batch, which = lax.axis_index("batch"), lax.axis_index("group")
    # The last tiles see most keys; they come first, so that no long one is left over.
    tile = first_g.shape[1] - 1 - lax.axis_index("tile")
    split, head = (f(lax.axis_index("head"), jnp.int32(num_kv_heads)) for f in (lax.div, lax.rem))
    begin, end = first_g[batch, tile, split], first_g[batch, tile, split + 1]

    def stage_of(number: Array) -> Array:
        return lax.rem(number - begin, jnp.int32(_STAGES))

    @pl.when(which < 2)
    def _compute() -> None:
        plgpu.set_max_registers(232, action="increase")
        rows = pl.ds(tile * (2 * KEYS) + which * KEYS, KEYS)
        position = _load(position_g.at[batch, rows], _BY_ROW)
        column = plgpu.broadcasted_iota(jnp.int32, (KEYS, KEYS), 1, layout=_MATRIX)

        def turn_queries(offset: Array) -> None:
            """By minus the offset: the keys stand inside their chunk."""
            turn = jnp.abs(offset)
            sign = lax.max(lax.min(offset, jnp.int32(1)), jnp.int32(-1)).astype(jnp.float32)
            cosine = lax.broadcast_in_dim(_load(cos_g.at[turn], _BY_COLUMN), (KEYS, _HALF), [1])
            sine = lax.broadcast_in_dim(_load(sin_g.at[turn], _BY_COLUMN), (KEYS, _HALF), [1])
            sine = sine * sign
            one = _load(one_g.at[batch, head, rows], _MATRIX)
            two = _load(two_g.at[batch, head, rows], _MATRIX)
            one_s.at[which][...] = (one * cosine + two * sine).astype(one_s.dtype)
            two_s.at[which][...] = (two * cosine - one * sine).astype(two_s.dtype)
            plgpu.commit_smem()

        def step(number: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            out, top, total = state
            stage, start = stage_of(number), start_g[batch, tile, number]
            offset = turn_g[batch, tile, number]
            before = turn_g[batch, tile, lax.max(number - 1, begin)]
            pl.when((number == begin) | (offset != before))(lambda: turn_queries(offset))
            plgpu.barrier_wait(k_full.at[stage])

            def score(acc: Ref) -> Array:
                plgpu.wgmma(acc, one_s.at[which], k_one_s.at[stage].T)
                plgpu.wgmma(acc, two_s.at[which], k_two_s.at[stage].T)
                return acc[...]

            scores = pl.run_scoped(score, plgpu.ACC((KEYS, KEYS), jnp.float32))
            plgpu.barrier_arrive(k_free.at[stage])
            here = slot_g.at[batch, pl.ds(start * page, KEYS)]
            keys = lax.broadcast_in_dim(_load(here, _BY_COLUMN), scores.shape, [1])
            queries = lax.broadcast_in_dim(position, scores.shape, [0])
            see = (keys <= queries) & (column < (stop_g[batch, tile, number] - start) * page)
            if windowed:
                see &= queries - keys < window_g[0]
            scores = jnp.where(see, scores, _FLOOR)
            new_top = jnp.maximum(top, scores.max(axis=1))
            shrink = jnp.exp2(top - new_top)
            # A row that has seen nothing yet has weights of 1, which its first visible key shrinks
            # to 0; if there is none they are dropped at the end.
            weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [0]))
            total = total * shrink + weights.sum(axis=1)
            out = out * lax.broadcast_in_dim(shrink, out.shape, [0])
            thin = weights.astype(v_s.dtype)
            out, total, new_top, thin = lax.optimization_barrier((out, total, new_top, thin))
            plgpu.barrier_wait(v_full.at[stage])

            def silence() -> None:
                slot = lax.broadcast_in_dim(_load(here, _BY_ROW), (KEYS, _DIM), [0])
                row = plgpu.broadcasted_iota(jnp.int32, (KEYS, _DIM), 0, layout=_MATRIX)
                # Behind the last page of a short tile lies a copy of it, not what ``slot`` says.
                real = (slot != _HIDDEN) & (row < (stop_g[batch, tile, number] - start) * page)
                value = _load(v_s.at[stage], _MATRIX)
                v_s.at[stage][...] = jnp.where(real, value, jnp.zeros_like(value))
                plgpu.commit_smem()

            pl.when(dirty_g[batch, tile, number] > 0)(silence)

            def mix(acc: Ref) -> None:
                plgpu.wgmma(acc, thin, v_s.at[stage])

            out = pl.run_state(mix)(plgpu.ACC.init(out))
            plgpu.barrier_arrive(v_free.at[stage])
            return out, new_top, total

        state = (
            plgpu.layout_cast(jnp.zeros((KEYS, _DIM), jnp.float32), _MATRIX),
            plgpu.layout_cast(jnp.full((KEYS,), _FLOOR, jnp.float32), _BY_ROW),
            plgpu.layout_cast(jnp.zeros((KEYS,), jnp.float32), _BY_ROW),
        )
        out, top, total = lax.fori_loop(begin, end, step, state)
        seen = top > 0.5 * _FLOOR
        total = jnp.where(seen, total, 1.0)
        share = jnp.where(seen, 1.0 / total, 0.0)
        out_s.at[which][...] = out * lax.broadcast_in_dim(share, out.shape, [0])
        lse = top * math.log(2) + jnp.log(total)
        lse_s.at[which][...] = jnp.where(seen, lse, -jnp.inf)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_s.at[which], out_g.at[batch, split, head, rows])
        plgpu.copy_smem_to_gmem(lse_s.at[which], lse_g.at[batch, split, head, rows])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(which == 2)
    def _produce() -> None:
        plgpu.set_max_registers(40, action="decrease")

        def fetch(number: Array) -> None:
            stage = stage_of(number)
            start, stop = start_g[batch, tile, number], stop_g[batch, tile, number]
            for n in range(KEYS // page):
                at = page_g[batch, lax.min(start + n, stop - 1)]
                to = pl.ds(n * page, page)
                for half, keys in enumerate((k_one_s, k_two_s)):
                    columns = pl.ds(half * _HALF, _HALF)
                    plgpu.copy_gmem_to_smem(
                        k_g.at[at, :, head, columns], keys.at[stage, to], k_full.at[stage]
                    )
                plgpu.copy_gmem_to_smem(v_g.at[at, :, head], v_s.at[stage, to], v_full.at[stage])

        @pl.loop(begin, lax.min(end, begin + _STAGES))
        def _fill(number: Array) -> None:
            fetch(number)

        @pl.loop(begin + _STAGES, end)
        def _refill(number: Array) -> None:
            plgpu.barrier_wait(k_free.at[stage_of(number)])
            plgpu.barrier_wait(v_free.at[stage_of(number)])
            fetch(number)

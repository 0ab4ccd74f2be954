"""Packed attention under the block mask as a Triton kernel, visiting live tiles only.

One program holds a tile of queries, of one or two heads of a KV head, and visits the key tiles on
its list: first those that need no mask, then those that do (FlashAttention-2, arXiv:2307.08691,
with the tiles of ``classify_tiles``). Tiles of foreign chunks are on no list.
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

from pallas_kernels.packed_tiles import Rule, classify_tiles
from pallas_kernels.tiles import pad_to
from pallas_kernels.triton.heads import LOG2_E, power_of_two
from pallas_kernels.visibility import EMPTY, packed_visible, within_window

Array = jax.Array
Ref = Any  # what a kernel reads and writes through
_State = tuple[Array, Array, Array]  # out, running maximum (base 2), sum of weights
RuleRefs = tuple[Ref, Ref, Ref, Ref]  # positions, segments, examples [T], window [1]

_FLOOR = -1e30


@dataclasses.dataclass(frozen=True)
class SegmentTiling:
    """Sizes of one program.

    Attributes:
      tile: queries, and keys, of a tile.
      heads: query heads side by side.
      warps: of a program.
      stages: of Triton's pipeline.
    """

    tile: int
    heads: int
    warps: int
    stages: int


def segment_tiling(length: int, group: int) -> SegmentTiling:
    """The sizes for rows of ``length`` tokens and ``group`` query heads of a KV head."""
    tile = min(64, power_of_two(length, 16))
    heads = 1 if group % 2 else 2
    return SegmentTiling(tile, heads, warps=8 if tile * heads == 128 else 4, stages=2)


def segment_kernel(
    q: Array,
    k: Array,
    v: Array,
    rule: Rule,
    *,
    scale: float,
    prefix_visible: bool,
    interpret: bool,
    tiling: SegmentTiling | None = None,
) -> tuple[Array, Array]:
    """Arguments and results of ``segment_attention``; the rule is the rows and the window."""
    _, length, num_heads, dim = q.shape
    group = num_heads // k.shape[2]
    tiling = tiling or segment_tiling(length, group)
    tile, heads = tiling.tile, tiling.heads
    # The op pads heads that are no power of two: k and v are activations of the same step.
    width = power_of_two(dim, 16)
    q, k, v = (pad_to(pad_to(x, 1, tile), 3, width) for x in (q, k, v))
    rows, sight = rows_of(rule, tile, prefix_visible)
    batch, padded = rows[0].shape
    num_tiles = padded // tile
    q = q.reshape(batch, padded, num_heads // heads, heads, width)
    visit, count = listed(chosen_tiles(rows, sight, tile))

    def last_first(i: Array) -> Array:
        return num_tiles - 1 - i

    keys = pl.BlockSpec(
        (None, padded, None, width), lambda i, n, b: (b, 0, lax.div(n * heads, group), 0)
    )
    queries = pl.BlockSpec(
        (None, tile, None, heads, width), lambda i, n, b: (b, last_first(i), n, 0, 0)
    )
    out, lse = pl.pallas_call(
        functools.partial(_kernel, scale=scale * LOG2_E, sight=sight),
        grid=(num_tiles, num_heads // heads, batch),
        in_specs=[
            pl.BlockSpec((None, None, 2), lambda i, n, b: (b, last_first(i), 0)),
            pl.BlockSpec((None, None, 2, num_tiles), lambda i, n, b: (b, last_first(i), 0, 0)),
            *rule_specs(padded),
            queries,
            keys,
            keys,
        ],
        out_specs=[
            queries,
            pl.BlockSpec((None, tile, None, heads), lambda i, n, b: (b, last_first(i), n, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32),
        ],
        compiler_params=plt.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
        interpret=interpret,
        name="segment_attention",
    )(count, visit, *rows, q, k, v)
    out = out.reshape(batch, padded, num_heads, width)[:, :length, :, :dim]
    return out, lse.reshape(batch, padded, num_heads)[:, :length]


@dataclasses.dataclass(frozen=True)
class Sight:
    """What of the packed rule is known when a kernel is compiled.

    Attributes:
      prefix_visible: may chunks see the prefix?
      with_examples: are there several examples in a row?
      windowed: is there a sliding window?
    """

    prefix_visible: bool
    with_examples: bool
    windowed: bool

    def sees(
        self, rule: RuleRefs, q_order: Array, k_order: Array, keys_first: bool = False
    ) -> Array:
        """Which queries [R] see which keys [S], by their order in the row: [R, S], or [S, R]."""
        positions, segments, examples, window = rule

        def query(x: Array) -> Array:
            return x[None, :] if keys_first else x[:, None]

        def key(x: Array) -> Array:
            return x[:, None] if keys_first else x[None, :]

        see = packed_visible(
            query(q_order),
            key(k_order),
            query(segments[q_order]),
            key(segments[k_order]),
            query(examples[q_order]) if self.with_examples else None,
            key(examples[k_order]) if self.with_examples else None,
            self.prefix_visible,
        )
        if self.windowed:
            see &= within_window(query(positions[q_order]), key(positions[k_order]), window[0])
        return see


def rows_of(
    rule: Rule, tile: int, prefix_visible: bool
) -> tuple[tuple[Array, Array, Array, Array], Sight]:
    """positions, segments, examples [B, T'] in whole tiles and window [1], as kernels read them."""
    (positions, segments, examples), window = rule
    sight = Sight(prefix_visible, examples is not None, window is not None)
    if examples is None:
        examples = jnp.zeros_like(segments)
    bound = jnp.asarray(0 if window is None else window, jnp.int32).reshape(1)
    positions, examples = pad_to(positions, 1, tile), pad_to(examples, 1, tile)
    return (positions, pad_to(segments, 1, tile, EMPTY), examples, bound), sight


def rule_specs(padded: int) -> list[pl.BlockSpec]:
    """Block specs of what ``rows_of`` returns, for a grid whose last index is the row."""
    row = pl.BlockSpec((None, padded), lambda i, n, b: (b, 0))
    return [row, row, row, pl.BlockSpec((1,), lambda i, n, b: (0,))]


def chosen_tiles(rows: tuple[Array, ...], sight: Sight, tile: int) -> Array:
    """Pairs of query and key tiles to compute without and with a mask: [B, I, 2, J] bool."""

    def of_row(segments: Array, examples: Array) -> tuple[Array, Array]:
        one = examples[None] if sight.with_examples else None
        return classify_tiles(segments[None], one, tile, sight.prefix_visible)

    live, whole = jax.vmap(of_row)(rows[1], rows[2])
    if sight.windowed:
        whole = jnp.zeros_like(whole)
    return jnp.stack((live & whole, live & ~whole), axis=2)


def listed(chosen: Array) -> tuple[Array, Array]:
    """The chosen of the last axis first, in order, and how many they are; both int32."""
    order = jnp.argsort(~chosen, axis=-1, stable=True).astype(jnp.int32)
    return order, chosen.sum(-1, dtype=jnp.int32)


def _kernel(
    count_ref: Ref,
    visit_ref: Ref,
    position_ref: Ref,
    segment_ref: Ref,
    example_ref: Ref,
    window_ref: Ref,
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    out_ref: Ref,
    lse_ref: Ref,
    *,
    scale: float,
    sight: Sight,
) -> None:
    """One tile of queries of neighbouring heads."""
    rule = (position_ref, segment_ref, example_ref, window_ref)
    tile, heads, width = q_ref.shape
    num_rows = tile * heads
    precision = lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else None
    q = q_ref[...].reshape(num_rows, width)
    start = (pl.num_programs(0) - 1 - pl.program_id(0)) * tile
    q_order = start + lax.div(lax.iota(jnp.int32, num_rows), heads)

    def update(number: Array, state: _State, *, masked: bool) -> _State:
        out, top, total = state
        first = visit_ref[1 if masked else 0, number] * tile
        key, value = k_ref[pl.ds(first, tile), :], v_ref[pl.ds(first, tile), :]
        scores = plt.dot(q, key.T, precision=precision) * scale
        if masked:
            see = sight.sees(rule, q_order, first + lax.iota(jnp.int32, tile))
            scores = jnp.where(see, scores, _FLOOR)
        new_top = jnp.maximum(top, scores.max(1))
        weights = jnp.exp2(scores - new_top[:, None])
        if masked:
            weights = jnp.where(see, weights, 0.0)
        shrink = jnp.exp2(top - new_top)
        part = plt.dot(weights.astype(value.dtype), value, precision=precision)
        return out * shrink[:, None] + part, new_top, total * shrink + weights.sum(1)

    state = (
        jnp.zeros((num_rows, width), jnp.float32),
        jnp.full((num_rows,), _FLOOR, jnp.float32),
        jnp.zeros((num_rows,), jnp.float32),
    )
    for which, masked in enumerate((False, True)):
        step = functools.partial(update, masked=masked)
        state = lax.fori_loop(0, count_ref[which], step, state)
    out, top, total = state
    seen = total > 0
    safe = jnp.where(seen, total, 1.0)
    out_ref[...] = (out / safe[:, None]).astype(out_ref.dtype).reshape(tile, heads, width)
    lse = jnp.where(seen, top * math.log(2) + jnp.log(safe), -jnp.inf)
    lse_ref[...] = lse.reshape(tile, heads)

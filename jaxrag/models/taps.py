"""Attends that show more than their output: heads of the layers, and where attention goes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrag.base.config import ModelConfig
from jaxrag.base.types import Array, Partial, Tokens
from jaxrag.kv.cache import PagePool, PageTable
from jaxrag.models.attention import (
    Attend,
    PackedAttend,
    PagedOp,
    Pages,
    attend_pool,
    attend_table,
    key_mass,
    paged_attention,
    rotary_of,
    scale_of,
    with_sink_logits,
)
from jaxrag.models.decoder import Decoder
from jaxrag.models.rope import RopeTable, scale_rotary


@dataclasses.dataclass(frozen=True)
class Tap:
    """Another attend, and what ``take`` keeps of every layer's heads, stacked over the layers.

    Attributes:
      attend: the other; what it collects itself is dropped.
      take: from q [B, T, N, H] and k, v [B, T, K, H] before rotation to a tree of arrays.
    """

    attend: Attend
    take: Callable[[Array, Array, Array], Any]

    def __call__(
        self,
        layer: Array,
        window: Array | int | None,
        q: Array,
        k: Array,
        v: Array,
        tokens: Tokens,
        cache: Any,
    ) -> tuple[Partial, Any, Any]:
        """Attend as the other does, and take."""
        out, cache, _ = self.attend(layer, window, q, k, v, tokens, cache)
        return out, cache, self.take(q, k, v)


def at_columns(x: Array, columns: Array) -> Array:
    """The tokens at columns [B, C] int32 of heads x [B, T, heads, H]: [B, C, heads, H]."""
    return jnp.take_along_axis(x, columns[:, :, None, None], axis=1)


@dataclasses.dataclass(frozen=True)
class LastQueries:
    """Another attend that also carries queries: the cache is (its cache, q [B, T, N, H]).

    After the last layer q holds that layer's queries before rotation. ``Tap`` would hold those of
    all layers at once.
    """

    attend: Attend

    def __call__(
        self,
        layer: Array,
        window: Array | int | None,
        q: Array,
        k: Array,
        v: Array,
        tokens: Tokens,
        cache: tuple[Any, Array],
    ) -> tuple[Partial, tuple[Any, Array], Any]:
        """Attend as the other does, and keep q."""
        out, inner, collected = self.attend(layer, window, q, k, v, tokens, cache[0])
        return out, (inner, q), collected


def attention_received(
    decoder: Decoder,
    pool: PagePool,
    table: PageTable,
    groups: Array,
    q: Array,
    query_position: Array,
    *,
    causal: bool,
) -> Array:
    """Attention that every slot of the table gets in the last layer; sink logits take of it.

    Args:
      decoder: with tables beyond every position and offset, layers stacked.
      groups: [B, M] int32 label of each page; a softmax runs over the pages of one label.
      q: [B, T, N, H] that layer's queries before rotation.
      query_position: [B, T] int32; -1 is padding.
      causal: does a query see only slots up to its position?

    Returns:
      [B, S] float32, summed over queries and heads.
    """
    config, sinks = decoder.config, decoder.params.layers.sink_logits
    window = config.sliding_window
    if not causal or (config.window_layers is not None and not config.window_layers[-1]):
        window = None
    rope = decoder.rope.of_layer(config.num_layers - 1)
    pages = pool.rows(config.num_layers - 1, table.pages, config.num_kv_layers)
    return key_mass(
        scale_rotary(q, rope, config.rope),
        pool.k,
        Pages(pages, table.offsets, table.slot_position),
        query_position,
        groups,
        rotary_of(config, rope),
        scale=scale_of(config),
        causal=causal,
        window=window,
        sink_logits=None if sinks is None else sinks[-1],
    )


@dataclasses.dataclass(frozen=True)
class ChunkMassAttend:
    """Causal attention of whole prompts that sums where it goes; the cache is the sum so far.

    The cache, float32 [B, T, C], grows in every layer by the share of each token's attention,
    averaged over the heads, that falls on each column.

    Attributes:
      columns: [B, T] int32 column of each token, 0 .. C-1, or -1.
      sink_logits: [L, N] of the model; they take of the shares.
    """

    config: ModelConfig
    rope: RopeTable
    columns: Array
    sink_logits: Array | None = None

    def __call__(
        self,
        layer: Array,
        window: Array | int | None,
        q: Array,
        k: Array,
        v: Array,
        tokens: Tokens,
        cache: Array,
    ) -> tuple[Partial, Array, None]:
        """Attend to V, then to one-hot columns in place of V: their mixture is the shares."""
        packed = PackedAttend(self.config, self.rope, prefix_visible=True)
        out, _, _ = packed(layer, window, q, k, v, tokens, None)
        dim = q.shape[-1]
        wide = (q.astype(jnp.float32), k.astype(jnp.float32))
        shares = []
        for first in range(0, cache.shape[-1], dim):
            hot = jax.nn.one_hot(self.columns - first, dim)[:, :, None]
            hot = jnp.broadcast_to(hot, k.shape)
            share, _, _ = packed(layer, window, *wide, hot, tokens, None)
            shares.append(with_sink_logits(share, _of_layer(self.sink_logits, layer)).mean(axis=2))
        return out, cache + jnp.concatenate(shares, -1)[..., : cache.shape[-1]], None


@dataclasses.dataclass(frozen=True)
class PartsAttend:
    """Tokens of one request whose KV is in the pool attend once more; nothing is written.

    Attributes:
      table: of the request, [1, M]; shows the tokens' own slots.
      parts: [M * page] int32 part of the prompt that each slot is of, 0..count-1; -1 is of none.
      take: what is kept of a layer's shares, float32 [T, N, count].
      sink_logits: [L, N] of the model; they take of the shares.
    """

    config: ModelConfig
    rope: RopeTable
    table: PageTable
    parts: Array
    count: int
    take: Callable[[Array], Any]
    sink_logits: Array | None = None

    def __call__(
        self,
        layer: Array,
        window: Array | int | None,
        q: Array,
        k: Array,
        v: Array,
        tokens: Tokens,
        cache: PagePool,
    ) -> tuple[Partial, PagePool, Any]:
        """Attend, and take of the shares of attention that every part gets."""
        pages = cache.rows(layer, self.table.pages, self.config.num_kv_layers)
        hot = jax.nn.one_hot(self.parts, self.count)[None]
        op = functools.partial(paged_attention, beside=hot, out_dtype=jnp.float32)

        def attend(op: PagedOp, where: Pages) -> tuple[Array, Array]:
            at, rope = tokens.positions, self.rope.of_layer(layer)
            return attend_pool(op, self.config, rope, cache, q, where, at, window)

        out, lse = attend_table(attend, op, self.table, pages)
        out, shares = jnp.split(out, [q.shape[-1]], -1)
        taken = with_sink_logits(Partial(shares, lse), _of_layer(self.sink_logits, layer))
        return Partial(out.astype(q.dtype), lse), cache, self.take(taken[0])


def _of_layer(sink_logits: Array | None, layer: Array) -> Array | None:
    return None if sink_logits is None else sink_logits[layer]

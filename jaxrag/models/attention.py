"""How the layers attend: packed rows, or new tokens against the paged pool. Chooses the kernel.

An `attend` is what ``forward`` calls in every layer with un-rotated q, k, v; it returns the output,
the cache it may have written to, and whatever should be stacked over the layers.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrag.cache import PagePool, PageTable
from jaxrag.cache.host import HostValues
from jaxrag.config import ModelConfig
from jaxrag.errors import ConfigError, RequestError
from jaxrag.models.rope import RopeTable, place, scale_rotary
from jaxrag.sharding import attention_axes
from jaxrag.types import Array, Partial, Tokens
from pallas_kernels import (
    BODIES,
    KernelError,
    check_impl,
    key_mass,
    paged_attention,
    paged_decode_attention,
    paged_scores,
    segment_attention,
    slot_mixture,
    slot_scores,
    slot_values,
    sparse_attention,
    topn_attention,
)
from pallas_kernels.segment_attention import SAVED as PACKED_OUT

__all__ = [
    "PACKED_OUT",
    "Attend",
    "PackedAttend",
    "PagedAttend",
    "attend_pool",
    "attention_received",
    "check_kernels",
    "merge",
    "paged_attention",
    "paged_decode_attention",
    "paged_scores",
    "slot_mixture",
    "slot_scores",
    "slot_values",
    "topn_attention",
]


_QUERIES_IN_TURN = 128  # measured: rows of fewer queries are faster together


class Attend(Protocol):
    """One layer's attention. Shapes: q [B, T, N, H]; k, v [B, T, K, H], before rotation."""

    def __call__(
        self,
        layer: Array,
        window: Array | int | None,
        q: Array,
        k: Array,
        v: Array,
        tokens: Tokens,
        cache: Any,
    ) -> tuple[Array, Any, Any]:
        """Return out [B, T, N, H], the cache, and a tree to stack over layers (or None)."""
        ...


@dataclasses.dataclass(frozen=True)
class PackedAttend:
    """Rows attend to themselves under the block mask; no cache."""

    config: ModelConfig
    rope: RopeTable
    prefix_visible: bool

    def __call__(
        self,
        layer: Array,
        window: Array | int | None,
        q: Array,
        k: Array,
        v: Array,
        tokens: Tokens,
        cache: None,
    ) -> tuple[Array, None, None]:
        """Place q and k at their positions and attend within the row."""
        config = self.config

        def attend(heads: tuple[Array, ...], rows: tuple[Any, ...], window: Any) -> Array:
            out, _ = segment_attention(
                *heads,
                *rows,
                scale=config.head_dim**-0.5,
                prefix_visible=self.prefix_visible,
                window=window,
                impl=config.kernels,
            )
            return out

        placed = (place(x, tokens.positions, self.rope, config.rope) for x in (q, k))
        operands = ((*placed, v), (tokens.positions, tokens.segments, tokens.examples), window)
        call: Callable[..., Array] = attend
        if config.kernel_mesh is not None:
            rows, heads = attention_axes(config.kernel_mesh, q.shape[0], config.num_kv_heads)
            by_head = PartitionSpec(rows, None, heads, None)
            call = jax.shard_map(
                attend,
                mesh=config.kernel_mesh,
                in_specs=(by_head, PartitionSpec(rows), PartitionSpec()),
                out_specs=by_head,
                check_vma=False,
            )
        return call(*operands), None, None


@dataclasses.dataclass(frozen=True)
class PagedAttend:
    """New tokens write their K and V to pages the request owns, then attend through its table.

    ``table`` must already show the new tokens' slots (PageTable.reveal). ``slots`` [B, T] are the
    request's slots to write to; a slot beyond the table is padding and is dropped. ``values`` is
    where V of some layers lies in host memory: it is written there, and V of the requests' pages is
    brought in for as long as the layer runs. With ``rows_in_turn`` the plain XLA body attends row
    by row where rows are long enough to gain by it (``Model.rows_in_turn``).
    """

    config: ModelConfig
    rope: RopeTable
    table: PageTable
    slots: Array
    values: HostValues | None = None
    rows_in_turn: bool = False

    def __call__(
        self,
        layer: Array,
        window: Array | int | None,
        q: Array,
        k: Array,
        v: Array,
        tokens: Tokens,
        cache: PagePool,
    ) -> tuple[Array, PagePool, None]:
        """Write, then attend."""
        if self.values is None and cache.v.shape != cache.k.shape:
            raise RequestError(
                "V of some layers lies in host memory, where only prefill and decode rule 'topn' "
                "read it; load the model without value_layers"
            )
        pages, cache = self.write(layer, k, v, tokens, cache)

        def attend(v_pool: Array, v_pages: Array | None = None) -> Array:
            table = (pages, self.table.offsets, self.table.slot_position)
            op: Callable[..., tuple[Array, Array]] = sparse_attention
            queries, positions = q, tokens.positions
            in_turn = self.rows_in_turn and q.shape[1] >= _QUERIES_IN_TURN
            if v_pages is not None:  # only XLA reads K and V at different pages
                op = functools.partial(paged_attention, v_pages=v_pages, rows_in_turn=in_turn)
            elif in_turn and self.config.kernels == "xla":
                op = functools.partial(paged_attention, rows_in_turn=True)
            elif q.shape[1] == 1:
                op, queries, positions = paged_decode_attention, q[:, 0], positions[:, 0]
            pool = PagePool(k=cache.k, v=v_pool)
            out, _ = attend_pool(
                op, self.config, self.rope, pool, queries, *table, positions, window
            )
            return out.reshape(q.shape).astype(q.dtype)

        if self.values is None:
            out = attend(cache.v)
        elif self.values.first_layer == 0:
            out = self._far(layer, v.astype(cache.v.dtype), attend)
        else:
            far = functools.partial(self._far, layer, v.astype(cache.v.dtype), attend)
            on_device = layer < self.values.first_layer
            out = jax.lax.cond(on_device, lambda: attend(cache.v), far)
        return out, cache, None

    def _far(self, layer: Array, v: Array, attend: Callable[[Array, Array | None], Array]) -> Array:
        """Attend to V of the requests' pages from host memory."""
        assert self.values is not None
        pages = self.table.pages
        read = self.values.pages(layer, pages, self.slots, v)
        own = jnp.arange(pages.size, dtype=jnp.int32).reshape(pages.shape)
        return attend(read.reshape(-1, *read.shape[2:]), own)

    def write(
        self, layer: Array, k: Array, v: Array, tokens: Tokens, cache: PagePool
    ) -> tuple[Array, PagePool]:
        """The table's pages [B, M] in this layer, and the pool with the new K and V.

        Owned pages have offset 0, so new keys are rotated absolutely.
        """
        pages = cache.rows(layer, self.table.pages, self.config.num_layers)
        used = jnp.maximum(tokens.positions, 0)
        placed = place(k, used, self.rope, self.config.rope)
        return pages, cache.write(pages, self.slots, placed, v)


def attention_received(
    config: ModelConfig,
    rope: RopeTable,
    pool: PagePool,
    table: PageTable,
    groups: Array,
    q: Array,
    query_position: Array,
    *,
    causal: bool,
) -> Array:
    """Attention that every slot of the table gets in the last layer: [B, S] float32.

    q [B, T, N, H] are that layer's queries before rotation, query_position [B, T] (-1 is padding);
    summed over queries and heads, the softmax within the pages of one label of ``groups`` [B, M].
    """
    window = config.sliding_window
    if not causal or (config.window_layers is not None and not config.window_layers[-1]):
        window = None
    return key_mass(
        scale_rotary(q, config.rope),
        pool.k,
        pool.rows(config.num_layers - 1, table.pages, config.num_layers),
        table.offsets,
        table.slot_position,
        query_position,
        groups,
        rope.cos,
        rope.sin,
        interleaved=config.rope.interleaved,
        scale=config.head_dim**-0.5,
        causal=causal,
        window=window,
    )


def attend_pool(
    op: Callable[..., tuple[Array, Array]],
    config: ModelConfig,
    rope: RopeTable,
    pool: PagePool,
    q: Array,
    pages: Array,
    offsets: Array,
    slot_position: Array,
    position: Array,
    window: Array | int | None = None,
) -> tuple[Array, Array]:
    """A paged op with the model's scale, rotation and kernels: its out and lse.

    q [B, T, N, H] or [B, N, H] is before rotation, ``position`` [B, T] or [B]. Where the config
    names a mesh, every device runs the kernel on its rows and its KV heads.
    """

    def attend(operands: tuple[Array, ...], window: Array | int | None) -> tuple[Array, Array]:
        limits: dict[str, Any] = {} if window is None else {"window": window}
        if config.kernels != "xla":
            limits["impl"] = config.kernels
        return op(
            *operands,
            **limits,
            interleaved=config.rope.interleaved,
            scale=config.head_dim**-0.5,
        )

    tables = (pages, offsets, slot_position, position)
    operands = (scale_rotary(q, config.rope), pool.k, pool.v, *tables, rope.cos, rope.sin)
    call: Callable[..., tuple[Array, Array]] = attend
    if config.kernel_mesh is not None:
        rows, heads = attention_axes(config.kernel_mesh, q.shape[0], config.num_kv_heads)
        by_head = PartitionSpec(rows, *(None,) * (q.ndim - 3), heads)
        of_pool = PartitionSpec(None, None, heads)
        specs = (by_head, of_pool, of_pool, *(PartitionSpec(rows),) * 4, *(PartitionSpec(),) * 2)
        call = jax.shard_map(
            attend,
            mesh=config.kernel_mesh,
            in_specs=(specs, PartitionSpec()),
            out_specs=by_head,
            check_vma=False,
        )
    return call(operands, window)


def check_kernels(kernels: str) -> None:
    """ConfigError unless the attention ops have these bodies and they run here."""
    try:
        for op in BODIES:
            check_impl(op, kernels)
    except KernelError as error:
        raise ConfigError(f"kernels={kernels!r}: {error}") from None


def merge(partials: Sequence[Partial]) -> Partial:
    """Combine attention over disjoint sets of keys; associative (RetrievalAttention eq. 4-5).

    A partial that saw no key (lse = -inf) contributes nothing, whatever its `out` holds.
    """
    lse = jnp.stack([part.lse for part in partials])
    total = jnp.logaddexp.reduce(lse, axis=0)
    seen = jnp.isfinite(total)
    weights = jnp.exp(lse - jnp.where(seen, total, 0.0))
    out = sum(
        jnp.where(weight[..., None] > 0, weight[..., None] * part.out.astype(jnp.float32), 0.0)
        for weight, part in zip(weights, partials, strict=True)
    )
    return Partial(out=jnp.asarray(out).astype(partials[0].out.dtype), lse=total)

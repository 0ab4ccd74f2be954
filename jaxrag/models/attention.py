"""How the layers attend: packed rows, or new tokens against the paged pool. Chooses the kernel.

An `attend` is what ``forward`` calls in every layer with un-rotated q, k, v; it returns the output,
the cache it may have written to, and whatever should be stacked over the layers.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import ConfigError, RequestError
from jaxrag.base.sharding import attention_axes
from jaxrag.base.types import HIDDEN, Array, Partial, Tokens
from jaxrag.kv.cache import PAGE, PagePool, PageTable
from jaxrag.kv.cache.host import HostValues
from jaxrag.models.rope import RopeTable, place, scale_rotary
from pallas_kernels import (
    BODIES,
    Capped,
    Impl,
    KernelError,
    Pages,
    Placed,
    Pool,
    Rotary,
    Rows,
    Scale,
    check_impl,
    default_impl,
    key_mass,
    paged_attention,
    paged_attention_by_row,
    paged_decode_attention,
    paged_scores,
    scored,
    segment_attention,
    slot_mixture,
    slot_scores,
    slot_values,
    sparse_attention,
    topn_attention,
)
from pallas_kernels.paged_attention import LONG
from pallas_kernels.segment_attention import SAVED as PACKED_OUT

__all__ = [
    "PACKED_OUT",
    "Attend",
    "PackedAttend",
    "PagedAttend",
    "PagedOp",
    "Pages",
    "Scale",
    "attend_placed",
    "attend_pool",
    "attend_table",
    "body_of",
    "check_kernels",
    "kept_mixture",
    "key_mass",
    "measured_kernels",
    "merge",
    "paged_attention",
    "paged_decode_attention",
    "paged_scores",
    "rotary_of",
    "scale_of",
    "scored",
    "slot_scores",
    "slot_values",
    "topn_attention",
    "with_sink_logits",
]


PagedOp = Callable[..., tuple[Array, Array]]  # out and lse of one of the paged ops


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
    ) -> tuple[Partial, Any, Any]:
        """Return out and lse, the cache, and a tree to stack over layers (or None)."""
        ...


@dataclasses.dataclass(frozen=True)
class PackedAttend:
    """Rows attend to themselves under the block mask; no cache.

    Attributes:
      prefix_visible: may chunks see the prefix?
    """

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
    ) -> tuple[Partial, None, None]:
        """Place q and k at their positions and attend within the row."""
        config = self.config

        def attend(q: Array, k: Array, v: Array, rows: Rows, window: Any) -> tuple[Array, Array]:
            return segment_attention(
                q,
                k,
                v,
                rows,
                scale=scale_of(config),
                prefix_visible=self.prefix_visible,
                window=window,
                impl=body_of("segment_attention", config),
            )

        rope = self.rope.of_layer(layer)
        q_at, k_at = (place(x, tokens.positions, rope, config.rope) for x in (q, k))
        packed = Rows(tokens.positions, tokens.segments, tokens.examples)
        call: Callable[..., tuple[Array, Array]] = attend
        if config.kernel_mesh is not None:
            rows, heads = attention_axes(config.kernel_mesh, q.shape[0], config.num_kv_heads)
            by_head = PartitionSpec(rows, None, heads, None)
            call = jax.shard_map(
                attend,
                mesh=config.kernel_mesh,
                in_specs=(by_head, by_head, by_head, PartitionSpec(rows), PartitionSpec()),
                out_specs=(by_head, PartitionSpec(rows, None, heads)),
                check_vma=False,
            )
        return Partial(*call(q_at, k_at, v, packed, window)), None, None


@dataclasses.dataclass(frozen=True)
class PagedAttend:
    """New tokens write their K and V to pages the request owns, then attend through its table.

    Attributes:
      table: the requests' pages; already shows the new tokens' slots (PageTable.reveal).
      slots: [B, T] int32 of the request to write to; one beyond the table is padding and dropped.
      rows_in_turn: the plain XLA body attends row by row where rows are long enough to gain by it
        (``Model.rows_in_turn``).
    """

    config: ModelConfig
    rope: RopeTable
    table: PageTable
    slots: Array
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
    ) -> tuple[Partial, PagePool, None]:
        """Write, then attend."""
        if cache.v.shape != cache.k.shape:
            raise RequestError(
                "V of some layers lies in host memory, where only prefill and decode rule 'topn' "
                "read it; load the model without value_layers"
            )
        pages, cache = self.write(layer, k, v, tokens, cache)
        op = self._op(q.shape[1])
        one = op is paged_decode_attention
        queries, at = (q[:, 0], tokens.positions[:, 0]) if one else (q, tokens.positions)
        rope = self.rope.of_layer(layer)

        def attend(op: PagedOp, where: Pages) -> tuple[Array, Array]:
            return attend_pool(op, self.config, rope, cache, queries, where, at, window)

        out, lse = attend_table(attend, op, self.table, pages)
        part = Partial(out.reshape(q.shape).astype(q.dtype), lse.reshape(q.shape[:-1]))
        return part, cache, None

    def _op(self, num_queries: int) -> PagedOp:
        """What queries [B, num_queries] attend with."""
        in_turn = self.rows_in_turn and num_queries >= LONG
        if in_turn and body_of("sparse_attention", self.config) == "xla":
            return paged_attention_by_row
        return paged_decode_attention if num_queries == 1 else sparse_attention

    def write(
        self, layer: Array, k: Array, v: Array, tokens: Tokens, cache: PagePool
    ) -> tuple[Array, PagePool]:
        """The table's pages [B, M] in this layer, and the pool with the new K and V.

        Owned pages have offset 0, so new keys are rotated absolutely.
        """
        pages = cache.rows(layer, self.table.pages, self.config.num_kv_layers)
        used = jnp.maximum(tokens.positions, 0)
        placed = place(k, used, self.rope.of_layer(layer), self.config.rope)
        return pages, cache.write(pages, self.slots, placed, v)


def kept_mixture(
    values: HostValues,
    layer: Array,
    pages: Array,
    slots: Array,
    v: Array,
    scores: Array,
    chosen: Array,
) -> tuple[Array, Array]:
    """Write the newest values to host memory, then mix those that are chosen.

    By the kernel that addresses host memory, where there is one, and no Python runs; else by
    ``HostValues.rows``.

    Args:
      layer: scalar int32.
      pages: [B, M] of the requests' tables.
      slots: [B, 1] of the newest tokens.
      v: [B, 1, K, H] of these.
      scores: [B, K, G, n] float32, -inf where a value does not count.
      chosen: [B, K, G, n] int32 slots of the values.

    Returns:
      out [B, N, H] and lse [B, N], as ``slot_mixture``.
    """
    if values.mapped is None:
        return slot_mixture(scores, values.rows(layer, pages, slots, v, chosen))
    from pallas_kernels.jax_triton.topn import address_parts, mix_kept_kernel

    batch, _, _, count = scores.shape
    best, at = (x.reshape(batch, -1, count) for x in (scores, chosen))
    address = jnp.array(address_parts(values.mapped.address), jnp.int32)
    out, lse = mix_kept_kernel(
        best, at, pages, layer - values.first_layer, slots[:, 0], v[:, 0], address,
        page=PAGE, steps=values.mapped.steps,
    )  # fmt: skip
    return out, lse


def attend_pool(
    op: PagedOp,
    config: ModelConfig,
    rope: RopeTable,
    pool: PagePool,
    q: Array,
    table: Pages,
    position: Array,
    window: Array | int | None = None,
) -> tuple[Array, Array]:
    """A paged op with the model's scale, rotation and kernels.

    Where the config names a mesh, every device runs the kernel on its rows and its KV heads.

    Args:
      op: one of the paged ops.
      rope: of the layer, beyond every position and offset.
      q: [B, T, N, H] or [B, N, H] before rotation.
      position: [B, T] or [B] int32 of the queries.
      window: sliding window in tokens, or None.

    Returns:
      out and lse, as the op says.
    """

    def attend(operands: tuple[Any, ...], window: Array | int | None) -> tuple[Array, Array]:
        limits: dict[str, Any] = {} if window is None else {"window": window}
        name = getattr(op, "func", op).__name__
        if name in BODIES and (impl := body_of(name, config)) != "xla":
            limits["impl"] = impl
        return op(*operands, **limits, scale=scale_of(config))

    kv, rotary = Pool(pool.k, pool.v), rotary_of(config, rope)
    operands = (scale_rotary(q, rope, config.rope), kv, table, position, rotary)
    call: Callable[..., tuple[Array, Array]] = attend
    if config.kernel_mesh is not None:
        rows, heads = attention_axes(config.kernel_mesh, q.shape[0], config.num_kv_heads)
        by_head = PartitionSpec(rows, *(None,) * (q.ndim - 3), heads)
        of_pool, of_rows = PartitionSpec(None, None, heads), PartitionSpec(rows)
        specs = (by_head, of_pool, of_rows, of_rows, PartitionSpec())
        call = jax.shard_map(
            attend,
            mesh=config.kernel_mesh,
            in_specs=(specs, PartitionSpec()),
            out_specs=by_head,
            check_vma=False,
        )
    return call(operands, window)


def attend_table(
    attend: Callable[[PagedOp, Pages], tuple[Array, Array]],
    op: PagedOp,
    table: PageTable,
    pages: Array,
) -> tuple[Array, Array]:
    """Attention through the tables of requests, to their chunks as these say.

    APE, arXiv:2502.05431: with chunks c at temperature T and all other keys o (prefix,
    question, answer), out = (e^(T S lse_c) out_c + e^lse_o out_o) / (e^(T S lse_c) + e^lse_o).

    Args:
      attend: ``attend_pool`` of some queries, by an op over some of the pages' slots.
      op: one of the paged ops.
      table: of the requests, of which ``pages`` [B, M] are those of this layer.

    Returns:
      out [B, T, N, H] and lse [B, T, N] of the merged parts, without T for ops of one query.
    """
    where = Pages(pages, table.offsets, table.slot_position)
    if table.chunks is None:
        return attend(op, where)
    how = table.chunks.attention
    of_chunk = jnp.repeat(table.chunks.held, where.slot_position.shape[1] // pages.shape[1], axis=1)

    @functools.wraps(getattr(op, "func", op))  # its name is that of its kernels
    def at_temperature(*operands: Any, scale: Scale, **limits: Any) -> tuple[Array, Array]:
        return op(*operands, scale=scale / how.temperature, **limits)

    def part(op: PagedOp, visible: Array) -> Partial:
        shown = jnp.where(visible, where.slot_position, HIDDEN)
        return Partial(*attend(op, where._replace(slot_position=shown)))

    chunks, others = part(at_temperature, of_chunk), part(op, ~of_chunk)
    both = merge([chunks.replace(lse=how.temperature * how.scale * chunks.lse), others])
    return both.out, both.lse


def attend_placed(
    config: ModelConfig,
    q: Array,
    pool: PagePool,
    table: Pages,
    position: Array,
    window: Array | int | None,
) -> Partial:
    """Attention of queries [B, T, N, H] to keys, all of which stand at their positions.

    Args:
      q: rotated, with the attention factor.
      table: where they stand; its offsets are 0.
      position: [B, T] int32 of the queries; -1 is padding.
      window: sliding window in tokens, or None.
    """
    out, lse = paged_attention(
        q,
        Pool(pool.k, pool.v),
        table,
        position,
        Placed(),
        scale=scale_of(config),
        window=window,
        rotate_side="keys",
        out_dtype=jnp.float32,
    )
    return Partial(out=out, lse=lse)


def rotary_of(config: ModelConfig, rope: RopeTable) -> Rotary:
    """The model's rotation as the ops take it."""
    return Rotary(rope.cos, rope.sin, config.rope.interleaved)


def scale_of(config: ModelConfig) -> Scale:
    """What makes scores of products of queries and keys."""
    scale, cap = config.score_scale, config.score_cap
    return scale if cap is None else Capped(scale, cap)


def body_of(op: str, config: ModelConfig) -> Impl:
    """The body of an op: as ``kernels`` says, or what was measured to be best on this device.

    No kernel caps scores: there it is "xla".
    """
    if config.kernels != "measured":
        return cast(Impl, config.kernels)
    return default_impl(op) if config.score_cap is None else "xla"


def measured_kernels() -> bool:
    """Whether "measured" means another body than "xla" for any op on this device."""
    return any(default_impl(op) != "xla" for op in BODIES)


def check_kernels(kernels: str) -> None:
    """ConfigError unless the attention ops have these bodies and they run here."""
    try:
        for op in BODIES:
            check_impl(op, default_impl(op) if kernels == "measured" else kernels)
    except KernelError as error:
        raise ConfigError(f"kernels={kernels!r}: {error}") from None


def with_sink_logits(part: Partial, sink_logits: Array | None) -> Array:
    """Attention over all keys, with one logit more a head [N] that only takes weight (gpt-oss).

    Once, behind every merge: none is a key of any part.
    """
    if sink_logits is None:
        return part.out
    kept = jax.nn.sigmoid(part.lse - sink_logits.astype(jnp.float32))
    return (part.out.astype(jnp.float32) * kept[..., None]).astype(part.out.dtype)


def merge(partials: Sequence[Partial]) -> Partial:
    """Combine attention over disjoint sets of keys; associative.

    RetrievalAttention equations 4 and 5, arXiv:2409.10516.

    A partial that saw no key (lse = -inf) contributes nothing, whatever its `out` holds.
    """
    lse = jnp.stack([part.lse for part in partials])
    total = jnp.logaddexp.reduce(lse, axis=0)
    attended = jnp.isfinite(total)
    weights = jnp.exp(lse - jnp.where(attended, total, 0.0))
    out = sum(
        jnp.where(weight[..., None] > 0, weight[..., None] * part.out.astype(jnp.float32), 0.0)
        for weight, part in zip(weights, partials, strict=True)
    )
    return Partial(out=jnp.asarray(out).astype(partials[0].out.dtype), lse=total)

"""Online prefill: new tokens run through the model against the paged pool."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrag.cache import PagePool, PageTable, batch_table
from jaxrag.cache.host import HostValues
from jaxrag.config import ModelConfig
from jaxrag.decode import Observe, PromptQueries
from jaxrag.engine.mapping import Mapped, keep_leading
from jaxrag.models.attention import Attend, PagedAttend
from jaxrag.models.decoder import forward, unembed
from jaxrag.models.model import Model
from jaxrag.models.rope import RopeTable
from jaxrag.models.spec import Params
from jaxrag.models.taps import Tap, at_columns
from jaxrag.select import choose
from jaxrag.shapes import bucket, pieces
from jaxrag.types import FINAL, Array, HostArray, Tokens

PREFILL_TOKENS = 1024  # of one pass; longer prompts run in pieces of this many


def select_tokens(model: Model, requests: Sequence[Mapped]) -> None:
    """Choose the chunk tokens that each request computes again, and hide their stored KV from it.

    They join the tokens to run, at their own positions, before the final block. Runs once a
    request; those that recompute nothing are left as they are.
    """
    for selector in dict.fromkeys(r.selector for r in requests if r.selector is not None):
        here = [r for r in requests if r.selector == selector]
        scenes = [r.scene for r in here if r.scene is not None]
        for request, choice in zip(here, choose(model, selector, scenes), strict=True):
            request.recompute(choice)


def prefill(model: Model, requests: Sequence[Mapped]) -> tuple[Array, PageTable]:
    """Select what is to be recomputed, then run every request's tokens.

    Returns logits [B', V] float32 after each request's last token, and the table with all prefilled
    slots shown (B' >= len(requests) is a power of two; padding rows hold nothing).
    """
    logits, table, _ = prefill_observed(model, requests, None)
    return logits, table


def prefill_observed(
    model: Model, requests: Sequence[Mapped], observe: Observe | None
) -> tuple[Array, PageTable, PromptQueries]:
    """As ``prefill``, and keep queries of tokens that were run: the last, or evenly spread ones.

    The bank holds as many queries a row as asked for, fewer where all requests run fewer tokens
    (then the next power of two), none where ``observe`` is None.
    """
    select_tokens(model, requests)
    rows = bucket(len(requests), 1)
    table = batch_table([r.table for r in requests], rows, model.put_batch)
    num_slots = table.slot_position.shape[1]
    rope = model.rope(num_slots)
    logits = model.put_batch(np.zeros((rows, model.config.vocab_size), np.float32), rows)
    observed, bank = _empty_bank(model, requests, observe, rows)
    start = 0
    for length, width in pieces(max(len(r.ids) for r in requests), PREFILL_TOKENS):
        ids = np.zeros((rows, width), np.int32)
        positions = np.full((rows, width), -1, np.int32)
        slots = np.full((rows, width), num_slots, np.int32)
        last = np.full(rows, -1, np.int32)
        for row, request in enumerate(requests):
            here = request.ids[start : start + length]
            ids[row, : len(here)] = here
            positions[row, : len(here)] = request.positions[start : start + length]
            slots[row, : len(here)] = request.slots[start : start + length]
            if start < len(request.ids) <= start + length:
                last[row] = len(here) - 1
        here = observed - start
        here = np.where((here >= 0) & (here < length), here, -1).astype(np.int32)
        batch = [model.put_batch(x, rows) for x in (ids, positions, slots, last, here)]
        carried = (model.cache.pool, table, logits, bank.queries)
        model.cache.pool, table, logits, queries = _prefill_piece(
            model.params,
            model.config,
            rope,
            *carried,
            *batch,
            values=model.cache.values,
            rows_in_turn=model.rows_in_turn,
        )
        bank = bank.replace(queries=queries)
        start += length
    for request in requests:
        keep_leading(model, request)
    return logits, table, bank


def _empty_bank(
    model: Model, requests: Sequence[Mapped], observe: Observe | None, rows: int
) -> tuple[HostArray, PromptQueries]:
    """Which of the tokens to run are observed, [B, W] (-1: none), and a bank for their queries."""
    config = model.config
    width = 0
    if observe is not None:
        width = min(observe.count, bucket(max(len(r.ids) for r in requests)))
    observed = np.full((rows, width), -1, np.int64)
    positions = np.full((rows, width), -1, np.int32)
    for row, request in enumerate(requests):
        count = min(width, len(request.ids))
        if observe is None or not count:
            continue
        first = len(request.ids) - count if observe.which == "last" else 0
        chosen = np.linspace(first, len(request.ids) - 1, count).round().astype(np.int64)
        observed[row, :count] = chosen
        positions[row, :count] = request.positions[chosen]
    shape = (config.num_layers, rows, width, config.num_heads, config.head_dim)
    queries = jnp.zeros(shape, config.dtype)
    return observed, PromptQueries(queries=queries, positions=model.put_batch(positions, rows))


def run_tokens(
    params: Params,
    config: ModelConfig,
    rope: RopeTable,
    pool: PagePool,
    table: PageTable,
    ids: Array,
    positions: Array,
    slots: Array,
) -> tuple[Array, PagePool, PageTable]:
    """One forward of new tokens [B, T] against the pool: hidden [B, T, D], pool, table.

    Padding tokens have position -1 and a slot beyond the table.
    """
    batch = (ids, positions, slots, None, None)
    hidden, pool, table, _ = _run_observed(params, config, rope, pool, table, *batch, False)
    return hidden, pool, table


def _run_observed(
    params: Params,
    config: ModelConfig,
    rope: RopeTable,
    pool: PagePool,
    table: PageTable,
    ids: Array,
    positions: Array,
    slots: Array,
    collect: Array | None,
    values: HostValues | None,
    rows_in_turn: bool,
) -> tuple[Array, PagePool, PageTable, Array | None]:
    """As ``run_tokens``, and the queries [L, B, W, N, H] of the tokens that ``collect`` names."""
    table = table.reveal(slots, positions)
    tokens = Tokens(ids=ids, positions=positions, segments=jnp.full_like(ids, FINAL))
    attend: Attend = PagedAttend(config, rope, table, slots, values, rows_in_turn)
    if collect is not None:
        attend = Tap(attend, lambda q, k, v: at_columns(q, collect))
    hidden, pool, queries = forward(params, config, tokens, pool, attend)
    return hidden, pool, table, queries


@functools.partial(
    jax.jit,
    static_argnames=("config", "values", "rows_in_turn"),
    donate_argnames=("pool", "logits"),
)
def _prefill_piece(
    params: Params,
    config: ModelConfig,
    rope: RopeTable,
    pool: PagePool,
    table: PageTable,
    logits: Array,
    queries: Array,
    ids: Array,
    positions: Array,
    slots: Array,
    last: Array,
    observed: Array,
    values: HostValues | None = None,
    rows_in_turn: bool = False,
) -> tuple[PagePool, PageTable, Array, Array]:
    """Run one piece; rows whose prompt ends in it (last >= 0) get their logits.

    Queries of its observed tokens [B, W] (-1: another piece's) go into ``queries``.
    """
    collect = jnp.maximum(observed, 0) if observed.shape[1] else None
    hidden, pool, table, new = _run_observed(
        params, config, rope, pool, table, ids, positions, slots, collect, values, rows_in_turn
    )
    if new is not None:
        queries = jnp.where((observed >= 0)[None, :, :, None, None], new, queries)

    def finish() -> Array:
        at = jnp.maximum(last, 0)[:, None, None]
        ends = jnp.take_along_axis(hidden, at, axis=1)[:, 0]
        return jnp.where((last >= 0)[:, None], unembed(params, ends), logits)

    return pool, table, lax.cond((last >= 0).any(), finish, lambda: logits), queries

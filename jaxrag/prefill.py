"""Online prefill: new tokens run through the model against the paged pool."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrag.attention import PagedAttend
from jaxrag.cache import PagePool, PageTable, batch_table
from jaxrag.config import ModelConfig
from jaxrag.mapping import Mapped, Prompt, check_length, keep_leading, map_request, unmap
from jaxrag.models.decoder import forward, unembed
from jaxrag.models.model import Model
from jaxrag.models.spec import Params
from jaxrag.rope import RopeTable
from jaxrag.segments import bucket, pieces
from jaxrag.select import choose
from jaxrag.types import FINAL, Array, Tokens

__all__ = [
    "PREFILL_TOKENS",
    "Mapped",
    "Prompt",
    "check_length",
    "map_request",
    "prefill",
    "run_tokens",
    "select_tokens",
    "unmap",
]

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
    select_tokens(model, requests)
    rows = bucket(len(requests), 1)
    table = batch_table([r.table for r in requests], rows, model.put_batch)
    num_slots = table.slot_position.shape[1]
    rope = model.rope(num_slots)
    logits = model.put_batch(np.zeros((rows, model.config.vocab_size), np.float32), rows)
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
        batch = [model.put_batch(x, rows) for x in (ids, positions, slots, last)]
        model.cache.pool, table, logits = _prefill_piece(
            model.params, model.config, rope, model.cache.pool, table, logits, *batch
        )
        start += length
    for request in requests:
        keep_leading(model, request)
    return logits, table


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
    table = table.reveal(slots, positions)
    tokens = Tokens(ids=ids, positions=positions, segments=jnp.full_like(ids, FINAL))
    attend = PagedAttend(config, rope, table, slots)
    hidden, pool, _ = forward(params, config, tokens, pool, attend)
    return hidden, pool, table


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("pool", "logits"))
def _prefill_piece(
    params: Params,
    config: ModelConfig,
    rope: RopeTable,
    pool: PagePool,
    table: PageTable,
    logits: Array,
    ids: Array,
    positions: Array,
    slots: Array,
    last: Array,
) -> tuple[PagePool, PageTable, Array]:
    """Run one piece; rows whose prompt ends in it (last >= 0) get their logits."""
    hidden, pool, table = run_tokens(params, config, rope, pool, table, ids, positions, slots)

    def finish() -> Array:
        at = jnp.maximum(last, 0)[:, None, None]
        ends = jnp.take_along_axis(hidden, at, axis=1)[:, 0]
        return jnp.where((last >= 0)[:, None], unembed(params, ends), logits)

    return pool, table, lax.cond((last >= 0).any(), finish, lambda: logits)

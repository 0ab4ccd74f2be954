"""The decode loop: blocks of tokens sampled on the device, for a batch of prefilled requests."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jaxrag.cache import PagePool, PageTable
from jaxrag.cache.host import HostValues
from jaxrag.decode import (
    Carried,
    DecodeAttend,
    DecodeRule,
    Decoding,
    Dense,
    HostSearch,
    PromptQueries,
    Prompts,
    order_of,
)
from jaxrag.engine.mapping import RequestState
from jaxrag.engine.prefill import Prefilled, run_tokens
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.sampling import SamplingParams, sample
from jaxrag.models.attention import PagedAttend
from jaxrag.models.decoder import Decoder, forward, unembed
from jaxrag.shapes import bucket
from jaxrag.types import Array, HostArray, Step

DENSE = Dense()


class SamplingRows(struct.PyTreeNode):
    """SamplingParams settings of every row of a batch, [B] each."""

    temperature: Array
    top_k: Array
    top_p: Array
    seeds: Array

    @classmethod
    def of(cls, settings: Sequence[SamplingParams], rows: int) -> "SamplingRows":
        """Settings padded with greedy rows."""
        padded = [*settings, *[SamplingParams()] * (rows - len(settings))]
        return cls(
            temperature=jnp.array([s.temperature for s in padded], jnp.float32),
            top_k=jnp.array([s.top_k for s in padded], jnp.int32),
            top_p=jnp.array([s.top_p for s in padded], jnp.float32),
            seeds=jnp.array([s.seed for s in padded], jnp.uint32),
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is compiled into a block of decode steps."""

    block: int  # tokens a row
    rule: DecodeRule
    host: HostSearch | None
    values: HostValues | None


class _Rows(struct.PyTreeNode):
    """Where every row of a batch stands, [B] each."""

    ids: Array  # the newest token
    position: Array  # of the newest token, -1 in padding rows
    slot: Array  # in which its KV is written
    token_index: Array  # of the newest token in its answer


def decode(
    runner: ModelRunner,
    requests: Sequence[RequestState],
    prefilled: Prefilled,
    sampling: SamplingRows,
    block: int,
    rule: DecodeRule = DENSE,
    room: int | None = None,
    numbers: Sequence[int] = (),
) -> Iterator[HostArray]:
    """Generate forever: yields ids [B, 1] (the first token), then [B, block] at a time.

    The caller stops when it has enough; pages must have been reserved for every token that is run.
    A larger block means fewer waits of the host for the device. Tokens attend by ``rule``, over the
    queries that it asked prefill for. ``room`` is the most tokens that will be run; None:
    as many as pages were reserved for; 0: the first token is all, and no rule is prepared. A rule
    that searches needs the ``numbers`` under which the caller admitted the requests to
    ``host_search``; the caller releases them, and has their account until then.
    """
    model, cache = runner.model, runner.cache
    rule.check_values(model.value_layers)
    rule.check_mesh(model.mesh)
    logits, table, bank = prefilled
    rows = logits.shape[0]
    hidden_slot = table.slot_position.shape[1]
    position, slot = _next(requests, rows, hidden_slot)
    token_index = np.zeros(rows, np.int32)
    if room == 0:
        yield np.asarray(_sample(logits, sampling, token_index))[:, None]
        return
    decoding = start_decoding(runner, requests, table, rule, bank, room, numbers)
    ids = _sample(logits, sampling, token_index)
    decoder = model.decoder(hidden_slot)
    host = None if rule.searches is None else runner.host_search
    plan = Plan(block, rule, host, cache.values)
    yield np.asarray(ids)[:, None]
    while True:
        at = _Rows(ids, *(model.put_batch(x, rows) for x in (position, slot, token_index)))
        table, decoding, ids, new = cache.run(
            _decode_block, decoding, decoder, table, sampling, at, plan
        )
        position = np.where(position >= 0, position + block, -1).astype(np.int32)
        slot = np.where(position >= 0, slot + block, slot).astype(np.int32)
        token_index = token_index + np.int32(block)
        yield np.asarray(new)


def _next(
    requests: Sequence[RequestState], rows: int, hidden_slot: int
) -> tuple[HostArray, HostArray]:
    """Position and slot of the first generated tokens, [rows] int32 each; of padding rows none."""
    pad = rows - len(requests)
    position = np.array([r.next_position for r in requests] + [-1] * pad, np.int32)
    slot = np.array([r.next_slot for r in requests] + [hidden_slot] * pad, np.int32)
    return position, slot


def start_decoding(
    runner: ModelRunner,
    requests: Sequence[RequestState],
    table: PageTable,
    rule: DecodeRule,
    bank: PromptQueries | None,
    room: int | None = None,
    numbers: Sequence[int] = (),
) -> Decoding | None:
    """What the rule carries from step to step; None where it leaves no key out.

    ``numbers`` are those of the requests in ``runner.host_search``, where the rule searches.
    """
    if not rule.sparse:
        return None
    model = runner.model
    config = model.config
    rows, hidden_slot = table.slot_position.shape
    position, slot = _next(requests, rows, hidden_slot)
    order = order_of(np.asarray(table.slot_position), position, slot)
    if bank is None or rule.observe is None:
        shape = (config.num_layers, rows, 0, config.num_heads, config.head_dim)
        none = np.zeros((rows, 0), np.int32)
        bank = PromptQueries(queries=jnp.zeros(shape, config.dtype), positions=jnp.asarray(none))
    if room is None:
        room = max(r.table.num_slots - r.next_slot for r in requests)
    last = np.where(position >= 0, position - 1, -1).astype(np.int32)
    prompts = Prompts(
        config=config,
        rope=model.rope(hidden_slot),
        pool=runner.cache.pool,
        table=table,
        order=model.put_batch(order, rows),
        position=model.put_batch(last, rows),
        bank=bank,
        room=bucket(room),
        numbers=numbers,
        carried=[_carried(request) for request in requests],
        host=None if rule.searches is None else runner.host_search,
    )
    return Decoding(order=prompts.order, state=rule.begin(prompts))


def _carried(request: RequestState) -> list[Carried]:
    """The chunks of a request that may have been stored with indexes."""
    if request.store is None:
        return []
    return [
        Carried(request.store, part.key, part.position, part.slots)
        for part in request.parts
        if part.key and not part.kept
    ]


@jax.jit
def _sample(logits: Array, settings: SamplingRows, token_index: Array) -> Array:
    s = settings
    return sample(logits, s.temperature, s.top_k, s.top_p, s.seeds, token_index)


@functools.partial(jax.jit, static_argnames=("plan",), donate_argnames=("pool", "decoding"))
def _decode_block(
    pool: PagePool,
    decoding: Decoding | None,
    decoder: Decoder,
    table: PageTable,
    sampling: SamplingRows,
    at: _Rows,
    plan: Plan,
) -> tuple[PagePool, PageTable, Decoding | None, Array, Array]:
    """Feed the newest tokens back, sample ``plan.block`` more of every row.

    Returns pool, table, what the rule carries, last ids [B] and new ids [B, block].
    """
    live = at.position >= 0

    def one(carry: tuple[Any, ...], n: Array) -> tuple[Any, Array]:
        pool, table, decoding, ids = carry
        step = Step(
            ids=ids[:, None],
            positions=jnp.where(live, at.position + n, -1)[:, None],
            slots=jnp.where(live, at.slot + n, table.slot_position.shape[1])[:, None],
        )
        if decoding is None:
            hidden, pool, table = run_tokens(decoder, pool, table, step)
        else:
            hidden, pool, table, decoding = run_by_rule(decoder, pool, table, decoding, step, plan)
        logits = unembed(decoder.params, hidden[:, 0])
        ids = _sample(logits, sampling, at.token_index + n + 1)
        return (pool, table, decoding, ids), ids

    carry, new = lax.scan(one, (pool, table, decoding, at.ids), jnp.arange(plan.block))
    return (*carry, new.T)


def run_by_rule(
    decoder: Decoder,
    pool: PagePool,
    table: PageTable,
    decoding: Decoding,
    step: Step,
    plan: Plan,
) -> tuple[Array, PagePool, PageTable, Decoding]:
    """As ``prefill.run_tokens`` for one token a row, [B, 1], attending by the plan's rule."""
    table = table.reveal(step.slots, step.positions)
    paged = PagedAttend(decoder.config, decoder.rope, table, step.slots, values=plan.values)
    attend = DecodeAttend(paged, plan.rule, decoding.order, plan.host)
    cache = (pool, decoding.state)
    hidden, cache, _ = forward(decoder.params, decoder.config, step.tokens, cache, attend)
    return hidden, cache[0], table, decoding.replace(state=cache[1])

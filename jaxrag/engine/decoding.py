"""From tokens to an answer: the decode loop on the device, and text with its stop rules."""

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
from jaxrag.config import ModelConfig
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
from jaxrag.engine.mapping import Mapped
from jaxrag.engine.prefill import run_tokens
from jaxrag.engine.sampling import Sampling, sample
from jaxrag.models.attention import PagedAttend
from jaxrag.models.decoder import forward, unembed
from jaxrag.models.model import Model
from jaxrag.models.rope import RopeTable
from jaxrag.models.spec import Params
from jaxrag.shapes import bucket
from jaxrag.types import FINAL, Array, HostArray, Tokens

DENSE = Dense()


class SamplingRows(struct.PyTreeNode):
    """Sampling settings of every row of a batch, [B] each."""

    temperature: Array
    top_k: Array
    top_p: Array
    seeds: Array

    @classmethod
    def of(cls, settings: Sequence[Sampling], rows: int) -> "SamplingRows":
        """Settings padded with greedy rows."""
        padded = [*settings, *[Sampling()] * (rows - len(settings))]
        return cls(
            temperature=jnp.array([s.temperature for s in padded], jnp.float32),
            top_k=jnp.array([s.top_k for s in padded], jnp.int32),
            top_p=jnp.array([s.top_p for s in padded], jnp.float32),
            seeds=jnp.array([s.seed for s in padded], jnp.uint32),
        )


def decode(
    model: Model,
    requests: Sequence[Mapped],
    table: PageTable,
    logits: Array,
    settings: SamplingRows,
    block: int,
    rule: DecodeRule = DENSE,
    bank: PromptQueries | None = None,
    room: int | None = None,
    numbers: Sequence[int] = (),
) -> Iterator[HostArray]:
    """Generate forever: yields ids [B, 1] (the first token), then [B, block] at a time.

    The caller stops when it has enough; pages must have been reserved for every token that is run.
    A larger block means fewer waits of the host for the device. Tokens attend by ``rule``; ``bank``
    holds the queries that it asked prefill for. ``room`` is the most tokens that will be run; None:
    as many as pages were reserved for; 0: the first token is all, and no rule is prepared. A rule
    that searches needs the ``numbers`` under which the caller admitted the requests to
    ``host_search``; the caller releases them, and has their account until then.
    """
    rule.check_values(model.value_layers)
    rule.check_mesh(model.mesh)
    rows = logits.shape[0]
    pad = rows - len(requests)
    hidden_slot = table.slot_position.shape[1]
    position = np.array([r.next_position for r in requests] + [-1] * pad, np.int32)
    slot = np.array([r.next_slot for r in requests] + [hidden_slot] * pad, np.int32)
    token_index = np.zeros(rows, np.int32)
    if room == 0:
        yield np.asarray(_sample(logits, settings, token_index))[:, None]
        return
    host = None if rule.searches is None else host_search(model)
    decoding = start_decoding(
        model, requests, table, rule, bank, position, slot, host, room, numbers
    )
    ids = _sample(logits, settings, token_index)
    rope = model.rope(hidden_slot)
    yield np.asarray(ids)[:, None]
    while True:
        batch = [model.put_batch(x, rows) for x in (position, slot, token_index)]
        model.cache.pool, table, decoding, ids, new = _decode_block(
            model.params, model.config, rope, model.cache.pool, table, decoding, settings, ids,
            *batch, block, rule, host, model.cache.values,
        )  # fmt: skip
        position = np.where(position >= 0, position + block, -1).astype(np.int32)
        slot = np.where(position >= 0, slot + block, slot).astype(np.int32)
        token_index = token_index + np.int32(block)
        yield np.asarray(new)


@functools.lru_cache(maxsize=8)
def host_search(model: Model) -> HostSearch:
    """The one place where indexes of this model's requests are searched; compiled steps name it."""
    return HostSearch()


def start_decoding(
    model: Model,
    requests: Sequence[Mapped],
    table: PageTable,
    rule: DecodeRule,
    bank: PromptQueries | None,
    position: HostArray,
    slot: HostArray,
    host: HostSearch | None,
    room: int | None = None,
    numbers: Sequence[int] = (),
) -> Decoding | None:
    """What the rule carries from step to step; None where it leaves no key out.

    ``position`` and ``slot`` [B] are those of the first generated tokens, ``numbers`` those of the
    requests in ``host``, where the rule searches.
    """
    if not rule.sparse:
        return None
    rows, config = len(position), model.config
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
        rope=model.rope(table.slot_position.shape[1]),
        pool=model.cache.pool,
        table=table,
        order=model.put_batch(order, rows),
        position=model.put_batch(last, rows),
        bank=bank,
        room=bucket(room),
        numbers=numbers,
        carried=[_carried(request) for request in requests],
        host=host,
    )
    return Decoding(order=prompts.order, state=rule.begin(prompts))


def _carried(request: Mapped) -> list[Carried]:
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


@functools.partial(
    jax.jit,
    static_argnames=("config", "block", "rule", "host", "values"),
    donate_argnames=("pool", "decoding"),
)
def _decode_block(
    params: Params,
    config: ModelConfig,
    rope: RopeTable,
    pool: PagePool,
    table: PageTable,
    decoding: Decoding | None,
    settings: SamplingRows,
    ids: Array,
    position: Array,
    slot: Array,
    token_index: Array,
    block: int,
    rule: DecodeRule,
    host: HostSearch | None,
    values: HostValues | None,
) -> tuple[PagePool, PageTable, Decoding | None, Array, Array]:
    """Feed ``ids`` [B] back, sample ``block`` more.

    Returns pool, table, what the rule carries, last ids [B] and new ids [B, block].
    """
    live = position >= 0

    def step(carry: tuple[Any, ...], n: Array) -> tuple[Any, Array]:
        pool, table, decoding, ids = carry
        at = jnp.where(live, position + n, -1)[:, None]
        to = jnp.where(live, slot + n, table.slot_position.shape[1])[:, None]
        if decoding is None:
            hidden, pool, table = run_tokens(
                params, config, rope, pool, table, ids[:, None], at, to
            )
        else:
            new = (ids[:, None], at, to)
            hidden, pool, table, decoding = run_by_rule(
                params, config, rope, pool, table, decoding, *new, rule, host, values
            )
        logits = unembed(params, hidden[:, 0])
        ids = _sample(logits, settings, token_index + n + 1)
        return (pool, table, decoding, ids), ids

    carry, new = lax.scan(step, (pool, table, decoding, ids), jnp.arange(block))
    return (*carry, new.T)


def run_by_rule(
    params: Params,
    config: ModelConfig,
    rope: RopeTable,
    pool: PagePool,
    table: PageTable,
    decoding: Decoding,
    ids: Array,
    positions: Array,
    slots: Array,
    rule: DecodeRule,
    host: HostSearch | None,
    values: HostValues | None = None,
) -> tuple[Array, PagePool, PageTable, Decoding]:
    """As ``prefill.run_tokens`` for one token a row, [B, 1], attending by the rule."""
    table = table.reveal(slots, positions)
    tokens = Tokens(ids=ids, positions=positions, segments=jnp.full_like(ids, FINAL))
    paged = PagedAttend(config, rope, table, slots, values=values)
    attend = DecodeAttend(paged, rule, decoding.order, host)
    hidden, (pool, state), _ = forward(params, config, tokens, (pool, decoding.state), attend)
    return hidden, pool, table, decoding.replace(state=state)


def reserved(max_new_tokens: int, block: int) -> int:
    """Slots to reserve: the first token comes from prefill, the rest in whole blocks."""
    return -(-(max_new_tokens - 1) // block) * block if max_new_tokens > 1 else 0

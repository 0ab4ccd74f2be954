"""Decode steps of a batch's rows: one token after the other, through all layers.

Where the layers of a model are apart, as on a CPU, a step is several programs, one of which has a
few layers and is called for each few: it compiles, and is read from the disk, in a fraction of the
time that a program of the whole model takes, and is nearly as fast. Else it is one program.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.stages import Lowered

from jaxrag.base import struct
from jaxrag.base.types import Array, Step, on_host
from jaxrag.engine.processors import ProcessorRows
from jaxrag.engine.request import DECODE_BLOCK, FAILED
from jaxrag.engine.sampling import sample
from jaxrag.engine.sampling_params import MOST_TOP, SamplingParams
from jaxrag.kv.cache import PagePool, PageTable
from jaxrag.kv.cache.host import HostValues
from jaxrag.models.attention import Attend, PagedAttend
from jaxrag.models.decoder import (
    Decoder,
    LayerAt,
    ResidualStream,
    before_layers,
    forward,
    layers_at,
    residual,
    rms_norm,
    run_layer,
    unembed,
    without_layers,
)
from jaxrag.reuse.decode import DecodeAttend, DecodeRule, Decoding, HostSearch
from jaxrag.reuse.decode.away import AwayAttend

GROUP = 6  # layers of a program at most: more compile longer, fewer cost every step more calls


class Drawn(NamedTuple):
    """Tokens, [...] int32, and of each the logarithm of its probability, float32.

    ``top`` holds the ids and log-probabilities of the likeliest tokens in the place of each,
    [..., MOST_TOP]; None where nobody asks.
    """

    ids: Array
    logprobs: Array
    top: tuple[Array, Array] | None = None


class SamplingRows(struct.PyTreeNode):
    """SamplingParams of every row of a batch, [B] each; ``processors`` where somebody asks."""

    temperature: Array
    top_k: Array
    top_p: Array
    seeds: Array
    processors: ProcessorRows | None = None

    @classmethod
    def of(cls, settings: Sequence[SamplingParams]) -> "SamplingRows":
        """On the host."""
        return on_host(
            cls,
            np.array([s.temperature for s in settings], np.float32),
            np.array([s.top_k for s in settings], np.int32),
            np.array([s.top_p for s in settings], np.float32),
            np.array([s.seed for s in settings], np.uint32),
        )


class BatchRows(struct.PyTreeNode):
    """State of every row of a batch, [R] each but the table.

    Attributes:
      position: of the newest token, -1 in an empty row.
      slot: in which its KV is written.
      index: of the newest token in its answer.
      last: position of the last token that may be run.
      sampling: how its tokens are drawn.
    """

    table: PageTable
    ids: Array
    position: Array
    slot: Array
    index: Array
    last: Array
    sampling: SamplingRows


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is compiled into decode steps."""

    rule: DecodeRule
    host: HostSearch | None
    values: HostValues | None
    away: bool = False


class _Token(struct.PyTreeNode):
    """The newest token of every row, on its way through the layers.

    Attributes:
      table: shows its slots.
      live: [R] whether a row has one.
    """

    step: Step
    table: PageTable
    live: Array


def run_steps(
    pool: PagePool,
    rows: BatchRows,
    decoding: Decoding | None,
    decoder: Decoder,
    block: int,
    plan: Plan,
) -> tuple[PagePool, BatchRows, Decoding | None, Drawn]:
    """Feed the newest tokens back and sample ``block`` more of every row.

    A row that has run its last token is empty from then on. Returns pool, rows, what the rule
    carries, and the new tokens, [R, DECODE_BLOCK] each. Where the decoder's layers are apart, one
    program serves all of them, called for each, as in prefill.
    """
    if not isinstance(decoder.params.layers, list):
        return _whole_steps(pool, rows, decoding, decoder, np.int32(block), plan=plan)
    ends, groups, drawn = without_layers(decoder), _groups(decoder), _nothing_drawn(rows)
    cache, order = _cache(pool, decoding, plan), None if decoding is None else decoding.order
    for at in range(block):
        token, x = _begin(ends, rows, plan=plan)
        for layers in groups:
            cache, x = _some_layers(cache, x, layers, ends, token, order, plan=plan)
        rows, drawn = _end(rows, drawn, ends, x, token, np.int32(at))
    pool, decoding = _uncached(cache, pool, decoding, plan)
    return pool, rows, decoding, drawn


def lower_steps(
    pool: PagePool,
    rows: BatchRows,
    decoding: Decoding | None,
    decoder: Decoder,
    plan: Plan,
) -> list[Lowered]:
    """The programs of ``run_steps`` for one token."""
    if not isinstance(decoder.params.layers, list):
        return [_whole_steps.lower(pool, rows, decoding, decoder, np.int32(1), plan=plan)]
    ends = without_layers(decoder)
    cache, order = _cache(pool, decoding, plan), None if decoding is None else decoding.order
    token, x = jax.eval_shape(functools.partial(_begin, plan=plan), ends, rows)
    own = decoder.config.num_kv_layers
    groups = _groups(decoder)
    kinds = [tuple(int(layer[1]) >= own for layer in layers) for layers in groups]
    each = dict(zip(kinds, groups, strict=True)).values()
    return [
        _begin.lower(ends, rows, plan=plan),
        *(_some_layers.lower(cache, x, layers, ends, token, order, plan=plan) for layers in each),
        _end.lower(rows, _nothing_drawn(rows), ends, x, token, np.int32(0)),
    ]


def _groups(decoder: Decoder) -> list[list[LayerAt]]:
    """Layers in as few groups as there may be, of one size or two."""
    layers = list(layers_at(decoder))
    parts = np.array_split(np.arange(len(layers)), -(-len(layers) // GROUP))
    return [layers[part[0] : part[-1] + 1] for part in parts]


def _cache(pool: PagePool, decoding: Decoding | None, plan: Plan) -> Any:
    """What the layers read and write."""
    if decoding is None:
        return pool
    return decoding.state if plan.away else (pool, decoding.state)


def _uncached(
    cache: Any, pool: PagePool, decoding: Decoding | None, plan: Plan
) -> tuple[PagePool, Decoding | None]:
    """Pool and what the rule carries behind the layers."""
    if decoding is None:
        return cache, None
    pool, state = (pool, cache) if plan.away else cache
    return pool, decoding.replace(state=state)


def _attend(
    decoder: Decoder, table: PageTable, step: Step, order: Array | None, plan: Plan
) -> Attend:
    """How new tokens attend whose slots the table shows; by the rule where it has an order."""
    if plan.away:
        window = plan.rule.static_pattern
        assert plan.host is not None and decoder.factors is not None and window is not None
        return AwayAttend(decoder.config, decoder.factors, window, plan.host, plan.rule.reads_far)
    paged = PagedAttend(decoder.config, decoder.rope, table, step.slots)
    if order is None:
        return paged
    return DecodeAttend(paged, plan.rule, order, plan.host, plan.values)


def run_tokens(
    decoder: Decoder, pool: PagePool, table: PageTable, step: Step
) -> tuple[Array, PagePool, PageTable]:
    """One forward of new tokens [B, T] against the pool: hidden [B, T, D], pool, table."""
    table = table.reveal(step.slots, step.positions)
    attend = PagedAttend(decoder.config, decoder.rope, table, step.slots)
    hidden, pool, _ = forward(decoder.params, decoder.config, step.tokens, pool, attend)
    return hidden, pool, table


def run_by_rule(
    decoder: Decoder,
    pool: PagePool,
    table: PageTable,
    decoding: Decoding,
    step: Step,
    plan: Plan,
) -> tuple[Array, PagePool, PageTable, Decoding | None]:
    """As ``run_tokens`` for one token a row, [B, 1], attending by the plan's rule."""
    if not plan.away:
        table = table.reveal(step.slots, step.positions)
    attend, cache = (
        _attend(decoder, table, step, decoding.order, plan),
        _cache(pool, decoding, plan),
    )
    hidden, cache, _ = forward(decoder.params, decoder.config, step.tokens, cache, attend)
    pool, after = _uncached(cache, pool, decoding, plan)
    return hidden, pool, table, after


@functools.partial(jax.jit, static_argnames=("plan",), donate_argnames=("pool", "rows", "decoding"))
def _whole_steps(
    pool: PagePool,
    rows: BatchRows,
    decoding: Decoding | None,
    decoder: Decoder,
    block: Array,
    plan: Plan,
) -> tuple[PagePool, BatchRows, Decoding | None, Drawn]:
    """``run_steps`` as one program, which scans over the layers."""

    def one(at: Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        pool, rows, decoding, drawn = carry
        step, live = _newest(rows)
        if decoding is None:
            hidden, pool, table = run_tokens(decoder, pool, rows.table, step)
        else:
            hidden, pool, table, decoding = run_by_rule(
                decoder, pool, rows.table, decoding, step, plan
            )
        token = _Token(step, table, live)
        rows, drawn = _sampled(rows, drawn, decoder, hidden[:, 0], token, at)
        return pool, rows, decoding, drawn

    out: tuple[PagePool, BatchRows, Decoding | None, Drawn]
    out = lax.fori_loop(0, block, one, (pool, rows, decoding, _nothing_drawn(rows)))
    return out


def _newest(rows: BatchRows) -> tuple[Step, Array]:
    """The newest token of every row, and which rows [R] have one that is to be run."""
    live = (rows.position >= 0) & (rows.position <= rows.last)
    step = Step(
        ids=jnp.maximum(rows.ids, 0)[:, None],
        positions=jnp.where(live, rows.position, -1)[:, None],
        slots=jnp.where(live, rows.slot, rows.table.slot_position.shape[1])[:, None],
    )
    return step, live


@functools.partial(jax.jit, static_argnames=("plan",))
def _begin(ends: Decoder, rows: BatchRows, plan: Plan) -> tuple[_Token, Array | ResidualStream]:
    """The newest tokens, and x of [R, 1] before the first layer."""
    step, live = _newest(rows)
    table = rows.table if plan.away else rows.table.reveal(step.slots, step.positions)
    return _Token(step, table, live), before_layers(ends.params, ends.config, step.ids)


@functools.partial(jax.jit, static_argnames=("plan",), donate_argnames=("cache", "x"))
def _some_layers(
    cache: Any,
    x: Array | ResidualStream,
    layers: list[LayerAt],
    ends: Decoder,
    token: _Token,
    order: Array | None,
    plan: Plan,
) -> tuple[Any, Array | ResidualStream]:
    """Cache and x behind some layers."""
    attend = _attend(ends, token.table, token.step, order, plan)

    @jax.jit  # traced once
    def one(carry: tuple[Any, Any], layer: LayerAt) -> tuple[Any, Any]:
        x, cache, _ = run_layer(ends.config, layer, carry[0], token.step.tokens, carry[1], attend)
        return x, cache

    for layer in layers:
        x, cache = one((x, cache), layer)
    return cache, x


@functools.partial(jax.jit, donate_argnames=("rows",))
def _end(
    rows: BatchRows,
    drawn: Drawn,
    ends: Decoder,
    x: Array | ResidualStream,
    token: _Token,
    at: Array,
) -> tuple[BatchRows, Drawn]:
    """``_sampled`` of x of [R, 1] behind the last layer."""
    hidden = rms_norm(residual(x)[:, 0], ends.params.final_norm, ends.config)
    return _sampled(rows, drawn, ends, hidden, token, at)


def _sampled(
    rows: BatchRows, drawn: Drawn, ends: Decoder, hidden: Array, token: _Token, at: Array
) -> tuple[BatchRows, Drawn]:
    """Rows behind a token, and ``drawn`` with the next, of hidden [R, D], put at column ``at``."""
    new = sample_rows(unembed(ends.params, ends.config, hidden), rows.sampling, rows.index + 1)
    rows = rows.replace(
        table=token.table,
        ids=new.ids,
        position=jnp.where(token.live, rows.position + 1, -1),
        slot=rows.slot + token.live,
        index=rows.index + 1,
    )
    drawn = jax.tree.map(lambda all_, new: all_.at[:, at].set(new), drawn, new)
    return counted(rows), drawn


def _nothing_drawn(rows: BatchRows) -> Drawn:
    """Of a step that has not begun, on the host."""
    shape, processors = (len(rows.ids), DECODE_BLOCK), rows.sampling.processors
    top = None
    if processors is not None:
        tops = (*shape, min(MOST_TOP, processors.bias.shape[1]))
        top = np.zeros(tops, np.int32), np.zeros(tops, np.float32)
    return on_host(Drawn, np.zeros(shape, np.int32), np.zeros(shape, np.float32), top)


@jax.jit  # within others: traced once for the first token and those after it
def sample_rows(logits: Array, settings: SamplingRows, token_index: Array) -> Drawn:
    """Tokens of rows [B] by their settings, FAILED where the logits [B, V] hold a NaN."""
    s, top, shaped = settings, None, logits
    if s.processors is not None:
        logits = lax.optimization_barrier(logits)  # the bits that they have without
        shaped = s.processors.applied(logits, token_index)
    drawn = sample(shaped, s.temperature, s.top_k, s.top_p, s.seeds, token_index)
    chosen = jnp.take_along_axis(logits, drawn[:, None], axis=-1)[:, 0]
    probability = chosen - jax.nn.logsumexp(logits, axis=-1)  # NaN where any of the logits is
    if s.processors is not None:
        ids, values = s.processors.likeliest(logits)
        top = ids, values - jax.nn.logsumexp(logits, axis=-1)[:, None]
    return Drawn(jnp.where(jnp.isnan(probability), FAILED, drawn), probability, top)


def counted(rows: BatchRows) -> BatchRows:
    """After the newest tokens were drawn."""
    processors = rows.sampling.processors
    return rows if processors is None else with_processors(rows, processors.counted(rows.ids))


def with_processors(rows: BatchRows, processors: ProcessorRows | None) -> BatchRows:
    """The rows with this state of processors."""
    return rows.replace(sampling=rows.sampling.replace(processors=processors))

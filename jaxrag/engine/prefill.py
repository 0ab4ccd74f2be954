"""Online prefill: new tokens run through the model against the paged pool."""

import dataclasses
import functools
from collections import abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.stages import Lowered

from jaxrag.base import struct
from jaxrag.base.shapes import bucket, pieces
from jaxrag.base.types import Array, HostArray, Step
from jaxrag.engine.mapping import recompute
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.sequence import Sequence
from jaxrag.kv.cache import PagePool, PageTable, batch_table
from jaxrag.models.attention import Attend, PagedAttend
from jaxrag.models.decoder import (
    Decoder,
    LayerAt,
    ResidualStream,
    before_layers,
    layers_at,
    residual,
    rms_norm,
    run_layer,
    run_layers,
    unembed,
    without_layers,
)
from jaxrag.models.taps import Tap, at_columns
from jaxrag.reuse.decode import Observe, PromptQueries
from jaxrag.reuse.select import choose

PREFILL_TOKENS = 1024  # of one pass; longer prompts run in pieces of this many


class Prefilled(NamedTuple):
    """A batch of B' rows after prefill, as many as its program has.

    Attributes:
      logits: [B', V] float32 after each request's last token; padding rows hold nothing.
      table: with all prefilled slots shown.
      bank: the queries that were asked for.
    """

    logits: Array
    table: PageTable
    bank: PromptQueries

    def row(self, row: int) -> "Prefilled":
        """One of its requests, a batch of one."""
        return self if len(self.logits) == 1 else _row(self, np.int32(row))


def observed_tokens(
    requests: abc.Sequence[Sequence], observe: Observe | None, rows: int
) -> tuple[HostArray, HostArray]:
    """Which of the tokens to run are observed, and their positions: [rows, W] each, -1: none.

    As many a row as asked for, fewer where all requests run fewer tokens (then the next power of
    two), none where ``observe`` is None.
    """
    width = 0
    if observe is not None:
        width = min(observe.count, bucket(max(len(r.run.ids) for r in requests)))
    observed = np.full((rows, width), -1, np.int64)
    positions = np.full((rows, width), -1, np.int32)
    for row, request in enumerate(requests):
        if observe is None:
            continue
        chosen = observe.chosen(len(request.run.ids))
        observed[row, : len(chosen)] = chosen
        positions[row, : len(chosen)] = request.run.positions[chosen]
    return observed, positions


class _Piece(struct.PyTreeNode):
    """Some tokens of every prompt of a batch, one pass of the model."""

    step: Step
    last: Array  # [B] index of the prompt's last token among them; -1 where it is not
    observed: Array  # [B, W] indices of the observed tokens among them; -1: in another piece


def select_tokens(runner: ModelRunner, sequence: Sequence, ahead: Any = None) -> None:
    """Choose the chunk tokens that a request computes again, and hide their stored KV from it.

    They join the tokens to run, at their own positions, before the final block. ``ahead``: what
    ``Selector.ahead`` made of that.
    """
    method = sequence.request.method
    if method.recomputes:
        scene = dataclasses.replace(sequence.scene, ahead=ahead)
        choice = choose(runner.model, runner.cache, method.selector, scene)
        recompute(sequence, scene, choice)


class Prefill:
    """Requests on their way through the model, whose selection is done, piece by piece.

    Attributes:
      left: (tokens, width) of the pieces that have not been run.
      prefilled: what there is so far; of all requests once nothing is left.
    """

    def __init__(
        self,
        runner: ModelRunner,
        requests: abc.Sequence[Sequence],
        observe: Observe | None,
        rows: int,
    ) -> None:
        """Runs nothing yet. ``rows`` is how many the program has."""
        self._runner, self._requests, model = runner, requests, runner.model
        table = batch_table([request.table for request in requests], rows, model.put_batch)
        logits = model.zeros((rows, model.config.vocab_size), "float32")
        self._observed, positions = observed_tokens(requests, observe, rows)
        shape = (model.config.num_layers, *positions.shape)
        bank = PromptQueries(
            queries=model.zeros((*shape, model.config.num_heads, model.config.head_dim)),
            positions=model.put_batch(positions, rows),
            sink_logits=model.params.layers.sink_logits,
        )
        self.prefilled = Prefilled(logits, table, bank)
        self.left = pieces(max(len(r.run.ids) for r in requests), PREFILL_TOKENS)
        self._start = 0

    def next_piece(self) -> int:
        """Run the next piece of every request; returns its width."""
        length, width = self.left[0]
        arguments, how = self._arguments(self._start, length, width)
        table, logits, queries = self._runner.cache.update(_prefill_piece, *arguments, **how)
        bank = self.prefilled.bank.replace(queries=queries)
        self.prefilled = Prefilled(logits, table, bank)
        self._start += length
        del self.left[0]
        return width

    def lower(self) -> dict[tuple[str, int], Lowered]:
        """The programs of the pieces that are left, by name and width, not compiled yet."""
        pool = self._runner.cache.pool
        lowered = {}
        for length, width in self.left:
            arguments, how = self._arguments(self._start, length, width)
            for name, program in _lower_piece(pool, *arguments, **how).items():
                lowered[name, width] = program
        return lowered

    def _arguments(
        self, start: int, length: int, width: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What a piece of ``length`` tokens from ``start`` on is run with."""
        model = self._runner.model
        logits, table, bank = self.prefilled
        rows, num_slots = table.slot_position.shape
        ids = np.zeros((rows, width), np.int32)
        positions = np.full((rows, width), -1, np.int32)
        slots = np.full((rows, width), num_slots, np.int32)
        last = np.full(rows, -1, np.int32)
        for row, request in enumerate(self._requests):
            piece_ids = request.run.ids[start : start + length]
            ids[row, : len(piece_ids)] = piece_ids
            positions[row, : len(piece_ids)] = request.run.positions[start : start + length]
            slots[row, : len(piece_ids)] = request.run.slots[start : start + length]
            if start < len(request.run.ids) <= start + length:
                last[row] = len(piece_ids) - 1
        seen = self._observed - start
        seen = np.where((seen >= 0) & (seen < length), seen, -1).astype(np.int32)
        step = Step(*(model.put_batch(x, rows) for x in (ids, positions, slots)))
        piece = _Piece(step, *(model.put_batch(x, rows) for x in (last, seen)))
        decoder = model.decoder(num_slots, weights="by_layer")
        arguments = (logits, bank.queries, decoder, table, piece)
        return arguments, {"rows_in_turn": model.rows_in_turn}


@jax.jit
def _row(prefilled: Prefilled, row: Array) -> Prefilled:
    logits, table, bank = prefilled
    queries, positions = bank.queries[:, row][:, None], bank.positions[row][None]
    bank = bank.replace(queries=queries, positions=positions)
    return Prefilled(logits[row][None], jax.tree.map(lambda x: x[row][None], table), bank)


def _prefill_piece(
    pool: PagePool,
    logits: Array,
    queries: Array,
    decoder: Decoder,
    table: PageTable,
    piece: _Piece,
    rows_in_turn: bool,
) -> tuple[PagePool, PageTable, Array, Array]:
    """Run one piece; rows whose prompt ends in it get their logits [B, V].

    The queries of its observed tokens go into ``queries`` [L, B, W, N, H]. Where the decoder's
    layers are apart, one program serves all of them, called for each: as fast as one of the whole
    model, and compiled and loaded in a fraction of the time.
    """
    if not isinstance(decoder.params.layers, list):
        whole = (pool, logits, queries, decoder, table, piece)
        return _whole_piece(*whole, rows_in_turn=rows_in_turn)
    ends, new = without_layers(decoder), []
    table, x = _begin(ends, table, piece)
    for layer in layers_at(decoder):
        pool, x, observed = _layer(pool, x, layer, ends, table, piece, rows_in_turn=rows_in_turn)
        new.append(observed)
    logits, queries = _end(logits, queries, ends, x, new if queries.shape[2] else None, piece)
    return pool, table, logits, queries


def _lower_piece(
    pool: PagePool,
    logits: Array,
    queries: Array,
    decoder: Decoder,
    table: PageTable,
    piece: _Piece,
    rows_in_turn: bool,
) -> dict[str, Lowered]:
    """The programs of ``_prefill_piece``, by name."""
    if not isinstance(decoder.params.layers, list):
        whole = (pool, logits, queries, decoder, table, piece)
        return {"whole": _whole_piece.lower(*whole, rows_in_turn=rows_in_turn)}
    ends = without_layers(decoder)
    shown, x = jax.eval_shape(_begin, ends, table, piece)
    layers, own = list(layers_at(decoder)), decoder.config.num_kv_layers
    arguments = (pool, x, layers[0], ends, shown, piece)
    several = {"layer": layers[0]} | ({"sharing": layers[own]} if layers[own:] else {})
    observed = [jax.eval_shape(functools.partial(_layer, rows_in_turn=rows_in_turn), *arguments)[2]]
    new = observed * len(layers) if queries.shape[2] else None
    return {
        "begin": _begin.lower(ends, table, piece),
        **{
            name: _layer.lower(pool, x, it, ends, shown, piece, rows_in_turn=rows_in_turn)
            for name, it in several.items()
        },
        "end": _end.lower(logits, queries, ends, x, new, piece),
    }


@functools.partial(
    jax.jit,
    static_argnames=("rows_in_turn",),
    donate_argnames=("pool", "logits"),
)
def _whole_piece(
    pool: PagePool,
    logits: Array,
    queries: Array,
    decoder: Decoder,
    table: PageTable,
    piece: _Piece,
    rows_in_turn: bool,
) -> tuple[PagePool, PageTable, Array, Array]:
    """``_prefill_piece`` as one program, which scans over the layers."""
    params, config = decoder.params, decoder.config
    table = table.reveal(piece.step.slots, piece.step.positions)
    attend = _attend(decoder, table, piece, rows_in_turn)
    x, pool, new = run_layers(params, config, piece.step.tokens, pool, attend, config.num_layers)
    logits, queries = _end(logits, queries, decoder, x, new, piece)
    return pool, table, logits, queries


def _attend(decoder: Decoder, table: PageTable, piece: _Piece, rows_in_turn: bool) -> Attend:
    slots, observed = piece.step.slots, piece.observed
    attend = PagedAttend(decoder.config, decoder.rope, table, slots, rows_in_turn)
    if not observed.shape[1]:
        return attend
    return Tap(attend, lambda q, k, v: at_columns(q, jnp.maximum(observed, 0)))


@jax.jit
def _begin(
    ends: Decoder, table: PageTable, piece: _Piece
) -> tuple[PageTable, Array | ResidualStream]:
    """The table that shows the piece's slots, and x before the first layer."""
    table = table.reveal(piece.step.slots, piece.step.positions)
    return table, before_layers(ends.params, ends.config, piece.step.ids)


@functools.partial(jax.jit, static_argnames=("rows_in_turn",), donate_argnames=("pool", "x"))
def _layer(
    pool: PagePool,
    x: Array | ResidualStream,
    layer: LayerAt,
    ends: Decoder,
    table: PageTable,
    piece: _Piece,
    rows_in_turn: bool,
) -> tuple[PagePool, Array | ResidualStream, Array | None]:
    """Pool and x behind one layer, and the queries of the observed tokens [B, W, N, H]."""
    attend = _attend(ends, table, piece, rows_in_turn)
    tokens = piece.step.tokens
    x, pool, new = run_layer(ends.config, layer, x, tokens, pool, attend)
    return pool, x, new


@functools.partial(jax.jit, donate_argnames=("logits",))
def _end(
    logits: Array, queries: Array, ends: Decoder, x: Array | ResidualStream, new: Any, piece: _Piece
) -> tuple[Array, Array]:
    """Logits and queries with those of this piece; ``new``: of all layers, stacked or apart."""
    if new is not None:
        new = jnp.stack(new) if isinstance(new, list) else new
        queries = jnp.where((piece.observed >= 0)[None, :, :, None, None], new, queries)

    def finish() -> Array:
        at = jnp.maximum(piece.last, 0)[:, None, None]
        last = jnp.take_along_axis(residual(x), at, axis=1)[:, 0]
        last = rms_norm(last, ends.params.final_norm, ends.config)
        return jnp.where(
            (piece.last >= 0)[:, None], unembed(ends.params, ends.config, last), logits
        )

    return lax.cond((piece.last >= 0).any(), finish, lambda: logits), queries

"""Batches: rows of one compiled program that requests join and leave between its steps.

A batch is what its program is compiled for: a decode rule, the width of its page tables, the room
for generated tokens, and how many rows it has. What a row computes does not depend on who has the
others.
"""

import functools
from collections import abc
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Lowered

from jaxrag.base.types import HIDDEN, Array, HostArray, on_host
from jaxrag.engine.mapping import batch_tables, carried_chunks
from jaxrag.engine.processors import ProcessorRows, all_allowed
from jaxrag.engine.request import DECODE_BLOCK, BatchKey
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.sampling_params import SamplingParams
from jaxrag.engine.sequence import Sequence
from jaxrag.engine.steps import (
    BatchRows,
    Drawn,
    Plan,
    SamplingRows,
    counted,
    lower_steps,
    run_steps,
    sample_rows,
    with_processors,
)
from jaxrag.kv.cache import PAGE, ChunkPages, PagePool, PageTable, table_width
from jaxrag.reuse.decode import DecodeRule, Decoding, Dense, PromptQueries, Prompts, order_of
from jaxrag.reuse.decode.view import PromptSlots

DENSE = Dense()

OnPool = Callable[[Callable[[PagePool], Any]], Any]  # calls a function with the pool


class DecodeBatch:
    """Rows on the device and the steps that all of them take together.

    Attributes:
      key: what it is compiled for.
      compiled: whether it has taken a step.
    """

    def __init__(self, runner: ModelRunner, key: BatchKey) -> None:
        """An empty batch. Raises RequestError for a rule that cannot serve this model."""
        model = runner.model
        key.rule.check_placement(model.config, model.placement)
        key.rule.check_mesh(model.config, model.mesh, model.placement)
        self.key = key
        self.compiled = False
        self._runner = runner
        rows, slots = key.rows, key.pages * PAGE
        none = np.full(rows, -1, np.int32)
        nowhere = np.zeros((rows, key.pages), np.int32)
        zeros, chunks = np.zeros(rows, np.int32), None
        if key.attention is not None:
            chunks = on_host(ChunkPages, nowhere.astype(bool), key.attention)
        empty = on_host(
            BatchRows,
            on_host(PageTable, nowhere, nowhere, np.full((rows, slots), HIDDEN), chunks),
            zeros,
            none,
            np.full(rows, slots, np.int32),
            zeros,
            none,
            SamplingRows.of([SamplingParams()] * rows),
        )
        placed = jax.tree.map(lambda x: model.put_batch(x, rows), empty)
        self._rows: BatchRows = jax.device_put(placed) if model.mesh is None else placed
        self._decoding: Decoding | None = None

    def join(
        self,
        rows: abc.Sequence[int | None],
        sequences: abc.Sequence[Sequence],
        logits: Array,
        decoding: Decoding | None = None,
    ) -> Drawn:
        """Give rows to requests that were prefilled together.

        Args:
          rows: of each of ``sequences``, free ones; None for one that does not join now.
          sequences: that were mapped and prefilled, in the order of ``logits``.
          logits: [B', V] float32 after the last token of each; B' is at least their number.
          decoding: of the one that joins, by ``start``; None for a rule that leaves no key out.

        Returns the first token of each, [B'], FAILED where its logits hold a NaN.
        """
        nowhere = self.key.rows
        at = np.full(len(logits), nowhere, np.int32)
        at[: len(rows)] = [nowhere if row is None else row for row in rows]
        if any(sequence.request.sampling.processes for sequence in sequences):
            self._have_processors()
        joining = self._joining(sequences, len(logits))
        self._rows, first = _join(self._rows, at, joining, logits)
        if decoding is not None:
            [row] = [row for row in rows if row is not None]
            self._take(row, decoding)
        return first

    def _joining(self, sequences: abc.Sequence[Sequence], count: int) -> BatchRows:
        """The rows of requests before their first token, on the host, padded to ``count``."""
        pad = count - len(sequences)
        position = [sequence.next_position for sequence in sequences]
        last = [p + seq.request.room - 1 for p, seq in zip(position, sequences, strict=True)]
        slot = [sequence.next_slot for sequence in sequences]
        zeros = np.zeros(count, np.int32)
        position_, last_, slot_ = (
            np.array([*x, *[0] * pad], np.int32) for x in (position, last, slot)
        )
        sampling = sampling_rows(
            sequences,
            count,
            self._runner.model.config.vocab_size if self._has_processors else None,
        )
        return on_host(
            BatchRows,
            batch_tables(sequences if self.key.pages else [], count, self.key.pages),
            zeros,
            position_,
            slot_,
            zeros,
            last_,
            sampling,
        )

    @property
    def _has_processors(self) -> bool:
        return self._rows.sampling.processors is not None

    def _have_processors(self) -> None:
        """Every row has their state from now on, which asks for nothing."""
        if not self._has_processors:
            model, rows = self._runner.model, self.key.rows
            none = ProcessorRows.of([], rows, model.config.vocab_size)
            placed = jax.tree.map(lambda x: model.put_batch(x, rows), none)
            self._rows = with_processors(self._rows, placed)

    def _take(self, row: int, decoding: Decoding | None) -> None:
        if decoding is None:
            return
        if self._decoding is None:
            self._decoding = _empty_decoding(decoding, self.key.rows)
        self._decoding = _put_decoding(self._decoding, np.int32(row), decoding)

    def step(self, block: int, processes: bool = True) -> Drawn:
        """Run every row by ``block`` tokens, at most DECODE_BLOCK: one program for all of them.

        ``processes``: whether ``SamplingParams.processes`` of any who has a row.

        Returns [R, DECODE_BLOCK] each, of which the first ``block`` count, to be read when they are
        ready.
        """
        assert 0 < block <= DECODE_BLOCK
        self.compiled = True
        if not processes:
            self._rows = with_processors(self._rows, None)
        arguments = self._arguments(block)
        self._rows, self._decoding, new = self._runner.cache.update(run_steps, *arguments)
        return new

    def allow(self, rows: Mapping[int, HostArray]) -> None:
        """What may come next in some rows, as ``ProcessorRows.allowed`` has it of one row."""
        processors = self._rows.sampling.processors
        assert processors is not None
        allowed = all_allowed(self.key.rows, self._runner.model.config.vocab_size)
        for row, bits in rows.items():
            allowed[row] = bits
        put = self._runner.model.put_batch(allowed, self.key.rows)
        self._rows = with_processors(self._rows, processors.replace(allowed=put))

    def lower(self) -> list[Lowered]:
        """The programs of ``step``, not compiled yet."""
        rows, decoding, decoder, _, plan = self._arguments(1)
        return lower_steps(self._runner.cache.pool, rows, decoding, decoder, plan)

    def lower_leave(self) -> Lowered:
        """The program of ``leave``, not compiled yet."""
        lowered: Lowered = _leave.lower(self._rows, np.zeros(self.key.rows, bool))
        return lowered

    def _arguments(self, block: int) -> tuple[Any, ...]:
        runner, rule = self._runner, self.key.rule
        values, away = runner.cache.values, runner.model.placement.away
        plan = Plan(rule, runner.searches(rule), values, away)
        decoder = runner.model.decoder(self.key.pages * PAGE, weights="decode")
        return self._rows, self._decoding, decoder, block, plan

    def leave(self, rows: Iterable[int]) -> None:
        """Nobody has these rows any more; what is in flight still runs them."""
        gone = np.zeros(self.key.rows, bool)
        gone[list(rows)] = True
        self._rows = _leave(self._rows, gone)

    def take_out(self, row: int) -> tuple[BatchRows, Decoding | None]:
        """A copy of a row on the device, before it leaves, for ``put_back``."""
        return _row(self._rows, self._decoding, np.int32(row))

    def put_back(
        self, row: int, sequence: Sequence, taken: tuple[BatchRows, Decoding | None]
    ) -> None:
        """Give a row to a request that had one, whose pages may be others now."""
        before, decoding = taken
        pages, offsets, _ = sequence.table.rows(self.key.pages)
        if before.sampling.processors is not None:
            self._have_processors()
        elif self._has_processors:
            none = ProcessorRows.of([], 1, self._runner.model.config.vocab_size)
            before = with_processors(before, jax.tree.map(lambda x: x[0], none))
        self._rows = _rejoin(self._rows, np.int32(row), before, pages, offsets)
        self._take(row, decoding)


def start_decoding(
    runner: ModelRunner,
    sequence: Sequence,
    rule: DecodeRule,
    bank: PromptQueries,
    room: int,
    number: int | None = None,
    on_pool: OnPool | None = None,
) -> Decoding | None:
    """What the rule carries from step to step; None where it leaves no key out.

    Args:
      runner: the model on its device.
      sequence: prefilled.
      bank: the queries that the rule asked its prefill for.
      number: of the request in ``runner.host_search``, where the rule searches.
      on_pool: calls a function with the pool, for whoever is not on the engine's thread.
    """
    if not rule.sparse:
        return None
    model = runner.model
    num_pages = table_width(sequence.table)
    table = batch_tables([sequence], 1, num_pages)
    position, slot = (np.array([x], np.int32) for x in (sequence.next_position, sequence.next_slot))
    order = order_of(np.asarray(table.slot_position), position, slot)
    put = functools.partial(model.put_batch, batch=1)
    prompts = Prompts(
        config=model.config,
        rope=model.rope(num_pages * PAGE),
        on_pool=on_pool or (lambda use: use(runner.cache.pool)),
        slots=PromptSlots(jax.tree.map(put, table), order, position - 1),
        bank=bank,
        room=room,
        number=number,
        carried=carried_chunks(sequence),
        host=None if rule.searches is None else runner.host_search,
    )
    return Decoding(order=put(order), state=rule.begin(prompts))


def sampling_rows(
    sequences: abc.Sequence[Sequence], count: int, vocab_size: int | None = None
) -> SamplingRows:
    """Of requests before their first tokens, and of others up to ``count``, on the host.

    With ``vocab_size`` they have the state of processors.
    """
    settings = [sequence.request.sampling for sequence in sequences]
    rows = SamplingRows.of([*settings, *[SamplingParams()] * (count - len(settings))])
    if vocab_size is None:
        return rows
    asked = [
        (own, sequence.request.prompt.ids, sequence.request.eos_ids, sequence.matcher)
        for own, sequence in zip(settings, sequences, strict=True)
    ]
    return rows.replace(processors=ProcessorRows.of(asked, count, vocab_size))


@jax.jit
def sample_first(logits: Array, sampling: SamplingRows) -> Drawn:
    """The first tokens [B] after prefill, FAILED where the logits [B, V] hold a NaN."""
    return sample_rows(logits, sampling, jnp.zeros(logits.shape[0], jnp.int32))


@functools.partial(jax.jit, donate_argnames=("rows",))
def _join(rows: BatchRows, at: Array, joining: BatchRows, logits: Array) -> tuple[BatchRows, Drawn]:
    """Put requests into their rows ``at`` [B], if there is one, and sample their first tokens."""
    first = sample_rows(logits, joining.sampling, joining.index)
    joining = counted(joining.replace(ids=first.ids))
    return jax.tree.map(lambda x, new: x.at[at].set(new, mode="drop"), rows, joining), first


@functools.partial(jax.jit, donate_argnames=("rows",))
def _rejoin(
    rows: BatchRows, row: Array, before: BatchRows, pages: Array, offsets: Array
) -> BatchRows:
    joining = before.replace(table=before.table.replace(pages=pages, offsets=offsets))
    return jax.tree.map(lambda all_, new: all_.at[row].set(new), rows, joining)


@jax.jit
def _row(
    rows: BatchRows, decoding: Decoding | None, row: Array
) -> tuple[BatchRows, Decoding | None]:
    taken = jax.tree.map(lambda x: x[row], rows)
    if decoding is None:
        return taken, None
    state = jax.tree.map(lambda x: x[:, row][:, None], decoding.state)
    order = jax.tree.map(lambda x: x[row][None], decoding.order)
    return taken, Decoding(order=order, state=state)


@functools.partial(jax.jit, donate_argnames=("rows",))
def _leave(rows: BatchRows, gone: Array) -> BatchRows:
    return rows.replace(position=jnp.where(gone, -1, rows.position))


@functools.partial(jax.jit, static_argnames=("rows",))
def _empty_decoding(row: Decoding, rows: int) -> Decoding:
    """As many rows as that, all of them as the one."""
    return Decoding(
        order=jax.tree.map(lambda x: jnp.repeat(x, rows, axis=0), row.order),
        state=jax.tree.map(lambda x: jnp.repeat(x, rows, axis=1), row.state),
    )


@functools.partial(jax.jit, donate_argnames=("decoding",))
def _put_decoding(decoding: Decoding, row: Array, new: Decoding) -> Decoding:
    return Decoding(
        order=jax.tree.map(lambda x, y: x.at[row].set(y[0]), decoding.order, new.order),
        state=jax.tree.map(lambda x, y: x.at[:, row].set(y[:, 0]), decoding.state, new.state),
    )

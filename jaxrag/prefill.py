"""Online prefill: new tokens run through the model against the paged pool."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrag.attention import PagedAttend
from jaxrag.cache import PAGE, PagePool, PageTable, TableBuilder, pages_for, stack_tables
from jaxrag.config import ModelConfig
from jaxrag.errors import RequestError
from jaxrag.load import Loaded, bring_in, release
from jaxrag.methods import Method
from jaxrag.models.decoder import forward, unembed
from jaxrag.models.model import Model
from jaxrag.models.spec import Params
from jaxrag.rope import RopeTable
from jaxrag.segments import bucket, lay_out, pieces
from jaxrag.store import KVStore
from jaxrag.types import FINAL, Array, HostArray, Tokens

PREFILL_TOKENS = 1024  # of one pass; longer prompts run in pieces of this many
MIN_TABLE_PAGES = 256  # tables are padded to powers of two from here; hidden pages cost nothing


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Token ids of the parts, int32 each, tokenised separately."""

    prefix: HostArray
    chunks: tuple[HostArray, ...]
    final: HostArray

    @property
    def num_tokens(self) -> int:
        """Length of the whole prompt."""
        return len(self.prefix) + sum(map(len, self.chunks)) + len(self.final)


@dataclasses.dataclass
class Mapped:
    """One request mapped into the pool: what is reused, and which tokens are still to be run."""

    table: TableBuilder
    owned: tuple[int, ...]  # pages to give back
    loaded: list[Loaded]
    ids: HostArray  # [n] the tokens to run, in order
    first_position: int  # of ids[0]; positions of the others follow
    first_slot: int  # of ids[0]; slots of the others follow

    @property
    def next_position(self) -> int:
        """Position of the first generated token."""
        return self.first_position + len(self.ids)

    @property
    def next_slot(self) -> int:
        """Slot of the first generated token."""
        return self.first_slot + len(self.ids)


def check_length(model: Model, prompt: Prompt, max_new_tokens: int) -> None:
    """RequestError when prompt and answer do not fit the model's context."""
    need, limit = prompt.num_tokens + max_new_tokens, model.config.max_positions
    if need > limit:
        parts = f"{len(prompt.prefix)} prefix + {sum(map(len, prompt.chunks))} chunk"
        raise RequestError(
            f"the prompt has {parts} + {len(prompt.final)} question tokens and {max_new_tokens} "
            f"may be generated: {need} in all, the model's context is {limit}; ask a shorter "
            f"question, retrieve fewer chunks or generate fewer tokens"
        )


def map_request(
    model: Model, store: KVStore, method: Method, prompt: Prompt, reserve_tokens: int
) -> Mapped:
    """Bring a prompt's chunks into the pool and reserve pages for what must be computed.

    ``reserve_tokens`` is room for generated tokens. Undo with ``unmap``.
    """
    table, loaded = TableBuilder(), list[Loaded]()
    lengths = [len(chunk) for chunk in prompt.chunks]
    layout = lay_out(len(prompt.prefix), lengths, len(prompt.final), method.positions)
    ids, first_position = prompt.final, layout.final_start
    try:
        if method.encoder is None:
            ids, first_position = np.concatenate((prompt.prefix, *prompt.chunks, ids)), 0
        else:
            if len(prompt.prefix):  # its own context: the prefix is what comes first
                loaded.append(
                    bring_in(model, store, "isolated", prompt.prefix[:0], [prompt.prefix])
                )
                table.map_chunk(loaded[-1].residents[0], 0)
            if prompt.chunks:
                loaded.append(bring_in(model, store, method.encoder, prompt.prefix, prompt.chunks))
                for resident, at in zip(loaded[-1].residents, layout.chunk_offsets, strict=True):
                    table.map_chunk(resident, at)
        why = f"a request of {len(ids)} new tokens and {reserve_tokens} to generate"
        owned = model.cache.owners.take(pages_for(len(ids) + reserve_tokens), why)
    except BaseException:
        for part in loaded:
            release(model, part)
        raise
    first_slot = table.reserve(owned)
    return Mapped(table, owned, loaded, ids, first_position, first_slot)


def unmap(model: Model, mapped: Mapped) -> None:
    """Give a request's pages back and let its chunks go."""
    model.cache.owners.give_back(mapped.owned)
    for part in mapped.loaded:
        release(model, part)


def prefill(model: Model, requests: Sequence[Mapped]) -> tuple[Array, PageTable]:
    """Run every request's tokens; rows are padded to a power of two.

    Returns logits [B', V] float32 after each request's last token, and the table with all prefilled
    slots shown (B' >= len(requests); padding rows hold nothing).
    """
    rows = bucket(len(requests), 1)
    num_pages = bucket(max(len(r.table.pages) for r in requests), MIN_TABLE_PAGES)
    empty = [TableBuilder()] * (rows - len(requests))
    table = stack_tables([*(r.table for r in requests), *empty], num_pages)
    table = jax.tree.map(lambda x: model.put_batch(np.asarray(x), rows), table)
    rope = model.rope(num_pages * PAGE)
    logits = model.put_batch(np.zeros((rows, model.config.vocab_size), np.float32), rows)
    start = 0
    for length, width in pieces(max(len(r.ids) for r in requests), PREFILL_TOKENS):
        ids = np.zeros((rows, width), np.int32)
        positions = np.full((rows, width), -1, np.int32)
        slots = np.full((rows, width), num_pages * PAGE, np.int32)
        last = np.full(rows, -1, np.int32)
        for row, request in enumerate(requests):
            here = request.ids[start : start + length]
            at = np.arange(start, start + len(here))
            ids[row, : len(here)] = here
            positions[row, : len(here)] = request.first_position + at
            slots[row, : len(here)] = request.first_slot + at
            if start < len(request.ids) <= start + length:
                last[row] = len(here) - 1
        batch = [model.put_batch(x, rows) for x in (ids, positions, slots, last)]
        model.cache.pool, table, logits = _prefill_piece(
            model.params, model.config, rope, model.cache.pool, table, logits, *batch
        )
        start += length
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

"""Online prefill: new tokens run through the model against the paged pool."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrag.attention import PagedAttend
from jaxrag.cache import PagePool, PageTable, TableBuilder, batch_table, pages_for
from jaxrag.config import ModelConfig
from jaxrag.encode import encoder_named
from jaxrag.errors import RequestError
from jaxrag.load import Loaded, bring_in, release
from jaxrag.methods import Method
from jaxrag.models.decoder import forward, unembed
from jaxrag.models.model import Model
from jaxrag.models.spec import Params
from jaxrag.rope import RopeTable
from jaxrag.segments import bucket, lay_out, pieces
from jaxrag.select import Choice, Scene, Selector, choose
from jaxrag.store import KVStore
from jaxrag.types import FINAL, Array, HostArray, Tokens

PREFILL_TOKENS = 1024  # of one pass; longer prompts run in pieces of this many


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Token ids of the parts, int32 each, tokenised separately.

    ``neighbours`` holds for each chunk the chunks it was encoded behind, in their order; read by
    encoders that see them, None where that is not known.
    """

    prefix: HostArray
    chunks: tuple[HostArray, ...]
    final: HostArray
    neighbours: tuple[tuple[HostArray, ...], ...] | None = None

    @property
    def num_tokens(self) -> int:
        """Length of the whole prompt."""
        return len(self.prefix) + sum(map(len, self.chunks)) + len(self.final)


@dataclasses.dataclass
class Mapped:
    """One request mapped into the pool: what is reused, and which tokens are still to be run.

    ``prefill`` lets ``selector`` choose among the chunk tokens of ``scene`` first, adds its choice
    to the tokens to run and clears ``selector``; ``choice`` is None where nothing is recomputed.
    """

    table: TableBuilder
    owned: tuple[int, ...]  # pages to give back
    loaded: list[Loaded]
    ids: HostArray  # [n] the tokens to run, by position
    positions: HostArray  # [n] int32 of ids
    first_slot: int  # of ids[0]; slots of the others follow
    chunk_loads: list[tuple[Loaded, int]]  # of each chunk: where it was loaded, and its index there
    scene: Scene | None = None
    selector: Selector | None = None
    choice: Choice | None = None

    @property
    def next_position(self) -> int:
        """Position of the first generated token."""
        return int(self.positions[-1]) + 1

    @property
    def chunks_encoded(self) -> list[bool]:
        """Of each chunk: was it not in the store and had to be encoded?"""
        return [loaded.encoded[at] for loaded, at in self.chunk_loads]

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
    room, chunk_loads = 0, list[tuple[Loaded, int]]()
    chunk_slots = [np.zeros(0, np.int32)]
    try:
        if method.encoder is None:
            ids, first_position = np.concatenate((prompt.prefix, *prompt.chunks, ids)), 0
        else:
            room = method.room(lengths)
            if len(prompt.prefix):  # its own context: the prefix is what comes first
                loaded.append(
                    bring_in(model, store, "isolated", prompt.prefix[:0], [prompt.prefix])
                )
                table.map_chunk(loaded[-1].residents[0], 0)
            for encoder, indices in _by_encoder(method, len(prompt.chunks)):
                loaded.append(_bring_in_chunks(model, store, encoder, prompt, indices))
                chunk_loads += [(loaded[-1], at) for at in range(len(indices))]
            for (part, at), offset in zip(chunk_loads, layout.chunk_offsets, strict=True):
                resident = part.residents[at]
                chunk_slots.append(table.num_slots + np.arange(resident.tokens, dtype=np.int32))
                table.map_chunk(resident, offset)
        new_tokens = len(ids) + room
        why = f"a request of {new_tokens} new tokens and {reserve_tokens} to generate"
        owned = model.cache.owners.take(pages_for(new_tokens + reserve_tokens), why)
    except BaseException:
        for part in loaded:
            release(model, part)
        raise
    first_slot = table.reserve(owned)
    positions = (first_position + np.arange(len(ids))).astype(np.int32)
    mapped = Mapped(table, owned, loaded, ids, positions, first_slot, chunk_loads)
    if method.recomputes:
        mapped.selector = method.selector
        mapped.scene = Scene(
            prefix=prompt.prefix,
            chunks=prompt.chunks,
            final=prompt.final,
            table=table,
            chunk_slots=np.concatenate(chunk_slots),
            scratch=first_slot,
            exact=method.exact(len(prompt.prefix), len(prompt.chunks)),
            seen=_seen(method, prompt),
            ratio=method.recompute_ratio,
        )
    return mapped


def _by_encoder(method: Method, num_chunks: int) -> list[tuple[str, range]]:
    """Which encoder serves which run of chunks."""
    if not num_chunks:
        return []
    first, rest = method.encoder_of(0), method.encoder_of(1)
    if first == rest:
        return [(rest, range(num_chunks))]
    parts = [(first, range(1)), (rest, range(1, num_chunks))]
    return [(encoder, indices) for encoder, indices in parts if indices]


def _bring_in_chunks(
    model: Model, store: KVStore, encoder: str, prompt: Prompt, indices: range
) -> Loaded:
    chunks = [prompt.chunks[i] for i in indices]
    neighbours = None
    if prompt.neighbours is not None and encoder_named(encoder).sees_neighbours:
        neighbours = [prompt.neighbours[i] for i in indices]
    return bring_in(model, store, encoder, prompt.prefix, chunks, neighbours)


def _seen(method: Method, prompt: Prompt) -> tuple[tuple[int, ...], ...]:
    """For each chunk: the chunks of this prompt that its KV saw, in the order they stood then."""
    place = {ids.tobytes(): index for index, ids in reversed(list(enumerate(prompt.chunks)))}
    seen = []
    for chunk in range(len(prompt.chunks)):
        others: Sequence[HostArray] = ()
        if prompt.neighbours and encoder_named(method.encoder_of(chunk)).sees_neighbours:
            others = prompt.neighbours[chunk]
        found = (place.get(ids.tobytes()) for ids in others)
        seen.append(tuple(index for index in found if index is not None))
    return tuple(seen)


def select_tokens(model: Model, requests: Sequence[Mapped]) -> None:
    """Choose the chunk tokens that each request computes again, and hide their stored KV from it.

    They join the tokens to run, at their own positions, before the final block. Runs once a
    request; those that recompute nothing are left as they are.
    """
    for selector in dict.fromkeys(r.selector for r in requests if r.selector is not None):
        here = [r for r in requests if r.selector == selector]
        scenes = [r.scene for r in here if r.scene is not None]
        for request, scene, choice in zip(
            here, scenes, choose(model, selector, scenes), strict=True
        ):
            tokens = choice.tokens
            request.table.hide(scene.chunk_slots[tokens])
            chunk_ids = np.concatenate((scene.prefix[:0], *scene.chunks))
            request.ids = np.concatenate((chunk_ids[tokens], request.ids))
            positions = (len(scene.prefix) + tokens).astype(np.int32)
            request.positions = np.concatenate((positions, request.positions))
            request.choice, request.selector = choice, None


def unmap(model: Model, mapped: Mapped) -> None:
    """Give a request's pages back and let its chunks go."""
    model.cache.owners.give_back(mapped.owned)
    for part in mapped.loaded:
        release(model, part)


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
            at = np.arange(start, start + len(here))
            ids[row, : len(here)] = here
            positions[row, : len(here)] = request.positions[start : start + length]
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

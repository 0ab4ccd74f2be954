"""Encodes chunks behind the KV of other chunks: only the chunk's own tokens run through the model.

FusionRAG section 3.1, equation 10 (arXiv:2601.12904).

A batch brings its context along: the KV of the prefix and of every neighbour, each once, rotated
to its place inside its chunk and laid out in pages, as online prefill has it. One page table for
each chunk says where they stand in front of it.
"""

import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrag.base import struct
from jaxrag.base.config import ModelConfig
from jaxrag.base.shapes import bucket, bucket_below, row_length
from jaxrag.base.types import FINAL, Array, HostArray, Tokens
from jaxrag.kv.cache import (
    MIN_TABLE_PAGES,
    PAGE,
    CachedChunk,
    PagePool,
    PageTable,
    TableBuilder,
    batch_table,
    pages_for,
)
from jaxrag.kv.cache.host import StagingBuffers
from jaxrag.kv.store.layout import KVLayout
from jaxrag.models.attention import PagedAttend
from jaxrag.models.decoder import run_layers
from jaxrag.models.model import Model
from jaxrag.models.rope import RopeTable, place
from jaxrag.models.spec import Params
from jaxrag.models.taps import Tap
from jaxrag.reuse.encode.packed import (
    ROW_TOKENS,
    Places,
    Started,
    check_context,
    encode_rows,
    start_taking,
    take_behind,
)

# Token ids [T] of chunks -> their KV [L, 2, T, K, H], each encoded directly behind the prefix.
OwnKV = Callable[[Sequence[HostArray]], Sequence[HostArray]]


class _Before(struct.PyTreeNode):
    """What the chunks of a batch see.

    Attributes:
      kv: [L, 2, S, K, H] as stored, in whole pages.
      local: [S] place of every token inside its chunk.
    """

    kv: Array
    local: Array
    table: PageTable


@functools.partial(jax.jit, static_argnames=("config", "rows_in_turn"))
def _encode(
    params: Params,
    config: ModelConfig,
    rope: RopeTable,
    before: _Before,
    tokens: Tokens,
    slots: Array,
    rows_in_turn: bool,
) -> tuple[Array, Array]:
    """K before RoPE and V of new tokens [B, T] behind their context: [L, B, T, K, H] each."""
    kv, local = before.kv, before.local
    num_layers, _, _, heads, dim = kv.shape
    if rope.kinds is None:
        k = place(kv[:, 0], jnp.broadcast_to(local, (num_layers, *local.shape)), rope, config.rope)
    else:
        own = [place(kv[i, 0], local, rope.of_layer(i), config.rope) for i in range(num_layers)]
        k = jnp.stack(own)
    pool = PagePool(k=k.reshape(-1, PAGE, heads, dim), v=kv[:, 1].reshape(-1, PAGE, heads, dim))
    table = before.table.reveal(slots, tokens.positions)
    paged = PagedAttend(config, rope, table, slots, rows_in_turn=rows_in_turn)
    attend = Tap(paged, lambda q, k, v: (k, v))
    kept: tuple[Array, Array]
    kept = run_layers(params, config, tokens, pool, attend, config.num_kv_layers)[2]
    return kept


def encode_behind(
    model: Model,
    prefix: HostArray,
    chunks: Sequence[HostArray],
    neighbours: Sequence[Sequence[HostArray]],
    own_kv: OwnKV,
) -> Iterator[tuple[int, HostArray]]:
    """Encode every chunk behind the prefix and the KV of its neighbours.

    The neighbours' KV is what each of them has directly behind the prefix, turned to its place in
    front of the chunk; it is not computed again. The chunk sees all of it and itself, at the
    positions that follow. K is handed over before RoPE, so that it stands at any place afterwards.

    Args:
      prefix: [P] int32, may be empty.
      chunks: [T] int32 each.
      neighbours: for every chunk those in front of it, in order, [T'] int32 each.
      own_kv: gives the KV of neighbours; asked for the distinct ones of a batch.

    Yields (index, kv [L, 2, T, K, H]). Raises RequestError for an empty chunk, or one that does
    not fit the model's context with its neighbours.
    """
    check_context(model, prefix, chunks, neighbours)
    yield from take_behind(_started(model, prefix, chunks, neighbours, own_kv))


def compute_own_kv(model: Model, prefix: HostArray, chunks: Sequence[HostArray]) -> list[HostArray]:
    """The KV [L, 2, T, K, H] of chunks directly behind the prefix; the ``OwnKV`` of no store."""
    found = dict(encode_rows(model, prefix, chunks))
    return [found[index] for index in range(len(chunks))]


def _started(
    model: Model,
    prefix: HostArray,
    chunks: Sequence[HostArray],
    neighbours: Sequence[Sequence[HostArray]],
    own_kv: OwnKV,
) -> Iterator[Started]:
    """Every chunk once, in batches of similar length, the longest first; each starts when drawn."""
    nothing = prefix[:0]
    prefix_kv = [kv for _, kv in encode_rows(model, nothing, [prefix])] if len(prefix) else []
    waiting = sorted(range(len(chunks)), key=lambda i: (-len(chunks[i]), i))
    staging = StagingBuffers()
    while waiting:
        rows = batch_rows(len(chunks[waiting[0]]))
        members, waiting = waiting[:rows], waiting[rows:]
        others = {ids.tobytes(): ids for i in members for ids in neighbours[i]}
        context = _Context(model.kv_layout, prefix_kv)
        for name, kv in zip(others, own_kv(list(others.values())), strict=True):
            context.add(name, kv)
        examples = [(i, chunks[i], neighbours[i]) for i in members]
        yield _start(model, context, examples, staging)


def batch_rows(longest: int) -> int:
    """How many chunks of at most that many tokens run at once; a power of two."""
    return bucket_below(ROW_TOKENS // row_length(longest))


def _width(longest: int) -> int:
    """Tokens of a row. It holds one chunk, so that its padding runs through all the chunk sees."""
    return bucket(longest, 64) if longest <= 256 else -(-longest // 64) * 64


class _Context:
    """The KV that the chunks of one batch see, and the pages it is laid out in."""

    def __init__(self, layout: KVLayout, prefix_kv: Sequence[HostArray]) -> None:
        self._layout = layout
        self._parts: list[tuple[CachedChunk, HostArray]] = []
        self._by_name: dict[bytes, CachedChunk] = {}
        self.num_pages = 0
        self.prefix = [self._lay_out(kv) for kv in prefix_kv]

    def add(self, name: bytes, kv: HostArray) -> None:
        """Add the KV [L, 2, T, K, H] of one neighbour."""
        self._by_name[name] = self._lay_out(kv)

    def table(self, neighbours: Sequence[HostArray]) -> tuple[TableBuilder, int]:
        """A table of the prefix and these neighbours, and the position behind them."""
        table, position = TableBuilder(), 0
        for part in [*self.prefix, *(self._by_name[ids.tobytes()] for ids in neighbours)]:
            table.map_chunk(part, position)
            position += part.tokens
        return table, position

    def reserve(self, tokens: int) -> range:
        """Pages for new tokens alone."""
        first, self.num_pages = self.num_pages, self.num_pages + pages_for(tokens)
        return range(first, self.num_pages)

    def arrays(self, staging: StagingBuffers) -> tuple[HostArray, HostArray]:
        """KV [L, 2, S, K, H] in a bucket of whole pages, and places in the chunks [S] int32.

        KV of no chunk holds anything: no table shows its slots.
        """
        slots = bucket(self.num_pages, MIN_TABLE_PAGES) * PAGE
        kv = staging.take(self._layout.shape(slots), self._layout.numpy_dtype)
        local = np.zeros(slots, np.int32)
        for part, own in self._parts:
            span = slice(part.pages[0] * PAGE, part.pages[0] * PAGE + part.tokens)
            kv[:, :, span] = own
            local[span] = np.arange(part.tokens)
        return kv, local

    def _lay_out(self, kv: HostArray) -> CachedChunk:
        tokens = kv.shape[2]
        part = CachedChunk(tuple(self.reserve(tokens)), tokens)
        self._parts.append((part, kv))
        return part


def _start(
    model: Model,
    context: _Context,
    examples: Sequence[tuple[int, HostArray, Sequence[HostArray]]],
    staging: StagingBuffers,
) -> Started:
    """Start one batch of (index, chunk, neighbours)."""
    rows = bucket(len(examples), 1)
    width = _width(max(len(chunk) for _, chunk, _ in examples))
    ids = np.zeros((rows, width), np.int32)
    positions = np.full((rows, width), -1, np.int32)
    slots = np.full((rows, width), np.iinfo(np.int32).max, np.int32)  # beyond any table: padding
    builders: list[TableBuilder] = []
    places: Places = []
    for row, (index, chunk, neighbours) in enumerate(examples):
        table, position = context.table(neighbours)
        slot = table.reserve(context.reserve(len(chunk)))
        span = slice(0, len(chunk))
        ids[row, span] = chunk
        positions[row, span] = position + np.arange(len(chunk))
        slots[row, span] = slot + np.arange(len(chunk))
        builders.append(table)
        places.append((index, row, span))
    kv, local = context.arrays(staging)
    put = functools.partial(model.put_batch, batch=rows)
    tokens = Tokens(ids=put(ids), positions=put(positions), segments=put(np.full_like(ids, FINAL)))
    k, v = _encode(
        model.params,
        model.config,
        model.rope(int(positions.max()) + 1),
        _Before(model.put_kv(kv), model.put(local), batch_table(builders, rows, model.put_batch)),
        tokens,
        put(slots),
        model.rows_in_turn,
    )
    staging.read_by(k)
    return start_taking(model, places, k, v)

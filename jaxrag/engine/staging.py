"""Chunk KV on its way into the paged pool: fetched or encoded, staged, placed.

A load belongs to a chunk, not to a request. Any thread may ``fetch``, ``keep`` and ``stage``; only
the engine's thread may ``encode`` and ``place``.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.stages import Lowered

from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import ChunkAbsent, ChunkCorrupt, ChunkNotSealed
from jaxrag.base.types import Array, HostArray
from jaxrag.engine.runner import BLOCK_TOKENS, ModelRunner
from jaxrag.kv.cache import PAGE, PagedCache, PagePool, pages_for
from jaxrag.kv.cache.host import arrived
from jaxrag.kv.store import Assembled, OwnRead, Refused, SharedStore, as_stored
from jaxrag.kv.store.dropping import dropped_tokens
from jaxrag.models.model import Model
from jaxrag.models.rope import RopeTable
from jaxrag.models.rope import place as at_position
from jaxrag.reuse.attention_index import rotated
from jaxrag.reuse.encode import (
    ENCODERS,
    ChunkEncoding,
    ChunkInContext,
    Encoded,
    StoredNeighbours,
    encoder_named,
    seen_prefix,
)
from jaxrag.reuse.encode.neighbours import compute_own_kv
from jaxrag.reuse.names import Misses

HitKind = Literal["pool", "host", "store", "encoded", "in place"]


def key_in_part(stored_key: str) -> str:
    """Under which pool and arena have some layers of a chunk."""
    return f"{stored_key} in part"


@dataclasses.dataclass(frozen=True)
class ChunkOrigin:
    """Where the KV of a chunk came from, for the request that had it loaded.

    Attributes:
      how: "pool": it was on the device, or on its way there; "host": in the arena, where it was
        used before; "store": it was read; "encoded": it was computed and kept; "nowhere": it is
        missing, and the request that needs it computes it.
      why: why it had to be computed; "" where it was found.
      corrupt: the store has it, damaged.
      unsealed: the store has it, not sealed with the store's secret.
      not_stored: why it was not kept after it was computed; None where it was.
      runs: (tokens, keys the last one sees) of every prefill that encoding it took.
    """

    how: Literal["pool", "host", "store", "encoded", "nowhere"]
    why: str = ""
    corrupt: bool = False
    unsealed: bool = False
    not_stored: str | None = None
    runs: tuple[tuple[int, int], ...] = ()

    @property
    def hit(self) -> bool:
        """Was nothing computed?"""
        return self.how in ("pool", "host", "store")

    @property
    def counted(self) -> HitKind:
        """Under which name it is counted."""
        return "in place" if self.how == "nowhere" else self.how


@dataclasses.dataclass(frozen=True, eq=False)
class ChunkLoad:
    """A chunk whose KV is wanted in the pool.

    Attributes:
      stored_key: in its store.
      encoder: a key of ENCODERS.
      chunk: its tokens, and those it is encoded behind.
      encoding: where it is kept, and how it is made.
      misses: what happens where it is not kept.
      layers: whose KV is wanted, ascending; None: of all.
    """

    stored_key: str
    encoder: str
    chunk: ChunkInContext
    encoding: ChunkEncoding
    misses: Misses
    layers: tuple[int, ...] | None = None

    @property
    def key(self) -> str:
        """In the pool and in the arena."""
        return self.stored_key if self.layers is None else key_in_part(self.stored_key)

    @property
    def nbytes(self) -> int:
        """Of its KV in memory."""
        layout = self.encoding.store.layout
        whole = layout.nbytes(self.tokens)
        return whole if self.layers is None else whole // layout.num_layers * len(self.layers)

    @property
    def tokens(self) -> int:
        """Its length."""
        return len(self.chunk.ids)

    @property
    def num_pages(self) -> int:
        """That it takes of the pool, below 0 parts: none for no layers, nobody sees it then."""
        count = pages_for(self.tokens)
        return count if self.layers is None else -count if self.layers else 0

    def table_pages(self, pages: Sequence[int]) -> Sequence[int]:
        """What tables name where it has these of the pool."""
        return pages or [0] * pages_for(self.tokens)

    def of(self, whole: HostArray) -> HostArray:
        """What is wanted of KV [L, 2, T, K, H] of all layers."""
        return whole if self.layers is None else whole[list(self.layers)]

    def room(self, block: HostArray) -> HostArray:
        """What of a staging block holds as many layers as are wanted."""
        return block if self.layers is None else block[: len(self.layers)]

    @property
    def layer_set(self) -> frozenset[int] | None:
        """As stores are asked for them."""
        return None if self.layers is None else frozenset(self.layers)


@dataclasses.dataclass(frozen=True, eq=False)
class Fetched:
    """The KV of some chunks in host memory.

    Attributes:
      origins: by key, where each came from.
      kv: one chunk behind the other, [L, 2, S, K, H], of their ``layers``.
      at: by key, the first token of every chunk.
      block: the staging block that ``kv`` is a part of; None where it is in none.
      refused: by key, why there is no KV.
    """

    origins: Mapping[str, ChunkOrigin]
    kv: HostArray
    at: Mapping[str, int]
    block: HostArray | None = None
    refused: Mapping[str, Refused] = dataclasses.field(default_factory=dict)

    def of(self, load: ChunkLoad) -> HostArray:
        """A copy of one chunk's KV [L, 2, T, K, H]."""
        first = self.at[load.key]
        return self.kv[:, :, first : first + load.tokens].copy()


class NewlyEncoded(NamedTuple):
    """A chunk that was encoded, and what it took, as in ``ChunkOrigin.runs``."""

    chunk: Encoded
    runs: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Staged:
    """The KV of some chunks, ready to be written to their pages.

    Attributes:
      chunks: each chunk, where it came from, and the first of its tokens in the blocks.
      blocks: host memory and the device's copy of every BLOCK_TOKENS tokens,
        [L, 2, BLOCK_TOKENS, K, H], of their ``layers`` the copy.
      dropped: by key the tokens that a store left out, of a store that does.
    """

    chunks: list[tuple[ChunkLoad, ChunkOrigin, int]]
    blocks: list[tuple[HostArray, Array]]
    dropped: Mapping[str, HostArray]


def groups(loads: Iterable[ChunkLoad]) -> Iterator[list[ChunkLoad]]:
    """Chunks that are read together: the same layers of one store, of a block, or a longer one."""
    alike: dict[Any, list[ChunkLoad]] = {}
    for load in loads:
        alike.setdefault((load.encoding.store, load.layers), []).append(load)
    for those in alike.values():
        group: list[ChunkLoad] = []
        for load in those:
            if group and load.tokens + sum(member.tokens for member in group) > BLOCK_TOKENS:
                yield group
                group = []
            group.append(load)
        yield group


def fetch(runner: ModelRunner, group: Sequence[ChunkLoad]) -> Fetched:
    """Read a group of chunks from their store into host memory; on any thread.

    Raises StoreError where the storage fails.
    """
    block = _block_for(runner, group)
    store, keys = group[0].encoding.store, [load.stored_key for load in group]
    out = None if block is None else group[0].room(block)
    layers = group[0].layer_set
    answer = store.get_many(keys, out, layers=layers, on_missing="skip")
    return _as_fetched(group, answer, block)


def _as_fetched(group: Sequence[ChunkLoad], answer: Assembled, block: HostArray | None) -> Fetched:
    named = {load.stored_key: load.key for load in group}
    at = {named[key]: first for key, (first, _) in answer.offsets.items()}
    refused = {named[key]: why for key, why in answer.refused.items()}
    return Fetched(dict.fromkeys(at, ChunkOrigin("store")), answer.kv, at, block, refused)


def read_own(runner: ModelRunner, group: Sequence[ChunkLoad]) -> tuple[OwnRead, HostArray | None]:
    """Read what this process holds of a group, and the staging block of it; on any thread.

    ``agreed`` makes of it what ``fetch`` returns. A failure is a part of it.
    """
    store, block = group[0].encoding.store, _block_for(runner, group)
    assert isinstance(store, SharedStore)
    out = None if block is None else group[0].room(block)
    keys = [load.stored_key for load in group]
    return store.read_own(keys, out, layers=group[0].layer_set), block


def agreed(
    group: Sequence[ChunkLoad], own: tuple[OwnRead, HostArray | None] | BaseException
) -> Fetched:
    """As ``fetch``, of a group that every process has read by now; all of them call it together.

    ``own``: of ``read_own``, or why it ended without. Raises StoreError where any storage fails.
    """
    store = group[0].encoding.store
    assert isinstance(store, SharedStore)
    if isinstance(own, BaseException):
        own = (OwnRead(None, f"{type(own).__name__}: {own}"), None)
    read, block = own
    return _as_fetched(group, store.agreed([load.stored_key for load in group], read), block)


def fetch_held(
    runner: ModelRunner,
    group: Sequence[ChunkLoad],
    held: Mapping[str, HostArray],
    origins: Mapping[str, ChunkOrigin],
) -> Fetched:
    """As ``fetch``, of chunks whose KV [L, 2, T, K, H] is in host memory, by key."""
    ends = np.cumsum([load.tokens for load in group])
    at = {load.key: int(end) - load.tokens for load, end in zip(group, ends, strict=True)}
    block = _block_for(runner, group)
    if block is None:  # a single one
        return Fetched(origins, held[group[0].key], at)
    room = group[0].room(block)
    for load in group:
        room[:, :, at[load.key] : at[load.key] + load.tokens] = held[load.key]
    return Fetched(origins, room[:, :, : ends[-1]], at, block)


def _block_for(runner: ModelRunner, group: Sequence[ChunkLoad]) -> HostArray | None:
    short = sum(load.tokens for load in group) <= BLOCK_TOKENS
    return runner.staging.take() if short else None


def drop(runner: ModelRunner, fetched: Fetched) -> None:
    """Give the memory of what was fetched back; on any thread."""
    if fetched.block is not None:
        runner.staging.give(fetched.block)


def is_elsewhere(load: ChunkLoad, reason: Refused) -> bool:
    """Whether another process encodes a chunk now that no store has; on any thread.

    Where not, and this one is to encode it, its lease is held from now on.
    """
    absent = load.misses == "encode" and isinstance(reason, ChunkAbsent)
    return absent and not load.encoding.store.lease(load.stored_key)


def why_refused(load: ChunkLoad, reason: Refused) -> ChunkOrigin:
    """Why a store refused a chunk, and under which other encoders it has it; on any thread.

    Only encoders that see no neighbours are looked up: other neighbours of a chunk are unknown.
    """
    encoding = load.encoding
    names = [
        name
        for name, encoder in ENCODERS.items()
        if name != load.encoder
        and not encoder.sees_neighbours
        and not encoder.wraps
        and not (encoder.sees_primer and encoding.primer is None)
    ]
    keys = [encoding.key(name, load.chunk.ids) for name in names]
    held = encoding.store.head(keys, on_corrupt="skip")
    known = [name for name, record in zip(names, held, strict=True) if record is not None]
    text = str(reason).removeprefix(f"chunk {load.stored_key}: ")
    unsealed = isinstance(reason, ChunkNotSealed)
    corrupt = isinstance(reason, ChunkCorrupt) and not unsealed
    if corrupt:
        text = f"damaged: {text}"
    why = "not in the store" if isinstance(reason, ChunkAbsent) else text
    if known:
        why += f" under {load.encoder}, but under {' and '.join(known)}"
    return ChunkOrigin(
        "nowhere" if load.misses == "in_place" else "encoded", why, corrupt, unsealed
    )


def encode(loads: Sequence[ChunkLoad], *, reads: bool = True) -> list[NewlyEncoded]:
    """Encode chunks that ``EncodeQueue.take`` gives; no chunk's KV depends on the others.

    ``reads``: its neighbours' KV may be read from the store; else that is computed too.
    """
    encoding, chosen = loads[0].encoding, encoder_named(loads[0].encoder)
    prefix = seen_prefix(chosen, encoding.prefix)
    own_kv = StoredNeighbours(encoding) if reads else _Computed(encoding.model, prefix)
    by_key = {load.stored_key: load.chunk for load in loads}
    made = {encoded.key: encoded for encoded in encoding.encode(chosen.name, by_key, own_kv)}
    num_primer = encoding.num_before(chosen.name) - len(prefix)  # run again with each chunk
    encoded = []
    for load in loads:
        num_before = len(prefix) + num_primer + sum(map(len, load.chunk.neighbours))
        again = num_before if chosen.neighbours == "joint" else num_primer
        runs = [(load.tokens + again, num_before + load.tokens)]
        runs += [(length, len(prefix) + length) for length in own_kv.computed]
        encoded.append(NewlyEncoded(made[load.stored_key], tuple(runs)))
    return encoded


@dataclasses.dataclass
class _Computed:
    """As ``StoredNeighbours``, of no store.

    Attributes:
      prefix: that precedes them, [P] int32.
      computed: lengths of the chunks that were computed so far.
    """

    model: Model
    prefix: HostArray
    computed: list[int] = dataclasses.field(default_factory=list)

    def __call__(self, chunks: Sequence[HostArray]) -> list[HostArray]:
        """The KV [L, 2, T, K, H] of distinct chunks, int32 [T] each."""
        self.computed += map(len, chunks)
        return compute_own_kv(self.model, self.prefix, chunks)


def keep(
    load: ChunkLoad, origin: ChunkOrigin, made: NewlyEncoded, *, stores: bool = True
) -> Fetched:
    """Store a chunk that was encoded, where its store takes it; on any thread.

    Returns what the store would give back, so that an answer does not depend on which request came
    first. A full disk does not fail a question. ``stores``: False keeps it from the store.
    """
    not_stored = load.encoding.offer(made.chunk) if stores else "its store was not asked"
    origin = dataclasses.replace(origin, not_stored=not_stored, runs=made.runs)
    kv = load.of(as_stored(made.chunk.kv, load.encoding.store.layout))
    return Fetched({load.key: origin}, kv, {load.key: 0})


def stage(
    runner: ModelRunner,
    cache: PagedCache,
    fetched: Fetched,
    loads: Sequence[ChunkLoad],
    pages: Mapping[str, Sequence[int]],
) -> Staged:
    """Copy some of the fetched chunks to the device, and wait for that; on any thread.

    What belongs in host memory is written there at once. ``cache`` has the pages: the runner may
    have another one by now.
    """
    chunks = [(load, fetched.origins[load.key], fetched.at[load.key]) for load in loads]
    dropped = {
        load.key: dropped_tokens(fetched.kv[:, :, first : first + load.tokens])
        for load, _, first in chunks
        if load.encoding.store.layout.drops
    }
    blocks = _cut(runner, fetched.kv) if fetched.block is None else [fetched.block]
    host = cache.host
    if host is not None:
        page, local = _targets(runner, chunks, len(blocks), pages)
        for index, block in enumerate(blocks):
            at = slice(index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS)
            inside = np.flatnonzero(page[at] < runner.num_pages)
            rows = page[at][inside].astype(np.int64) * PAGE + local[at][inside] % PAGE
            k = None
            if runner.model.placement.away:  # [L, K, n, H], then as the store has it
                keys, rope_of = block[:, 0][:, inside].swapaxes(1, 2), runner.model.config.rope_of
                places = local[at][inside]
                k = np.stack([rotated(head, places, rope_of(i)) for i, head in enumerate(keys)])
                k = k.swapaxes(1, 2)
            host.put(rows, k, block[host.first_layer :, 1][:, inside])
    if runner.model.placement.away:
        for block in blocks:
            runner.staging.give(block)
        return Staged(chunks, [], dropped)
    on_device = [(block, runner.model.put_kv(loads[0].room(block))) for block in blocks]
    return Staged(chunks, [(block, arrived(kv)) for block, kv in on_device], dropped)


def _cut(runner: ModelRunner, kv: HostArray) -> list[HostArray]:
    """KV [L, 2, T, K, H] in staging blocks."""
    blocks = []
    for start in range(0, kv.shape[2], BLOCK_TOKENS):
        part = kv[:, :, start : start + BLOCK_TOKENS]
        block = runner.staging.take()
        block[: len(kv), :, : part.shape[2]] = part
        blocks.append(block)
    return blocks


def place(
    runner: ModelRunner,
    staged: Staged,
    pages: Mapping[str, Sequence[int]],
    first: int = 0,
    end: int | None = None,
) -> None:
    """Write chunks to their pages, block by block: one program, whatever their lengths.

    ``first`` and ``end`` choose some of the blocks. KV in host memory was written by ``stage``.
    """
    if runner.model.placement.away:
        return
    page, local = _targets(runner, staged.chunks, len(staged.blocks), pages)
    rope = runner.model.rope(int(local.max(initial=0)) + 1)
    layers = staged.chunks[0][0].layers
    for index in range(len(staged.blocks))[first:end]:
        block, kv = staged.blocks[index]
        at = slice(index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS)
        placed = runner.cache.update(
            _place, runner.model.config, kv, page[at], local[at], rope, layers=layers
        )
        runner.staging.give(block, placed)


def lower_place(runner: ModelRunner, load: ChunkLoad) -> Lowered:
    """The program of ``place`` for chunks of at most 1,024 tokens, not compiled yet."""
    kv = runner.model.put_kv(load.room(runner.staging.take()))
    page, local = (np.zeros(BLOCK_TOKENS, np.int32) for _ in range(2))
    rope = runner.model.rope(1)
    arguments = (runner.cache.pool, runner.model.config, kv, page, local, rope)
    lowered: Lowered = _place.lower(*arguments, layers=load.layers)
    return lowered


def _targets(
    runner: ModelRunner,
    chunks: Sequence[tuple[ChunkLoad, ChunkOrigin, int]],
    blocks: int,
    pages: Mapping[str, Sequence[int]],
) -> tuple[HostArray, HostArray]:
    """Of every token of the blocks its page, beyond the last for none, and its place there."""
    page = np.full(blocks * BLOCK_TOKENS, runner.num_pages, np.int32)
    local = np.zeros(blocks * BLOCK_TOKENS, np.int32)
    for load, _, start in chunks:
        at = np.arange(load.tokens, dtype=np.int32)
        page[start : start + load.tokens] = np.asarray(load.table_pages(pages[load.key]), np.int32)[
            at // PAGE
        ]
        local[start : start + load.tokens] = at
    return page, local


@functools.partial(jax.jit, static_argnames=("config", "layers"), donate_argnames=("pool",))
def _place(
    pool: PagePool,
    config: ModelConfig,
    kv: Array,
    page: Array,
    local: Array,
    rope: RopeTable,
    layers: tuple[int, ...] | None,
) -> tuple[PagePool, Array]:
    """Rotate K of kv [L, 2, S, K, H] to its place in the chunk (fp32) and scatter to pages [S].

    Of some ``layers`` [n, 2, S, K, H], to parts of pages.
    The second result is ready when kv has been read; the pool itself is donated to the next call.
    """
    nowhere, slot = page >= pool.k.shape[0] // config.num_kv_layers, local % PAGE

    def layer(at: Array, pool: PagePool) -> PagePool:
        index = at if layers is None else jnp.array(layers)[at]
        rows = jnp.where(nowhere, pool.k.shape[0], pool.rows(index, page, config.num_kv_layers))
        k = at_position(kv[at, 0], local, rope.of_layer(index), config.rope)
        return pool.replace(
            k=pool.k.at[rows, slot].set(k, mode="drop"),
            v=pool.v.at[rows, slot].set(kv[at, 1], mode="drop"),
        )

    return lax.fori_loop(0, len(kv), layer, pool) if len(kv) else pool, jnp.max(local)

"""Chunk KV on its way into the paged pool: resident already, from the store, or encoded now."""

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrag.attention_index.document import Indexing
from jaxrag.cache import PAGE, CachedChunk, PagePool, pages_for
from jaxrag.config import ModelConfig
from jaxrag.encode import (
    ENCODERS,
    ChunkEncoding,
    ChunkInContext,
    StoredNeighbours,
    chunk_key,
    encoder_named,
    seen_prefix,
)
from jaxrag.engine.runner import ModelRunner
from jaxrag.errors import ChunkCorrupt
from jaxrag.methods import Misses
from jaxrag.models.rope import RopeTable, place
from jaxrag.shapes import bucket
from jaxrag.store import KVStore, Refused
from jaxrag.types import Array, HostArray

WINDOW_TOKENS = 2048  # of chunks that are read and placed at once


@dataclasses.dataclass(frozen=True)
class Found:
    """Where the KV of one chunk came from.

    Attributes:
      how: "pool": it lay on the device; "store": it was read; "encoded": it was computed and kept;
        "nowhere": it is not there, and whoever asked for it computes it.
      why: why it had to be computed; "" where it was found.
    """

    how: Literal["pool", "store", "encoded", "nowhere"]
    why: str = ""

    @property
    def hit(self) -> bool:
        """Was nothing computed?"""
        return self.how in ("pool", "store")


@dataclasses.dataclass
class Loaded:
    """Chunks mapped into the pool for one request, in prompt order. Give back with ``release``.

    ``residents`` is None for a chunk that is nowhere; ``keys`` are those of all others.
    """

    keys: list[str]
    residents: list[CachedChunk | None]
    found: list[Found]
    runs: list[tuple[int, int]]  # (tokens, keys the last one sees) of every prefill on the way
    load_seconds: float
    encode_seconds: float
    notes: list[str]

    @property
    def encoded(self) -> list[bool]:
        """Of each chunk: had it to be prefilled to be brought in?"""
        return [found.how == "encoded" for found in self.found]


def release(runner: ModelRunner, loaded: Loaded) -> None:
    """The request is over; its chunks stay resident until their pages are needed."""
    for key in loaded.keys:
        runner.cache.allocator.release(key)


def load_chunks(
    runner: ModelRunner,
    store: KVStore,
    encoder: str,
    prefix_ids: HostArray,
    chunks: Sequence[HostArray],
    neighbours: Sequence[Sequence[HostArray]] | None = None,
    misses: Misses = "encode",
    indexing: Indexing | None = None,
) -> Loaded:
    """Map chunks into the pool, reading or encoding what is not there yet.

    A chunk that the store does not hold, or holds corrupt, is encoded, stored (where the store can
    be written), used, and named in ``notes``; with ``misses="in_place"`` it is named there and
    nothing else. ``neighbours`` of every chunk are needed by encoders that see them, as
    ``encode_chunks`` says. What is encoded is stored with the indexes that it gets by ``indexing``.
    Raises RequestError when the pool is too small.
    """
    store = runner.model.held(store)
    allocator = runner.cache.allocator
    seen: Sequence[Sequence[HostArray] | None]
    seen = [None] * len(chunks) if neighbours is None else neighbours
    keys = [
        chunk_key(store.fingerprint, runner.model, encoder, prefix_ids, ids, others)
        for ids, others in zip(chunks, seen, strict=True)
    ]
    before = dict(zip(keys, seen, strict=True))
    found = {key: allocator.acquire(key) for key in dict.fromkeys(keys)}
    inside = {key for key, resident in found.items() if resident is not None}
    wanted = {key: ids for key, ids in zip(keys, chunks, strict=True) if found[key] is None}
    pages: dict[str, tuple[int, ...]] = {}
    try:
        for key, ids in wanted.items():
            pages[key] = allocator.allocate(pages_for(len(ids)), f"a chunk of {len(ids)} tokens")
        start = time.perf_counter()
        reasons = _read(runner, store, wanted, pages)
        load_seconds = time.perf_counter() - start
        refused = {key: wanted[key] for key in reasons}
        why = _why(runner, store, encoder, prefix_ids, refused, reasons)
        start = time.perf_counter()
        not_stored, runs = None, list[tuple[int, int]]()
        if misses == "in_place":
            for key in refused:
                del wanted[key]
                allocator.free(pages.pop(key))
        else:
            encoding = ChunkEncoding(runner.model, store, prefix_ids, indexing)
            lacking = {
                key: ChunkInContext(ids, tuple(before[key] or ())) for key, ids in refused.items()
            }
            not_stored, runs = _encode(runner, encoding, encoder, lacking, pages)
        encode_seconds = time.perf_counter() - start
    except BaseException:
        for taken in pages.values():
            allocator.free(taken)
        for key, resident in found.items():
            if resident is not None:
                allocator.release(key)
        raise
    how = {key: Found("pool" if key in inside else "store") for key in found}
    for key in reasons:
        how[key] = Found("nowhere" if misses == "in_place" else "encoded", why[key])
    for key, ids in wanted.items():
        found[key] = allocator.insert(key, pages[key], len(ids))
    residents: list[CachedChunk | None] = []
    for index, key in enumerate(keys):
        residents.append(allocator.acquire(key) if key in keys[:index] else found[key])
    return Loaded(
        keys=[key for key, it in zip(keys, residents, strict=True) if it is not None],
        residents=residents,
        found=[how[key] for key in keys],
        runs=runs,
        load_seconds=load_seconds,
        encode_seconds=encode_seconds,
        notes=_notes(refused, reasons, misses, not_stored),
    )


def _notes(
    refused: Mapping[str, HostArray],
    reasons: Mapping[str, Refused],
    misses: Misses,
    not_stored: str | None,
) -> list[str]:
    """One line on what was not found, or none."""
    if not refused:
        return []
    corrupt = sum(isinstance(reason, ChunkCorrupt) for reason in reasons.values())
    why = f"{len(refused) - corrupt} not in the store, {corrupt} corrupt there"
    done = "encoded" if misses == "encode" else "computed in place"
    if misses == "in_place":
        kept = "not stored"
    else:
        kept = "stored" if not_stored is None else f"not stored: {not_stored}"
    tokens = sum(map(len, refused.values()))
    return [f"{len(refused)} chunk(s), {tokens} tokens, {done} ({why}) and {kept}"]


def _why(
    runner: ModelRunner,
    store: KVStore,
    encoder: str,
    prefix_ids: HostArray,
    wanted: Mapping[str, HostArray],
    reasons: Mapping[str, Refused],
) -> dict[str, str]:
    """Per key why the store refused it, and under which other encoders the chunk is there.

    Of these only the ones that see no neighbours are looked at: those of a chunk are unknown here.
    """
    if not reasons:
        return {}
    names = [name for name, it in ENCODERS.items() if name != encoder and not it.sees_neighbours]
    others = {
        (key, name): chunk_key(store.fingerprint, runner.model, name, prefix_ids, ids)
        for key, ids in wanted.items()
        for name in names
    }
    held = store.head(list(others.values()), on_corrupt="skip")
    there = {at for at, record in zip(others, held, strict=True) if record is not None}
    why = {}
    for key, reason in reasons.items():
        text = str(reason).removeprefix(f"chunk {key}: ")
        known = [name for name in names if (key, name) in there]
        if isinstance(reason, ChunkCorrupt):
            text = f"damaged: {text}"
        why[key] = "not in the store" if text.startswith("not in ") else text
        if known:
            why[key] += f" under {encoder}, but under {' and '.join(known)}"
    return why


def _read(
    runner: ModelRunner,
    store: KVStore,
    wanted: dict[str, HostArray],
    pages: dict[str, tuple[int, ...]],
) -> dict[str, Refused]:
    """Read what the store holds into the pool; per key that it refused, why."""
    refused: dict[str, Refused] = {}
    for keys in _windows({key: len(ids) for key, ids in wanted.items()}):
        tokens = sum(len(wanted[key]) for key in keys)
        ways = runner.model.head_share.ways
        buffer = runner.cache.staging_buffer(runner.model.config, bucket(tokens, 256), ways)
        read = store.get_many(keys, out=buffer, on_missing="skip")
        if read.offsets:
            _place_spans(runner, buffer, read.offsets, pages)
        refused |= read.refused
    return refused


def _windows(lengths: Mapping[str, int]) -> list[list[str]]:
    """Keys in runs of at most WINDOW_TOKENS tokens, so that few shapes are ever compiled."""
    runs: list[list[str]] = []
    filled = WINDOW_TOKENS
    for key, length in lengths.items():
        if filled + length > WINDOW_TOKENS:
            runs.append([])
            filled = 0
        runs[-1].append(key)
        filled += length
    return runs


def _encode(
    runner: ModelRunner,
    encoding: ChunkEncoding,
    encoder: str,
    wanted: Mapping[str, ChunkInContext],
    pages: dict[str, tuple[int, ...]],
) -> tuple[str | None, list[tuple[int, int]]]:
    """Encode chunks, store them durably where the store may be written, and place them.

    Returns why some are not stored, if so (a full disk does not keep a question from its answer),
    and the prefills as ``Loaded.runs`` counts them.
    """
    model, chosen = encoding.model, encoder_named(encoder)
    num_prefix = len(seen_prefix(chosen, encoding.prefix))
    own_kv = StoredNeighbours(encoding)
    not_stored = None
    runs = []
    for made in encoding.encode(encoder, wanted, own_kv):
        length = len(made.chunk.ids)
        num_before = num_prefix + sum(map(len, made.chunk.neighbours))
        joint = chosen.neighbours == "joint"
        runs.append((length + num_before * joint, num_before + length))
        not_stored = encoding.offer(made) or not_stored
        ways = model.head_share.ways
        buffer = runner.cache.staging_buffer(model.config, bucket(length, 256), ways)
        buffer[:, :, :length] = made.kv
        _place_spans(runner, buffer, {made.key: (0, length)}, pages)
    runs += [(length, num_prefix + length) for length in own_kv.computed]
    return not_stored, runs


def _place_spans(
    runner: ModelRunner,
    buffer: HostArray,
    spans: Mapping[str, tuple[int, int]],
    pages: dict[str, tuple[int, ...]],
) -> None:
    """Write spans of a staging buffer, key -> (first token, tokens), to their chunks' pages."""
    size = buffer.shape[2]
    nowhere = runner.cache.pool.k.shape[0]
    page = np.full(size, nowhere, np.int32)
    local = np.zeros(size, np.int32)
    for key, (start, length) in spans.items():
        at = np.arange(length, dtype=np.int32)
        page[start : start + length] = np.array(pages[key], np.int32)[at // PAGE]
        local[start : start + length] = at
    rope = runner.model.rope(int(local.max()) + 1)
    kv = runner.model.put_kv(buffer)
    placed = runner.cache.run(_place, runner.model.config, kv, page, local, rope)
    runner.cache.staged(placed)
    values = runner.cache.values
    if values is not None:
        here = np.flatnonzero(page != nowhere)
        values.put(page[here], local[here] % PAGE, buffer[values.first_layer :, 1][:, here])


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("pool",))
def _place(
    pool: PagePool, config: ModelConfig, kv: Array, page: Array, local: Array, rope: RopeTable
) -> tuple[PagePool, Array]:
    """Rotate K of kv [L, 2, S, K, H] to its place in the chunk (fp32) and scatter to pages [S].

    The second result is ready when kv has been read; the pool itself is donated to the next call.
    """

    def layer(index: Array, pool: PagePool) -> PagePool:
        rows, slot = pool.rows(index, page, config.num_layers), local % PAGE
        k = place(kv[index, 0], local, rope, config.rope)
        return PagePool(
            k=pool.k.at[rows, slot].set(k, mode="drop"),
            v=pool.v.at[rows, slot].set(kv[index, 1], mode="drop"),
        )

    return lax.fori_loop(0, config.num_layers, layer, pool), jnp.max(local)

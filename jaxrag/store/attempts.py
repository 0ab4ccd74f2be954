"""A chunk being written: by one process, or by several that hold a share of the heads each."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxrag.errors import StoreError
from jaxrag.store.backend import WriteFuture
from jaxrag.store.grid import KV_AXES, aux_grid, kv_grid
from jaxrag.store.layout import KVLayout
from jaxrag.store.namespace import Namespace, aux_path
from jaxrag.store.quantise import quantise
from jaxrag.store.record import (
    SCALE,
    AuxArray,
    Provenance,
    Record,
    digest,
    layer_digests,
    new_record,
)


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A chunk that was begun. It can be sent to other processes."""

    key: str
    attempt: str
    tokens: int  # T
    ways: int  # ranks that write K / ways heads each
    provenance: Provenance
    generation: bytes  # of the commit that this one may replace


@dataclasses.dataclass(frozen=True)
class Shard:
    """What one rank wrote, for the one that commits. It can be sent to other processes."""

    attempt: str
    rank: int
    xxh3: tuple[str, ...]  # [L]
    scale: str | None  # digest of the scales of an int8 chunk


def start_shard(
    space: Namespace, attempt: Attempt, rank: int, kv: NDArray[Any]
) -> tuple[Shard, list[WriteFuture]]:
    """Begin to write ``kv`` [L, 2, T, K / ways, H], the share of one rank."""
    layout, backend = space.layout, space.backend
    base = space.attempt(attempt.key, attempt.attempt)
    writes = []
    elements, scale = kv, None
    if layout.stored == "int8":
        try:
            elements, scales = quantise(kv)
        except StoreError as error:
            raise StoreError(f"chunk {attempt.key}: {error}") from None
        grid = aux_grid(layout.shape(attempt.tokens)[:-1], scales.dtype.name, attempt.ways)
        writes.append(backend.start_part(aux_path(base, SCALE), grid, rank, scales))
        scale = digest(scales)
    grid = kv_grid(layout, attempt.tokens, attempt.ways)
    writes.append(backend.start_part(base, grid, rank, elements))
    return Shard(attempt.attempt, rank, layer_digests(elements), scale), writes


def start_record(
    space: Namespace,
    attempt: Attempt,
    shards: Sequence[Shard],
    aux: Mapping[str, NDArray[Any]],
    described: Mapping[str, AuxArray],
) -> tuple[Record, list[WriteFuture]]:
    """Begin to write all that is not a rank's: auxiliary arrays and the headers.

    Raises:
        StoreError: ``shards`` are not those of every rank.
    """
    record = _describe(space.layout, attempt, shards, described)
    backend = space.backend
    base = space.bytes_of(record)
    writes = []
    for name, array in aux.items():
        entry = record.aux[name]
        grid = aux_grid(entry.shape, entry.dtype)
        writes.append(backend.start_part(aux_path(base, name), grid, 0, array))
    for path, grid in space.arrays(record).items():
        if path == base:
            attributes = {"jaxrag": json.loads(record.to_json()), "rope_applied": False}
            writes.append(backend.start_header(path, grid, KV_AXES, attributes))
        else:
            name = path.removesuffix("/").rpartition("/")[2]
            entry = record.aux[name]
            attributes = {"jaxrag": {"chunk": record.key, "aux": name, "dtype": entry.dtype}}
            axes = KV_AXES[:-1] if name == SCALE else None
            writes.append(backend.start_header(path, grid, axes, attributes))
    return record, writes


def _describe(
    layout: KVLayout,
    attempt: Attempt,
    shards: Sequence[Shard],
    described: Mapping[str, AuxArray],
) -> Record:
    ranks = sorted(shard.rank for shard in shards)
    foreign = [shard.attempt for shard in shards if shard.attempt != attempt.attempt]
    if foreign or ranks != list(range(attempt.ways)):
        raise StoreError(
            f"chunk {attempt.key}: shards of ranks {ranks}"
            + (f", some of attempt {foreign[0]}" if foreign else "")
            + f": expected one of each of {attempt.ways} ranks of attempt {attempt.attempt}"
        )
    ordered = sorted(shards, key=lambda shard: shard.rank)
    aux = dict(described)
    if layout.stored == "int8":
        scales = tuple(shard.scale or "" for shard in ordered)
        aux[SCALE] = AuxArray(layout.shape(attempt.tokens)[:-1], np.dtype("f4").name, scales)
    by_layer = zip(*(shard.xxh3 for shard in ordered), strict=True)
    return new_record(
        attempt.key,
        attempt.attempt,
        attempt.tokens,
        layout,
        attempt.provenance,
        [digest for layer in by_layer for digest in layer],
        aux,
        attempt.ways,
    )

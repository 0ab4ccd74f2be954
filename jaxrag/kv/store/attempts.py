"""A chunk being written: by one process, or by several that hold a share of the heads each."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxrag.base.errors import StoreError
from jaxrag.kv.store.backend import WriteFuture
from jaxrag.kv.store.grid import KV_AXES, aux_grid, kv_grid
from jaxrag.kv.store.namespace import Namespace, aux_path
from jaxrag.kv.store.quantise import to_stored
from jaxrag.kv.store.record import (
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
class WrittenShard:
    """What one rank wrote, for the one that commits. It can be sent to other processes."""

    attempt: str
    rank: int
    xxh3: tuple[str, ...]  # [L]
    scale: str | None  # digest of the scales of an int8 chunk
    seals: tuple[str, ...] = ()  # [L]; none where the store has no secret
    scale_seal: str | None = None
    kept: str = ""  # the tokens that are stored; "" where all are


def start_shard(
    space: Namespace, attempt: Attempt, rank: int, kv: NDArray[Any]
) -> tuple[WrittenShard, list[WriteFuture]]:
    """Begin to write ``kv`` [L, 2, T, K / ways, H], the share of one rank."""
    layout, backend, sealer = space.layout, space.backend, space.sealer
    base = space.attempt(attempt.key, attempt.attempt)
    writes = []
    scale, scale_seal = None, None
    try:
        elements, scales, kept = to_stored(kv, layout)
    except StoreError as error:
        raise StoreError(f"chunk {attempt.key}: {error}") from None
    if scales is not None:
        grid = aux_grid(layout.shape(attempt.tokens)[:-1], scales.dtype.name, attempt.ways)
        writes.append(backend.start_part(aux_path(base, SCALE), grid, rank, scales))
        scale = digest(scales)
        scale_seal = None if sealer is None else sealer.of_array(scales)
    grid = kv_grid(layout, attempt.tokens, attempt.ways)
    writes.append(backend.start_part(base, grid, rank, elements))
    seals = () if sealer is None else sealer.of_layers(elements)
    digests = layer_digests(elements)
    shard = WrittenShard(attempt.attempt, rank, digests, scale, seals, scale_seal, kept)
    return shard, writes


def start_record(
    space: Namespace,
    attempt: Attempt,
    shards: Sequence[WrittenShard],
    aux: Mapping[str, NDArray[Any]],
    described: Mapping[str, AuxArray],
) -> tuple[Record, list[WriteFuture]]:
    """Begin to write all that is not a rank's: auxiliary arrays and the headers.

    Raises:
        StoreError: ``shards`` are not those of every rank, or lack seals that others have.
    """
    entries = dict(described)
    if space.sealer is not None:
        for name, array in aux.items():
            seals = (space.sealer.of_array(array),)
            entries[name] = dataclasses.replace(entries[name], seals=seals)
    record = _describe(space, attempt, shards, entries)
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
    space: Namespace,
    attempt: Attempt,
    shards: Sequence[WrittenShard],
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
    layout, sealer = space.layout, space.sealer
    ordered = sorted(shards, key=lambda shard: shard.rank)
    odd = [shard.rank for shard in ordered if bool(shard.seals) != (sealer is not None)]
    if odd:
        raise StoreError(
            f"chunk {attempt.key}: rank {odd[0]} opened the store "
            f"{'with' if sealer is None else 'without'} a secret, the one that commits did not: "
            "open it with the same secret in every process"
        )
    aux = dict(described)
    if layout.stored == "int8":
        scales = tuple(shard.scale or "" for shard in ordered)
        seals = () if sealer is None else tuple(shard.scale_seal or "" for shard in ordered)
        shape = layout.shape(attempt.tokens)[:-1]
        aux[SCALE] = AuxArray(shape, np.dtype("f4").name, scales, seals)
    return new_record(
        attempt.key,
        attempt.attempt,
        attempt.tokens,
        layout,
        attempt.provenance,
        _by_layer(shard.xxh3 for shard in ordered),
        aux,
        attempt.ways,
        _by_layer(shard.seals for shard in ordered),
        sealer,
        ordered[0].kept,
    )


def _by_layer(of_ranks: Iterable[Sequence[str]]) -> list[str]:
    """What every rank has of every layer: layer by layer, in a layer rank by rank."""
    return [one for layer in zip(*of_ranks, strict=True) for one in layer]

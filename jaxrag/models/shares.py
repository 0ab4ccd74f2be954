"""Which KV heads a process holds of a model that lies on the devices of several.

Everything here is the identity where one process has all devices of the mesh.
"""

import dataclasses
import functools

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrag.base.config import ModelConfig
from jaxrag.base.sharding import (
    Rules,
    attention_axes,
    exchange,
    host_part,
    placed,
    processes_of,
)
from jaxrag.base.types import Array, HostArray
from jaxrag.kv.store.base import KVStore
from jaxrag.kv.store.layout import HeadShare
from jaxrag.kv.store.shared import SharedStore

HEAD_AXIS = 3  # of KV [L, 2, T, K, H], and of K or V of rows [L, B, T, K, H]


def head_share(mesh: Mesh | None, kv_heads: int) -> HeadShare:
    """The heads that this process's devices hold, as a share of all.

    All of them where the processes' heads are no equal runs, or are replicated; then they are
    brought together on every process before they are read.
    """
    processes = processes_of(mesh)
    if mesh is None or len(processes) == 1:
        return HeadShare()
    mine, leads = jax.process_index(), jax.process_index() == processes[0]
    held: dict[int, set[int]] = {process: set() for process in processes}
    place = NamedSharding(mesh, PartitionSpec(attention_axes(mesh, 1, kv_heads)[1]))
    for device, index in place.devices_indices_map((kv_heads,)).items():
        assert isinstance(device, jax.Device) and index is not None
        held[device.process_index].update(range(kv_heads)[index[0]])
    size = len(held[mine])
    runs = {tuple(sorted(heads)) for heads in held.values()}
    if any(run != tuple(range(run[0], run[0] + size)) or run[0] % size for run in runs):
        return HeadShare(writes=leads, leads=leads)
    first = min(process for process in processes if held[process] == held[mine])
    return HeadShare(min(held[mine]) // size, kv_heads // size, mine == first, leads)


def by_heads(mesh: Mesh | None, share: HeadShare, rows: tuple[Array, ...]) -> tuple[Array, ...]:
    """K and V [L, B, T, K, H] of a program, placed so that a process holds its heads of all rows.

    ``sharding.host_part`` of them is then [L, B, T, K / ways, H].
    """
    if mesh is None or len(processes_of(mesh)) == 1:
        return rows
    heads = None if share.ways == 1 else attention_axes(mesh, 1, rows[0].shape[HEAD_AXIS])[1]
    spec = PartitionSpec(*[None] * HEAD_AXIS, heads)
    moved: tuple[Array, ...] = placed(rows, NamedSharding(mesh, spec))
    return moved


def own_heads(mesh: Mesh | None, share: HeadShare, x: Array, axis: int) -> HostArray:
    """What this process has of an array whose dimension ``axis`` is the KV or query heads."""
    if mesh is None or len(processes_of(mesh)) == 1:
        return np.asarray(x)
    over = None if share.ways == 1 else Rules().kv_heads
    part = host_part(placed(x, NamedSharding(mesh, PartitionSpec(*[None] * axis, over))))
    if part.shape[axis] == x.shape[axis]:  # whole: the array is empty, or not split at all
        first, end = share.heads(x.shape[axis])
        part = part[(slice(None),) * axis + (slice(first, end),)]
    return part


def with_heads(config: ModelConfig, ways: int) -> ModelConfig:
    """The config of one of so many equal runs of the heads."""
    return dataclasses.replace(
        config, num_heads=config.num_heads // ways, num_kv_heads=config.num_kv_heads // ways
    )


def put_share(mesh: Mesh, share: HeadShare, kv: HostArray, head_axis: int = HEAD_AXIS) -> Array:
    """KV [L, 2, T, K / ways, H] of this process's share as [L, 2, T, K, H] on the mesh, by heads.

    Every process puts its own share, all of them tokens of the same chunks. ``head_axis`` is that
    of another shape.
    """
    heads = kv.shape[head_axis] * share.ways
    axis = attention_axes(mesh, 1, heads)[1]
    place = NamedSharding(mesh, PartitionSpec(*[None] * head_axis, axis))
    shape = (*kv.shape[:head_axis], heads, *kv.shape[head_axis + 1 :])
    before = share.heads(heads)[0]

    def part(index: tuple[slice, ...] | None) -> HostArray:
        assert index is not None
        first, end, _ = index[head_axis].indices(heads)
        return kv[(slice(None),) * head_axis + (slice(first - before, end - before),)]

    return jax.make_array_from_callback(shape, place, part)


def as_held(mesh: Mesh | None, share: HeadShare, store: KVStore) -> KVStore:
    """A store as this process of a model reads and writes it, its share of the heads."""
    if len(processes_of(mesh)) == 1 or isinstance(store, SharedStore):
        return store
    return SharedStore(store, share, functools.partial(exchange, mesh))

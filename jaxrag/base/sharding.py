"""Meshes and shardings: logical axes of arrays mapped to the mesh axes (data, fsdp, tensor).

``jax.jit`` with ``NamedSharding`` on parameters, pool and tokens is all there is (what pjit
became); the mesh axes are Auto, so the compiler places the collectives. Auto is said explicitly
here because ``jax.make_mesh`` now defaults to Explicit axes, under which a plain embedding lookup
fails.
"""

import dataclasses
import functools
import logging
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrag.base.errors import ConfigError, EngineError
from jaxrag.base.tables import require_kind
from jaxrag.base.types import Array, HostArray

_LOG = logging.getLogger("jaxrag")

MESH_AXES = ("data", "fsdp", "tensor")

_FRAME = 4096  # bytes of a first message between processes; one shape, compiled once
_LENGTH = 8  # bytes of its size, which it opens with


@dataclasses.dataclass(frozen=True)
class Rules:
    """Which mesh axis (or axes) each logical axis is split over; None replicates it.

    Weights: `embed` (D) over fsdp, everything that is per head or per MLP unit over tensor, so that
    attention and MLP need one reduction each. Tokens: `batch` over data and fsdp. The paged pool is
    split over its KV heads only: any request may point at any page.
    """

    batch: tuple[str, ...] | str | None = ("data", "fsdp")
    vocab: str | None = "tensor"
    embed: str | None = "fsdp"
    heads: str | None = "tensor"
    kv_heads: str | None = "tensor"
    mlp: str | None = "tensor"
    experts: str | None = "tensor"  # then the units of one lie together
    layers: str | None = None


def make_mesh(
    data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """A (data, fsdp, tensor) mesh over the first data * fsdp * tensor devices.

    Raises ConfigError when there are fewer devices than that, or a process would have none of them,
    and RequestError for what is no number.
    """
    devices = list(jax.devices() if devices is None else devices)
    for name, count in (("data", data), ("fsdp", fsdp), ("tensor", tensor)):
        require_kind(name, count, (int,), "how many devices", optional=False)
    need = data * fsdp * tensor
    if min(data, fsdp, tensor) < 1 or need > len(devices):
        raise ConfigError(
            f"mesh data={data} fsdp={fsdp} tensor={tensor} needs {need} devices, there are "
            f"{len(devices)}; choose sizes whose product is at most that"
        )
    idle = {d.process_index for d in devices} - {d.process_index for d in devices[:need]}
    if idle:
        raise ConfigError(
            f"mesh data={data} fsdp={fsdp} tensor={tensor} takes {need} of {len(devices)} devices "
            f"and none of process {min(idle)}; choose sizes whose product is {len(devices)}"
        )
    grid = np.asarray(devices[:need]).reshape(data, fsdp, tensor)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def sharding(
    mesh: Mesh, shape: Sequence[int], axes: Sequence[str | None], rules: Rules, name: str
) -> NamedSharding:
    """NamedSharding of an array whose dimensions carry these logical axes.

    A dimension that its mesh axes do not divide is replicated, and a warning says so by name.
    """
    spec: list[tuple[str, ...] | str | None] = []
    for size, axis in zip(shape, axes, strict=True):
        target = None if axis is None else getattr(rules, axis)
        over = (target,) if isinstance(target, str) else tuple(target or ())
        ways = math.prod(mesh.shape[part] for part in over)
        if ways > 1 and size % ways:
            _LOG.warning(
                "%s: dimension %s=%d is not divisible by mesh %s=%d and is replicated",
                name, axis, size, "*".join(over), ways,
            )  # fmt: skip
            target = None
        spec.append(target)
    return NamedSharding(mesh, PartitionSpec(*spec))


def attention_axes(
    mesh: Mesh, batch: int, kv_heads: int
) -> tuple[tuple[str, ...] | str | None, str | None]:
    """The mesh axes over which attention splits its rows and its KV heads.

    None where they do not divide them, as for the arrays themselves (``sharding``).
    """
    rules = Rules()
    rows = (rules.batch,) if isinstance(rules.batch, str) else rules.batch or ()
    ways = math.prod(mesh.shape[axis] for axis in rows)
    heads = rules.kv_heads
    if heads is not None and kv_heads % mesh.shape[heads]:
        heads = None
    return (rules.batch if batch % ways == 0 else None), heads


def device_axes(*axes: str | None) -> PartitionSpec:
    """How the devices of a mesh split an array whose dimensions carry these logical axes."""
    return PartitionSpec(*(None if axis is None else getattr(Rules(), axis) for axis in axes))


def by_device[T](
    mesh: Mesh | None,
    function: Callable[..., T],
    operands: Sequence[Any],
    results: PartitionSpec | tuple[PartitionSpec, ...],
) -> Callable[..., T]:
    """A function of arrays that every device of a mesh runs for itself, on its part of them.

    Args:
        function: takes which run of the KV heads the device has, [] int32 (0 without a mesh), and
            the arrays. It may call the host: the device's own process answers.
        operands: of every array, or tuple of them, how it is split, by ``device_axes``; a part is
            as large on every device.
        results: the same of what the function returns.
    """
    if mesh is None:
        return functools.partial(function, 0)
    heads = Rules().kv_heads
    assert heads is not None

    def on_device(*arrays: Array) -> T:
        return function(jax.lax.axis_index(heads), *arrays)

    return jax.shard_map(
        on_device, mesh=mesh, in_specs=tuple(operands), out_specs=results, check_vma=False
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding that puts a whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def put(x: HostArray, place: NamedSharding) -> Array:
    """A host array on a mesh, of which every process has the whole and places its devices' part.

    ``jax.device_put`` would compare the array over all processes, milliseconds for every one.
    """
    return jax.make_array_from_callback(x.shape, place, lambda index: x[index])


@functools.partial(jax.jit, static_argnames=("place",))
def placed(x: Any, place: NamedSharding) -> Any:
    """A tree of device arrays, each placed so, by whatever collectives that takes."""
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, place), x)


def to_host(x: Array) -> HostArray:
    """The whole of a device array on the host.

    What lies on a mesh of several processes and is not whole on each of them is brought together
    first: then all of these call this, in the same order.
    """
    if not (x.is_fully_addressable or x.is_fully_replicated):
        x = placed(x, replicated(x.sharding.mesh))  # type: ignore[attr-defined]
    return np.asarray(x)


def host_part(x: Array) -> HostArray:
    """What this process's devices hold of an array, together a box of it; all of it on one process.

    A copy or read-only.
    """
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    shards = {}
    for shard in x.addressable_shards:
        edges = (part.indices(size)[:2] for part, size in zip(shard.index, x.shape, strict=True))
        shards[tuple(edges)] = shard.data
    first = np.min([[a for a, _ in box] for box in shards], axis=0)
    end = np.max([[b for _, b in box] for box in shards], axis=0)
    out = np.empty(end - first, x.dtype)
    for box, data in shards.items():
        span = tuple(slice(a - start, b - start) for (a, b), start in zip(box, first, strict=True))
        out[span] = np.asarray(data)
    return out


def processes_of(mesh: Mesh | None) -> tuple[int, ...]:
    """The indices of the processes whose devices a mesh has, ascending; of none, this one's."""
    if mesh is None:
        return (jax.process_index(),)
    return tuple(sorted({device.process_index for device in mesh.devices.flat}))


_MAY: list[Callable[[], bool]] = []


def collectives_by(mine: Callable[[], bool]) -> None:
    """From now on only threads of which this says so call ``exchange``; no argument: all may.

    Processes must make their collectives in one order, so one thread of each makes them.
    """
    _MAY[:] = [mine]


def exchange(mesh: Mesh | None, value: Any) -> list[Any]:
    """What every process of a mesh passes, by ``processes_of``. All of them call it, in one order.

    One collective of 4 KiB, and another where somebody passes more. Values are pickled.
    """
    if len(processes_of(mesh)) == 1:
        return [value]
    if not all(may() for may in _MAY):
        raise EngineError(
            "several processes hold this model: what they do together is the engine's alone to do"
        )
    assert mesh is not None
    data = pickle.dumps(value)
    length = len(data).to_bytes(_LENGTH, "little")
    frames = _gather(mesh, length + data[: _FRAME - _LENGTH], _FRAME)
    sizes = [int.from_bytes(frame[:_LENGTH].tobytes(), "little") for frame in frames]
    size = max(sizes)
    if size > _FRAME - _LENGTH:
        frames = _gather(mesh, data, 1 << (size - 1).bit_length())
    else:
        frames = frames[:, _LENGTH:]
    return [pickle.loads(row[:n].tobytes()) for row, n in zip(frames, sizes, strict=True)]


def _gather(mesh: Mesh, data: bytes, size: int) -> HostArray:
    """The bytes of every process of the mesh, padded: uint8 [processes, size]."""
    mine = np.zeros((1, size), np.uint8)
    mine[0, : len(data)] = np.frombuffer(data, np.uint8)
    line = _one_device_each(mesh)
    place = NamedSharding(line, PartitionSpec("process"))
    shape = (line.size, size)
    return to_host(jax.make_array_from_callback(shape, place, lambda _: mine))


@functools.lru_cache(maxsize=8)
def _one_device_each(mesh: Mesh) -> Mesh:
    """The first device of every process of a mesh, in a line."""
    first: dict[int, Any] = {}
    for device in mesh.devices.flat:
        first.setdefault(device.process_index, device)
    devices = [first[process] for process in sorted(first)]
    return Mesh(np.asarray(devices), ("process",), axis_types=(AxisType.Auto,))

"""Meshes and shardings: logical axes of arrays mapped to the mesh axes (data, fsdp, tensor).

``jax.jit`` with ``NamedSharding`` on parameters, pool and tokens is all there is (what pjit
became); the mesh axes are Auto, so the compiler places the collectives. Auto is said explicitly
here because ``jax.make_mesh`` now defaults to Explicit axes, under which a plain embedding lookup
fails.
"""

import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrag.errors import ConfigError

_LOG = logging.getLogger("jaxrag")

MESH_AXES = ("data", "fsdp", "tensor")


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
    layers: str | None = None


def make_mesh(
    data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """A (data, fsdp, tensor) mesh over the first data * fsdp * tensor devices.

    Raises ConfigError when there are fewer devices than that, or a process would have none of them.
    """
    devices = list(jax.devices() if devices is None else devices)
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


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding that puts a whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())

"""What a model takes of memory, from its config alone, and whether there is so much here."""

import dataclasses
import math
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import ModelError
from jaxrag.base.sharding import Rules, attention_axes
from jaxrag.kv.cache.budget import (
    available_bytes,
    default_host_tokens,
    default_pool_tokens,
    pool_budget,
    whole_pages,
)
from jaxrag.kv.cache.pool import PAGE
from jaxrag.kv.placement import ON_DEVICE, KVPlacement, check_size
from jaxrag.models.spec import ParamSpec, is_spec, num_params, num_table_params, param_specs


@dataclasses.dataclass(frozen=True)
class Memory:
    """What a model and its pool take, in bytes, and what is free. Make one with ``memory_of``.

    On the CPU "device" is the host's memory, for all of its devices; else it is one accelerator.

    Attributes:
      device: platform, or kind of accelerator.
      on_cpu: is the device the host itself?
      devices: how many of them this process has the model on.
      reading: beside them in host memory while weights are read: the largest one.
      kv_per_token: K and V of a token, over all layers and all devices.
      pool_tokens: as asked for, or by default.
      pool: of these tokens on the device.
      host_pool: of these tokens in host memory.
      free: on the device now; None where it is not reported.
      host_free: of host memory now; None where it is not reported.
    """

    device: str
    on_cpu: bool
    devices: int
    weights: int
    reading: int
    kv_per_token: int
    pool_tokens: int
    pool: int
    host_pool: int
    free: int | None
    host_free: int | None

    @property
    def missing(self) -> int:
        """Bytes that the weights lack on the device; 0 where they fit or it is not known."""
        need = self.weights + (self.reading if self.on_cpu else 0)
        return 0 if self.free is None else max(need - self.free, 0)

    @property
    def most_tokens(self) -> int | None:
        """Tokens of KV that fit beside the weights, in whole pages; None: not known.

        Of a pool that lies where this one does.
        """
        device, host = self.pool / self.pool_tokens, self.host_pool / self.pool_tokens
        if self.on_cpu:
            device, host = device + host, 0.0
        rooms = [
            (free, each)
            for free, each in (
                (None if self.free is None else self.free - self.weights, device),
                (self.host_free, host),
            )
            if free is not None and each
        ]
        if not rooms:
            return None
        return min(max(int(free / each) // PAGE * PAGE, 0) for free, each in rooms)


def free_bytes(device: jax.Device) -> int | None:
    """Of a device's memory now: of the host's, of what JAX may take of an accelerator's."""
    if device.platform == "cpu":
        return available_bytes()
    stats = device.memory_stats()
    return None if not stats else stats["bytes_limit"] - stats["bytes_in_use"]


def memory_of(
    config: ModelConfig,
    mesh: Mesh | None = None,
    cache_tokens: int | None = None,
    placement: KVPlacement = ON_DEVICE,
) -> Memory:
    """What ``load_model`` with these arguments would take here; nothing is read or allocated."""
    devices = _devices(mesh)
    on_cpu = devices[0].platform == "cpu"
    copies = len(devices) if on_cpu else 1  # all of them lie in the host's memory
    frees = [free for free in map(free_bytes, devices) if free is not None]
    free, host_free = min(frees, default=None), available_bytes()
    width = np.dtype(jax.numpy.dtype(config.dtype)).itemsize
    shapes = _shapes(config, mesh)
    weights = sum(map(math.prod, shapes)) * width * copies
    tokens = cache_tokens
    if tokens is None and placement.away:
        left = None if host_free is None else host_free - (weights if on_cpu else 0)
        tokens = default_host_tokens(config, left)
    elif tokens is None:
        budget = pool_budget(None if free is None else free - weights, on_cpu)
        tokens = default_pool_tokens(config, budget, placement)
    tokens = whole_pages(max(tokens, PAGE))
    heads = None if mesh is None else attention_axes(mesh, 1, config.num_kv_heads)[1]
    ways = 1 if mesh is None or heads is None else mesh.shape[heads]
    return Memory(
        device="cpu" if on_cpu else devices[0].device_kind,
        on_cpu=on_cpu,
        devices=len(devices),
        weights=weights,
        reading=max(map(math.prod, shapes)) * width,
        kv_per_token=config.kv_bytes_per_token,
        pool_tokens=tokens,
        pool=placement.device_bytes(config, tokens) // ways * copies,
        host_pool=placement.host_bytes(config, tokens),
        free=free,
        host_free=host_free,
    )


def require_room(path: Path, config: ModelConfig, memory: Memory) -> None:
    """Raise ModelError, with what would fit, where weights or pool find no room; before reading."""
    where = "of memory" if memory.on_cpu else f"on {memory.device}"
    has = f"{gib(memory.weights)} of {config.dtype} weights"
    if memory.missing:
        assert memory.free is not None
        read = f" and {gib(memory.reading)} to read them" if memory.on_cpu else ""
        narrow = "load it in bfloat16, " if config.dtype == "float32" else ""
        raise ModelError(
            f"{path}: {has}{read}, and {gib(memory.free)} {where} are free; {narrow}spread it over "
            "more devices (a mesh), or take a smaller model or a larger machine"
        )
    most = memory.most_tokens
    if most is None or memory.pool_tokens <= most:
        return
    lies = memory.pool + memory.host_pool
    raise ModelError(
        f"{path}: a pool of {memory.pool_tokens} tokens takes {gib(lies)} beside {has}, more than "
        f"there is {where if memory.pool else 'in host memory'}; lower cache_tokens, to "
        f"{most} at most"
    )


def require_room_for_int8(name: str, config: ModelConfig, memory: Memory) -> None:
    """Raise ModelError where a copy in int8 finds no room beside pool and weights that are read."""
    copy = num_params(config) - num_table_params(config)  # a byte each; scales are few
    left = None if memory.free is None else memory.free - memory.pool - memory.host_pool
    if left is not None and copy > left:
        raise ModelError(
            f"{name}: decode_weights='int8' keeps {gib(copy)} beside the weights, and "
            f"{gib(max(left, 0))} of memory are free behind the pool; leave it out, lower "
            "cache_tokens, or load the model in bfloat16"
        )


def gib(size: int) -> str:
    """1610612736 -> 1.5 GiB; MiB and KiB below."""
    for power, unit in ((30, "GiB"), (20, "MiB")):
        if size >= 1 << power:
            return f"{size / (1 << power):,.1f} {unit}"
    return f"{size / 1024:,.1f} KiB"


def _devices(mesh: Mesh | None) -> list[jax.Device]:
    """Those of this process that the weights go to."""
    if mesh is None:
        return jax.local_devices()[:1]
    mine = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    return mine or jax.local_devices()[:1]


def _shapes(config: ModelConfig, mesh: Mesh | None) -> list[tuple[int, ...]]:
    """Of every weight what one device holds of it."""
    specs: list[ParamSpec] = jax.tree.leaves(param_specs(config), is_leaf=is_spec)
    if mesh is None:
        return [spec.shape for spec in specs]
    return [
        tuple(_share(mesh, size, axis) for size, axis in zip(spec.shape, spec.axes, strict=True))
        for spec in specs
    ]


def _share(mesh: Mesh, size: int, axis: str | None) -> int:
    """Of a dimension; as ``sharding.sharding`` has it, without its warnings."""
    target = None if axis is None else getattr(Rules(), axis)
    ways = 1 if target is None else mesh.shape[target]
    return size if size % ways else size // ways


def check_pool(
    config: ModelConfig, mesh: Mesh | None, cache_tokens: int | None, placement: KVPlacement
) -> None:
    """Refuse a pool that no model can have, whatever memory there is: RequestError, ConfigError."""
    check_size("cache_tokens", cache_tokens, PAGE)
    placement.check(config, mesh)

"""How much memory there is for KV, and how large a pool is by default."""

from pathlib import Path

from jaxrag.base.config import ModelConfig
from jaxrag.kv.cache.pages import pages_for
from jaxrag.kv.cache.pool import PAGE
from jaxrag.kv.placement import ON_DEVICE, KVPlacement

CPU_POOL_BYTES = 1 << 30
SHARE = 0.5  # of the memory that is free once the weights are there

_CONTEXTS = 8  # in a pool, at most
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")  # of this container: its limits lie at the root


def pool_budget(free: int | None, on_cpu: bool) -> int:
    """Bytes of a pool by default; ``free`` is what the device has left, None: not known."""
    if free is None:
        return CPU_POOL_BYTES
    share = int(max(free, 0) * SHARE)
    return min(share, CPU_POOL_BYTES) if on_cpu else share


def default_pool_tokens(
    config: ModelConfig, budget: int, placement: KVPlacement = ON_DEVICE
) -> int:
    """Tokens of a pool that takes at most ``budget`` bytes of the device, a page at least.

    What is in host memory takes no more there than its ceiling.
    """
    tokens = budget // placement.device_bytes(config, 1)
    if placement.max_host_bytes is not None and not placement.on_device:
        there = placement.max_host_bytes // placement.host_bytes(config, 1) // PAGE * PAGE
        tokens = min(tokens, max(there, PAGE))  # a ceiling below a page is refused later
    return max(min(tokens, _CONTEXTS * config.max_positions), PAGE)


def default_host_tokens(config: ModelConfig, free: int | None = None) -> int:
    """Tokens of K and V that fit into a quarter of the host memory that is free (None: now)."""
    free = available_bytes() or 4 << 30 if free is None else free
    tokens = max(free, 0) // 4 // config.kv_bytes_per_token
    return min(tokens, _CONTEXTS * config.max_positions)


def whole_pages(tokens: int) -> int:
    """Tokens of a pool of so many, rounded up to whole pages."""
    return pages_for(tokens) * PAGE


def available_bytes() -> int | None:
    """Of memory, that the system could give now, a container's limit included; None: not known."""
    bounds = [bound for bound in (_system_bytes(), _container_bytes()) if bound is not None]
    return min(bounds, default=None)


def _system_bytes() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    fields = (line.split() for line in lines)
    return next((int(it[1]) * 1024 for it in fields if it and it[0] == "MemAvailable:"), None)


def _container_bytes() -> int | None:
    """What a limit of control groups, version 2, leaves; cached files can be given back."""
    try:
        limit, used, stat = (
            (_CGROUP / name).read_text() for name in ("memory.max", "memory.current", "memory.stat")
        )
    except OSError:
        return None
    if not limit.strip().isdigit():
        return None  # "max"
    fields = dict(line.split() for line in stat.splitlines())
    return max(int(limit) - int(used) + int(fields.get("inactive_file", 0)), 0)

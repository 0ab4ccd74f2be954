"""What the machine itself can do: copy, read, multiply. The limits that results stand beside."""

import itertools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrag.config import DType

BYTES = 1 << 30  # of the array that is read and copied, far above any cache
_MATMUL = {"cpu": 2048}  # side of the square matrices whose product is the peak; 8192 elsewhere


def bandwidth(size: int = BYTES, repeats: int = 5) -> dict[str, float]:
    """Bytes/s of the default device's memory, the best of some: ``read`` alone, and ``copy``.

    ``read`` sums an array of ``size`` bytes; ``copy`` counts what is read and what is written. On a
    CPU all cores take a part each; elsewhere the device does it.
    """
    if jax.default_backend() == "cpu":
        return _host_bandwidth(size, repeats)
    array = jnp.ones(size // 4, jnp.float32)
    total, copy = jax.jit(jnp.sum), jax.jit(lambda x: -x)
    return {
        "read": size / _best(lambda: total(array).block_until_ready(), repeats),
        "copy": 2 * size / _best(lambda: copy(array).block_until_ready(), repeats),
    }


def _host_bandwidth(size: int, repeats: int) -> dict[str, float]:
    cores = len(os.sched_getaffinity(0))
    source, target = np.ones(size // 8, np.int64), np.zeros(size // 8, np.int64)
    edges = np.linspace(0, len(source), cores + 1).astype(int)
    parts = [slice(*pair) for pair in itertools.pairwise(edges)]

    with ThreadPoolExecutor(cores) as threads:

        def each(job: Callable[[slice], Any]) -> None:
            for _ in threads.map(job, parts):
                pass

        read = _best(lambda: each(lambda part: np.bitwise_xor.reduce(source[part])), repeats)
        copy = _best(lambda: each(lambda part: np.copyto(target[part], source[part])), repeats)
    return {"read": size / read, "copy": 2 * size / copy}


def matmul_side() -> int:
    """Of the square matrices whose product is the peak."""
    return _MATMUL.get(jax.default_backend(), 8192)


def matmul_peak(dtype: DType, repeats: int = 5) -> float:
    """FLOP/s of a large square matrix product on the default device, the best of some."""
    side = matmul_side()
    a = jnp.ones((side, side), dtype)
    product = jax.jit(jnp.matmul)
    return 2 * side**3 / _best(lambda: product(a, a).block_until_ready(), repeats)


def _best(job: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of some calls, after one that is not counted."""
    job()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        job()
        seconds.append(time.perf_counter() - start)
    return min(seconds)

"""What the machine itself can do, which results stand beside: multiply matrices."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrag.base.config import DType

_MATMUL = {"cpu": 2048}  # side of the square matrices whose product is the peak; 8192 elsewhere


def matmul_side() -> int:
    """Of the square matrices whose product is the peak."""
    return _MATMUL.get(jax.default_backend(), 8192)


def matmul_peak(dtype: DType, repeats: int = 5) -> float:
    """FLOP/s of a large square matrix product on the default device, the best of some."""
    side = matmul_side()
    a = jnp.ones((side, side), dtype)
    product = jax.jit(jnp.matmul)
    return 2 * side**3 / best_seconds(lambda: product(a, a).block_until_ready(), repeats)


def best_seconds(job: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of some calls, after one that is not counted."""
    job()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        job()
        seconds.append(time.perf_counter() - start)
    return min(seconds)

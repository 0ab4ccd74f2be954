"""What the machine itself can do: copy, read, multiply. The limits that results stand beside."""

import itertools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from jaxrag.base.config import DType
from jaxrag.base.types import HostArray

BYTES = 1 << 30  # of the array that is read and copied, far above any cache
_MATMUL = {"cpu": 2048}  # side of the square matrices whose product is the peak; 8192 elsewhere


def bandwidth(repeats: int = 5) -> dict[str, float]:
    """Bytes/s of the default device's memory, the best of some: ``read`` alone, and ``copy``.

    ``read`` is the better of a product with a vector and, on a CPU, all cores combining the words
    of a part each; ``copy`` counts what is read and what is written.
    """
    array = jnp.ones((BYTES >> 16, 1 << 14), jnp.float32)
    vector = jnp.ones(array.shape[1], jnp.float32)
    product = jax.jit(jnp.matmul)
    read = BYTES / _best(lambda: product(array, vector).block_until_ready(), repeats)
    if jax.default_backend() != "cpu":
        negate = jax.jit(jnp.negative)
        copied = _best(lambda: negate(array).block_until_ready(), repeats)
        return {"read": read, "copy": 2 * BYTES / copied}
    source = np.asarray(array).view(np.int64).ravel()
    by_words, copy = _on_all_cores(source, repeats)
    return {"read": max(read, by_words), "copy": copy}


def _on_all_cores(source: HostArray, repeats: int) -> tuple[float, float]:
    """Bytes/s of reading and of copying, a part of the array on each core."""
    cores, target = len(os.sched_getaffinity(0)), np.zeros_like(source)
    edges = np.linspace(0, len(source), cores + 1).astype(int)
    parts = [slice(*pair) for pair in itertools.pairwise(edges)]

    with ThreadPoolExecutor(cores) as threads:

        def each(job: Callable[[slice], object]) -> None:
            for _ in threads.map(job, parts):
                pass

        read = _best(lambda: each(lambda part: np.bitwise_xor.reduce(source[part])), repeats)
        copied = _best(lambda: each(lambda part: np.copyto(target[part], source[part])), repeats)
    return source.nbytes / read, 2 * source.nbytes / copied


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

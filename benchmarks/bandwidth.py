"""What the memory of the machine can do: read and copy. Results of decoding stand beside it."""

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from limits import best_seconds

from jaxrag.base.types import HostArray

BYTES = 1 << 30  # of the array that is read and copied, far above any cache


def bandwidth(repeats: int = 5) -> dict[str, float]:
    """Bytes/s of the default device's memory, the best of some: ``read`` alone, and ``copy``.

    ``read`` is the better of a product with a vector and, on a CPU, all cores combining the words
    of a part each; ``copy`` counts what is read and what is written.
    """
    array = jnp.ones((BYTES >> 16, 1 << 14), jnp.float32)
    vector = jnp.ones(array.shape[1], jnp.float32)
    product = jax.jit(jnp.matmul)
    read = BYTES / best_seconds(lambda: product(array, vector).block_until_ready(), repeats)
    if jax.default_backend() != "cpu":
        negate = jax.jit(jnp.negative)
        copied = best_seconds(lambda: negate(array).block_until_ready(), repeats)
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

        read = best_seconds(lambda: each(lambda part: np.bitwise_xor.reduce(source[part])), repeats)
        copied = best_seconds(
            lambda: each(lambda part: np.copyto(target[part], source[part])), repeats
        )
    return source.nbytes / read, 2 * source.nbytes / copied

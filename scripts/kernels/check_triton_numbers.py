"""Run the kernels in Triton's own language on the CPU, in Triton's interpreter, with numpy arrays.

Their numbers are held against the `xla` body over sizes, dtypes and rows that nobody may read,
which hold NaN. Needs `triton`, and neither a GPU nor torch (`make check-kernels` runs it).

    python scripts/kernels/check_triton_numbers.py
"""

import itertools
import os
import sys
from typing import Any

TOLERANCE = 2e-5


class Storage:
    """The memory of a ``Tensor``, as the interpreter asks torch for it."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def data_ptr(self) -> int:
        """Where it begins."""
        return int(self.array.ctypes.data)

    def cpu(self) -> "Storage":
        """It lies on the CPU already."""
        return self

    def copy_(self, other: "Storage") -> None:
        """What the kernel wrote is in place already."""


class Tensor:
    """A numpy array that Triton's interpreter takes for a tensor of torch."""

    def __init__(self, array: Any = None) -> None:
        if array is not None:
            self._hold(array)

    def _hold(self, array: Any) -> None:
        import triton.language as tl

        types = {"float32": tl.float32, "float16": tl.float16, "int32": tl.int32}
        self.array, self.shape, self.dtype = array, array.shape, types[array.dtype.name]

    def data_ptr(self) -> int:
        """Where it begins."""
        return int(self.array.ctypes.data)

    def untyped_storage(self) -> Storage:
        """Its memory."""
        return Storage(self.array)

    def storage_offset(self) -> int:
        """It begins where its memory does."""
        return 0

    def size(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.shape)

    def stride(self, axis: int | None = None) -> Any:
        """In elements."""
        steps = tuple(step // self.array.itemsize for step in self.array.strides)
        return steps if axis is None else steps[axis]

    def element_size(self) -> int:
        """Bytes of an element."""
        return int(self.array.itemsize)

    def new_empty(self, *_: Any, **__: Any) -> "Tensor":
        """One that ``set_`` fills."""
        return Tensor()

    def set_(self, storage: Storage, *_: Any) -> "Tensor":
        """Hold that memory."""
        self._hold(storage.array)
        return self


def check(batch: int, group: int, dim: int, count: int, dtype: str) -> float:
    """The largest difference from the reference on a random scene; raises where NaN got through."""
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels.jax_triton.topn import sizes, topn_mix_host
    from pallas_kernels.slot_attention import slot_values

    rng = np.random.default_rng((batch, group, dim, count))
    kv_heads, page, pool_pages, num_pages = 2, 16, 20, 9
    heads = kv_heads * group
    v_pool = rng.normal(size=(pool_pages, page, kv_heads, dim)).astype(dtype)
    pages = rng.integers(0, pool_pages, (batch, num_pages)).astype(np.int32)
    slots = np.stack(
        [rng.permutation(num_pages * page)[:count] for _ in range(batch * heads)]
    ).reshape(batch, heads, count)
    slots = slots.astype(np.int32)
    best = (4 * rng.normal(size=slots.shape)).astype(np.float32)
    best[rng.random(best.shape) < 0.3] = -np.inf
    best[0, 0], best[-1, -1, 0] = -np.inf, 1.0  # a head that sees nothing, one that does
    read = np.zeros(v_pool.shape[:3], bool)
    row = np.arange(batch)[:, None, None]
    head = np.broadcast_to(np.arange(heads)[None, :, None] // group, slots.shape)
    counts = best > -np.inf
    read[pages[row, slots // page][counts], (slots % page)[counts], head[counts]] = True
    v_pool[~read] = np.nan
    out = np.full((batch, heads, dim), np.nan, np.float32)
    lse = np.full((batch, heads), np.nan, np.float32)
    arrays = (best, slots, pages, v_pool, out, lse)
    topn_mix_host[(heads, batch)](*map(Tensor, arrays), **sizes(best, v_pool, pages))

    def grouped(x: Any) -> Any:
        return jnp.asarray(x.reshape(batch, kv_heads, group, count))

    expected = slot_values(grouped(best), jnp.asarray(v_pool), jnp.asarray(pages), grouped(slots))
    blind = np.isneginf(np.asarray(expected[1]))
    if not (np.isneginf(lse) == blind).all() or not blind.any() or np.isnan(out).any():
        raise ValueError("a value that does not count was read, or a head that sees nothing")
    differences = [
        np.abs(np.asarray(x)[~blind] - y[~blind]).max()
        for x, y in zip(expected, (out, lse), strict=True)
    ]
    return float(max(differences))


def main() -> int:
    """Check every size; exit status 1 where one differs."""
    os.environ |= {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}  # before triton is imported
    failed = 0
    for case in itertools.product((2,), (1, 3), (16, 24), (1, 7, 130), ("float32", "float16")):
        worst = check(*case)
        if not worst < TOLERANCE:
            failed += 1
            print(f"FAIL  topn_mix_host {case}: differs by {worst:.1e}")
    print(f"{'FAIL' if failed else 'ok':5} topn_mix_host: interpreted, {failed} sizes differ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Run the kernels in Triton's own language on the CPU, in Triton's interpreter, with numpy arrays.

Their numbers are held against the `xla` body over sizes, dtypes and rows that nobody may read,
which hold NaN. Needs `triton`, and neither a GPU nor torch (`make check-kernels` runs it).

    python scripts/kernels/check_triton_numbers.py
"""

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Scene:
    """Random values of pages, and what heads have chosen of them; NaN where nobody may read.

    Attributes:
      best: [B, N, n] float32 scores; of one head all are -inf.
      slots: [B, N, n] int32.
      pages: [B, M] int32, of different requests different ones.
      v_pool: [P, page, K, H].
    """

    best: Any
    slots: Any
    pages: Any
    v_pool: Any

    def expected(self, v_pool: Any) -> Any:
        """out and lse by the `xla` body."""
        import jax.numpy as jnp

        from pallas_kernels.slot_attention import slot_values

        kv_heads = v_pool.shape[2]

        def grouped(x: Any) -> Any:
            return jnp.asarray(x.reshape(len(x), kv_heads, -1, x.shape[-1]))

        best, slots = grouped(self.best), grouped(self.slots)
        return slot_values(best, jnp.asarray(v_pool), jnp.asarray(self.pages), slots)


def scene_of(batch: int, group: int, dim: int, count: int, dtype: str) -> Scene:
    """A random one."""
    import numpy as np

    rng = np.random.default_rng((batch, group, dim, count))
    kv_heads, page, pool_pages, num_pages = 2, 16, 20, 9
    heads = kv_heads * group
    v_pool = rng.normal(size=(pool_pages, page, kv_heads, dim)).astype(dtype)
    pages = rng.permutation(pool_pages)[: batch * num_pages].reshape(batch, num_pages)
    pages = pages.astype(np.int32)
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
    return Scene(best, slots, pages, v_pool)


def difference(expected: Any, out: Any, lse: Any) -> float:
    """The largest; raises where NaN got through."""
    import numpy as np

    blind = np.isneginf(np.asarray(expected[1]))
    if not (np.isneginf(lse) == blind).all() or not blind.any() or np.isnan(out).any():
        raise ValueError("a value that does not count was read, or a head that sees nothing")
    pairs = zip(expected, (out, lse), strict=True)
    return float(max(np.abs(np.asarray(x)[~blind] - y[~blind]).max() for x, y in pairs))


def outputs(scene: Scene) -> tuple[Any, Any]:
    """out and lse to be filled."""
    import numpy as np

    shape, dim = scene.best.shape[:2], scene.v_pool.shape[-1]
    return np.full((*shape, dim), np.nan, np.float32), np.full(shape, np.nan, np.float32)


def check_host(*size: Any) -> float:
    """How far ``topn_mix_host`` is from the reference on a random scene."""
    from pallas_kernels.jax_triton.topn import sizes, topn_mix_host

    scene = scene_of(*size)
    out, lse = outputs(scene)
    arrays = (scene.best, scene.slots, scene.pages, scene.v_pool, out, lse)
    constants = sizes(scene.best, scene.v_pool, scene.pages)
    batch, heads, _ = scene.best.shape
    topn_mix_host[(heads, batch)](*map(Tensor, arrays), **constants)
    return difference(scene.expected(scene.v_pool), out, lse)


def check_kept(*size: Any) -> float:
    """How far ``topn_mix_kept`` is, and that it writes the newest values and nothing else.

    The memory has three layers, of which it is given the second, and KV heads lie apart in it.
    """
    import numpy as np

    from pallas_kernels.jax_triton.topn import address_parts, kept_sizes, topn_mix_kept

    scene = scene_of(*size)
    batch, heads, _ = scene.best.shape
    pool_pages, page, kv_heads, dim = scene.v_pool.shape
    rng = np.random.default_rng(size[:4])
    memory = rng.normal(size=(3, kv_heads, pool_pages * page, dim)).astype(scene.v_pool.dtype)
    memory[1] = scene.v_pool.reshape(-1, kv_heads, dim).swapaxes(0, 1)
    layer_step, head_step, row_step, _ = (step // memory.itemsize for step in memory.strides)
    # Of the last head's first choice, which counts; of the first row nobody's.
    fresh = np.full(batch, scene.pages.shape[1] * page, np.int32)
    fresh[-1] = scene.slots[-1, -1, 0]
    new = rng.normal(size=(batch, kv_heads, dim)).astype(memory.dtype)
    after, filled = memory.copy(), scene.v_pool.copy()
    at = scene.pages[-1, fresh[-1] // page] * page + fresh[-1] % page
    after[1, :, at] = new[-1]
    filled.reshape(-1, kv_heads, dim)[at] = new[-1]
    out, lse = outputs(scene)
    layer = np.array([1], np.int32)
    address = np.array(address_parts(memory.ctypes.data), np.int32)
    arrays = (scene.best, scene.slots, scene.pages, layer, fresh, new, address, out, lse)
    steps = (layer_step, head_step, row_step)
    constants = kept_sizes(scene.best, scene.pages, new, page, steps)
    topn_mix_kept[(heads, batch)](*map(Tensor, arrays), **constants)
    if memory.tobytes() != after.tobytes():
        raise ValueError("the newest values are not where they belong, or others were overwritten")
    return difference(scene.expected(filled), out, lse)


def main() -> int:
    """Check every size; exit status 1 where one differs."""
    os.environ |= {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}  # before triton is imported
    failed = 0
    for name, check in (("topn_mix_host", check_host), ("topn_mix_kept", check_kept)):
        wrong = 0
        for size in itertools.product((2,), (1, 3), (16, 24), (1, 7, 130), ("float32", "float16")):
            worst = check(*size)
            if not worst < TOLERANCE:
                wrong += 1
                print(f"FAIL  {name} {size}: differs by {worst:.1e}")
        print(f"{'FAIL' if wrong else 'ok':5} {name}: interpreted, {wrong} sizes differ")
        failed += wrong
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

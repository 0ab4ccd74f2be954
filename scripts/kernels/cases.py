"""What `make check-kernels` compiles: every GPU body at the shapes of Llama-3-8B, and budgets.

``BROKEN`` are kernels that must be refused, each for its reason: they check the check.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.bodies import Impl
from pallas_kernels.operands import Pages, Pool, Rotary, Rows
from pallas_kernels.paged_decode_attention import paged_decode_attention
from pallas_kernels.segment_attention import segment_attention
from pallas_kernels.sparse_attention import sparse_attention
from pallas_kernels.topn_attention import topn_attention
from pallas_kernels.triton.paged import PagedTiling, paged_kernel

Array = jax.Array
_Shape = jax.ShapeDtypeStruct
_ids = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)

PAGE, HEADS, KV_HEADS, DIM = 16, 32, 8, 128  # of Llama-3-8B and Mistral-7B, in our pages
CONTEXT = 32_768


@dataclasses.dataclass(frozen=True)
class Case:
    """A function that holds kernels, shapes to compile it for, and what each may use.

    The shared memory of a kernel has the chip's limit as its budget: more does not compile.

    Attributes:
      op: the op.
      kernels: their names in the program; each is held to the budget.
      function: what is compiled.
      arguments: shapes.
      registers: most a thread may use.
      spill_bytes: most a thread may spill, stores and loads.
      impl: which body of the op it is.
      host: which arrays of the arguments, counted flat, lie in pinned host memory; the program may
        hold no copy of them.
    """

    op: str
    kernels: tuple[str, ...]
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    registers: int = 255
    spill_bytes: int = 0
    impl: Impl = "pallas_triton"
    host: tuple[int, ...] = ()


def paged_arguments(batch: int, rows: int, dtype: Any = jnp.bfloat16) -> tuple[Any, ...]:
    """Shapes of a paged op for ``rows`` queries over CONTEXT tokens and what they write."""
    num_pages = -(-(CONTEXT + rows) // PAGE)
    pool: Any = _Shape((num_pages * 2, PAGE, KV_HEADS, DIM), dtype)
    angles: Any = _Shape((65_536, DIM // 2), jnp.float32)
    pages: Any = _ids((batch, num_pages))
    slots: Any = _ids((batch, num_pages * PAGE))
    return (
        _Shape((batch, rows, HEADS, DIM), dtype),
        Pool(pool, pool),
        Pages(pages, pages, slots),
        _ids((batch, rows)),
        Rotary(angles, angles, interleaved=False),
    )


def _one_query(batch: int) -> tuple[Any, ...]:
    """Shapes of an op for one query a row."""
    q, pool, pages, _, rotary = paged_arguments(batch, 1)
    return _Shape((batch, HEADS, DIM), q.dtype), pool, pages, _ids((batch,)), rotary


def _paged(op: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return functools.partial(op, scale=DIM**-0.5, **options)


def _sparse(rows: int, impl: Impl = "pallas_triton", window: int | None = None) -> Case:
    function = _paged(sparse_attention, impl=impl, window=window)
    kernel = "paged_attention" if impl == "pallas_triton" else "anonymous_mosaic_gpu_kernel"
    return Case("sparse_attention", (kernel,), function, paged_arguments(1, rows), impl=impl)


def _decode(batch: int) -> Case:
    function = _paged(paged_decode_attention, impl="pallas_triton")
    kernels = ("paged_attention",)
    return Case("paged_decode_attention", kernels, function, _one_query(batch), registers=168)


def _topn(batch: int, n: int, impl: Impl = "pallas_triton", host: tuple[int, ...] = ()) -> Case:
    function = _paged(topn_attention, n=n, renormalise=False, impl=impl)
    mix = "topn_mix_host" if impl == "jax_triton" else "topn_mix"
    kernels = ("topn_score", "topn_select", mix)
    return Case("topn_attention", kernels, function, _one_query(batch), impl=impl, host=host)


def _kept(batch: int, n: int) -> Case:
    """What a step of decoding runs: values at an address, of an eighth of a million tokens."""

    def function(*arrays: Array) -> tuple[Array, Array]:
        from pallas_kernels.jax_triton.topn import mix_kept_kernel

        rows = 1 << 17
        steps = (KV_HEADS * rows * DIM, rows * DIM, DIM)
        return mix_kept_kernel(*arrays, page=PAGE, steps=steps)

    best, new = _Shape((batch, HEADS, n), jnp.float32), _Shape((batch, KV_HEADS, DIM), jnp.bfloat16)
    slots, pages = _ids((batch, HEADS, n)), _ids((batch, CONTEXT // PAGE))
    arguments = (best, slots, pages, _ids(()), _ids((batch,)), new, _ids((2,)))
    return Case("topn_attention", ("topn_mix_kept",), function, arguments, impl="jax_triton")


def _segment(length: int, with_examples: bool, gradient: bool = False) -> Case:
    q = _Shape((1, length, HEADS, DIM), jnp.bfloat16)
    kv = _Shape((1, length, KV_HEADS, DIM), jnp.bfloat16)
    row: Any = _ids((1, length))
    function = functools.partial(
        segment_attention, scale=DIM**-0.5, prefix_visible=True, impl="pallas_triton"
    )
    arguments = (q, kv, kv, Rows(row, row, row if with_examples else None))
    if not gradient:
        return Case("segment_attention", ("segment_attention",), function, arguments)

    def pulled(
        d_out: Array, d_lse: Array, q: Array, k: Array, v: Array, rows: Rows
    ) -> tuple[Array, ...]:
        _, pull = jax.vjp(lambda q, k, v: function(q, k, v, rows), q, k, v)
        d_heads: tuple[Array, ...] = pull((d_out, d_lse))
        return d_heads

    kernels = ("segment_attention", "segment_gradient_q", "segment_gradient_kv")
    lse = _Shape(q.shape[:3], jnp.float32)
    return Case("segment_attention", kernels, pulled, (q, lse, *arguments))


_VALUES = (2,)  # where V of the pool is among the arrays that topn_attention is given

CASES: dict[str, Case] = {
    "sparse_15_percent_of_32k": _sparse(4_966),
    "sparse_question_over_32k": _sparse(50),
    "sparse_15_percent_of_32k_window": _sparse(4_966, window=4_096),
    "sparse_15_percent_of_32k_mosaic": _sparse(4_966, "pallas_mosaic"),
    "sparse_question_over_32k_mosaic": _sparse(50, "pallas_mosaic"),
    "sparse_15_percent_of_32k_window_mosaic": _sparse(4_966, "pallas_mosaic", window=4_096),
    "decode_one_row": _decode(1),
    "decode_eight_rows": _decode(8),
    "segment_8k": _segment(8_192, False),
    "segment_4k_packed": _segment(4_096, True),
    "segment_4k_gradient": _segment(4_096, True, gradient=True),
    "topn_128_of_32k": _topn(1, 128),
    "topn_512_of_32k_eight_rows": _topn(8, 512),
    "topn_128_of_32k_in_host_memory": _topn(1, 128, host=_VALUES),
    "topn_128_of_32k_in_host_memory_jax_triton": _topn(1, 128, "jax_triton", host=_VALUES),
    "topn_128_of_32k_kept_in_host_memory": _kept(1, 128),
    "topn_128_of_32k_kept_in_host_memory_eight_rows": _kept(8, 128),
}


def _tiled(tiling: PagedTiling) -> Case:
    function = _paged(paged_kernel, window=None, interpret=False, tiling=tiling)
    return Case("sparse_attention", ("paged_attention",), function, paged_arguments(1, 4_966))


def _sorted(x: Array) -> Array:
    """A kernel that the interpreter runs and Triton has no primitive for."""

    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = jnp.sort(x_ref[...])

    return pl.pallas_call(
        kernel,
        out_shape=_Shape(x.shape, x.dtype),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        name="sorted",
    )(x)


def _copied(q: Array, pool: Pool, *others: Any) -> tuple[Array, Array]:
    """Values of host memory that are moved about before the kernel reads a few of them."""
    options = {"n": 128, "renormalise": False, "impl": "pallas_triton"}
    moved = pool._replace(v=jnp.roll(pool.v, 1, axis=0))
    out: tuple[Array, Array] = _paged(topn_attention, **options)(q, moved, *others)
    return out


# Name -> the case, and a word of the reason that it must be refused for.
BROKEN: dict[str, tuple[Case, str]] = {
    "shared_memory_overflow": (_tiled(PagedTiling(128, 512, warps=8, stages=8)), "shared memory"),
    "spill": (_tiled(PagedTiling(128, 64, warps=2, stages=2)), "spill"),
    "unsupported_primitive": (
        Case("sparse_attention", ("sorted",), _sorted, (_Shape((128,), jnp.float32),)),
        "sort",
    ),
    "host_values_copied": (
        dataclasses.replace(
            CASES["topn_128_of_32k_in_host_memory"], function=_copied, host=_VALUES
        ),
        "hold a copy",
    ),
}

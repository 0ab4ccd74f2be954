"""The values of the top N in Triton's own language, read where they lie: in pinned host memory.

KCache (arXiv:2404.18057, section 3.1) keeps V in host memory and brings over the N rows a head has
chosen. A GPU addresses pinned host memory as its own, so the kernel reads the rows over the bus in
place. Each program asks for many rows at once, and a masked load never leaves the chip: rows that
do not count cost nothing, which Pallas' indexed loads cannot express. Addresses are 64-bit from the
start, for a pool of host memory is the one that is large.

The memory is an array in ``mix_host_kernel``, the body of an op. In ``mix_kept_kernel`` it is known
by its address, as numpy allocated it: what the steps of a model run, which write to it as well.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.bodies import KernelError, described_device
from pallas_kernels.triton.heads import power_of_two

Array = jax.Array

ROWS = 64  # values that a program reads at a time
PART = 1 << 30  # an address is two numbers of 32 bits: the rest of dividing by this, and how often
# Of chips that are only described; of a device that is there jax-triton asks the driver.
_CAPABILITY = {"NVIDIA H100": 90, "NVIDIA H200": 90}


# Triton evaluates annotations, and pointers have none.
@triton.jit
def mixed(  # type: ignore[no-untyped-def]  # noqa: ANN201
    best_ptr,  # noqa: ANN001
    slot_ptr,  # noqa: ANN001
    page_ptr,  # noqa: ANN001
    v_ptr,  # noqa: ANN001
    fresh,  # noqa: ANN001
    new,  # noqa: ANN001
    here,  # noqa: ANN001
    row,  # noqa: ANN001
    COUNT: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    STEP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One query head of one row: two passes over its COUNT scores, for their maximum and the mix.

    Values of its KV head lie STEP apart from ``v_ptr`` on; that of slot ``fresh`` is ``new``, and
    not read. Returns out [WIDTH] and lse.
    """
    column = tl.arange(0, WIDTH)
    top = tl.full((), float("-inf"), tl.float32)
    for start in range(0, COUNT, BLOCK):
        at = start + tl.arange(0, BLOCK)
        score = tl.load(best_ptr + here * COUNT + at, mask=at < COUNT, other=float("-inf"))
        top = tl.maximum(top, tl.max(score, 0))
    top = tl.where(top > float("-inf"), top, 0.0)
    out = tl.zeros((WIDTH,), tl.float32)
    total = tl.zeros((), tl.float32)
    for start in range(0, COUNT, BLOCK):
        at = start + tl.arange(0, BLOCK)
        score = tl.load(best_ptr + here * COUNT + at, mask=at < COUNT, other=float("-inf"))
        counts = score > float("-inf")
        slot = tl.load(slot_ptr + here * COUNT + at, mask=counts, other=0)
        page = tl.load(page_ptr + row * PAGES + slot // PAGE, mask=counts, other=0)
        line = page.to(tl.int64) * PAGE + slot % PAGE
        is_new = (slot == fresh)[:, None]
        # A slot that does not count may hold NaN, and is not read.
        real = counts[:, None] & (column < DIM)[None, :] & ~is_new
        value = tl.load(v_ptr + line[:, None] * STEP + column[None, :], mask=real, other=0.0)
        value = tl.where(is_new & counts[:, None], new[None, :], value)
        weight = tl.exp(score - top)
        out += tl.sum(weight[:, None] * value.to(tl.float32), 0)
        total += tl.sum(weight, 0)
    safe = tl.where(total > 0, total, 1.0)
    return out / safe, tl.where(total > 0, top + tl.log(safe), float("-inf"))


@triton.jit
def topn_mix_host(  # type: ignore[no-untyped-def]  # noqa: ANN201
    best_ptr,  # noqa: ANN001
    slot_ptr,  # noqa: ANN001
    page_ptr,  # noqa: ANN001
    v_ptr,  # noqa: ANN001
    out_ptr,  # noqa: ANN001
    lse_ptr,  # noqa: ANN001
    COUNT: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One query head of one row of ``mix_host_kernel``, constants as ``sizes`` gives them."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    here = row * tl.num_programs(0) + head
    column = tl.arange(0, WIDTH)
    nothing = tl.zeros((WIDTH,), v_ptr.dtype.element_ty)
    out, lse = mixed(
        best_ptr, slot_ptr, page_ptr, v_ptr + head // GROUP * DIM, -1, nothing, here, row,
        COUNT, PAGES, PAGE, KV_HEADS * DIM, DIM, WIDTH, BLOCK,
    )  # fmt: skip
    tl.store(out_ptr + here * DIM + column, out, mask=column < DIM)
    tl.store(lse_ptr + here, lse)


@triton.jit
def topn_mix_kept(  # type: ignore[no-untyped-def]  # noqa: ANN201
    best_ptr,  # noqa: ANN001
    slot_ptr,  # noqa: ANN001
    page_ptr,  # noqa: ANN001
    layer_ptr,  # noqa: ANN001
    fresh_ptr,  # noqa: ANN001
    new_ptr,  # noqa: ANN001
    address_ptr,  # noqa: ANN001
    out_ptr,  # noqa: ANN001
    lse_ptr,  # noqa: ANN001
    LAYER: tl.constexpr,
    HEAD: tl.constexpr,
    STEP: tl.constexpr,
    COUNT: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
):
    """One query head of one row of ``mix_kept_kernel``; the first of a group writes ``new``.

    Nobody reads what is written here: every head takes the newest value as it came.
    """
    head = tl.program_id(0)
    row = tl.program_id(1)
    here = row * tl.num_programs(0) + head
    kv_head = head // GROUP
    column = tl.arange(0, WIDTH)
    inside = column < DIM
    layer = tl.load(layer_ptr).to(tl.int64)
    address = tl.load(address_ptr + 1).to(tl.int64) * PART + tl.load(address_ptr)
    v_ptr = tl.multiple_of(address.to(new_ptr.dtype), 16)  # or every value is a load of its own
    v_ptr += layer * LAYER + kv_head.to(tl.int64) * HEAD
    fresh = tl.load(fresh_ptr + row)
    new = tl.load(new_ptr + (row * KV_HEADS + kv_head) * DIM + column, mask=inside, other=0.0)
    if (fresh < PAGES * PAGE) & (head % GROUP == 0):  # beyond the table: nobody has the row
        page = tl.load(page_ptr + row * PAGES + fresh // PAGE).to(tl.int64)
        tl.store(v_ptr + (page * PAGE + fresh % PAGE) * STEP + column, new, mask=inside)
    out, lse = mixed(
        best_ptr, slot_ptr, page_ptr, v_ptr, fresh, new, here, row,
        COUNT, PAGES, PAGE, STEP, DIM, WIDTH, BLOCK,
    )  # fmt: skip
    tl.store(out_ptr + here * DIM + column, out, mask=inside)
    tl.store(lse_ptr + here, lse)


def sizes(best: Any, v_pool: Any, pages: Any) -> dict[str, int]:
    """The constants of ``topn_mix_host`` for arrays of these shapes."""
    _, page, num_kv_heads, dim = v_pool.shape
    return _sizes(best, pages, page, num_kv_heads, dim)


def _sizes(best: Any, pages: Any, page: int, num_kv_heads: int, dim: int) -> dict[str, int]:
    _, num_heads, count = best.shape
    return {
        "COUNT": count,
        "PAGES": pages.shape[1],
        "PAGE": page,
        "KV_HEADS": num_kv_heads,
        "GROUP": num_heads // num_kv_heads,
        "DIM": dim,
        "WIDTH": power_of_two(dim),
        "BLOCK": min(ROWS, power_of_two(count)),
    }


def kept_sizes(
    best: Any, pages: Any, new: Any, page: int, steps: tuple[int, int, int]
) -> dict[str, int]:
    """The constants of ``topn_mix_kept``; arguments as those of ``mix_kept_kernel``."""
    layer, head, row = steps
    of_heads = _sizes(best, pages, page, *new.shape[1:])
    return {"LAYER": layer, "HEAD": head, "STEP": row, "PART": PART} | of_heads


def address_parts(address: int) -> tuple[int, int]:
    """An address as JAX takes it, which has no 64 bits by default."""
    return address % PART, address // PART


def mix_host_kernel(best: Array, slots: Array, v_pool: Array, pages: Array) -> tuple[Array, Array]:
    """Softmax mixture of the values at slots [B, N, n] with scores ``best`` [B, N, n].

    ``v_pool`` may lie in pinned host memory; rows with a score of -inf are not read.

    Returns:
      out [B, N, H] and lse [B, N], float32; 0 and -inf where every score is -inf.

    Raises:
      KernelError: jax-triton cannot be imported, or compiles for a chip that it is not told of.
    """
    arrays, constants = (best, slots, pages, v_pool), sizes(best, v_pool, pages)
    return _call(topn_mix_host, "topn_mix_host", best, v_pool.shape[-1], arrays, constants)


def mix_kept_kernel(
    best: Array,
    slots: Array,
    pages: Array,
    layer: Array,
    fresh: Array,
    new: Array,
    address: Array,
    *,
    page: int,
    steps: tuple[int, int, int],
) -> tuple[Array, Array]:
    """As ``mix_host_kernel``, of memory that is not an array; the newest values are written there.

    Whoever calls it sees to it that the memory is there, page-locked, for as long as the program
    may run.

    Args:
      best: [B, N, n] float32 scores.
      slots: [B, N, n] int32 of the table.
      pages: [B, M] int32 of the table.
      layer: scalar int32, counted from the first layer in the memory.
      fresh: [B] int32 slots of the newest tokens; one beyond the table is nobody's, and its values
        are dropped.
      new: [B, K, H] their values, in the dtype of the memory.
      address: [2] int32, ``address_parts`` of the memory's as the GPU knows it.
      page: slots of a page.
      steps: between one layer, one KV head and one slot and the next, in values.

    Returns and raises as ``mix_host_kernel``.
    """
    constants = kept_sizes(best, pages, new, page, steps)
    arrays = (best, slots, pages, layer.reshape(1), fresh, new, address)
    return _call(topn_mix_kept, "topn_mix_kept", best, new.shape[-1], arrays, constants)


def _call(
    kernel: Any, name: str, best: Array, dim: int, arrays: tuple[Any, ...], constants: Any
) -> tuple[Array, Array]:
    """One program for every query head and row: out [B, N, H] and lse [B, N]."""
    try:
        import jax_triton
    except ImportError as error:
        reason = str(error).splitlines()[0]
        raise KernelError(
            f"topn_attention: the body 'jax_triton' cannot import jax-triton ({reason}); install "
            "jaxrag[cuda], or choose 'pallas_triton'"
        ) from None
    batch, num_heads, _ = best.shape
    shapes = [
        jax.ShapeDtypeStruct((batch, num_heads, dim), jnp.float32),
        jax.ShapeDtypeStruct((batch, num_heads), jnp.float32),
    ]
    options: dict[str, Any] = {"out_shape": shapes, "enable_fp_fusion": True}
    if "out_type" in inspect.signature(jax_triton.triton_call).parameters:  # from 0.4 on
        options = {"out_type": shapes, "backend_options": {"enable_fp_fusion": True}}
    out, lse = jax_triton.triton_call(
        *arrays,
        kernel=kernel, grid=(num_heads, batch), name=name, num_warps=4, num_stages=1,
        compute_capability=_capability(), **options, **constants,
    )  # fmt: skip
    return out, lse


def _capability() -> int | None:
    """The compute capability of the chip that is described; None: there is a device to ask."""
    described = described_device()
    if described is None or jax.default_backend() in ("cuda", "gpu"):
        return None
    if described not in _CAPABILITY:
        raise KernelError(
            f"topn_attention: the body 'jax_triton' cannot compile for {described!r} where there "
            f"is no such device; choose one of {', '.join(_CAPABILITY)}, or 'pallas_triton'"
        )
    return _CAPABILITY[described]

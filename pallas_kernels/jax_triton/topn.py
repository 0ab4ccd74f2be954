"""The values of the top N in Triton's own language, read where they lie: in pinned host memory.

KCache (arXiv:2404.18057, section 3.1) keeps V in host memory and brings over the N rows a head has
chosen. A GPU addresses pinned host memory as its own, so the kernel reads the rows over the bus in
place. Each program asks for many rows at once, and a masked load never leaves the chip: rows that
do not count cost nothing, which Pallas' indexed loads cannot express. Addresses are 64-bit from the
start, for a pool of host memory is the one that is large.
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
# Of chips that are only described; of a device that is there jax-triton asks the driver.
_CAPABILITY = {"NVIDIA H100": 90, "NVIDIA H200": 90}


# Triton evaluates annotations, and pointers have none.
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
    """One query head of one row: two passes over its COUNT scores, for their maximum and the mix.

    Arrays as those of ``mix_host_kernel``, constants as ``sizes`` gives them.
    """
    head = tl.program_id(0)
    row = tl.program_id(1)
    here = row * tl.num_programs(0) + head
    kv_head = head // GROUP
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
        line = (page.to(tl.int64) * PAGE + slot % PAGE) * KV_HEADS + kv_head
        # A slot that does not count may hold NaN, and is not read.
        real = counts[:, None] & (column < DIM)[None, :]
        value = tl.load(v_ptr + line[:, None] * DIM + column[None, :], mask=real, other=0.0)
        weight = tl.exp(score - top)
        out += tl.sum(weight[:, None] * value.to(tl.float32), 0)
        total += tl.sum(weight, 0)
    safe = tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + here * DIM + column, out / safe, mask=column < DIM)
    tl.store(lse_ptr + here, tl.where(total > 0, top + tl.log(safe), float("-inf")))


def sizes(best: Any, v_pool: Any, pages: Any) -> dict[str, int]:
    """The constants of ``topn_mix_host`` for arrays of these shapes."""
    _, num_heads, count = best.shape
    _, page, num_kv_heads, dim = v_pool.shape
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


def mix_host_kernel(best: Array, slots: Array, v_pool: Array, pages: Array) -> tuple[Array, Array]:
    """Softmax mixture of the values at slots [B, N, n] with scores ``best`` [B, N, n].

    ``v_pool`` may lie in pinned host memory; rows with a score of -inf are not read.

    Returns:
      out [B, N, H] and lse [B, N], float32; 0 and -inf where every score is -inf.

    Raises:
      KernelError: jax-triton cannot be imported, or compiles for a chip that it is not told of.
    """
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
        jax.ShapeDtypeStruct((batch, num_heads, v_pool.shape[-1]), jnp.float32),
        jax.ShapeDtypeStruct((batch, num_heads), jnp.float32),
    ]
    options: dict[str, Any] = {"out_shape": shapes, "enable_fp_fusion": True}
    if "out_type" in inspect.signature(jax_triton.triton_call).parameters:  # from 0.4 on
        options = {"out_type": shapes, "backend_options": {"enable_fp_fusion": True}}
    out, lse = jax_triton.triton_call(
        best, slots, pages, v_pool,
        kernel=topn_mix_host, grid=(num_heads, batch), name="topn_mix_host", num_warps=4,
        num_stages=1, compute_capability=_capability(), **options, **sizes(best, v_pool, pages),
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

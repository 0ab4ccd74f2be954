"""Scattered query rows over shared and owned pages: FusionRAG's Q-Sparse-Attn (section 4.3).

The rows are any tokens with positions of their own, those that are computed again and the final
block; what each may see follows from positions and ``slot_position`` alone. Contract and choice of
the body; the numbers are those of ``paged_attention``.
"""

from typing import Any

import jax

from pallas_kernels.bodies import Impl, check_impl
from pallas_kernels.paged_attention import paged_attention

Array = jax.Array


def sparse_attention(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    pages: Array,
    offsets: Array,
    slot_position: Array,
    query_position: Array,
    cos: Array,
    sin: Array,
    *,
    interleaved: bool,
    scale: float,
    window: Array | int | None = None,
    impl: Impl = "xla",
) -> tuple[Array, Array]:
    """Attention of new tokens through a page table.

    Args:
      q: [B, T, N, H] queries before rotation. k_pool, v_pool: [pages, page, K, H] of q's dtype.
      pages: [B, M] int32 page of the pool (any valid index where every slot is hidden).
      offsets: [B, M] int32 position of each page's chunk in this request's prompt.
      slot_position: [B, M * page] int32 absolute position; INT32_MAX hides a slot, and what it
        holds, NaN included, is unused.
      query_position: [B, T] int32; -1 for padding rows. Any order is right; ascending is fastest.
      cos, sin: [S, R/2] float32 rotation tables, S beyond every position and offset.
      window: sliding window in tokens, or None. impl: the body, one of ``bodies.BODIES``.

    Returns:
      out [B, T, N, H] in q's dtype, lse [B, T, N] float32; 0 and -inf where nothing is visible.

    Raises:
      KernelError: no such body, or it cannot run on this backend or with such heads.
    """
    check_impl("sparse_attention", impl)
    operands = (
        q, k_pool, v_pool, pages, offsets, slot_position, query_position, cos, sin,
    )  # fmt: skip
    if impl == "xla":
        return paged_attention(*operands, interleaved=interleaved, scale=scale, window=window)
    options: dict[str, Any] = {"interleaved": interleaved, "scale": scale, "window": window}
    if impl == "pallas_mosaic":
        from pallas_kernels.mosaic.paged import paged_mosaic_kernel

        out, lse = paged_mosaic_kernel(*operands, **options)
    else:
        from pallas_kernels.triton.paged import paged_kernel

        out, lse = paged_kernel(*operands, **options, interpret=impl == "pallas_interpret")
    return out.astype(q.dtype), lse

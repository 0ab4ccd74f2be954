"""Scattered query rows over shared and owned pages: FusionRAG's Q-Sparse-Attn.

FusionRAG section 4.3, arXiv:2601.12904. The rows are any tokens with positions of their own, those
that are computed again and the final block; what each may see follows from positions and
``slot_position`` alone. Contract and choice of the body; the numbers are those of
``paged_attention``.
"""

import jax

from pallas_kernels.bodies import Impl, check_impl
from pallas_kernels.operands import Pages, Pool, Rotary, Scale, uncapped
from pallas_kernels.paged_attention import paged_attention

Array = jax.Array


def sparse_attention(
    q: Array,
    pool: Pool,
    table: Pages,
    query_position: Array,
    rotary: Rotary,
    *,
    scale: Scale,
    window: Array | int | None = None,
    impl: Impl = "xla",
) -> tuple[Array, Array]:
    """Attention of new tokens through a page table.

    Args:
      q: [B, T, N, H] queries before rotation.
      pool: of q's dtype.
      table: where the keys stand.
      query_position: [B, T] int32; -1 for padding rows. Any order is right; ascending is fastest.
      rotary: of positions and offsets.
      scale: factor on the scores, which the `xla` body may cap.
      window: sliding window in tokens, or None.
      impl: the body, one of ``bodies.BODIES``.

    Returns:
      out [B, T, N, H] in q's dtype, lse [B, T, N] float32; 0 and -inf where nothing is visible.

    Raises:
      KernelError: no such body, or it cannot run on this backend or with such heads.
    """
    check_impl("sparse_attention", impl)
    operands = (q, pool, table, query_position, rotary)
    if impl == "xla":
        return paged_attention(*operands, scale=scale, window=window)
    if impl == "pallas_mosaic":
        from pallas_kernels.mosaic.paged import paged_mosaic_kernel

        out, lse = paged_mosaic_kernel(*operands, scale=uncapped(scale, impl), window=window)
    else:
        from pallas_kernels.triton.paged import paged_kernel

        interpret = impl == "pallas_interpret"
        out, lse = paged_kernel(
            *operands, scale=uncapped(scale, impl), window=window, interpret=interpret
        )
    return out.astype(q.dtype), lse

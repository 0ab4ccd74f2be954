"""One new token a row over a paged pool: what a decode step attends with. Bound by memory.

The contract of ``sparse_attention`` with T = 1, and everything returned in float32, so that parts
over disjoint keys can be merged without a loss.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.bodies import Impl, check_impl
from pallas_kernels.operands import Pages, Pool, Rotary
from pallas_kernels.paged_attention import paged_attention

Array = jax.Array


def paged_decode_attention(
    q: Array,
    pool: Pool,
    table: Pages,
    query_position: Array,
    rotary: Rotary,
    *,
    scale: float,
    window: Array | int | None = None,
    impl: Impl = "xla",
) -> tuple[Array, Array]:
    """Attention of one query a row through a page table.

    Args:
      q: [B, N, H] queries before rotation.
      pool: of q's dtype.
      table: where the keys stand.
      query_position: [B] int32; -1 for padding rows.
      rotary: of positions and offsets.
      scale: factor on the scores.
      window: sliding window in tokens, or None.
      impl: the body, one of ``bodies.BODIES``.

    Returns:
      out [B, N, H] and lse [B, N], both float32; 0 and -inf where nothing is visible.

    Raises:
      KernelError: no such body, or it cannot run on this backend.
    """
    check_impl("paged_decode_attention", impl)
    operands = (q[:, None], pool, table, query_position[:, None], rotary)
    if impl == "xla":
        out, lse = paged_attention(*operands, scale=scale, window=window, out_dtype=jnp.float32)
    else:
        from pallas_kernels.triton.paged import paged_kernel

        interpret = impl == "pallas_interpret"
        out, lse = paged_kernel(*operands, scale=scale, window=window, interpret=interpret)
    return out[:, 0], lse[:, 0]

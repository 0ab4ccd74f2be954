"""One new token a row attends to the N keys with the largest weights of every query head: KCache.

Every key is scored, the N highest scores of a head are selected, and only their values are read
(KCache section 3.1), so that the values may lie where reading is slow.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.bodies import Impl, check_impl
from pallas_kernels.paged_scores import paged_scores
from pallas_kernels.slot_attention import slot_values

Array = jax.Array


def topn_attention(
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
    n: int,
    renormalise: bool,
    interleaved: bool,
    scale: float,
    impl: Impl = "xla",
) -> tuple[Array, Array]:
    """Attention of one query a row to its ``n`` best keys, chosen per query head.

    Args:
      q: [B, N, H] queries before rotation. query_position: [B] int32; -1 for padding rows.
      k_pool, v_pool: [pages, page, K, H]; hidden slots may hold anything, NaN included. With
        `pallas_triton` and `jax_triton` v_pool may lie in pinned host memory: only chosen rows are
        read.
      pages: [B, M] int32 page of the pool (any valid index where every slot is hidden).
      offsets: [B, M] int32 position of each page's chunk in this request's prompt.
      slot_position: [B, M * page] int32 absolute position; INT32_MAX hides a slot.
      cos, sin: [S, R/2] float32 rotation tables, S beyond every position.
      n: keys that are used, at least 1; of equal scores the earlier slot's. All where there are
        fewer.
      renormalise: divide by the weights that are used. The paper does not: the weights are those of
        the softmax over all visible keys, and the output shrinks by what is left out.
      scale: factor on the scores. impl: the body, one of ``bodies.BODIES``.

    Returns:
      out [B, N, H] and lse [B, N], float32; 0 and -inf where nothing is visible. ``lse`` is over
      the keys that are used if ``renormalise``, else over all visible ones, which is what
      ``out`` has to be merged with.

    Raises:
      KernelError: no such body, or it cannot run on this backend.
    """
    check_impl("topn_attention", impl)
    tables = (pages, offsets, slot_position, query_position, cos, sin)
    n = min(n, slot_position.shape[1])
    if impl == "xla":
        every = paged_scores(q, k_pool, *tables, interleaved=interleaved, scale=scale)
        best, slots = lax.top_k(every, n)
        out, kept = slot_values(best, v_pool, pages, slots)
        total = jax.nn.logsumexp(every, axis=-1).reshape(kept.shape)
    else:
        from pallas_kernels.triton.topn import Mix, topn_kernel

        mix: Mix | None = None
        if impl == "jax_triton":
            from pallas_kernels.jax_triton.topn import mix_host_kernel

            mix = mix_host_kernel
        interpret = impl == "pallas_interpret"
        out, kept, total = topn_kernel(
            q, k_pool, v_pool, *tables, n=n, interleaved=interleaved, scale=scale,
            interpret=interpret, mix=mix,
        )  # fmt: skip
    if renormalise:
        return out, kept
    share = jnp.exp(kept - jnp.where(jnp.isfinite(total), total, 0.0))
    return out * share[..., None], total

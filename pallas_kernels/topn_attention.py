"""One new token a row attends to the N keys with the largest weights of every query head: KCache.

Every key is scored, the N highest scores of a head are selected, and only their values are read
(KCache section 3.1, arXiv:2404.18057), so that the values may lie where reading is slow.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.bodies import Impl, check_impl
from pallas_kernels.operands import Pages, Pool, Rotary, Scale, uncapped
from pallas_kernels.paged_scores import paged_scores
from pallas_kernels.slot_attention import slot_values

Array = jax.Array


def topn_attention(
    q: Array,
    pool: Pool,
    table: Pages,
    query_position: Array,
    rotary: Rotary,
    *,
    n: int,
    renormalise: bool,
    scale: Scale,
    impl: Impl = "xla",
) -> tuple[Array, Array]:
    """Attention of one query a row to its ``n`` best keys, chosen per query head.

    Args:
      q: [B, N, H] queries before rotation.
      pool: with `pallas_triton` and `jax_triton` its V may lie in pinned host memory: only chosen
        rows are read.
      table: where the keys stand.
      query_position: [B] int32; -1 for padding rows.
      rotary: of positions and offsets.
      n: keys that are used, at least 1; of equal scores the earlier slot's. All where there are
        fewer.
      renormalise: divide by the weights that are used. The paper does not: the weights are those of
        the softmax over all visible keys, and the output shrinks by what is left out.
      scale: factor on the scores, which the `xla` body may cap.
      impl: the body, one of ``bodies.BODIES``.

    Returns:
      out [B, N, H] and lse [B, N], float32; 0 and -inf where nothing is visible. ``lse`` is over
      the keys that are used if ``renormalise``, else over all visible ones, which is what
      ``out`` has to be merged with.

    Raises:
      KernelError: no such body, or it cannot run on this backend.
    """
    check_impl("topn_attention", impl)
    n = min(n, table.slot_position.shape[1])
    if impl == "xla":
        every = paged_scores(q, pool.k, table, query_position, rotary, scale=scale)
        best, slots = lax.top_k(every, n)
        out, kept = slot_values(best, pool.v, table.pages, slots)
        total = jax.nn.logsumexp(every, axis=-1).reshape(kept.shape)
    else:
        from pallas_kernels.triton.topn import Mix, topn_kernel

        mix: Mix | None = None
        if impl == "jax_triton":
            from pallas_kernels.jax_triton.topn import mix_host_kernel

            mix = mix_host_kernel
        interpret = impl == "pallas_interpret"
        out, kept, total = topn_kernel(
            q,
            pool,
            table,
            query_position,
            rotary,
            n=n,
            scale=uncapped(scale, impl),
            interpret=interpret,
            mix=mix,
        )
    if renormalise:
        return out, kept
    share = jnp.exp(kept - jnp.where(jnp.isfinite(total), total, 0.0))
    return out * share[..., None], total

"""Attention ops, one contract each, with the jnp reference (`xla`). Imports jax only."""

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.segment_attention import segment_attention

__all__ = ["paged_attention", "segment_attention"]

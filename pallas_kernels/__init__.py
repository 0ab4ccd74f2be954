"""Attention ops, one contract each, with the jnp reference (`xla`). Imports jax only."""

from pallas_kernels.bodies import BODIES, IMPLS, Impl, KernelError, check_impl, default_impl
from pallas_kernels.key_mass import key_mass
from pallas_kernels.operands import Capped, Pages, Placed, Pool, Rotary, Rows, Scale, scored
from pallas_kernels.paged_attention import paged_attention, paged_attention_by_row
from pallas_kernels.paged_decode_attention import paged_decode_attention
from pallas_kernels.paged_scores import paged_scores
from pallas_kernels.segment_attention import segment_attention
from pallas_kernels.slot_attention import slot_mixture, slot_scores, slot_values
from pallas_kernels.sparse_attention import sparse_attention
from pallas_kernels.topn_attention import topn_attention

__all__ = [
    "BODIES",
    "IMPLS",
    "Capped",
    "Impl",
    "KernelError",
    "Pages",
    "Placed",
    "Pool",
    "Rotary",
    "Rows",
    "Scale",
    "check_impl",
    "default_impl",
    "key_mass",
    "paged_attention",
    "paged_attention_by_row",
    "paged_decode_attention",
    "paged_scores",
    "scored",
    "segment_attention",
    "slot_mixture",
    "slot_scores",
    "slot_values",
    "sparse_attention",
    "topn_attention",
]

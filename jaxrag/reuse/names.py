"""Names of methods and decode rules, for help: to import what they name is to import JAX."""

from typing import Literal

Misses = Literal["encode", "in_place"]  # what becomes of chunks that the store does not hold

METHOD_NAMES = (
    "full_attention", "full_reuse", "turborag", "turborag_composite", "block_attention",
    "cacheblend", "cache_craft", "epic", "ape", "fusionrag", "primed", "primed_fusion",
    "packets", "retrieval_attention", "kcache",
)  # fmt: skip
DEFAULT_PRIMER = "bakery"  # of configs/primers
DECODE_NAMES = (
    "dense", "static_window", "snapkv", "infllm", "quest", "flat", "ivf", "retrieval", "topn",
)  # fmt: skip

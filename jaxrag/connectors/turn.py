"""Stored keys given their places in a prompt, in NumPy.

Beside an engine's forward pass the parallel loops of torch wait for each other; NumPy's do not.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxrag.base.config import RopeConfig
from jaxrag.base.rotary import attention_factor, frequencies

_ROWS = 256  # tokens turned at a time, so that they stay in the processor's cache


def rope_table(rope: RopeConfig, first: int, end: int) -> NDArray[np.float32]:
    """Cosines, then sines, of positions first .. end - 1: [2, T, R/2].

    Angles in float64; multiplied by the attention factor, as engines hold it in their tables.
    """
    angles = np.arange(first, end, dtype=np.float64)[:, None] * frequencies(rope)
    both = np.stack((np.cos(angles), np.sin(angles))) * attention_factor(rope)
    return both.astype(np.float32)


def place(keys: NDArray[Any], table: NDArray[np.float32], rope: RopeConfig) -> None:
    """Give keys [T, K, H] before RoPE the positions of ``table`` [2, T, R/2], in their place.

    Computed in float32 and rounded once, to the dtype of the keys.
    """
    half, dim = rope.rotary_dim // 2, rope.rotary_dim
    if rope.interleaved:
        one, other = slice(0, dim, 2), slice(1, dim, 2)
    else:
        one, other = slice(0, half), slice(half, dim)
    for start in range(0, len(keys), _ROWS):
        rows = keys[start : start + _ROWS]
        cos, sin = table[:, start : start + _ROWS, None]
        a, b = (rows[..., part].astype(np.float32) for part in (one, other))
        rows[..., one] = a * cos - b * sin
        rows[..., other] = b * cos + a * sin

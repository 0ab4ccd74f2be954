"""Stored keys given their places in a prompt, in NumPy.

Beside an engine's forward pass the parallel loops of torch wait for each other; NumPy's do not.
"""

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxrag.base.config import RopeConfig
from jaxrag.base.rotary import attention_factor, frequencies

_ROWS = 256  # tokens rotated at a time, so that they stay in the processor's cache


@functools.cache
def rope_table(rope: RopeConfig, first: int, end: int) -> NDArray[np.float32]:
    """Cosines, then sines, of positions first .. end - 1: [2, T, R/2].

    Angles in float64; multiplied by the attention factor, as engines hold it in their tables. The
    same table for the same arguments: it is not to be written to.
    """
    angles = np.arange(first, end, dtype=np.float64)[:, None] * frequencies(rope)
    both = np.stack((np.cos(angles), np.sin(angles))) * attention_factor(rope)
    return both.astype(np.float32)


def place(keys: NDArray[Any], table: NDArray[np.float32], rope: RopeConfig) -> None:
    """Give keys [L, T, K, H] before RoPE the positions of ``table`` [2, T, R/2], in their place.

    Computed in float32 and rounded once, to the dtype of the keys.
    """
    half, dim = rope.rotary_dim // 2, rope.rotary_dim
    pairs = (slice(0, dim, 2), slice(1, dim, 2)), (slice(half), slice(half, dim))
    one, other = pairs[0 if rope.interleaved else 1]
    for start in range(0, keys.shape[1], _ROWS):
        block = keys[:, start : start + _ROWS, :, :dim]
        cos, sin = table[:, start : start + _ROWS, None]
        shape = (2, *block.shape[1:])  # for all heads: no short inner loops
        rotations = np.empty(shape, np.float32)
        rotations[0][..., one] = rotations[0][..., other] = cos
        rotations[1][..., one], rotations[1][..., other] = -sin, sin
        for rows in block:
            kept = rows.astype(np.float32)
            moved = np.empty_like(kept)
            moved[..., one], moved[..., other] = kept[..., other], kept[..., one]
            kept *= rotations[0]
            moved *= rotations[1]
            rows[...] = np.add(kept, moved, out=kept)

"""Which tokens of a chunk are kept where a format drops some, whatever will be asked.

A token is one for all layers and heads: what hides it from a question is one mask over the slots
of a page table. Dropped tokens come back as zeros, which no token that a model computed is.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def kept_tokens(kv: NDArray[Any], count: int) -> NDArray[np.int64]:
    """The ``count`` tokens of ``kv`` [L, 2, T, K, H] to keep, ascending.

    Those whose keys are least like the mean key of their layer and head, by the cosine, summed over
    layers and heads (KeyDiff): a key like all the others tells no token from another.
    """
    tokens = kv.shape[2]
    if count >= tokens:
        return np.arange(tokens)
    alike = np.zeros(tokens)
    for layer in kv:
        keys = layer[0].astype(np.float64)
        keys /= np.maximum(np.sqrt(np.square(keys).sum(-1, keepdims=True)), 1e-300)
        mean = keys.mean(0)
        mean /= np.maximum(np.sqrt(np.square(mean).sum(-1, keepdims=True)), 1e-300)
        alike += np.einsum("tkh,kh->t", keys, mean)
    order = np.argsort(alike, kind="stable")[:count]
    return np.sort(order)


def dropped_tokens(kv: NDArray[Any]) -> NDArray[np.int64]:
    """The tokens of ``kv`` [L, 2, T, K, H] that a store left out, ascending."""
    bits = kv.view(f"uint{8 * kv.dtype.itemsize}")
    return np.flatnonzero(~bits.any(axis=(0, 1, 3, 4)))


def to_bits(kept: NDArray[np.int64], tokens: int) -> str:
    """Tokens as a record names them: a bit each, the first the highest of its byte, hexadecimal."""
    mask = np.zeros(tokens, bool)
    mask[kept] = True
    return np.packbits(mask).tobytes().hex()


def from_bits(bits: str, tokens: int) -> NDArray[np.int64]:
    """Inverse of ``to_bits``; of other texts a ValueError."""
    packed = np.frombuffer(bytes.fromhex(bits), np.uint8)
    kept = np.flatnonzero(np.unpackbits(packed))
    if to_bits(kept[kept < tokens], tokens) != bits:
        raise ValueError(bits)
    return kept

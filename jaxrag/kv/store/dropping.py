"""Which tokens of a chunk are kept where a format drops some, whatever will be asked.

A token is one for all layers and heads: what hides it from a question is one mask over the slots
of a page table. Dropped tokens come back as zeros, which no token that a model computed is.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

ENDS = 4  # tokens at both ends of a chunk that are always kept
_PLAIN = 4  # one of so many that are kept is of the keys most like all others


def kept_tokens(kv: NDArray[Any], count: int) -> NDArray[np.int64]:
    """The ``count`` tokens of ``kv`` [L, 2, T, K, H] to keep, ascending.

    A key that is like all others tells no token from another (KeyDiff): tokens are ranked by the
    cosine of their keys and the mean key, summed over layers and heads, and the least alike are
    kept. Attention that has nothing to look for goes to the others, and must find some: a quarter
    of what is kept are the most alike. The first and the last tokens are kept too, at which
    attention collects (StreamingLLM).
    """
    tokens = kv.shape[2]
    if count >= tokens:
        return np.arange(tokens)
    alike = np.zeros(tokens)
    for layer in kv:
        keys = layer[0].astype(np.float64)
        mean = _unit(_unit(keys).mean(0))
        alike += np.einsum("tkh,kh->t", _unit(keys), mean)
    alike[:ENDS] = alike[tokens - ENDS :] = -np.inf
    order = np.argsort(alike, kind="stable")
    plain = count // _PLAIN
    return np.sort(np.concatenate((order[: count - plain], order[tokens - plain :])))


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


def _unit(keys: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each of length 1; zeros stay."""
    length = np.sqrt(np.square(keys).sum(-1, keepdims=True))
    unit: NDArray[np.float64] = keys / np.where(length > 0, length, 1.0)
    return unit

"""KV as a store keeps it: as it is, as int8, or packed.

int8 is symmetric, with one float32 scale per layer, K or V, token and head; ``int4`` packs
all tokens of a chunk, or some (``jaxrag.kv.store.dropping``).
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxrag.base.errors import StoreError
from jaxrag.kv import int4
from jaxrag.kv.store.dropping import from_bits, kept_tokens, to_bits
from jaxrag.kv.store.layout import KVLayout

_LEVELS = 127  # of each sign, so that the range is symmetric
_BLOCK_ROWS = 4096  # rows of H converted at a time, so that they stay in the cache


def quantise(kv: NDArray[Any]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Round every row of H elements of ``kv`` [..., H] to multiples of its largest / 127.

    The result is the same on every machine. An element comes back within half a scale, before the
    rounding to its own dtype.

    Returns:
        int8 [..., H] in -127..127 and the scales, float32 [...].

    Raises:
        StoreError: a NaN or an infinity, which int8 cannot hold.
    """
    elements = np.empty(kv.shape, np.int8)
    scale = np.empty(kv.shape[:-1], np.float32)
    sources, targets, scales = _rows(kv), _rows(elements), scale.reshape(-1)
    for start in range(0, len(sources), _BLOCK_ROWS):
        block = slice(start, start + _BLOCK_ROWS)
        rows = sources[block].astype(np.float32)
        largest = np.abs(rows).max(axis=1)
        if not np.isfinite(largest).all():
            raise StoreError("kv holds NaN or infinity, which int8 cannot: store it as native")
        scales[block] = largest / np.float32(_LEVELS)
        # A row of zeros, or of numbers so small that its scale is 0, becomes zeros.
        divisor = np.where(scales[block] > 0, scales[block], np.float32(np.inf))
        rows /= divisor[:, None]
        targets[block] = np.clip(np.rint(rows, out=rows), -_LEVELS, _LEVELS, out=rows)
    return elements, scale


def dequantise(elements: NDArray[np.int8], scale: NDArray[np.float32], out: NDArray[Any]) -> None:
    """Write ``elements`` [A, T, K, H] times ``scale`` [A, T, K] to ``out`` [A, T, K, H].

    The product is taken in float32 and rounded once, to the dtype of ``out``; any of the arrays
    may be strided.
    """
    tokens = max(1, _BLOCK_ROWS // elements.shape[2])
    for kind in range(elements.shape[0]):
        for start in range(0, elements.shape[1], tokens):
            block = (kind, slice(start, start + tokens))
            out[block] = elements[block] * scale[block][..., None]


class StoredElements(NamedTuple):
    """KV as a store of some layout holds it.

    Attributes:
      elements: of the layout's ``stored_shape`` (or a share of its heads) and ``stored_dtype``.
      scale: float32 [L, 2, T, K] of int8; None of others.
      kept: the tokens that are stored, as a record names them; "" where all are.
    """

    elements: NDArray[Any]
    scale: NDArray[np.float32] | None = None
    kept: str = ""


def to_stored(kv: NDArray[Any], layout: KVLayout) -> StoredElements:
    """What a store of this layout holds for ``kv`` [L, 2, T, K, H].

    Raises:
        StoreError: as ``quantise`` and ``int4.pack``.
    """
    if layout.stored == "native":
        return StoredElements(kv)
    if layout.stored == "int8":
        return StoredElements(*quantise(kv))
    if not layout.drops:
        return StoredElements(int4.pack(kv))
    tokens = kv.shape[2]
    kept = kept_tokens(kv, layout.kept_tokens(tokens))
    return StoredElements(int4.pack(kv[:, :, kept]), None, to_bits(kept, tokens))


def unpack(packed: NDArray[np.uint8], kept: str, out: NDArray[Any]) -> None:
    """Write a packed layer [2, 1, K, M] to ``out`` [2, T, K, H]; dropped tokens become zeros."""
    tokens, dim = out.shape[1], out.shape[3]
    if not kept:
        out[0], out[1] = int4.unpack(packed, tokens, dim)
        return
    at = from_bits(kept, tokens)
    out[...] = 0
    out[0, at], out[1, at] = int4.unpack(packed, len(at), dim)


def as_stored(kv: NDArray[Any], layout: KVLayout) -> NDArray[Any]:
    """What a store of this layout gives back for ``kv`` [L, 2, T, K, H]: itself, where exact.

    Raises:
        StoreError: as ``to_stored``.
    """
    if layout.stored == "native":
        return kv
    elements, scale, kept = to_stored(kv, layout)
    rounded = np.empty_like(kv)
    for layer, out in enumerate(rounded):
        if scale is None:
            unpack(elements[layer], kept, out)
        else:
            dequantise(elements[layer], scale[layer], out)
    return rounded


def _rows(array: NDArray[Any]) -> NDArray[Any]:
    return array.reshape(-1, array.shape[-1])

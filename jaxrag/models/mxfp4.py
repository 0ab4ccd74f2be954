"""Tensors in MXFP4: 32 values of 4 bits and a power of two for them (OCP Microscaling, 5.2).

A checkpoint has two tensors of such a weight [E, I, O]: ``NAME_blocks`` [E, O, I / 32, 16], of
bytes with two values each, the first in the lower bits; and ``NAME_scales`` [E, O, I / 32],
exponents from -127 on. Read, they are one tensor NAME in bfloat16, which holds every value exactly.
"""

import dataclasses
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from jaxrag.base.errors import ModelError
from jaxrag.base.types import HostArray
from jaxrag.models.tensor_files import StoredTensor

_BLOCKS, _SCALES = "_blocks", "_scales"
_BYTES = 16  # of a block
_BIAS = 127
_POSITIVE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([_POSITIVE, -_POSITIVE])


@dataclasses.dataclass(frozen=True)
class MXFP4Tensor(StoredTensor):
    """The weight that two tensors of a checkpoint are; its bytes are those of the blocks."""

    scales: StoredTensor

    @property
    def num_bytes(self) -> int:
        """Size of its blocks in the file."""
        return self.shape[0] * self.shape[1] * self.shape[2] // 2

    @property
    def identity(self) -> tuple[str, str]:
        """Name and type."""
        return self.name, "mxfp4"

    def view(self) -> HostArray:
        """The values [E, I, O], bfloat16."""
        count, inner, outer = self.shape
        blocks = self.raw.reshape(count, outer, -1, _BYTES)
        out = np.empty((count, outer, inner), ml_dtypes.bfloat16)
        for expert, (packed, scale) in enumerate(zip(blocks, self.scales.view(), strict=True)):
            pairs = np.stack((packed & 15, packed >> 4), axis=-1)
            values = _VALUES[pairs.reshape(outer, -1, 2 * _BYTES)]
            out[expert] = np.ldexp(values, scale[..., None].astype(int) - _BIAS).reshape(outer, -1)
        return out.swapaxes(1, 2)


def joined(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of a directory, every pair of blocks and scales as one.

    Raises ModelError for blocks without scales, and for shapes that do not go together.
    """
    ours = dict(tensors)
    for name, blocks in tensors.items():
        if not (name.endswith(_BLOCKS) and blocks.dtype == np.uint8):
            continue
        stem = name.removesuffix(_BLOCKS)
        scales = ours.pop(stem + _SCALES, None)
        shape = None if scales is None else (*scales.shape, _BYTES)
        if scales is None or scales.dtype != np.uint8 or blocks.shape != shape or len(shape) != 4:
            has = "no scales" if scales is None else f"scales {list(scales.shape)}"
            raise ModelError(
                f"{blocks.path}: {name!r} {list(blocks.shape)} in MXFP4 has {has}, expected "
                f"{stem + _SCALES!r} of one byte for each {_BYTES} of the blocks; download it again"
            )
        count, outer, groups, _ = blocks.shape
        del ours[name]
        ours[stem] = MXFP4Tensor(
            name=stem,
            path=blocks.path,
            dtype=np.dtype(ml_dtypes.bfloat16),
            shape=(count, groups * 2 * _BYTES, outer),
            start=blocks.start,
            scales=scales,
        )
    return ours

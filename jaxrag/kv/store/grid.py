"""How an array is cut into files: its zarr v3 metadata and the paths under its directory.

Elements are written as unsigned bits, which every zarr reader opens and no conversion can alter.
There is no codec checksum: the commit record's digests are checked where the bytes arrive.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrag.kv.store.layout import KVLayout

HEADER = "zarr.json"

KV_AXES = ("layer", "kv", "token", "kv_head", "head_dim")
HEAD_AXIS = 3  # of KV [L, 2, T, K, H] and of scales [L, 2, T, K]

_LITTLE_ENDIAN = {"name": "bytes", "configuration": {"endian": "little"}}


@dataclasses.dataclass(frozen=True)
class Grid:
    """An array in one file, or in ``ways`` files that split its heads evenly.

    A layered array has a piece per layer in each file and an index of the pieces at its end (the
    zarr sharding codec), so that one layer can be read alone.
    """

    shape: tuple[int, ...]
    bits: str  # an unsigned numpy dtype
    ways: int
    layered: bool

    @property
    def part(self) -> tuple[int, ...]:
        """The shape of what one file holds."""
        if self.ways == 1:
            return self.shape
        heads = self.shape[HEAD_AXIS] // self.ways
        return (*self.shape[:HEAD_AXIS], heads, *self.shape[HEAD_AXIS + 1 :])

    @property
    def layer_nbytes(self) -> int:
        """Bytes of one layer in one file of a layered array."""
        return int(np.prod(self.part[1:], dtype=np.int64)) * np.dtype(self.bits).itemsize

    def slices(self, rank: int) -> tuple[slice, ...]:
        """Where in the array the part of ``rank`` lies."""
        whole = tuple(slice(size) for size in self.shape)
        if self.ways == 1:
            return whole
        heads = self.part[HEAD_AXIS]
        mine = slice(rank * heads, (rank + 1) * heads)
        return (*whole[:HEAD_AXIS], mine, *whole[HEAD_AXIS + 1 :])

    def file(self, rank: int) -> str:
        """The path of a part under the array's directory."""
        index = [0] * len(self.shape)
        if self.ways > 1:
            index[HEAD_AXIS] = rank
        return "/".join(["c", *map(str, index)])

    def paths(self) -> list[str]:
        """Every path that the complete array has under its directory."""
        return [HEADER, *(self.file(rank) for rank in range(self.ways))]

    def metadata(self) -> dict[str, Any]:
        """The zarr v3 metadata that decides how the bytes lie in the files."""
        codecs: list[dict[str, Any]] = [_LITTLE_ENDIAN]
        if self.layered:
            configuration = {
                "chunk_shape": [1, *self.part[1:]],
                "codecs": [_LITTLE_ENDIAN],
                "index_codecs": [_LITTLE_ENDIAN, {"name": "crc32c"}],
                "index_location": "end",
            }
            codecs = [{"name": "sharding_indexed", "configuration": configuration}]
        return {
            "shape": list(self.shape),
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.part)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "data_type": self.bits,
            "fill_value": 0,
            "codecs": codecs,
        }

    def header(self, axes: tuple[str, ...] | None, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """The whole ``zarr.json`` of the array."""
        named = {} if axes is None else {"dimension_names": list(axes)}
        head = {"zarr_format": 3, "node_type": "array"}
        return {**head, **self.metadata(), **named, "attributes": dict(attributes)}


def kv_grid(layout: KVLayout, tokens: int, ways: int = 1) -> Grid:
    """The grid of a chunk's KV as stored."""
    return Grid(layout.stored_shape(tokens), layout.bits_dtype.name, ways, layered=True)


def aux_grid(shape: tuple[int, ...], dtype: str, ways: int = 1) -> Grid:
    """The grid of an auxiliary array."""
    return Grid(shape, f"uint{8 * np.dtype(dtype).itemsize}", ways, layered=False)

"""From stored bytes to a caller's buffer: a layer at a time, verified while it is in the cache."""

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxrag.errors import ChunkCorrupt, StoreError
from jaxrag.store.grid import Grid, kv_grid
from jaxrag.store.layout import KVLayout
from jaxrag.store.quantise import dequantise
from jaxrag.store.record import Record, layer_digest


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A part of a chunk and where it goes."""

    record: Record
    layers: tuple[int, int]  # first, end
    tokens: tuple[int, int]  # first, end
    out: NDArray[Any]  # [layers, 2, tokens, K, H] in the layout's dtype; layers may be strided
    verify: bool

    @property
    def grid(self) -> Grid:
        """How the chunk's KV is cut into files."""
        return kv_grid(self.record.layout, self.record.tokens, self.record.ways)

    @property
    def direct(self) -> bool:
        """Whether stored layers are wanted as they are, so that they can be read into ``out``."""
        whole = self.tokens == (0, self.record.tokens)
        return whole and self.record.stored == "native" and self.record.ways == 1

    def layer_out(self, layer: int) -> NDArray[Any]:
        """Where the wanted tokens of a layer go, [2, tokens, K, H]."""
        view: NDArray[Any] = self.out[layer - self.layers[0]]
        return view

    def buffer(self) -> NDArray[Any]:
        """Room for one layer as stored, unless it is read into ``out`` directly: [ways, ...]."""
        grid = self.grid
        return np.empty((grid.ways, *grid.part[1:]), self.record.layout.stored_dtype)


def settle(
    wanted: Wanted, layer: int, parts: NDArray[Any], scale: NDArray[np.float32] | None
) -> ChunkCorrupt | None:
    """Check a layer as it was stored, then put what is wanted of it where it belongs.

    Args:
        wanted: what was asked for. layer: which one ``parts`` is.
        parts: [ways, 2, T, K / ways, H] in the stored dtype, one entry per file; the view of
            ``out`` itself where ``wanted.direct``.
        scale: float32 [L, 2, T, K], of an int8 chunk.

    Returns:
        None, or why the layer is refused; ``out`` is then left as it is.
    """
    record = wanted.record
    ways = record.ways
    if wanted.verify:
        stated = record.xxh3[layer * ways : (layer + 1) * ways]
        for rank, (part, expected) in enumerate(zip(parts, stated, strict=True)):
            actual = layer_digest(part)
            if actual != expected:
                where = f" in file {rank} of {ways}" if ways > 1 else ""
                return ChunkCorrupt(
                    f"chunk {record.key}: layer {layer} of {record.shape[0]}{where} has xxh3 "
                    f"{actual}, expected {expected}"
                )
    if wanted.direct:
        return None
    out = wanted.layer_out(layer)
    first, end = wanted.tokens
    heads = parts.shape[3]
    for rank, part in enumerate(parts):
        mine = slice(rank * heads, (rank + 1) * heads)
        if scale is None:
            out[:, :, mine] = part[:, first:end]
        else:
            dequantise(part[:, first:end], scale[layer, :, first:end, mine], out[:, :, mine])
    return None


def require_layers(layers: tuple[int, int] | None, layout: KVLayout) -> tuple[int, int]:
    """The range of layers asked for. Raises StoreError unless 0 <= first < end <= L."""
    return _range(layers, layout.num_layers, "layers")


def require_tokens(tokens: tuple[int, int] | None, record: Record) -> tuple[int, int]:
    """The range of tokens asked for. Raises StoreError unless 0 <= first < end <= T."""
    return _range(tokens, record.tokens, "tokens")


def _range(value: tuple[int, int] | None, size: int, name: str) -> tuple[int, int]:
    if value is None:
        return (0, size)
    sound = isinstance(value, tuple) and len(value) == 2 and all(type(i) is int for i in value)
    if not sound or not 0 <= value[0] < value[1] <= size:
        raise StoreError(f"{name}={value!r}: expected (first, end) with 0 <= first < end <= {size}")
    return value

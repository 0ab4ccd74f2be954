"""The saved state of one sequence of llama.cpp, taken apart into KV and put together from it.

A sequence is saved as its cells: the position of each, then K of every layer and V of every layer,
a row of bytes for each cell. A model with local and global layers has two such parts, and of the
local one only the cells that its window leaves. What stands between the rows is the same for every
sequence of a context, so ``StateForm`` learns it once, from the state of a short one.
"""

import dataclasses
import struct

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_HEAD = struct.Struct("=Ii")  # magic number, sequence
_COUNTS = struct.Struct("=II")  # streams, cells
_CELL = np.dtype([("position", "=i4"), ("sequences", "=u4"), ("sequence", "=i4")])
_LAYERS = struct.Struct("=II")  # whether V is transposed, layers
_ROW = struct.Struct("=iQ")  # type, bytes of a row


class StateError(Exception):
    """A state that is not laid out as this version reads it; says what differs."""


@dataclasses.dataclass(frozen=True)
class _Part:
    """One cache of the context: ``kinds`` are the types of K and V, a row of ``row`` bytes each."""

    layers: int
    kinds: tuple[int, int]
    row: int
    window: int  # cells that are kept behind the newest; 0: all

    def cells(self, tokens: int) -> int:
        return min(tokens, self.window) if self.window else tokens

    def nbytes(self, tokens: int) -> int:
        cells = self.cells(tokens)
        whole = _COUNTS.size + cells * _CELL.itemsize + _LAYERS.size
        return whole + 2 * self.layers * (_ROW.size + cells * self.row)


@dataclasses.dataclass(frozen=True)
class StateForm:
    """How the states of a context are laid out.

    KV is uint8 [L, 2, T, row]: K as it was rotated to its place, and V, in the context's own type;
    layers stand in the order of the state, the global ones first. Where a local layer's window does
    not reach back to a token its row is 0.
    """

    magic: int
    parts: tuple[_Part, ...]

    @classmethod
    def learn(cls, state: bytes, window: int) -> "StateForm":
        """From the state of a sequence that is no longer than the window.

        ``window``: of the local layers, if there are some; 0: none. Raises StateError for layers
        of different sizes, and for a layout that this does not know.
        """
        magic, sequence = _HEAD.unpack_from(state)
        at, parts = _HEAD.size, list[_Part]()
        try:
            while at < len(state):
                part, at = _learned(state, at, window if parts else 0)
                parts.append(part)
        except (struct.error, ValueError) as error:
            raise StateError(f"its states are laid out in another way ({error})") from None
        if len({(it.row, it.kinds) for it in parts}) != 1 or len(parts) > 2:
            raise StateError("its layers keep KV of different sizes")
        form = cls(magic, tuple(parts))
        positions = np.frombuffer(state, _CELL, 1, _HEAD.size + _COUNTS.size)["position"]
        tokens = _COUNTS.unpack_from(state, _HEAD.size)[1]
        again = form.joined(form.taken(state), int(positions[0]), sequence)
        if again.tobytes() != state:
            raise StateError(f"a state of {tokens} tokens does not come back as it was")
        return form

    @property
    def layers(self) -> int:
        """L, of all parts."""
        return sum(it.layers for it in self.parts)

    @property
    def row(self) -> int:
        """Bytes of K, or of V, of a token in a layer."""
        return self.parts[0].row

    def taken(self, state: bytes | Bytes) -> Bytes:
        """The KV uint8 [L, 2, T, row] of a sequence's state. Raises StateError for another's."""
        data = np.frombuffer(state, np.uint8)
        tokens = _COUNTS.unpack_from(data, _HEAD.size)[1]
        if len(data) != _HEAD.size + sum(it.nbytes(tokens) for it in self.parts):
            raise StateError(f"a state of {tokens} tokens has {len(data)} bytes")
        kv = np.zeros((self.layers, 2, tokens, self.row), np.uint8)
        at, layer = _HEAD.size, 0
        for part in self.parts:
            cells = part.cells(tokens)
            at += _COUNTS.size + cells * _CELL.itemsize + _LAYERS.size
            rows = self._rows(data, at, part, cells)
            kv[layer : layer + part.layers, :, tokens - cells :] = rows.swapaxes(0, 1)
            at, layer = at + rows.shape[0] * rows.shape[1] * (_ROW.size + cells * part.row), (
                layer + part.layers
            )
        return kv

    def joined(self, kv: Bytes, first: int, sequence: int = 0) -> Bytes:
        """The state of a sequence with this KV [L, 2, T, row], from position ``first`` on."""
        tokens = kv.shape[2]
        state = np.empty(_HEAD.size + sum(it.nbytes(tokens) for it in self.parts), np.uint8)
        _HEAD.pack_into(state, 0, self.magic, sequence)
        at, layer = _HEAD.size, 0
        for part in self.parts:
            cells = part.cells(tokens)
            _COUNTS.pack_into(state, at, 1, cells)
            at += _COUNTS.size
            table = state[at : at + cells * _CELL.itemsize].view(_CELL)
            table["position"] = first + tokens - cells + np.arange(cells)
            table["sequences"], table["sequence"] = 1, sequence
            at += table.nbytes
            _LAYERS.pack_into(state, at, 0, part.layers)
            at += _LAYERS.size
            rows = self._rows(state, at, part, cells)
            rows[...] = kv[layer : layer + part.layers, :, tokens - cells :].swapaxes(0, 1)
            for kind in part.kinds:
                for _ in range(part.layers):
                    _ROW.pack_into(state, at, kind, part.row)
                    at += _ROW.size + cells * part.row
            layer += part.layers
        return state

    @staticmethod
    def _rows(data: Bytes, at: int, part: _Part, cells: int) -> Bytes:
        """K of every layer, then V of every layer, [2, layers, cells, row], in place."""
        size = _ROW.size + cells * part.row
        whole = data[at : at + 2 * part.layers * size].reshape(2, part.layers, size)
        return whole[:, :, _ROW.size :].reshape(2, part.layers, cells, part.row)


def _learned(state: bytes, at: int, window: int) -> tuple[_Part, int]:
    streams, cells = _COUNTS.unpack_from(state, at)
    at += _COUNTS.size + cells * _CELL.itemsize
    transposed, layers = _LAYERS.unpack_from(state, at)
    if streams != 1 or transposed or not 0 < layers < 1 << 12:
        raise ValueError(f"{streams} streams, {layers} layers, V transposed: {transposed}")
    at += _LAYERS.size
    kinds = []
    rows = set[int]()
    for _ in range(2):
        for _ in range(layers):
            kind, row = _ROW.unpack_from(state, at)
            rows.add(row)
            at += _ROW.size + cells * row
        kinds.append(kind)
    if len(rows) != 1:
        raise ValueError("rows of different sizes")
    return _Part(layers, (kinds[0], kinds[1]), rows.pop(), window), at

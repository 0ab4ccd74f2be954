"""The saved state of one sequence of llama.cpp, taken apart into KV and put together from it.

A sequence is saved as its cells: the position of each, then K of every layer and V of every layer,
a row of bytes for each cell. A model with local and global layers has two such parts, and of the
local one only the cells that its window leaves. What stands between the rows is the same for every
sequence of a context, so ``StateForm`` learns it once, from the state of a short one.
"""

import dataclasses
import math
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

Octets = NDArray[np.uint8]

_HEAD = struct.Struct("=Ii")  # magic number, sequence
_COUNTS = struct.Struct("=II")  # streams, cells
_CELL = np.dtype([("position", "=i4"), ("sequences", "=u4"), ("sequence", "=i4")])
_LAYERS = struct.Struct("=II")  # whether V is transposed, layers
_ROW = struct.Struct("=iQ")  # type, bytes of a row
_COLUMN = struct.Struct("=iII")  # type, bytes of an element, elements of a row


class StateError(Exception):
    """A state that is not laid out as this version reads it; says what differs."""


@dataclasses.dataclass(frozen=True)
class _Part:
    """One cache of the context.

    Attributes:
      kinds: types of K and V, of which a token has ``row`` bytes in a layer.
      element: bytes that stay together where V is transposed, [row / element, T]; 0: it is not.
      window: cells that are kept behind the newest; 0: all.
    """

    layers: int
    kinds: tuple[int, int]
    row: int
    element: int
    window: int

    def cells(self, tokens: int) -> int:
        return min(tokens, self.window) if self.window else tokens

    @property
    def heads(self) -> tuple[struct.Struct, struct.Struct]:
        """What stands before K, and before V, of a layer."""
        return _ROW, _COLUMN if self.element else _ROW

    def nbytes(self, tokens: int) -> int:
        cells = self.cells(tokens)
        whole = _COUNTS.size + cells * _CELL.itemsize + _LAYERS.size
        return whole + self.layers * sum(it.size + cells * self.row for it in self.heads)

    @property
    def dtype(self) -> np.dtype[Any]:
        """As which elements are moved."""
        return np.dtype(f"u{self.element or 1}")

    def rows(self, data: Octets, cells: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """K and V [layers, cells, row] in place, in elements; ``data``: both."""
        views, at = list[NDArray[Any]](), 0
        for head in self.heads:
            size = head.size + cells * self.row
            whole = data[at : at + self.layers * size].reshape(self.layers, size)[:, head.size :]
            if head is _COLUMN:
                columns = whole.view(self.dtype).reshape(self.layers, -1, cells)
                views.append(columns.swapaxes(1, 2))
            else:
                views.append(whole.reshape(self.layers, cells, -1).view(self.dtype))
            at += self.layers * size
        return views[0], views[1]


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
        """Octets of K, or of V, of a token in a layer."""
        return self.parts[0].row

    def taken(self, state: bytes | Octets) -> Octets:
        """The KV uint8 [L, 2, T, row] of a sequence's state. Raises StateError for another's."""
        data = np.frombuffer(state, np.uint8)
        tokens = _COUNTS.unpack_from(data, _HEAD.size)[1]
        if len(data) != _HEAD.size + sum(it.nbytes(tokens) for it in self.parts):
            raise StateError(f"a state of {tokens} tokens has {len(data)} bytes")
        kv = np.zeros((self.layers, 2, tokens, self.row), np.uint8)
        at, layer = _HEAD.size, 0
        for part in self.parts:
            cells = part.cells(tokens)
            start = at + _COUNTS.size + cells * _CELL.itemsize + _LAYERS.size
            for which, rows in enumerate(part.rows(data[start:], cells)):
                own = kv[layer : layer + part.layers, which, tokens - cells :]
                own.view(part.dtype)[...] = rows
            at, layer = at + part.nbytes(tokens), layer + part.layers
        return kv

    def joined(self, kv: Octets, first: int, sequence: int = 0) -> Octets:
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
            _LAYERS.pack_into(state, at, int(part.element > 0), part.layers)
            at += _LAYERS.size
            for which, rows in enumerate(part.rows(state[at:], cells)):
                own = kv[layer : layer + part.layers, which, tokens - cells :]
                rows[...] = own.view(part.dtype)
            for head, kind in zip(part.heads, part.kinds, strict=True):
                sizes = (part.row,) if head is _ROW else (part.element, part.row // part.element)
                for _ in range(part.layers):
                    head.pack_into(state, at, kind, *sizes)
                    at += head.size + cells * part.row
            layer += part.layers
        return state


def _learned(state: bytes, at: int, window: int) -> tuple[_Part, int]:
    streams, cells = _COUNTS.unpack_from(state, at)
    at += _COUNTS.size + cells * _CELL.itemsize
    transposed, layers = _LAYERS.unpack_from(state, at)
    if streams != 1 or transposed > 1 or not 0 < layers < 1 << 12:
        raise ValueError(f"{streams} streams, {layers} layers")
    at += _LAYERS.size
    kinds, rows, element = list[int](), set[int](), 0
    for head in (_ROW, _COLUMN if transposed else _ROW):
        for _ in range(layers):
            kind, *sizes = head.unpack_from(state, at)
            rows.add(math.prod(sizes))
            at += head.size + cells * math.prod(sizes)
        kinds.append(kind)
        element = sizes[0] if head is _COLUMN else 0
    if len(rows) != 1 or element not in (0, 1, 2, 4):
        raise ValueError("rows of different sizes")
    return _Part(layers, (kinds[0], kinds[1]), rows.pop(), element, window), at

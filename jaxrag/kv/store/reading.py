"""Reading chunks: which are asked for, where each lands, and what must hold before it is given out.

``assemble`` lays chunks side by side in one buffer and says which were refused. A store fills each
place with layers as they were stored; ``settle`` verifies one while it is in the cache.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from jaxrag.base.errors import ChunkCorrupt, ChunkMissing, ChunkNotSealed, StoreError
from jaxrag.kv.store.grid import HEAD_AXIS, Grid, kv_grid
from jaxrag.kv.store.layout import WHOLE, HeadShare, KVLayout
from jaxrag.kv.store.quantise import dequantise, unpack
from jaxrag.kv.store.record import Record, layer_digest
from jaxrag.kv.store.seal import Sealer, same_seal

OnMissing = Literal["raise", "skip"]
# (first, end) of layers, or a set of them, which come in ascending order; None: all of them.
SomeLayers = tuple[int, int] | frozenset[int] | None

Refused = ChunkMissing | ChunkCorrupt
Lookup = Record | Refused


@dataclasses.dataclass(frozen=True)
class Assembled:
    """The chunks that were found, one behind the other along the token axis."""

    kv: NDArray[Any]  # [layers, 2, sum T, K, H]
    offsets: dict[str, tuple[int, int]]  # key -> (first token, tokens and rows), as asked for
    refused: dict[str, Refused]  # key -> why it is not among them

    @property
    def missing(self) -> tuple[str, ...]:
        """Keys without a committed chunk, or whose bytes are gone."""
        return tuple(k for k, reason in self.refused.items() if isinstance(reason, ChunkMissing))

    @property
    def corrupt(self) -> tuple[str, ...]:
        """Keys whose record or bytes were refused."""
        return tuple(k for k, reason in self.refused.items() if isinstance(reason, ChunkCorrupt))


@dataclasses.dataclass(frozen=True)
class ReadRequest:
    """Layers of a chunk, all heads of them or a share, and where they go."""

    record: Record
    layers: tuple[int, ...]  # ascending
    out: NDArray[Any]  # [layers, 2, T, K / ways, H] in the layout's dtype; layers may be strided
    share: HeadShare = WHOLE

    @property
    def heads(self) -> slice:
        """The KV heads that are wanted."""
        return slice(*self.share.heads(self.record.layout.num_kv_heads))

    @property
    def ranks(self) -> range:
        """The files that hold these heads. Digests are of whole files, so they are read whole."""
        size = self.grid.part[HEAD_AXIS]
        return range(self.heads.start // size, -(-self.heads.stop // size))

    @property
    def grid(self) -> Grid:
        """How the chunk's KV is cut into files."""
        return kv_grid(self.record.layout, self.record.tokens, self.record.ways)

    @property
    def direct(self) -> bool:
        """Whether stored layers are wanted as they are, so that they can be read into ``out``."""
        one = len(self.ranks) == 1 and self.grid.part[HEAD_AXIS] == self.out.shape[HEAD_AXIS]
        return self.record.stored == "native" and one

    def layer_out(self, layer: int) -> NDArray[Any]:
        """Where a layer goes, [2, T, K / ways, H]."""
        view: NDArray[Any] = self.out[self.layers.index(layer)]
        return view

    def buffer(self) -> NDArray[Any]:
        """Room for one layer as stored, unless it is read into ``out`` directly: [ranks, ...]."""
        size = (len(self.ranks), *self.grid.part[1:])
        return np.empty(size, self.record.layout.stored_dtype)


def assemble(
    found: Mapping[str, Lookup],
    layout: KVLayout,
    layers: SomeLayers,
    out: NDArray[Any] | None,
    on_missing: OnMissing,
    load: Callable[[Sequence[ReadRequest]], Sequence[Refused | None]],
    share: HeadShare = WHOLE,
) -> Assembled:
    """Lay the chunks of ``found`` into ``out``, or into a new buffer, in order and without gaps.

    Args:
        found: per key its record, or why there is none.
        layout: sizes and dtype of the store.
        layers: that are requests.
        out: [layers, 2, S, K / ways, H] with S >= sum of tokens, or None.
        on_missing: "raise" the first refusal, or "skip" refused chunks and name them.
        load: fills each view of the buffer with verified bytes and answers, per chunk, None or
            the reason why the view must not be used.
        share: the heads that are requests.

    Raises:
        ChunkMissing, ChunkCorrupt: a chunk was refused and ``on_missing`` is "raise". What ``out``
            then holds is unspecified.
        StoreError: ``out`` does not fit, or a range is not in the chunk.
    """
    chosen = _require_layers(layers, layout)
    refused = {key: value for key, value in found.items() if not isinstance(value, Record)}
    if refused and on_missing == "raise":
        raise next(iter(refused.values()))
    records = [value for value in found.values() if isinstance(value, Record)]
    tokens = sum(record.shape[2] for record in records)
    buffer = _buffer(out, layout.of_share(share), len(chosen), tokens)

    requests = []
    start = 0
    for record in records:
        view = buffer[:, :, start : start + record.shape[2]]
        requests.append(ReadRequest(record, chosen, view, share))
        start += record.shape[2]
    answers = load(requests)

    offsets = {}
    start = end = 0
    for request, answer in zip(requests, answers, strict=True):
        key, size = request.record.key, request.record.shape[2]
        start += size
        if answer is not None:
            if on_missing == "raise":
                raise answer
            refused[key] = answer
            continue
        if end != start - size:  # a refused chunk left a gap: close it
            buffer[:, :, end : end + size] = request.out
        offsets[key] = (end, size)
        end += size
    return Assembled(kv=buffer[:, :, :end], offsets=offsets, refused=refused)


def settle(
    request: ReadRequest,
    layer: int,
    parts: NDArray[Any],
    scale: NDArray[np.float32] | None,
    sealer: Sealer | None = None,
) -> ChunkCorrupt | None:
    """Check a layer as it was stored, then put it where it belongs.

    Args:
        layer: which one ``parts`` is.
        parts: [ranks, 2, T, K / ways, H] in the stored dtype, packed [ranks, 2, 1, K / ways, M],
            one entry for each file of ``request.ranks``; the view of ``out`` itself where
            ``request.direct``.
        scale: float32 [L, 2, T, K], of an int8 chunk.
        sealer: checks the seals; None checks xxh3.

    Returns:
        None, or why the layer is refused; ``out`` is then left as it is.
    """
    for rank, part in zip(request.ranks, parts, strict=True):
        refused = _check_part(request.record, layer, rank, part, sealer)
        if refused is not None:
            return refused
    if request.direct:
        return None
    out, heads = request.layer_out(layer), request.heads
    size = parts.shape[3]
    for rank, part in zip(request.ranks, parts, strict=True):
        first, end = max(heads.start, rank * size), min(heads.stop, (rank + 1) * size)
        mine = part[:, :, first - rank * size : end - rank * size]
        target = out[:, :, first - heads.start : end - heads.start]
        if request.record.layout.packed:
            unpack(mine, request.record.kept, target)
        elif scale is None:
            target[...] = mine
        else:
            dequantise(mine, scale[layer, :, :, first:end], target)
    return None


def _check_part(
    record: Record, layer: int, rank: int, part: NDArray[Any], sealer: Sealer | None
) -> ChunkCorrupt | None:
    """Why a layer in one file is not what was stored, or None."""
    place = layer * record.ways + rank
    if sealer is not None and same_seal(sealer.of_layer(part), record.seals[place]):
        return None
    where = f" in file {rank} of {record.ways}" if record.ways > 1 else ""
    name = f"chunk {record.key}: layer {layer} of {record.shape[0]}{where}"
    actual, expected = layer_digest(part), record.xxh3[place]
    if actual != expected:
        return ChunkCorrupt(f"{name} has xxh3 {actual}, expected {expected}")
    return None if sealer is None else ChunkNotSealed(f"{name} is not what was sealed")


def require_choice(value: object, choices: Any, name: str) -> None:
    """Raise StoreError unless ``value`` is one of the strings of the Literal ``choices``."""
    if value not in get_args(choices):
        raise StoreError(f"{name}={value!r}: expected one of {', '.join(get_args(choices))}")


def _require_layers(layers: SomeLayers, layout: KVLayout) -> tuple[int, ...]:
    size = layout.num_layers
    if layers is None:
        return tuple(range(size))
    if isinstance(layers, frozenset):
        if not layers <= set(range(size)):
            raise StoreError(f"layers={set(layers)}: expected some of 0..{size - 1}")
        return tuple(sorted(layers))
    sound = isinstance(layers, tuple) and len(layers) == 2 and all(type(i) is int for i in layers)
    if not sound or not 0 <= layers[0] < layers[1] <= size:
        raise StoreError(
            f"layers={layers!r}: expected (first, end) with 0 <= first < end <= {size}"
        )
    return tuple(range(*layers))


def _buffer(out: NDArray[Any] | None, layout: KVLayout, count: int, tokens: int) -> NDArray[Any]:
    if out is None:
        return np.empty(
            (count, 2, tokens, layout.num_kv_heads, layout.head_dim), layout.numpy_dtype
        )
    layout.require(out, "out", layers=count)
    if out.shape[2] < tokens:
        raise StoreError(f"out holds {out.shape[2]} tokens: the chunks need {tokens}")
    if not out.flags.writeable:
        raise StoreError("out is read-only: expected a writable buffer")
    if count and not out[0, 0].flags.c_contiguous:
        raise StoreError("out is strided over tokens, heads or head dim: expected contiguous rows")
    return out[:, :, :tokens]

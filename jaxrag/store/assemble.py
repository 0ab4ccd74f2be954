"""Chunks side by side in one buffer: where each lands, and what is left when one is refused."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from jaxrag.errors import ChunkCorrupt, ChunkMissing, StoreError
from jaxrag.store.layout import KVLayout
from jaxrag.store.reading import Wanted, require_layers, require_tokens
from jaxrag.store.record import Record

OnMissing = Literal["raise", "skip"]
Verify = Literal["always", "first", "never"]

Refused = ChunkMissing | ChunkCorrupt
Found = Record | Refused


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which part of every chunk is wanted; None means all."""

    layers: tuple[int, int] | None = None  # first, end
    tokens: tuple[int, int] | None = None  # first, end


@dataclasses.dataclass(frozen=True)
class Assembled:
    """The chunks that were found, one behind the other along the token axis."""

    kv: NDArray[Any]  # [L, 2, sum T, K, H]
    offsets: dict[str, tuple[int, int]]  # key -> (first token, tokens), in the order asked for
    refused: dict[str, Refused]  # key -> why it is not among them

    @property
    def missing(self) -> tuple[str, ...]:
        """Keys without a committed chunk, or whose bytes are gone."""
        return tuple(k for k, reason in self.refused.items() if isinstance(reason, ChunkMissing))

    @property
    def corrupt(self) -> tuple[str, ...]:
        """Keys whose record or bytes were refused."""
        return tuple(k for k, reason in self.refused.items() if isinstance(reason, ChunkCorrupt))


def assemble(
    found: Mapping[str, Found],
    layout: KVLayout,
    selection: Selection,
    out: NDArray[Any] | None,
    on_missing: OnMissing,
    verify: Callable[[Record], bool],
    load: Callable[[Sequence[Wanted]], Sequence[Refused | None]],
) -> Assembled:
    """Lay the chunks of ``found`` into ``out``, or into a new buffer, in order and without gaps.

    Args:
        found: per key its record, or why there is none.
        layout: sizes and dtype of the store.
        selection: the layers and tokens of every chunk that are wanted.
        out: [layers, 2, S, K, H] with S >= sum of tokens, or None.
        on_missing: "raise" the first refusal, or "skip" refused chunks and name them.
        verify: whether the bytes of a chunk have to be hashed.
        load: fills each view of the buffer with verified bytes and answers, per chunk, None or
            the reason why the view must not be used.

    Raises:
        ChunkMissing, ChunkCorrupt: a chunk was refused and ``on_missing`` is "raise". What ``out``
            then holds is unspecified.
        StoreError: ``out`` does not fit, or a range is not in the chunk.
    """
    require_choice(on_missing, OnMissing, "on_missing")
    layers = require_layers(selection.layers, layout)
    refused = {key: value for key, value in found.items() if not isinstance(value, Record)}
    if refused and on_missing == "raise":
        raise next(iter(refused.values()))
    records = [value for value in found.values() if isinstance(value, Record)]
    ranges = [require_tokens(selection.tokens, record) for record in records]
    buffer = _buffer(out, layout, layers, sum(end - first for first, end in ranges))

    wanted = []
    start = 0
    for record, tokens in zip(records, ranges, strict=True):
        size = tokens[1] - tokens[0]
        view = buffer[:, :, start : start + size]
        wanted.append(Wanted(record, layers, tokens, view, verify(record)))
        start += size
    answers = load(wanted)

    offsets = {}
    start = end = 0
    for want, answer in zip(wanted, answers, strict=True):
        key, size = want.record.key, want.out.shape[2]
        start += size
        if answer is not None:
            if on_missing == "raise":
                raise answer
            refused[key] = answer
            continue
        if end != start - size:  # a refused chunk left a gap: close it
            buffer[:, :, end : end + size] = want.out
        offsets[key] = (end, size)
        end += size
    return Assembled(kv=buffer[:, :, :end], offsets=offsets, refused=refused)


def require_choice(value: object, choices: Any, name: str) -> None:
    """Raise StoreError unless ``value`` is one of the strings of the Literal ``choices``."""
    if value not in get_args(choices):
        raise StoreError(f"{name}={value!r}: expected one of {', '.join(get_args(choices))}")


def _buffer(
    out: NDArray[Any] | None, layout: KVLayout, layers: tuple[int, int], tokens: int
) -> NDArray[Any]:
    count = layers[1] - layers[0]
    if out is None:
        return np.empty((count, *layout.shape(tokens)[1:]), layout.numpy_dtype)
    layout.require(out, "out", layers=count)
    if out.shape[2] < tokens:
        raise StoreError(f"out holds {out.shape[2]} tokens: the chunks need {tokens}")
    if not out.flags.writeable:
        raise StoreError("out is read-only: expected a writable buffer")
    if not out[0, 0].flags.c_contiguous:
        raise StoreError("out is strided over tokens, heads or head dim: expected contiguous rows")
    return out[:, :, :tokens]

"""Chunks side by side in one buffer: where each lands, and what is left when one is refused."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from jaxrag.errors import ChunkCorrupt, ChunkMissing, StoreError
from jaxrag.store.record import KVLayout, Record, layer_digests

OnMissing = Literal["raise", "skip"]
Verify = Literal["always", "never"]

Found = Record | ChunkMissing | ChunkCorrupt
Load = Callable[
    [Sequence[tuple[Record, NDArray[Any]]]], Sequence[ChunkMissing | ChunkCorrupt | None]
]


@dataclasses.dataclass(frozen=True)
class Assembled:
    """The chunks that were found, one behind the other along the token axis."""

    kv: NDArray[Any]  # [L, 2, sum T, K, H]
    offsets: dict[str, tuple[int, int]]  # key -> (first token, tokens), in the order asked for
    missing: tuple[str, ...]  # keys without a committed chunk
    corrupt: tuple[str, ...]  # keys whose record or bytes were refused


def assemble(
    found: Mapping[str, Found],
    layout: KVLayout,
    out: NDArray[Any] | None,
    on_missing: OnMissing,
    load: Load,
) -> Assembled:
    """Lay the chunks of ``found`` into ``out``, or into a new buffer, in order and without gaps.

    Args:
        found: per key its record, or why there is none.
        layout: sizes and dtype of the store.
        out: [L, 2, S, K, H] with S >= sum T, or None.
        on_missing: "raise" the first refusal, or "skip" refused chunks and name them.
        load: fills each record's [L, 2, T, K, H] view of the buffer with verified bytes and
            answers, per record, None or the reason why the view must not be used.

    Raises:
        ChunkMissing, ChunkCorrupt: a chunk was refused and ``on_missing`` is "raise". What ``out``
            then holds is unspecified.
        StoreError: ``out`` does not fit.
    """
    require_choice(on_missing, OnMissing, "on_missing")
    refused = {key: value for key, value in found.items() if not isinstance(value, Record)}
    if refused and on_missing == "raise":
        raise next(iter(refused.values()))
    records = [value for value in found.values() if isinstance(value, Record)]
    buffer = _buffer(out, layout, sum(record.tokens for record in records))

    views = []
    start = 0
    for record in records:
        views.append((start, record, buffer[:, :, start : start + record.tokens]))
        start += record.tokens
    answers = load([(record, view) for _, record, view in views])

    offsets = {}
    end = 0
    for (start, record, view), answer in zip(views, answers, strict=True):
        if answer is not None:
            if on_missing == "raise":
                raise answer
            refused[record.key] = answer
            continue
        if end != start:  # a refused chunk left a gap: close it
            buffer[:, :, end : end + record.tokens] = view
        offsets[record.key] = (end, record.tokens)
        end += record.tokens
    return Assembled(
        kv=buffer[:, :, :end],
        offsets=offsets,
        missing=tuple(k for k, reason in refused.items() if isinstance(reason, ChunkMissing)),
        corrupt=tuple(k for k, reason in refused.items() if isinstance(reason, ChunkCorrupt)),
    )


def verify_digests(record: Record, kv: NDArray[Any]) -> ChunkCorrupt | None:
    """Compare ``kv`` [L, 2, T, K, H] with the record's digests; None when every layer agrees."""
    for layer, (actual, stated) in enumerate(zip(layer_digests(kv), record.xxh3, strict=True)):
        if actual != stated:
            return ChunkCorrupt(
                f"chunk {record.key}: layer {layer} of {record.shape[0]} has xxh3 {actual}, "
                f"expected {stated}"
            )
    return None


def require_choice(value: object, choices: Any, name: str) -> None:
    """Raise StoreError unless ``value`` is one of the strings of the Literal ``choices``."""
    if value not in get_args(choices):
        raise StoreError(f"{name}={value!r}: expected one of {', '.join(get_args(choices))}")


def _buffer(out: NDArray[Any] | None, layout: KVLayout, tokens: int) -> NDArray[Any]:
    if out is None:
        return np.empty(layout.shape(tokens), layout.numpy_dtype)
    layout.require(out, "out")
    if out.shape[2] < tokens:
        raise StoreError(f"out holds {out.shape[2]} tokens: the chunks need {tokens}")
    if not out.flags.writeable:
        raise StoreError("out is read-only: expected a writable buffer")
    if not out[0, 0].flags.c_contiguous:
        raise StoreError("out is strided over tokens, heads or head dim: expected contiguous rows")
    return out[:, :, :tokens]

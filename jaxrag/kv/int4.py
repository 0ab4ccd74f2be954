"""KV in 4 bits an element: K by channel, V by token, in small groups, as bytes of one head.

Of K every channel (one of the H dimensions of a head) has a range for each GROUP tokens, as keys
differ more between channels than between tokens (KIVI, section 3). The channels of a head that
range widest, one in CHANNELS, get 8 bits. Of V every CHANNELS elements of a token share a step.
"""

import math
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from jaxrag.base.errors import StoreError

GROUP = 64  # tokens of a channel of K that share a range
CHANNELS = 32  # channels of a token of V that share a step; one of K in so many has 8 bits

_BF16 = np.dtype(ml_dtypes.bfloat16)
_COARSE, _FINE = 15, 255  # the largest code in 4 bits and in 8
_ZERO = 8  # the code of V's zero: codes 0 to 15 are -8 to 7 steps
_REST = np.uint32(0xFFFF)  # the bits of a float32 that bfloat16 has not


def wide_channels(head_dim: int) -> int:
    """How many channels of a head of K have 8 bits."""
    return max(1, head_dim // CHANNELS)


def head_nbytes(tokens: int, head_dim: int) -> int:
    """Bytes of K and V of a head and so many tokens, an even number."""
    return 2 * -(-sum(map(_nbytes, _sections(tokens, head_dim))) // 2)


def pack(kv: NDArray[Any]) -> NDArray[np.uint8]:
    """Round K and V [L, 2, T, K, H] of any float dtype to codes; the same on every machine.

    An element of K comes back within half a step of its group and channel, one of V within half a
    step, or one if it is as large as the largest of its group and of the other sign.

    Returns:
        [L, 2, 1, K, M], M half of ``head_nbytes``: the two halves of the bytes of every head.

    Raises:
        StoreError: a NaN or an infinity, or numbers of one channel too far apart for float32.
    """
    layers, _, tokens, heads, dim = kv.shape
    nbytes = head_nbytes(tokens, dim)
    packed = np.zeros((layers, heads, nbytes), np.uint8)
    for layer, out in zip(kv, packed, strict=True):
        with np.errstate(over="ignore", invalid="ignore"):
            wide = layer.astype(np.float32).swapaxes(1, 2)  # [2, K, T, H]
            parts = [*_pack_keys(wide[0]), *_pack_values(wide[1])]
        start = 0
        for part in parts:
            flat = np.ascontiguousarray(part).reshape(heads, -1).view(np.uint8)
            out[:, start : start + flat.shape[1]] = flat
            start += flat.shape[1]
    halves = packed.reshape(layers, heads, 2, 1, nbytes // 2)
    return np.ascontiguousarray(halves.transpose(0, 2, 3, 1, 4))


def unpack(packed: NDArray[np.uint8], tokens: int, dim: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """K and V, float32 [T, K, H] each, of one layer that was packed, [2, 1, K, M]."""
    heads = packed.shape[2]
    halves = np.concatenate((packed[0, 0], packed[1, 0]), axis=1)
    parts, start = [], 0
    for shape, kind in _sections(tokens, dim):
        end = start + _nbytes((shape, kind))
        part = np.ascontiguousarray(halves[:, start:end])
        parts.append(part if kind is None else part.view(kind).reshape(heads, *shape))
        start = end
    channels, low, step, codes, fine, steps, values = parts
    k = _keys(channels, low, step, _nibbles(codes, (tokens, dim)), fine)
    v = _nibbles(values, (tokens, dim)).astype(np.float32)
    v -= _ZERO
    v *= steps.astype(np.float32).repeat(CHANNELS, axis=2)[:, :, :dim]
    return k.swapaxes(0, 1), v.swapaxes(0, 1)


# Shape and dtype; None: two codes a byte.
_Section: TypeAlias = "tuple[tuple[int, ...], np.dtype[np.generic] | None]"


def _sections(tokens: int, dim: int) -> list[_Section]:
    """What the bytes of one head are, in order: of K five arrays, of V two."""
    groups, wide = -(-tokens // GROUP), wide_channels(dim)
    return [
        ((wide,), np.dtype("<u2")),
        ((groups, dim), _BF16),
        ((groups, dim), _BF16),
        ((tokens, dim), None),
        ((tokens, wide), None),
        ((tokens, -(-dim // CHANNELS)), _BF16),
        ((tokens, dim), None),
    ]


def _nbytes(section: _Section) -> int:
    shape, kind = section
    count = math.prod(shape)
    return -(-count // 2) if kind is None else count * kind.itemsize


def _pack_keys(k: NDArray[Any]) -> list[NDArray[Any]]:
    """The arrays of K [K, T, H] float32."""
    heads, tokens, dim = k.shape
    grouped = _by_group(k)
    low, high = _to_bfloat16(grouped.min(2), up=False), grouped.max(2)
    spread = high - low
    if not np.isfinite(spread).all():
        raise StoreError(
            "kv holds NaN, infinity or numbers too far apart, which int4 cannot: store it as native"
        )
    order = np.argsort(-spread.max(1), axis=1, kind="stable")
    channels = np.sort(order[:, : wide_channels(dim)], axis=1)
    most = np.full((heads, 1, dim), _COARSE, np.float32)
    np.put_along_axis(most, channels[:, None], _FINE, axis=2)
    step = _to_bfloat16(spread / most, up=True)
    divisor = np.where(step > 0, step, np.float32(np.inf))
    codes = np.rint((grouped - low[:, :, None]) / divisor[:, :, None])
    codes = np.clip(codes, 0, most[:, :, None], out=codes).astype(np.uint8)
    codes = codes.reshape(heads, -1, dim)[:, :tokens]
    at = np.broadcast_to(channels[:, None], (heads, tokens, channels.shape[1]))
    wide = np.take_along_axis(codes, at, axis=2)
    np.put_along_axis(codes, at, wide >> 4, axis=2)
    return [
        channels.astype("<u2"),
        low.astype(_BF16),
        step.astype(_BF16),
        _pairs(codes),
        _pairs(wide & _COARSE),
    ]


def _keys(
    channels: NDArray[Any],
    low: NDArray[Any],
    step: NDArray[Any],
    codes: NDArray[Any],
    fine: NDArray[Any],
) -> NDArray[Any]:
    """K [K, T, H] float32 of its arrays."""
    heads, tokens, dim = codes.shape
    at = np.minimum(channels, dim - 1).astype(np.int64)[:, None]
    at = np.broadcast_to(at, (heads, tokens, at.shape[2]))
    wide = np.take_along_axis(codes, at, axis=2) << 4
    np.put_along_axis(codes, at, wide | _nibbles(fine, at.shape[1:]), axis=2)
    k: NDArray[Any] = _by_group(codes).astype(np.float32)
    k *= step.astype(np.float32)[:, :, None]
    k += low.astype(np.float32)[:, :, None]
    return k.reshape(heads, -1, dim)[:, :tokens]


def _pack_values(v: NDArray[Any]) -> list[NDArray[Any]]:
    """The arrays of V [K, T, H] float32."""
    heads, tokens, dim = v.shape
    groups = -(-dim // CHANNELS)
    padded = np.zeros((heads, tokens, groups * CHANNELS), np.float32)
    padded[:, :, :dim] = v
    grouped = padded.reshape(heads, tokens, groups, CHANNELS)
    largest = np.abs(grouped).argmax(3)[..., None]
    extreme = np.take_along_axis(grouped, largest, axis=3)[..., 0]
    if not np.isfinite(extreme).all():
        raise StoreError("kv holds NaN or infinity, which int4 cannot: store it as native")
    step = _to_bfloat16(extreme / np.float32(-_ZERO) + np.float32(0), up=None)  # no -0
    divisor = np.where(step != 0, step, np.float32(np.inf))
    codes = np.rint(grouped / divisor[..., None]) + _ZERO
    codes = np.clip(codes, 0, _COARSE, out=codes).astype(np.uint8)
    return [step.astype(_BF16), _pairs(codes.reshape(heads, tokens, -1)[:, :, :dim])]


def _by_group(array: NDArray[Any]) -> NDArray[Any]:
    """[K, T, H] as [K, groups, GROUP, H], the last token repeated."""
    missing = -array.shape[1] % GROUP
    padded = np.pad(array, ((0, 0), (0, missing), (0, 0)), mode="edge") if missing else array
    return padded.reshape(len(array), -1, GROUP, array.shape[2])


def _pairs(codes: NDArray[Any]) -> NDArray[np.uint8]:
    """Codes of 4 bits [K, ...] two to a byte [K, bytes], the first in the low bits."""
    flat = codes.reshape(len(codes), -1)
    if flat.shape[1] % 2:
        flat = np.pad(flat, ((0, 0), (0, 1)))
    pairs: NDArray[np.uint8] = flat[:, ::2] | (flat[:, 1::2] << 4)
    return pairs


def _nibbles(pairs: NDArray[Any], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Inverse of ``_pairs``: [K, *shape]."""
    codes = np.empty((*pairs.shape, 2), np.uint8)
    np.bitwise_and(pairs, _COARSE, out=codes[..., 0])
    np.right_shift(pairs, 4, out=codes[..., 1])
    return codes.reshape(len(pairs), -1)[:, : math.prod(shape)].reshape(len(pairs), *shape)


def _to_bfloat16(wide: NDArray[Any], *, up: bool | None) -> NDArray[Any]:
    """Float32 that bfloat16 holds: the next one up, the next one down, or (None) the larger one.

    A range that is rounded outwards still covers every element.
    """
    bits = np.ascontiguousarray(wide, np.float32).view(np.uint32)
    larger = (bits + _REST) & ~_REST
    smaller = bits & ~_REST
    if up is None:
        return larger.view(np.float32)
    grows = (wide >= 0) if up else (wide < 0)
    return np.where(grows, larger, smaller).astype(np.uint32).view(np.float32)

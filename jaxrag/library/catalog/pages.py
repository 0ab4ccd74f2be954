"""The pages of a catalog as bytes: their checksums, flipped bits, and the rows that stand in them.

The layout is SQLite's (https://www.sqlite.org/fileformat.html) with 8 reserved bytes a page, which
hold the checksum of its checksum VFS.
"""

import functools
import struct
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np

from jaxrag.base.types import HostArray
from jaxrag.kv.store.sqlite import CHECKSUM_BYTES

PAGE_BYTES = 4096  # SQLite's default, and so of every catalog

_USABLE = PAGE_BYTES - CHECKSUM_BYTES
_WORDS = _USABLE // 4  # under the checksum
_LOCK_PAGE = 0x40000000 // PAGE_BYTES  # never written: SQLite locks its bytes
_AT_ONCE = 4096  # pages whose checksums are computed together
_TABLE_LEAF, _INDEX_LEAF, _INDEX_INTERIOR = 13, 10, 2  # kinds of pages that hold rows
_MOST = {_TABLE_LEAF: _USABLE - 35, _INDEX_LEAF: (_USABLE - 12) * 64 // 255 - 23}
_MOST[_INDEX_INTERIOR] = _MOST[_INDEX_LEAF]  # bytes of a row that stand in the page itself
_LEAST = (_USABLE - 12) * 32 // 255 - 23  # of a longer one
_POSTING = (str, int, int)
_INTEGERS = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}  # bytes by serial type


def wrong_pages(pages: HostArray) -> list[int]:
    """Which of the pages, uint8 [P, PAGE_BYTES], are not as their checksums say, ascending."""
    found: list[int] = []
    for start in range(0, len(pages), _AT_ONCE):
        some = pages[start : start + _AT_ONCE]
        wrong = (_checksums(some) != _stored(some)).any(axis=1)
        found += (np.flatnonzero(wrong) + start).tolist()
    return found


def lost_pages(pages: HostArray) -> list[int]:
    """Pages of zeros, whose checksum is zero too, that the first page does not name as free."""
    zeros = np.flatnonzero(~pages.any(axis=1)).tolist()
    free = {_LOCK_PAGE}
    trunk = _number(pages[0], 8)
    while 0 < trunk <= len(pages) and trunk - 1 not in free:
        page = pages[trunk - 1]
        free.add(trunk - 1)
        leaves = page[8 : 8 + 4 * _number(page, 1)].tobytes()
        free.update(
            number - 1 for (number,) in struct.iter_unpack(">I", leaves[: len(leaves) & ~3])
        )
        trunk = _number(page, 0)
    return [number for number in zeros if number not in free]


def _number(page: HostArray, place: int) -> int:
    """The number that stands behind ``place`` others in a page."""
    return int.from_bytes(page[4 * place : 4 * place + 4].tobytes(), "big")


def mend(page: HostArray) -> bool:
    """Turn back the one bit that was flipped in a page, uint8 [PAGE_BYTES], in place.

    Returns whether there is exactly one bit that explains the checksum.
    """
    found = flips(page)
    if len(found) == 1:
        turn(page, *found[0])
    return len(found) == 1


def turn(page: HostArray, word: int, bit: int) -> None:
    """Flip a bit of a page, uint8 [PAGE_BYTES], in place."""
    page.view("<u4")[word] ^= np.uint32(1) << np.uint32(bit)


def flips(page: HostArray) -> list[tuple[int, int]]:
    """Each single bit that explains the checksum of a page, uint8 [PAGE_BYTES]: (word, bit).

    A word is added up, so that of its highest bits several words' do: one in six has no other.
    """
    words = page.view("<u4")
    stored, computed = _stored(page[None])[0], _checksums(page[None])[0]
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    # A bit that is 0 now was 1 and added its worth; one that is 1 was 0.
    set_now = (words[:_WORDS, None] & bits) != 0
    change = np.where(set_now, np.uint32(0) - bits, bits)
    effect = change[..., None] * _effects()[:, None, :]
    found = [
        (int(word), int(bit)) for word, bit in np.argwhere((effect == stored - computed).all(-1))
    ]
    differ = stored ^ computed
    if sum(int(word).bit_count() for word in differ) == 1:
        own = int(np.flatnonzero(differ)[0])
        found.append((_WORDS + own, int(differ[own]).bit_length() - 1))
    return found


def _stored(pages: HostArray) -> HostArray:
    return pages.view("<u4")[:, _WORDS:]


def _checksums(pages: HostArray) -> HostArray:
    """The checksum of every page, uint32 [P, 2]."""
    words = np.ascontiguousarray(pages.view("<u4")[:, :_WORDS].T)
    first = np.zeros(len(pages), np.uint32)
    second = np.zeros(len(pages), np.uint32)
    for odd, even in zip(words[::2], words[1::2], strict=True):
        first += odd + second
        second += even + first
    return np.stack([first, second], axis=1)


@functools.cache
def _effects() -> HostArray:
    """What 1 more in a word adds to the checksum, uint32 [_WORDS, 2]: it is linear."""
    units = np.zeros((_WORDS, PAGE_BYTES // 4), "<u4")
    np.fill_diagonal(units, 1)
    return _checksums(units.view(np.uint8))


def rows_of(
    pages: HostArray, wrong: Collection[int], only: Iterable[int] | None = None
) -> Iterator[tuple[int, tuple[Any, ...] | None]]:
    """The rows that stand in pages, uint8 [P, PAGE_BYTES], but ``wrong`` ones; in no order.

    Nothing is asked of the trees that lead to them. A row id stands in the place of the column that
    is its alias, or in front of the columns. What can be computed anew is left out: pages whose
    first row is (text, integer, integer), a posting.

    Args:
      only: pages to read; None: all.

    Yields the page of each row and the row, None of one that reaches into a wrong page.
    """
    whole = np.ones(len(pages), bool)
    whole[list(wrong)] = False
    for number in np.flatnonzero(whole) if only is None else only:
        page = pages[number].tobytes()
        start = 100 if number == 0 else 0
        kind = page[start]
        if kind not in _MOST:
            continue
        for place in _cells(page, start):
            row = _row(pages, whole, page, kind, place)
            if row is not None and tuple(map(type, row)) == _POSTING:
                break
            yield int(number), row


def _cells(page: bytes, start: int) -> tuple[int, ...]:
    count = int.from_bytes(page[start + 3 : start + 5], "big")
    first = start + (12 if page[start] == _INDEX_INTERIOR else 8)
    return struct.unpack_from(f">{count}H", page, first) if first + 2 * count <= _USABLE else ()


def _row(
    pages: HostArray, whole: HostArray, page: bytes, kind: int, place: int
) -> tuple[Any, ...] | None:
    """The row of a cell; None where the bytes are none, or lie in pages that are not whole."""
    try:
        size, place = _varint(page, place + (4 if kind == _INDEX_INTERIOR else 0))
        if kind != _TABLE_LEAF:
            payload = _payload(pages, whole, page[place:], kind, size)
            return None if payload is None else tuple(_values(payload))
        row_id, place = _varint(page, place)
        payload = _payload(pages, whole, page[place:], kind, size)
        if payload is None:
            return None
        first, *others = _values(payload)
        return (row_id, *others) if first is None else (row_id, first, *others)
    except (IndexError, ValueError):
        return None


def _payload(pages: HostArray, whole: HostArray, rest: bytes, kind: int, size: int) -> bytes | None:
    """The bytes of a row that begins with ``rest`` of its page."""
    if size <= _MOST[kind]:
        return rest[:size]
    fitting = _LEAST + (size - _LEAST) % (_USABLE - 4)
    here = fitting if fitting <= _MOST[kind] else _LEAST
    parts, left = [rest[:here]], size - here
    after = int.from_bytes(rest[here : here + 4], "big")
    while left > 0:
        if not 0 < after <= len(pages) or not whole[after - 1]:
            return None
        more = pages[after - 1].tobytes()
        parts.append(more[4 : 4 + min(left, _USABLE - 4)])
        left -= len(parts[-1])
        after = int.from_bytes(more[:4], "big")
    return b"".join(parts)


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """A number of 1 to 9 bytes, and the place behind it."""
    value = 0
    for count in range(8):
        byte = data[place + count]
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, place + count + 1
    value = value << 8 | data[place + 8]
    return (value - (1 << 64) if value >> 63 else value), place + 9


def _values(payload: bytes) -> Iterator[Any]:
    """The columns of a row. Raises ValueError or IndexError for bytes that are no row."""
    header, place = _varint(payload, 0)
    data = header
    while place < header:
        kind, place = _varint(payload, place)
        if kind == 0:
            yield None
            continue
        if kind in (8, 9):
            yield kind - 8
            continue
        size = _INTEGERS.get(kind, 8 if kind == 7 else (kind - 12) // 2)
        value = payload[data : data + size]
        if kind in (10, 11) or size < 0 or len(value) != size:
            raise ValueError(f"serial type {kind} in {len(payload)} bytes")
        data += size
        if kind in _INTEGERS:
            yield int.from_bytes(value, "big", signed=True)
        elif kind == 7:
            yield struct.unpack(">d", value)[0]
        else:
            yield value.decode() if kind % 2 else value

"""Digests of rows: as the format says, of every column, and kept by every change."""

import struct

import numpy as np
import xxhash

from jaxrag.library.catalog import digests
from jaxrag.library.catalog.digests import CHUNKS, DOCUMENTS, KEYS, SETTINGS, Totals


def as_documented(name, values):
    """docs/format.md in other words."""
    data = name.encode()
    for value in values:
        if value is None:
            data += b"n" + bytes(8)
        elif isinstance(value, int):
            data += b"i" + struct.pack("<Qq", 8, value)
        else:
            content = value.encode() if isinstance(value, str) else value
            data += (b"t" if isinstance(value, str) else b"b") + struct.pack("<Q", len(content))
            data += content
    return struct.unpack("<q", struct.pack("<Q", xxhash.xxh3_64_intdigest(data)))[0]


ROW = (7, "a", 0, 0, 4, None, "", "f0", "灯塔", b"\x01\x00\x00\x00")


def test_a_digest_is_what_the_format_says():
    for number in range(50):  # of both signs
        row = (number, *ROW[1:])
        assert CHUNKS.digest(row) == as_documented("chunks", row)
    assert {CHUNKS.digest((n, *ROW[1:])) > 0 for n in range(50)} == {True, False}


def test_every_column_counts():
    digest = CHUNKS.digest(ROW)
    assert CHUNKS.is_whole((*ROW, digest))
    for place in range(len(ROW)):
        for other in (None, 1, "other", b"other", 2.5, "7"):
            if other != ROW[place]:
                changed = (*ROW[:place], other, *ROW[place + 1 :])
                assert not CHUNKS.is_whole((*changed, digest)), (place, other)
    assert KEYS.digest(("1", "2", "3")) != KEYS.digest(("12", "", "3"))
    assert SETTINGS.digest(("a", "b")) != KEYS.digest(("a", "b"))
    assert len(DOCUMENTS.columns) == 8


def test_a_sum_of_ids_tells_them_apart():
    ids = np.arange(1, 2000)
    sums = {digests.sum_of_ids(np.delete(ids, place)) for place in range(len(ids))}
    assert len(sums) == len(ids)
    assert digests.sum_of_ids(range(1, 2000)) == digests.sum_of_ids(ids)
    totals = Totals(chunks=len(ids), chunk_ids=digests.sum_of_ids(ids))
    assert totals.has_ids(ids[::-1])
    assert not totals.has_ids(ids[1:])
    assert not totals.has_ids(ids + 1)

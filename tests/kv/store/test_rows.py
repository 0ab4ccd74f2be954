"""What lies behind the tokens of a chunk: the same number of rows, however many tokens."""

import dataclasses
import json

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import ChunkCorrupt, StoreError
from jaxrag.kv.store import KVLayout

ROWS = 3


@pytest.fixture
def with_rows(layout):
    return dataclasses.replace(layout, rows=ROWS)


def test_rows_come_back_with_their_chunk_and_are_no_tokens(any_store, chunk, with_rows):
    store = any_store(with_rows, max_tokens=8)
    a, b = chunk(1, 3, with_rows), chunk(2, 8, with_rows)
    assert a.kv.shape[2] == 3 + ROWS
    for it in (a, b):
        assert store.put(it.key, it.kv, record=it.record).won
    found = store.get_many([b.key, a.key])
    assert found.offsets == {b.key: (0, 8 + ROWS), a.key: (8 + ROWS, 3 + ROWS)}
    for it in (a, b):
        start, length = found.offsets[it.key]
        assert found.kv[:, :, start : start + length].tobytes() == it.kv.tobytes()
    [one, other] = store.head([a.key, b.key])
    assert (one.tokens, one.layout, one.nbytes) == (3, with_rows, a.kv.nbytes)
    assert other.nbytes == with_rows.stored_nbytes(8) == b.kv.nbytes
    assert "rows" in json.loads(one.to_json())
    long = chunk(3, 9, with_rows)
    with refused(StoreError, "9 tokens, expected 1 to max_tokens=8"):
        store.put(long.key, long.kv, record=long.record)


def test_a_flipped_bit_behind_the_tokens_is_never_served(open_store, chunk, with_rows, tmp_path):
    store, c = open_store(layout=with_rows), chunk(1, 4, with_rows)
    store.put(c.key, c.kv, record=c.record)
    last = c.kv[-1, 1, -1].tobytes()  # V of the last row of the last layer
    [path] = [it for it in tmp_path.rglob("*") if it.is_file() and last in it.read_bytes()]
    data = bytearray(path.read_bytes())
    data[data.index(last)] ^= 1
    path.write_bytes(data)
    with refused(ChunkCorrupt, "layer 2 of 3"):
        store.get(c.key)
    assert store.verify([c.key]).corrupt == (c.key,)


def test_bits_behind_the_tokens_may_be_any(any_store, chunk, with_rows):
    store, c = any_store(with_rows), chunk(1, 4, with_rows)
    c.kv[:, :, :4], c.kv[:, :, 4:] = 0, np.nan
    store.put(c.key, c.kv, record=c.record)
    assert store.verify([c.key], finite=True).ok == 1
    c.kv[:, :, 0] = np.nan
    store.put(c.key, c.kv, record=c.record, replace=True)
    assert store.verify([c.key], finite=True).corrupt == (c.key,)


def test_layouts_say_so_only_where_there_are_rows(layout, with_rows):
    assert "rows" not in layout.to_dict()
    for it in (layout, with_rows):
        assert KVLayout(**it.to_dict()) == it
    with refused(StoreError, "rows=3"):
        dataclasses.replace(with_rows, stored="int8")
    with refused(StoreError, "rows=-1"):
        dataclasses.replace(layout, rows=-1)

import dataclasses
import json

import numpy as np
import pytest
import xxhash

from jaxrag.errors import ChunkCorrupt, StoreError
from jaxrag.store.record import (
    MAX_RECORD_BYTES,
    KVLayout,
    Provenance,
    Record,
    layer_digests,
    new_record,
    read_record,
)


@pytest.fixture
def record(chunk):
    c = chunk(1)
    return new_record(c.key, "a1" * 8, c.kv, "bfloat16", c.record)


def signed(values):
    """The JSON of a record with these values and a checksum that agrees with them."""
    body = {name: value for name, value in values.items() if name != "check"}
    text = json.dumps(body, sort_keys=True).encode()
    return json.dumps({**body, "check": xxhash.xxh3_64_hexdigest(text)}).encode()


def test_json_round_trip(record):
    assert Record.from_json(record.to_json()) == record
    assert record.tokens == 7
    assert Record.from_json(signed(json.loads(record.to_json()))) == record


def test_digests_are_those_of_each_layers_bytes(record, chunk):
    kv = chunk(1).kv
    assert record.xxh3 == tuple(xxhash.xxh3_64_hexdigest(layer.tobytes()) for layer in kv)


def test_digests_of_a_slice_of_a_larger_buffer(chunk, layout):
    c = chunk(2)
    big = np.zeros(layout.shape(40), layout.numpy_dtype)
    big[:, :, 11:18] = c.kv
    assert layer_digests(big[:, :, 11:18]) == layer_digests(c.kv)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 2}, "format is 2"),
        ({"format": "1"}, "format is '1'"),
        ({"key": "ab"}, "key='ab'"),
        ({"attempt": "../../../../etc"}, "attempt='../"),
        ({"attempt": "A1" * 8}, "attempt="),
        ({"shape": [3, 2, 7, 2]}, "shape is"),
        ({"shape": [3, 3, 7, 2, 5]}, "shape is"),
        ({"shape": [3, 2, -7, 2, 5]}, "shape is"),
        ({"shape": [3, 2, 0, 2, 5]}, "shape is"),
        ({"shape": [3, 2, 7.0, 2, 5]}, "shape is"),
        ({"shape": [True, 2, 7, 2, 5]}, "shape is"),
        ({"shape": "3"}, "shape is"),
        ({"dtype": "float64"}, "dtype is"),
        ({"dtype": None}, "dtype is"),
        ({"dtype": ["bfloat16"]}, "dtype is"),
        ({"xxh3": []}, "xxh3 is not"),
        ({"xxh3": ["0" * 16] * 4}, "xxh3 is not"),
        ({"xxh3": ["0" * 15] * 3}, "xxh3 is not"),
        ({"xxh3": {"0": 1}}, "xxh3 is not"),
        ({"encoder": ""}, "encoder="),
        ({"encoder": 3}, "encoder is 3"),
        ({"encoder": "x" * 65}, "encoder="),
        ({"content_id": None}, "content_id="),
        ({"context_id": "0" * 41}, "context_id="),
        ({"created": "yesterday"}, "created is"),
        ({"created": 0}, "created is"),
        ({"created": "2026-01-31"}, "created is"),
        ({"created": "2026-01-31T12:00:00+02:00"}, "created is"),
        ({"extra": 1}, "'extra'"),
    ],
)
def test_from_json_refuses_what_no_writer_wrote(record, change, said):
    values = {**json.loads(record.to_json()), **change}
    with pytest.raises(StoreError, match=said):
        Record.from_json(signed(values))


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Record)])
def test_from_json_refuses_a_missing_field(record, name):
    values = json.loads(record.to_json())
    del values[name]
    with pytest.raises(StoreError, match=name):
        Record.from_json(signed(values))


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 50_000, b"{}", b"\0" * 100]
)
def test_from_json_refuses_what_is_no_object(text):
    with pytest.raises(StoreError):
        Record.from_json(text)


def test_every_flipped_bit_of_a_record_is_noticed(record):
    text = record.to_json()
    for position in range(len(text)):
        for bit in (1, 4, 64):
            damaged = bytearray(text)
            damaged[position] ^= bit
            try:
                # White space and number spellings may change without changing a value.
                assert Record.from_json(bytes(damaged)) == record
            except StoreError:
                continue


def test_a_record_of_another_chunk_model_or_size_is_refused(record, model, layout):
    def read(record=record, key=record.key, model=model, layout=layout, max_tokens=7):
        return read_record(record.to_json(), key, model, layout, max_tokens)

    assert read() == record
    with pytest.raises(ChunkCorrupt, match=f"chunk {'0' * 40}: .* belongs to {record.key}"):
        read(key="0" * 40)
    with pytest.raises(ChunkCorrupt, match="not written under fingerprint ffff"):
        read(model="f" * 64)
    with pytest.raises(ChunkCorrupt, match=r"bfloat16 \[3, 2, 7, 2, 5\], expected bfloat16 \[4, 2"):
        read(layout=dataclasses.replace(layout, num_layers=4))
    with pytest.raises(ChunkCorrupt, match="expected float16"):
        read(layout=dataclasses.replace(layout, dtype="float16"))
    with pytest.raises(ChunkCorrupt, match="7 tokens, expected at most 6"):
        read(max_tokens=6)
    with pytest.raises(ChunkCorrupt, match="not written under fingerprint"):
        read(dataclasses.replace(record, content_id="0" * 40))
    with pytest.raises(ChunkCorrupt, match="longer than"):
        padded = record.to_json() + b" " * MAX_RECORD_BYTES
        read_record(padded, record.key, model, layout, 7)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_layers": 0}, "num_layers=0"),
        ({"num_kv_heads": -1}, "num_kv_heads=-1"),
        ({"head_dim": 2.0}, r"head_dim=2\.0"),
        ({"head_dim": True}, "head_dim=True"),
        ({"dtype": "int8"}, "dtype='int8'"),
    ],
)
def test_layout_refuses_impossible_sizes(layout, change, said):
    with pytest.raises(StoreError, match=said):
        dataclasses.replace(layout, **change)


def test_layout_sizes():
    layout = KVLayout(num_layers=3, num_kv_heads=2, head_dim=5, dtype="float32")
    assert layout.shape(11) == (3, 2, 11, 2, 5)
    assert layout.nbytes(11) == np.zeros(layout.shape(11), np.float32).nbytes
    assert layout.bits_dtype == np.uint32


@pytest.mark.parametrize("encoder", ["", "x" * 65, "a\nb"])
def test_provenance_refuses_an_encoder_name_that_no_record_can_hold(encoder):
    with pytest.raises(StoreError, match="encoder="):
        Provenance(encoder, "0" * 40, "0" * 40)

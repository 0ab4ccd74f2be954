import dataclasses
import json
import re
import time

import numpy as np
import pytest
import xxhash
from refusal import refused

from jaxrag.base.errors import ChunkCorrupt, ChunkNotSealed, StoreError
from jaxrag.kv.store.layout import KVLayout
from jaxrag.kv.store.record import (
    MAX_RECORD_BYTES,
    AuxArray,
    Record,
    attempt_age,
    describe_aux,
    layer_digests,
    new_attempt,
    new_record,
    read_record,
)
from jaxrag.kv.store.seal import Sealer

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=5, dtype="bfloat16")
DIGEST = "0123456789abcdef"
SEALER = Sealer(b"a secret of sixteen bytes or more")


@pytest.fixture
def record(chunk):
    c = chunk(1)
    aux = {"summary": describe_aux("summary", np.arange(6, dtype=np.float32).reshape(2, 3))}
    return new_record(c.key, "a1" * 12, 7, LAYOUT, c.record, layer_digests(c.kv), aux)


@pytest.fixture
def sealed(record):
    """The same record with seals."""
    aux = {
        name: dataclasses.replace(entry, seals=("0f" * 16,)) for name, entry in record.aux.items()
    }
    seals = ("1f" * 16,) * 3
    return dataclasses.replace(record, seals=seals, aux=aux).sealed(SEALER)


def signed(values):
    """The JSON of a record with these values and a checksum that agrees with them."""
    body = {name: value for name, value in values.items() if name != "check"}
    text = json.dumps(body, sort_keys=True).encode()
    return json.dumps({**body, "check": xxhash.xxh3_64_hexdigest(text)}).encode()


def test_json_round_trip(record):
    assert Record.from_json(record.to_json()) == record
    assert record.tokens == 7
    assert Record.from_json(signed(json.loads(record.to_json()))) == record


def test_a_record_with_seals_comes_back_and_is_of_another_format(record, sealed):
    assert Record.from_json(sealed.to_json()) == sealed
    assert [json.loads(it.to_json())["format"] for it in (record, sealed)] == [2, 3]
    assert sealed.sealed(None) == record
    sealed.require_seal(SEALER)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 2}, ""),
        ({"format": 3.0}, "3"),
        ({"seal": ""}, "seal=''"),
        ({"seal": None}, "seal=None"),
        ({"seal": "0" * 31}, "000"),
        ({"seals": []}, "3"),
        ({"seals": ["0" * 16] * 3}, ""),
        ({"aux": {"x": {"shape": [2], "dtype": "uint8", "xxh3": [DIGEST]}}}, "xxh3"),
        ({"aux": {"x": {"shape": [2], "dtype": "uint8", "xxh3": [DIGEST], "seals": [DIGEST]}}}, ""),
    ],
)
def test_from_json_refuses_seals_that_no_writer_made(sealed, change, said):
    with refused(StoreError, said):
        Record.from_json(signed({**json.loads(sealed.to_json()), **change}))


def test_a_seal_is_over_every_field(sealed):
    changes = {
        "key": "ab" * 20, "attempt": "b2" * 12, "shape": [3, 2, 8, 2, 5], "dtype": "float16",
        "stored": "native", "ways": 1, "xxh3": [DIGEST] * 3, "encoder": "another",
        "content_id": "cd" * 20, "context_id": "ef" * 20, "created": "2001-01-01T00:00:00Z",
        "seals": ["2f" * 16] * 3, "seal": "3f" * 16, "aux": {},
    }  # fmt: skip
    values = json.loads(sealed.to_json())
    assert changes.keys() == values.keys() - {"format", "check"}
    for name, value in changes.items():
        if values[name] == value:
            continue
        changed = Record.from_json(signed({**values, name: value}))
        with refused(ChunkNotSealed):
            changed.require_seal(SEALER)
    for name in ("shape", "dtype", "xxh3", "seals"):
        aux = json.loads(sealed.to_json())["aux"]
        value = {"shape": [6, 1], "dtype": "int32", "xxh3": [DIGEST], "seals": ["2f" * 16]}[name]
        aux["summary"][name] = value
        changed = Record.from_json(signed({**values, "aux": aux}))
        with pytest.raises(ChunkNotSealed):
            changed.require_seal(SEALER)
    with pytest.raises(ChunkNotSealed):
        sealed.require_seal(Sealer(b"another secret of many bytes"))


def test_a_record_without_seal_is_as_it_was(record):
    with refused(ChunkNotSealed):
        record.require_seal(SEALER)


def test_seals_leave_no_less_room_for_digests(chunk):
    """As many as a record without seals holds, of 8 ranks and 126 layers, find room."""
    c = chunk(1)
    layout = KVLayout(126, 8, 5, "bfloat16", "int8")
    scale = AuxArray((126, 2, 7, 8), "float32", (DIGEST,) * 8, ("0f" * 16,) * 8)
    aux = {
        f"attention_index_{i}": AuxArray((9,), "uint8", (DIGEST,), ("0f" * 16,)) for i in range(126)
    }
    made = new_record(
        c.key, "a1" * 12, 7, layout, c.record, [DIGEST] * 1008, aux | {"scale": scale}, 8,
        ["0f" * 16] * 1008, SEALER,
    )  # fmt: skip
    assert Record.from_json(made.to_json()) == made


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
        ({"format": 1}, "1"),
        ({"key": "ab"}, "key='ab'"),
        ({"attempt": "../../../../etc"}, ""),
        ({"shape": [3, 3, 7, 2, 5]}, ""),
        ({"shape": [3, 2, 0, 2, 5]}, ""),
        ({"shape": [3, 2, 7.0, 2, 5]}, ""),
        ({"shape": [True, 2, 7, 2, 5]}, ""),
        ({"dtype": "float64"}, ""),
        ({"dtype": ["bfloat16"]}, ""),
        ({"stored": "int3"}, "'int3'"),
        ({"stored": "int8"}, ""),
        ({"ways": 3}, "3"),
        ({"ways": 2}, "xxh3"),
        ({"aux": []}, ""),
        ({"aux": {"../x": {}}}, "'../x'"),
        ({"aux": {"x": {"shape": [2], "dtype": "float32"}}}, ""),
        ({"aux": {"x": {"shape": [2], "dtype": "object", "xxh3": [DIGEST]}}}, "'object'"),
        ({"aux": {"x": {"shape": [0], "dtype": "uint8", "xxh3": [DIGEST]}}}, "0"),
        ({"aux": {"x": {"shape": [3], "dtype": "uint8", "xxh3": []}}}, "xxh3"),
        ({"aux": {"x": {"shape": [2**60], "dtype": "uint8", "xxh3": [DIGEST]}}}, "11529215"),
        ({"aux": {"scale": {"shape": [3], "dtype": "uint8", "xxh3": [DIGEST]}}}, ""),
        ({"xxh3": []}, "xxh3"),
        ({"xxh3": ["0" * 15] * 3}, "xxh3"),
        ({"encoder": ""}, ""),
        ({"encoder": "x" * 65}, ""),
        ({"content_id": None}, "content_id"),
        ({"created": "yesterday"}, ""),
        ({"created": "2026-01-31T12:00:00+02:00"}, ""),
        ({"extra": 1}, "'extra'"),
    ],
)
def test_from_json_refuses_what_no_writer_wrote(record, change, said):
    values = {**json.loads(record.to_json()), **change}
    with refused(StoreError, said):
        Record.from_json(signed(values))


@pytest.mark.parametrize(
    "name",
    [it.name for it in dataclasses.fields(Record) if it.name not in ("kept", "rows")],  # in some
)
def test_from_json_refuses_a_missing_field(sealed, name):
    values = json.loads(sealed.to_json())
    del values[name]
    with refused(StoreError, name):
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
    with refused(ChunkCorrupt, "0" * 40):
        read(key="0" * 40)
    with refused(ChunkCorrupt):
        read(model="f" * 64)
    with refused(ChunkCorrupt, "bfloat16"):
        read(layout=dataclasses.replace(layout, num_layers=4))
    with refused(ChunkCorrupt, "float16"):
        read(layout=dataclasses.replace(layout, dtype="float16"))
    with refused(ChunkCorrupt, "int8"):
        read(layout=dataclasses.replace(layout, stored="int8"))
    with refused(ChunkCorrupt, "7"):
        read(max_tokens=6)
    with refused(ChunkCorrupt):
        read(dataclasses.replace(record, content_id="0" * 40))
    with refused(ChunkCorrupt):
        padded = record.to_json() + b" " * MAX_RECORD_BYTES
        read_record(padded, record.key, model, layout, 7)


def test_layout_sizes():
    layout = KVLayout(num_layers=3, num_kv_heads=2, head_dim=5, dtype="float32")
    assert layout.shape(11) == (3, 2, 11, 2, 5)
    assert layout.nbytes(11) == np.zeros(layout.shape(11), np.float32).nbytes
    assert layout.stored_nbytes(11) == layout.nbytes(11)
    assert (layout.bits_dtype, layout.stored_dtype) == (np.uint32, np.float32)
    small = dataclasses.replace(layout, stored="int8")
    assert small.nbytes(11) == layout.nbytes(11)
    assert small.stored_nbytes(11) == 3 * 2 * 11 * 2 * (5 + 4)
    assert (small.bits_dtype, small.stored_dtype) == (np.uint8, np.int8)


def test_attempts_tell_their_age():
    assert new_attempt() != new_attempt()
    assert -1 <= attempt_age(new_attempt()) < 60
    hour_ago = f"{int(time.time()) - 3600:08x}{'0' * 16}"
    assert 3599 <= attempt_age(hour_ago) < 3660


@pytest.mark.parametrize("clock", [-86_400.0, 2.0**32 + 5, 2.0**40])
def test_attempts_have_one_length_however_the_clock_is_set(monkeypatch, clock):
    monkeypatch.setattr(time, "time", lambda: clock)
    assert re.fullmatch("[0-9a-f]{24}", new_attempt())


def test_a_record_knows_its_age_and_bytes(record):
    assert -1 <= record.age < 60
    old = dataclasses.replace(record, created="2001-09-09T01:46:40Z")
    assert old.age == pytest.approx(time.time() - 1_000_000_000, abs=60)
    assert record.nbytes == LAYOUT.nbytes(7) + 24


def test_a_record_that_no_reader_would_take_is_refused(chunk):
    c = chunk(1)
    aux = {f"a{number}": AuxArray((1,), "uint8", (DIGEST,)) for number in range(1000)}
    with refused(StoreError, "65536"):
        new_record(c.key, "a1" * 12, 7, LAYOUT, c.record, [DIGEST] * 3, aux)

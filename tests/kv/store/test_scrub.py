"""Verification of everything stored, and putting over what it refused."""

import types

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import StoreError
from jaxrag.kv.store import ScrubReport, scrub


def put(store, *chunks, replace=False):
    for c in chunks:
        store.put(c.key, c.kv, record=c.record, aux={"x": np.arange(3)}, replace=replace)


def flip(path):
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_found_where_it_was_written_so(any_store, chunk, value):
    store = any_store()
    chunks = [chunk(number) for number in range(3)]
    for c in chunks:
        c.kv.fill(1)
    chunks[1].kv.reshape(-1)[-1] = value
    put(store, *chunks)
    assert store.verify() == ScrubReport(3, (), ())  # the bytes are those that were put
    assert store.verify(finite=True) == ScrubReport(2, (chunks[1].key,), ())


@pytest.fixture
def damaged(open_store, chunk, tmp_path):
    """A store and its chunks by what is wrong with them."""
    store = open_store()
    chunks = {
        name: chunk(number, 3 + number)
        for number, name in enumerate(["good", "kv", "aux", "record", "gone", "absent"])
    }
    put(store, *(c for name, c in chunks.items() if name != "absent"))

    def path(name, pattern):
        (found,) = (tmp_path / "kb").glob(f"kv/*/*/{chunks[name].key}/{pattern}")
        return found

    flip(path("kv", "*/c/0/0/0/0/0"))
    flip(path("aux", "*/aux/x/c/0"))
    flip(path("record", "commit.json"))
    path("gone", "*/c/0/0/0/0/0").unlink()
    return store, chunks


def test_every_kind_of_damage_is_named(damaged, open_store):
    _, chunks = damaged
    names = {c.key: name for name, c in chunks.items()}
    report = open_store("r").verify([c.key for c in chunks.values()])
    assert report.ok == 1
    assert [names[key] for key in report.corrupt] == ["kv", "aux", "record"]
    assert [names[key] for key in report.missing] == ["gone", "absent"]


def test_the_rate_is_kept(any_store, chunk, monkeypatch):
    store = any_store()
    chunks = [chunk(number) for number in range(3)]
    put(store, *chunks)
    slept = []
    clock = types.SimpleNamespace(monotonic=lambda: 100.0 + sum(slept), sleep=slept.append)
    monkeypatch.setattr(scrub, "time", clock)
    nbytes = store.head([chunks[0].key])[0].nbytes
    assert store.verify(max_bytes_per_second=nbytes / 2).ok == 3
    assert slept == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_a_rate_must_be_positive(any_store, rate):
    with refused(StoreError, "max_bytes_per_second"):
        any_store().verify(max_bytes_per_second=rate)

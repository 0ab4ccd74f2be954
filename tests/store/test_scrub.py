"""Verification of everything stored, and repair."""

import time

import numpy as np
import pytest

from jaxrag.errors import StoreError
from jaxrag.store import Fresh, Provenance, Record, VerifyReport


def put(store, *chunks):
    for c in chunks:
        store.put(c.key, c.kv, record=c.record, aux={"x": np.arange(3)})


def flip(path):
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


def test_a_sound_store(any_store, chunk):
    store = any_store()
    assert store.verify() == VerifyReport(0, (), (), ())
    chunks = [chunk(number, 1 + number) for number in range(6)]
    put(store, *chunks)
    assert store.verify() == VerifyReport(6, (), (), ())
    absent = chunk(9)
    report = store.verify([chunks[0].key, absent.key, chunks[0].key])
    assert report == VerifyReport(1, (), (), (absent.key,))


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
    assert report.repaired == ()
    assert [names[key] for key in report.corrupt] == ["kv", "aux", "record"]
    assert [names[key] for key in report.missing] == ["gone", "absent"]


def test_repair_puts_over_the_damage(damaged):
    store, chunks = damaged
    by_key = {c.key: c for c in chunks.values()}
    asked = {}

    def repair(found):
        key = found.key if isinstance(found, Record) else found
        asked[key] = found
        if key == chunks["absent"].key:
            return None
        return Fresh(by_key[key].kv, by_key[key].record, {"x": np.arange(3)})

    report = store.verify(list(by_key), repair=repair)
    assert report.ok == 1
    assert set(report.repaired) == {chunks[name].key for name in ("kv", "aux", "record", "gone")}
    assert (report.corrupt, report.missing) == ((), (chunks["absent"].key,))
    assert asked[chunks["kv"].key].provenance == chunks["kv"].record
    assert asked[chunks["record"].key] == chunks["record"].key  # its record says nothing
    assert store.verify() == VerifyReport(5, (), (), ())
    for name in ("kv", "aux", "record", "gone"):
        chunks[name].assert_equal(store.get(chunks[name].key))
        assert store.aux(chunks[name].key, "x").tolist() == [0, 1, 2]


def test_what_somebody_else_repaired_meanwhile_counts(damaged, open_store, monkeypatch):
    store, chunks = damaged
    c = chunks["kv"]
    finish_writes = store._backend.finish_writes

    def slow_write(*arguments):
        finish_writes(*arguments)
        monkeypatch.undo()
        open_store().put(c.key, c.kv, record=c.record, replace=True)

    monkeypatch.setattr(store._backend, "finish_writes", slow_write)
    report = store.verify([c.key], repair=lambda record: Fresh(c.kv, c.record))
    assert report.repaired == (c.key,)
    c.assert_equal(store.get(c.key))


def test_a_repair_that_does_not_fit_is_an_error(damaged):
    store, chunks = damaged
    wrong = Fresh(chunks["kv"].kv, Provenance("isolated", "0" * 40, "0" * 40))
    with pytest.raises(StoreError, match="make the key"):
        store.verify([chunks["kv"].key], repair=lambda record: wrong)


def test_the_rate_is_kept(any_store, chunk, monkeypatch):
    store = any_store()
    chunks = [chunk(number) for number in range(3)]
    put(store, *chunks)
    slept = []
    monkeypatch.setattr(time, "monotonic", lambda: 100.0 + sum(slept))
    monkeypatch.setattr(time, "sleep", slept.append)
    nbytes = store.head([chunks[0].key])[0].nbytes
    assert store.verify(max_bytes_per_second=nbytes / 2).ok == 3
    assert slept == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_a_rate_must_be_positive(any_store, rate):
    with pytest.raises(StoreError, match="max_bytes_per_second=.*: expected a positive number"):
        any_store().verify(max_bytes_per_second=rate)

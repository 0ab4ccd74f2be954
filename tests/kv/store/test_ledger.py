"""What writers note of their records is what is there, however they end."""

import os
import shutil
import stat
import subprocess
import sys

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import StoreError
from jaxrag.kv.store import chunk_store, ledger
from jaxrag.kv.store.backend import Backend
from jaxrag.kv.store.ledger import StoredChunk, Sums
from jaxrag.kv.store.namespace import Namespace


@pytest.fixture
def read(monkeypatch):
    """The keys whose records were read."""
    keys = []
    find = Namespace.find

    def counting(self, asked):
        keys.extend(asked)
        return find(self, asked)

    monkeypatch.setattr(Namespace, "find", counting)
    return keys


def test_over_a_shared_file_system_records_are_read(open_store, chunk, read, monkeypatch):
    chunks = [chunk(n, tokens=3 + n) for n in range(3)]
    local = open_store()
    put(local, chunks[0])
    monkeypatch.setattr(chunk_store, "is_shared", lambda folder: True)
    put(open_store(), chunks[1])
    monkeypatch.undo()
    put(local, chunks[2])
    for store in (local, open_store(mode="r")):
        assert store.counted() == walked(store)
        assert store.counted().encoders[chunks[0].record.encoder].chunks == 3


def put(store, *chunks, **arguments):
    for one in chunks:
        store.put(one.key, one.kv, record=one.record, **arguments)


def walked(store):
    """What a look at every record counts."""
    found = Sums()
    for record in store.records():
        found.add(StoredChunk.of(record))
    return found


def test_what_is_noted_is_what_is_there(open_store, chunk, read):
    store = open_store()
    chunks = [chunk(n, tokens=3 + n) for n in range(9)]
    put(store, *chunks[:6])
    put(store, *chunks[6:], aux={"queries": np.zeros(5, np.float32)})
    store.delete([chunks[0].key, chunks[8].key])
    put(store, chunks[1], replace=True)
    put(store, chunks[7], aux={"queries": np.zeros(50, np.float32)}, replace=True)
    store.gc(lambda record: record.key != chunks[3].key, grace_seconds=0)
    there = walked(store)
    for reader in (store, open_store(mode="r")):
        read.clear()
        assert reader.counted() == there
        assert read == []
    assert there.encoders["isolated"].chunks == 6
    assert (there.aux["queries"].chunks, there.aux["queries"].nbytes) == (2, 220)


@pytest.mark.parametrize("done", [False, True])
def test_of_a_change_that_did_not_end_the_record_is_read(open_store, chunk, monkeypatch, done):
    store = open_store()
    put(store, chunk(0), chunk(1))
    change = Backend._change_if

    def dies(self, path, *arguments):
        if done:
            change(self, path, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(Backend, "_change_if", dies)
    with pytest.raises(KeyboardInterrupt):
        put(store, chunk(2))
    with pytest.raises(KeyboardInterrupt):
        store.delete([chunk(0).key])
    monkeypatch.undo()
    assert store.counted() == walked(store)
    assert open_store(mode="r").counted() == walked(store)
    assert (store.counted().encoders["isolated"].chunks == 2) and done == (
        chunk(2).key in set(store.keys())
    )
    monkeypatch.setattr(ledger, "_STALE_SECONDS", -1.0)
    store.gc(lambda record: True, grace_seconds=0)
    counted, changing = store._anyones.ledger.counted()
    assert (counted, changing) == (walked(store), [])


def test_a_killed_process_leaves_what_is_there(open_store, chunk, tmp_path):
    """Processes killed at moments of their own, between any two steps of a put or a delete."""
    store = open_store()
    put(store, *map(chunk, range(4)))
    script = """
import sys, threading, os, signal, time
sys.path.insert(0, sys.argv[1])
from conftest import LAYOUT, FINGERPRINT, make_chunk
from jaxrag.kv.store import ChunkStore
store = ChunkStore.open(sys.argv[2], FINGERPRINT, LAYOUT, mode="rw")
print("begun", flush=True)
threading.Timer(float(sys.argv[3]), os.kill, (os.getpid(), signal.SIGKILL)).start()
for number in range(10**6):
    one = make_chunk(number % 7)
    store.put(one.key, one.kv, record=one.record, replace=number % 2 == 0)
    store.delete([make_chunk((number + 3) % 7).key])
"""
    for number in range(6):
        subprocess.run(
            [sys.executable, "-c", script, os.path.dirname(__file__), str(store.directory),
             str(0.05 + 0.013 * number)],
            stdout=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        assert store.counted() == walked(store)


def test_two_who_change_one_key_leave_what_is_there(open_store, chunk):
    """Who notes last need not have changed the key last."""
    store, one = open_store(), chunk(0)
    put(store, one)
    notes = store._anyones.ledger
    (record,) = store.records()
    with notes.changing(one.key) as first:
        with notes.changing(one.key) as second:
            second(None)
        first(record)
    assert store.counted() == walked(store)


def test_what_was_there_before_is_counted_by_the_first_writer(open_store, chunk, monkeypatch):
    store = open_store()
    put(store, *map(chunk, range(40)))
    store.close()
    shutil.rmtree(store.directory / ledger.FOLDER)
    reader = open_store(mode="r")
    assert reader.counted() == walked(reader)
    assert not (store.directory / ledger.FOLDER).exists()
    monkeypatch.setattr(ledger, "_TURN_SECONDS", 0.0)  # a part each
    folders, asked = Namespace.folders, []

    def killed(self, part):
        asked.append(part)
        if len(asked) == 100:
            raise KeyboardInterrupt
        return folders(self, part)

    monkeypatch.setattr(Namespace, "folders", killed)
    with pytest.raises(KeyboardInterrupt):
        put(open_store(), chunk(40))
    assert reader.counted() == walked(reader)
    asked.clear()
    monkeypatch.setattr(Namespace, "folders", folders)
    writer = open_store()
    put(writer, chunk(41))
    writer.delete([chunk(5).key])
    assert reader._anyones.ledger.counted() is not None
    assert reader.counted() == walked(reader)


def test_a_power_cut_is_made_good_by_a_collection(open_store, chunk):
    """Notes wait for no disk, so that the last may be lost: here the file is an older copy."""
    store = open_store()
    put(store, *map(chunk, range(5)))
    store.close()
    (path,) = (store.directory / ledger.FOLDER).glob("*.sqlite")
    older = path.read_bytes()
    store = open_store()
    put(store, chunk(5), chunk(6))
    store.delete([chunk(0).key])
    store.close()
    path.write_bytes(older)
    store = open_store()
    assert store.counted() != walked(store)
    store.gc(lambda record: True, grace_seconds=0)
    assert store.counted() == walked(store)


def test_a_damaged_ledger_is_named(open_store, chunk):
    store = open_store()
    put(store, *map(chunk, range(50)))
    store.close()
    (path,) = (store.directory / ledger.FOLDER).glob("*.sqlite")
    data = bytearray(path.read_bytes())
    for place in range(5000, len(data), 4096):
        data[place] ^= 1
    path.write_bytes(data)
    with refused(StoreError):
        open_store(mode="r").counted()
    path.unlink()
    assert open_store(mode="r").counted() == walked(store)


def test_a_folder_that_cannot_be_written_is_counted(open_store, chunk):
    store = open_store()
    put(store, *map(chunk, range(5)))
    store.close()
    folder = store.directory / ledger.FOLDER
    mode = folder.stat().st_mode
    folder.chmod(mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    try:
        reader = open_store(mode="r")
        assert reader.counted() == walked(reader)
        assert [path.suffix for path in folder.iterdir()] == [".sqlite"]
    finally:
        folder.chmod(mode)


def test_with_a_secret_records_are_read(open_store, chunk):
    """Which secret sealed a record, only the record tells."""
    open_store(secret=b"x" * 16).put(chunk(0).key, chunk(0).kv, record=chunk(0).record)
    put(open_store(), chunk(1))
    assert open_store(secret=b"x" * 16).counted().encoders["isolated"].chunks == 1
    assert open_store().counted().encoders["isolated"].chunks == 2

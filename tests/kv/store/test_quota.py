"""A chunk store with a size limit: what leaves, what stays, and what never comes back wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from refusal import refused

from jaxrag.base.errors import ChunkMissing, StoreError
from jaxrag.kv.store import ChunkStore, ReadThrough, fingerprint

OTHER = fingerprint({"weights": "another model"})


@pytest.fixture
def size(chunk):
    """Bytes of a chunk of the standard length."""
    return chunk(0).kv.nbytes


def put(store, *chunks):
    return [store.put(c.key, c.kv, record=c.record) for c in chunks]


def bytes_on_disk(root):
    return sum(path.stat().st_size for path in root.rglob("c/**/*") if path.is_file())


def test_a_put_makes_room(open_store, chunk, size, tmp_path):
    store = open_store(max_bytes=3 * size)
    chunks = [chunk(number) for number in range(8)]
    for c in chunks:
        assert put(store, c)[0].won
        assert sum(it.nbytes for it in store.records()) <= 3 * size
    held = list(store.keys())
    assert len(held) == 3
    for c in chunks:
        if c.key in held:
            c.assert_equal(store.get(c.key))
        else:
            with pytest.raises(ChunkMissing):
                store.get(c.key)
    assert bytes_on_disk(tmp_path / "kb") < 4 * size


def test_auxiliary_arrays_count(open_store, chunk, size):
    store = open_store(max_bytes=4 * size)
    c = chunk(1)
    store.put(c.key, c.kv, record=c.record, aux={"index": chunk(1).kv.view("uint16")})
    put(store, chunk(2), chunk(3), chunk(4))
    assert sum(it.nbytes for it in store.records()) <= 4 * size
    assert len(list(store.keys())) == 3


def test_chunks_that_stand_already_are_counted_when_a_limit_is_set(open_store, chunk, size):
    put(open_store(), *(chunk(number) for number in range(6)))
    store = open_store(max_bytes=4 * size)
    assert len(list(store.keys())) == 4
    store.close()
    lower = open_store(max_bytes=2 * size)
    assert len(list(lower.keys())) == 2


def test_the_chunks_of_others_are_neither_counted_nor_dropped(open_store, chunk, size):
    """Two tenants of one folder: the limit of one is nothing to the other, whoever came first."""
    theirs = [chunk(number, model=OTHER) for number in range(4)]
    other = open_store(model=OTHER)
    put(other, *theirs[:2])
    store = open_store(max_bytes=2 * size)
    put(store, chunk(1), chunk(2))
    assert len(list(store.keys())) == 2  # their two take no room of ours
    put(store, chunk(3))
    put(other, *theirs[2:])
    store.close()
    open_store(max_bytes=size).close()
    assert len(list(open_store("r").keys())) == 1
    for c in theirs:
        c.assert_equal(open_store("r", model=OTHER).get(c.key))


def test_deleted_and_collected_chunks_give_their_room_back(open_store, chunk, size):
    store = open_store(max_bytes=3 * size)
    put(store, chunk(1), chunk(2), chunk(3))
    store.get_many([chunk(2).key] * 2 + [chunk(3).key])
    store.delete([chunk(1).key])
    put(store, chunk(4))
    assert len(list(store.keys())) == 3
    store.gc(lambda record: record.key == chunk(4).key, grace_seconds=0.0)
    put(store, chunk(5), chunk(6))
    assert len(list(store.keys())) == 3


def test_a_chunk_larger_than_the_limit_is_refused_and_nothing_leaves(open_store, chunk, size):
    store = open_store(max_bytes=2 * size)
    put(store, chunk(1))
    with refused(StoreError):
        put(store, chunk(2, tokens=15))
    assert list(store.keys()) == [chunk(1).key]


def test_reading_changes_nothing_on_disk(open_store, chunk, size, tmp_path):
    writer = open_store(max_bytes=3 * size)
    put(writer, chunk(1))
    writer.close()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "kb").rglob("*")}
    reader = open_store(mode="r", max_bytes=size)
    reader.get(chunk(1).key)
    reader.close()
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "kb").rglob("*")} == before


def test_ranks_that_write_together_keep_the_limit(open_store, chunk, size):
    store = open_store(max_bytes=2 * size)
    for number in range(4):
        c = chunk(number)
        attempt = store.begin(c.key, c.kv.shape[2], c.record, ways=2)
        halves = [c.kv[:, :, :, rank : rank + 1].copy() for rank in (0, 1)]
        shards = [store.put_shard(attempt, rank, half) for rank, half in enumerate(halves)]
        assert store.commit(attempt, shards).won
    assert len(list(store.keys())) == 2


def test_a_limit_needs_a_local_directory(s3_location, layout, model, open_store, tmp_path):
    with refused(StoreError, "max_bytes=5"):
        ChunkStore.open(s3_location, model, layout, mode="rw", max_bytes=5)
    with refused(StoreError, "max_bytes=-5"):
        open_store(max_bytes=-5)
    remote = ChunkStore.open(s3_location, model, layout, mode="rw")
    near = ChunkStore.open(tmp_path / "near", model, layout, mode="rw", max_bytes=5_000)
    assert ReadThrough(remote, near).writable


def test_several_processes_share_one_limit(tmp_path):
    """Four writers put different chunks; what stands at the end is within the limit and whole."""
    program = """
import sys
import numpy as np
from jaxrag.kv.store import *
LAYOUT = KVLayout(2, 2, 16, "float16")
MODEL = fingerprint({"weights": "shared"})
store = ChunkStore.open(sys.argv[1], MODEL, LAYOUT, mode="rw", max_bytes=8 * 4096)
for number in range(int(sys.argv[2]), 40, 4):
    ids = np.full(16, number, np.int32)
    record = Provenance("isolated", content_id("t", ids), context_id("isolated", ids[:0]))
    key = chunk_key(MODEL, record.content_id, record.context_id)
    store.put(key, np.full(LAYOUT.shape(16), number, np.float16), record=record)
    store.get_many([key], on_missing="skip")
store.close()
report = ChunkStore.open(sys.argv[1], MODEL, LAYOUT, mode="rw", max_bytes=8 * 4096).verify()
assert not report.corrupt, report
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", program, str(tmp_path / "kb")]
    writers = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(4)]
    assert [writer.wait(timeout=300) for writer in writers] == [0] * 4
    folders = [path.parent for path in (tmp_path / "kb" / "kv").rglob("commit.json")]
    assert 1 <= len(folders) <= 8
    assert bytes_on_disk(tmp_path / "kb") < 9 * 4096


def test_a_chunk_that_is_put_while_all_are_listed_stays_counted(open_store, chunk, size):
    store = open_store(max_bytes=2 * size)
    put(store, chunk(1))

    def listed():
        found = list(store.keys())
        put(store, chunk(2))
        return found

    store._limit.recount(listed)
    put(store, chunk(3))
    assert sum(it.nbytes for it in store.records()) <= 2 * size

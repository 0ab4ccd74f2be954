"""What only an object store does, or does differently; test_any_store.py runs there as a whole."""

import concurrent.futures

import pytest
import tensorstore as ts
from refusal import refused

from jaxrag.base.errors import ChunkCorrupt, ChunkMissing, StoreError
from jaxrag.kv.store import ChunkStore
from jaxrag.kv.store.address import kvstore_spec


def put(store, *chunks):
    return [store.put(c.key, c.kv, record=c.record) for c in chunks]


@pytest.fixture
def open_remote(s3_location, layout, model):
    """``open_remote(mode="rw")``: one repository in the bucket."""

    def open_(mode="rw", **options):
        return ChunkStore.open(s3_location, model, layout, mode=mode, **options)

    return open_


@pytest.fixture
def objects(s3_location):
    """The objects of that repository, by path."""
    return ts.KvStore.open(kvstore_spec(s3_location)).result()


def data_path(objects):
    (path,) = (p for p in objects.list().result() if b"/c/" in p)
    return path


def test_one_of_many_writers_wins(open_remote, chunk, objects):
    versions = [chunk(1, seed=seed) for seed in range(6)]
    stores = [open_remote() for _ in versions]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        results = list(
            pool.map(lambda pair: put(pair[0], pair[1])[0], zip(stores, versions, strict=True))
        )
    winners = [c for c, result in zip(versions, results, strict=True) if result.won]
    assert len(winners) == 1
    winners[0].assert_equal(open_remote("r").get(winners[0].key))
    assert sum(b"/c/" in path for path in objects.list().result()) == 1


def test_damage_is_refused(open_remote, chunk, objects):
    c = chunk(1)
    put(open_remote(), c)
    path = data_path(objects)
    data = bytearray(objects.read(path).result().value)
    data[5] ^= 1
    objects.write(path, bytes(data)).result()
    with refused(ChunkCorrupt, c.key):
        open_remote("r").get(c.key)
    objects.write(path, bytes(data[:-40])).result()
    with refused(ChunkCorrupt, c.key):
        open_remote("r").get(c.key)
    objects.write(path, None).result()
    with refused(ChunkMissing):
        open_remote("r").get(c.key)
    assert open_remote().put(c.key, c.kv, record=c.record, replace=True).won
    c.assert_equal(open_remote("r").get(c.key))


def test_an_attempt_that_was_not_committed_is_invisible_until_gc(open_remote, chunk, objects):
    store = open_remote()
    a, b = chunk(1), chunk(2)
    put(store, a)
    attempt = store.begin(b.key, 7, b.record, ways=1)
    shard = store.put_shard(attempt, 0, b.kv)
    assert store.head([b.key]) == [None]
    report = store.gc(lambda record: True, grace_seconds=0.0)
    assert (report.chunks, report.attempts) == (0, 1)
    assert sum(b"/c/" in path for path in objects.list().result()) == 1
    with refused(StoreError):
        store.commit(attempt, [shard])
    assert store.head([b.key]) == [None]
    a.assert_equal(store.get(a.key))


def test_deleting_leaves_nothing_behind(open_remote, chunk, objects):
    store = open_remote()
    put(store, chunk(1), chunk(2))
    assert store.delete([chunk(1).key, chunk(2).key]) == 2
    assert not [path for path in objects.list().result() if path.startswith(b"kv/")]


def test_locations_that_tensorstore_knows_are_left_to_it(tmp_path):
    assert kvstore_spec("s3://bucket/path") == "s3://bucket/path"
    assert kvstore_spec("gs://bucket/path") == "gs://bucket/path"
    assert kvstore_spec(str(tmp_path)) == {"driver": "file", "path": f"{tmp_path}/"}
    assert kvstore_spec("s3://b/a/c?endpoint=http://h:1&aws_region=eu") == {
        "driver": "s3",
        "bucket": "b",
        "path": "a/c",
        "endpoint": "http://h:1",
        "aws_region": "eu",
    }

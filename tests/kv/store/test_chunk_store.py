"""What lies on disk, and that nothing damaged, foreign or half-written is served."""

import dataclasses
import json
import os

import pytest
from refusal import refused

from jaxrag.base.errors import ChunkCorrupt, StoreError
from jaxrag.kv.store import ChunkStore, fingerprint


@pytest.fixture
def root(tmp_path):
    return tmp_path / "kb"


@pytest.fixture
def stored(open_store, chunk):
    """A store with one chunk of 7 tokens."""
    store, c = open_store(), chunk(1)
    store.put(c.key, c.kv, record=c.record)
    return store, c


def one(root, pattern):
    (path,) = root.glob(pattern)
    return path


def shard_of(root, key):
    return one(root, f"kv/*/*/{key}/*/c/0/0/0/0/0")


def commit_of(root, key):
    return one(root, f"kv/*/*/{key}/commit.json")


def files(root):
    paths = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    return sorted(str(path) for path in paths if path.parts[0] != "ledger")


def test_what_lies_on_disk(stored, root, model, layout):
    store, c = stored
    attempt = store.head([c.key])[0].attempt
    base = f"kv/{model[:16]}/{c.key[:2]}/{c.key}"
    assert files(root) == sorted(
        [
            "jaxrag.json",
            f"layouts/{model}.json",
            f"{base}/commit.json",
            f"{base}/{attempt}/zarr.json",
            f"{base}/{attempt}/c/0/0/0/0/0",
        ]
    )
    assert json.loads((root / "jaxrag.json").read_text())["format"] == 2
    zarr = json.loads((root / base / attempt / "zarr.json").read_text())
    assert (zarr["zarr_format"], zarr["data_type"]) == (3, "uint16")
    assert zarr["dimension_names"] == ["layer", "kv", "token", "kv_head", "head_dim"]
    assert zarr["attributes"]["rope_applied"] is False
    assert zarr["attributes"]["jaxrag"] == json.loads(commit_of(root, c.key).read_text())
    # Little-endian bits of one layer after the other, then the shard's index.
    shard = shard_of(root, c.key).read_bytes()
    assert shard[: c.kv.nbytes] == c.kv.tobytes()
    assert len(shard) == c.kv.nbytes + 16 * layout.num_layers + 4


@pytest.mark.parametrize(("options", "waits"), [({}, True), ({"durable": False}, False)])
def test_a_write_waits_for_the_disk_unless_told_otherwise(open_store, options, waits):
    """No killed process shows this: what it wrote stands in the page cache."""
    store = open_store(**options)
    assert store._backend._context["file_io_sync"].to_json() is waits


def test_a_url_is_the_same_place_as_a_path(stored, root, model, layout):
    _, c = stored
    for location in (f"file://{root}", f"file://{root}/", str(root) + "/", root):
        c.assert_equal(ChunkStore.open(location, model, layout).get(c.key))
    relative = os.path.relpath(root)
    c.assert_equal(ChunkStore.open(relative, model, layout).get(c.key))


def test_other_key_value_stores_work(chunk, model, layout):
    store = ChunkStore.open("memory://somewhere", model, layout, mode="rw")
    c = chunk(1)
    assert store.put(c.key, c.kv, record=c.record).won
    assert not store.put(c.key, c.kv, record=c.record).won
    c.assert_equal(store.get(c.key))
    assert list(store.keys()) == [c.key]


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def test_a_digest_names_the_layer(stored, root):
    store, c = stored
    flip(shard_of(root, c.key), c.kv[0].nbytes + 1)
    with refused(ChunkCorrupt, "1"):
        store.get(c.key)


def test_zarr_json_on_disk_decides_nothing(stored, open_store, root):
    _, c = stored
    metadata = shard_of(root, c.key).parents[5] / "zarr.json"
    text = json.loads(metadata.read_text())
    text["shape"] = text["chunk_grid"]["configuration"]["chunk_shape"] = [2**40] * 5
    metadata.write_text(json.dumps(text))
    c.assert_equal(open_store("r").get(c.key))
    metadata.unlink()
    c.assert_equal(open_store("r").get(c.key))


def grow(store, c, path):
    record = store.head([c.key])[0]
    path.write_bytes(dataclasses.replace(record, shape=(3, 2, 2**50, 2, 5)).to_json())


RECORD_DAMAGE = {
    "bit flip": lambda store, c, path: flip(path, 40),
    "empty": lambda store, c, path: path.write_bytes(b""),
    "cut": lambda store, c, path: os.truncate(path, 100),
    "oversized": lambda store, c, path: path.write_bytes(path.read_bytes() + b" " * (1 << 16)),
    "huge": lambda store, c, path: os.truncate(path, 1 << 36),
    "petabytes of tokens": grow,
    "not a record": lambda store, c, path: path.write_text('{"format": 1}'),
}


@pytest.mark.parametrize("damage", RECORD_DAMAGE)
def test_a_damaged_record_is_refused_before_anything_is_allocated(
    stored, open_store, chunk, root, damage, model, layout
):
    store, c = stored
    good = chunk(2, 4)
    store.put(good.key, good.kv, record=good.record)
    RECORD_DAMAGE[damage](store, c, commit_of(root, c.key))
    with refused(ChunkCorrupt, c.key):
        store.head([good.key, c.key])
    with refused(ChunkCorrupt, c.key):
        store.get(c.key)
    assert store.head([c.key, good.key], on_corrupt="skip")[0] is None
    got = store.get_many([c.key, good.key], on_missing="skip")
    assert got.corrupt == (c.key,)
    good.assert_equal(got.kv)
    if damage != "petabytes of tokens":  # a record of this size is valid elsewhere
        [record] = store.records()
        assert (record.tokens, record.nbytes) == (4, layout.nbytes(4))
        assert sum(isinstance(it, ChunkCorrupt) for _, it in store.committed()) == 1
    # Such a record does not keep the key from being written again.
    assert store.put(c.key, c.kv, record=c.record).won
    c.assert_equal(open_store("r").get(c.key))


def test_the_second_of_two_replacements_loses(stored, root, chunk, monkeypatch):
    """Both saw the same damaged chunk; the later must not undo the earlier."""
    store, _ = stored
    mine, theirs = chunk(1, seed=5), chunk(1, seed=6)
    finish_writes = store._backend.finish_writes

    def slow_write(*arguments):
        finish_writes(*arguments)
        monkeypatch.undo()
        assert store.put(theirs.key, theirs.kv, record=theirs.record, replace=True).won

    monkeypatch.setattr(store._backend, "finish_writes", slow_write)
    assert not store.put(mine.key, mine.kv, record=mine.record, replace=True).won
    theirs.assert_equal(store.get(mine.key))


def test_stats_cover_its_own_model_alone(stored, open_store, chunk, model, layout):
    store, _ = stored
    other_model = fingerprint({"weights": "another"})
    wide = dataclasses.replace(layout, num_layers=2, dtype="float32")
    other = open_store(model=other_model, layout=wide)
    c = chunk(1, 5, wide, other_model)
    other.put(c.key, c.kv, record=c.record)
    for one, nbytes in ((store, layout.nbytes(7)), (other, wide.nbytes(5))):
        assert [it.nbytes for it in one.records()] == [nbytes]
    assert list(other.keys()) == [c.key]


def test_a_loser_leaves_nothing_behind(stored, root, chunk, monkeypatch):
    store, _ = stored
    mine, theirs = chunk(2, seed=5), chunk(2, seed=6)
    finish_writes = store._backend.finish_writes

    def slow_write(*arguments):
        finish_writes(*arguments)
        monkeypatch.undo()
        assert store.put(theirs.key, theirs.kv, record=theirs.record).won

    monkeypatch.setattr(store._backend, "finish_writes", slow_write)
    result = store.put(mine.key, mine.kv, record=mine.record)
    assert (result.won, result.attempt) == (False, None)
    theirs.assert_equal(store.get(mine.key))
    assert len(files(commit_of(root, mine.key).parent)) == 3


@pytest.mark.parametrize("mode", ["r", "rw"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"repository": "jaxrag chunks", "format": 1}', "'format'"),
        ('{"repository": "jaxrag chunks"}', ""),
        ("{}", ""),
        ("[1]", ""),
        ("", ""),
    ],
)
def test_an_unknown_format_is_refused_at_open(stored, open_store, root, mode, text, said):
    (root / "jaxrag.json").write_text(text)
    before = files(root)
    with refused(StoreError, said):
        open_store(mode)
    assert files(root) == before


@pytest.mark.parametrize("mode", ["r", "rw"])
def test_a_model_with_other_sizes_is_refused_at_open(stored, open_store, layout, mode):
    for change in ({"num_layers": 4}, {"head_dim": 6}, {"dtype": "float16"}):
        with refused(StoreError, *change.values()):
            open_store(mode, layout=dataclasses.replace(layout, **change))


def test_a_model_that_is_not_there_is_refused_for_reading(stored, open_store):
    with refused(StoreError):
        open_store("r", model="f" * 64)


@pytest.mark.parametrize("there", [False, True])
def test_reading_where_no_repository_is(open_store, root, there):
    if there:
        root.mkdir()
    with refused(StoreError, "'rw'"):
        open_store("r")
    assert root.exists() == there
    assert files(root) == []


@pytest.mark.parametrize(
    ("location", "said"), [("", ""), ("nosuch://x", ""), ("/proc/none/kb", "")]
)
def test_an_unusable_location(model, layout, location, said):
    with refused(StoreError, said) as raised:
        ChunkStore.open(location, model, layout, mode="rw")
    assert str(raised.value).isprintable()


def test_options_of_open_are_checked(open_store, model):
    for options, said in [
        ({"mode": "w"}, "mode='w'"),
        ({"io_mode": "direct"}, "io_mode='direct'"),
        ({"model": "abc"}, "fingerprint='abc'"),
        ({"max_tokens": 0}, "max_tokens=0"),
    ]:
        with refused(StoreError, said):
            open_store(**options)


def test_a_store_opened_for_reading_writes_nothing(stored, open_store, root, chunk):
    _, c = stored
    store = open_store("r")
    before = files(root)
    other = chunk(2)
    with refused(StoreError):
        store.put(other.key, other.kv, record=other.record)
    with refused(StoreError):
        store.writer()
    c.assert_equal(store.get(c.key))
    assert files(root) == before


def test_a_chunk_beyond_the_declared_size_is_refused(stored, open_store):
    _, c = stored
    with refused(ChunkCorrupt, "7"):
        open_store("r", max_tokens=6).head([c.key])

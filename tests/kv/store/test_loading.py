"""The index at the end of a file decides where layers are, if it can be trusted."""

import os
import struct

import google_crc32c
import pytest
from refusal import refused

from jaxrag.base.errors import ChunkCorrupt


@pytest.fixture
def shard(open_store, chunk, tmp_path):
    """A store, its chunk of 3 layers, and the file of the chunk."""
    store, c = open_store(), chunk(1)
    store.put(c.key, c.kv, record=c.record)
    (path,) = (tmp_path / "kb").glob(f"kv/*/*/{c.key}/*/c/0/0/0/0/0")
    return store, c, path


def index(*entries):
    text = b"".join(struct.pack("<QQ", *entry) for entry in entries)
    return text + struct.pack("<I", google_crc32c.value(text))


def test_the_index_is_that_of_the_zarr_sharding_codec(shard):
    _, c, path = shard
    nbytes = c.kv[0].nbytes
    assert path.read_bytes()[c.kv.nbytes :] == index(*((i * nbytes, nbytes) for i in range(3)))


@pytest.mark.parametrize("io_mode", ["memmap", "default"])
def test_layers_may_lie_in_any_order(shard, open_store, io_mode):
    _, c, path = shard
    nbytes = c.kv[0].nbytes
    path.write_bytes(
        c.kv[[2, 0, 1]].tobytes() + index((nbytes, nbytes), (2 * nbytes, nbytes), (0, nbytes))
    )
    store = open_store("r", io_mode=io_mode)
    c.assert_equal(store.get(c.key))
    assert store.get(c.key, layers=(2, 3)).tobytes() == c.kv[2].tobytes()


@pytest.mark.parametrize("io_mode", ["memmap", "default"])
@pytest.mark.parametrize("entry", [(2**64 - 1, 2**64 - 1), (2**63, None), (10**6, None), (0, 7)])
def test_an_index_that_points_elsewhere_is_refused(shard, open_store, io_mode, entry):
    """Its checksum agrees: a layer that was never written, or one behind the end of the file."""
    _, c, path = shard
    nbytes = c.kv[0].nbytes
    wrong = (entry[0], nbytes if entry[1] is None else entry[1])
    path.write_bytes(c.kv.tobytes() + index((0, nbytes), wrong, (2 * nbytes, nbytes)))
    with refused(ChunkCorrupt):
        open_store("r", io_mode=io_mode).get(c.key)


@pytest.mark.parametrize("io_mode", ["memmap", "default"])
@pytest.mark.parametrize("name", ["data", "commit"])
def test_a_pipe_in_place_of_a_file_is_damage_and_keeps_nobody(shard, open_store, io_mode, name):
    _, c, path = shard
    if name == "commit":
        (path,) = path.parents[6].glob("commit.json")
    path.unlink()
    os.mkfifo(path)
    store = open_store("r", io_mode=io_mode)
    with refused(ChunkCorrupt):
        store.get(c.key)
    assert store.verify([c.key]).corrupt == (c.key,)
    if name == "data":
        store.prefetch([c.key]).result()


def test_a_directory_in_place_of_the_file_is_damage(shard, open_store):
    _, c, path = shard
    path.unlink()
    path.mkdir()
    with refused(ChunkCorrupt):
        open_store("r").get(c.key)


def test_a_file_cut_short_while_it_is_read_is_an_exception(shard, open_store, monkeypatch):
    _, c, path = shard
    nbytes = c.kv[0].nbytes

    def cut(*_):
        path.write_bytes(path.read_bytes()[:nbytes])
        return (0, nbytes, 2 * nbytes)

    store = open_store("r", io_mode="default")
    monkeypatch.setattr("jaxrag.kv.store.loading._parse_index", cut)
    with refused(ChunkCorrupt):
        store.get(c.key, layers=(2, 3))

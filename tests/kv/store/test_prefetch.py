"""Chunks brought nearer before they are asked for."""

import ctypes
import os

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import StoreError
from jaxrag.kv.store import ChunkStore
from jaxrag.kv.store.prefetch import HostTier


def put(store, *chunks):
    for c in chunks:
        store.put(c.key, c.kv, record=c.record)


def remove_bytes(root):
    for path in root.rglob("c/**/*"):
        if path.is_file():
            path.unlink()


def resident_share(path):
    pages = np.memmap(path, mode="r")
    vector = np.zeros(-(-pages.size // 4096), np.uint8)
    arguments = (pages.ctypes.data, pages.size, vector.ctypes.data)
    assert ctypes.CDLL(None).mincore(*map(ctypes.c_void_p, arguments)) == 0
    return (vector & 1).mean()


def test_the_host_tier_answers_without_the_files(open_store, chunk, tmp_path):
    store = open_store()
    a, b = chunk(1, 3), chunk(2, 8)
    put(store, a, b)
    assert store.prefetch([a.key, b.key, a.key], "host").result() == a.kv.nbytes + b.kv.nbytes
    remove_bytes(tmp_path / "kb")
    got = store.get_many([b.key, a.key])
    assert got.kv.tobytes() == np.concatenate([b.kv, a.kv], axis=2).tobytes()
    part = store.get(b.key, layers=(1, 3))
    assert part.tobytes() == b.kv[1:3].tobytes()
    got.kv[...] = 0  # the caller's own copy
    a.assert_equal(store.get(a.key))


def test_the_page_tier_reads_the_files(open_store, chunk, tmp_path):
    store = open_store()
    c = chunk(1, tokens=9000)
    put(store, c)
    (path,) = (p for p in (tmp_path / "kb").rglob("c/**/*") if p.is_file())
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident_share(path) > 0.5:
        pytest.skip("the file system keeps its files in memory")
    header = next((tmp_path / "kb").rglob("zarr.json"))
    assert store.prefetch([c.key]).result() == path.stat().st_size + header.stat().st_size
    assert resident_share(path) == 1.0


def test_bad_requests_are_refused(open_store, chunk, s3_location, layout, model):
    store = open_store()
    with refused(StoreError, "tier='disk'"):
        store.prefetch([chunk(1).key], "disk")
    remote = ChunkStore.open(s3_location, model, layout, mode="rw")
    with refused(StoreError, "'host'"):
        remote.prefetch([chunk(1).key])
    put(remote, chunk(1))
    assert remote.prefetch([chunk(1).key], "host").result() == chunk(1).kv.nbytes


def test_the_kv_used_last_stays_in_the_host_tier():
    tier = HostTier(20)
    for name in ("a", "b"):
        assert tier.keep(name, np.zeros(10, np.uint8))
    assert tier.get("a") is not None
    assert tier.keep("c", np.zeros(10, np.uint8))
    assert [tier.get(name) is not None for name in "abc"] == [True, False, True]
    assert not tier.keep("d", np.zeros(21, np.uint8))  # and nothing leaves for it
    assert tier.nbytes == 20

"""The reader of examples/, which docs/format.md names, reads what the store writes."""

import ast
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from jaxrag.kv.store import (
    ChunkStore,
    KVLayout,
    Provenance,
    chunk_key,
    content_id,
    context_id,
    fingerprint,
)

FILE = Path(__file__).parents[3] / "examples" / "read_store.py"
ALLOWED = {"hashlib", "json", "math", "numpy", "sys", "xxhash"}
FROM = {"collections.abc", "pathlib", "typing"}


@pytest.fixture(scope="module")
def listing():
    return FILE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def reader(listing):
    module = types.ModuleType("reader")
    exec(compile(listing, str(FILE), "exec"), module.__dict__)
    return module


def test_it_needs_numpy_only(listing):
    found = set()
    for node in ast.walk(ast.parse(listing)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        assert not isinstance(node, ast.ImportFrom) or node.module in FROM
    assert found <= ALLOWED


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_it_reads_every_chunk(fill, reader, tmp_path, dtype):
    chunks, _ = fill(dtype)
    root = tmp_path / f"store-{dtype}-native"
    keys = [bundle.name for bundle in chunks.bundles]
    assert list(reader.chunks(root)) == [(chunks.store.fingerprint, key) for key in sorted(keys)]
    for key, kv in zip(keys, chunks.kv, strict=True):
        found, record = reader.read_chunk(root, chunks.store.fingerprint, key)
        np.testing.assert_array_equal(found, kv.astype(np.float32))
        assert record["encoder"] == "isolated"


def test_it_reads_int8_chunks(fill, reader, tmp_path):
    chunks, _ = fill("float32", "int8")
    for bundle in chunks.bundles:
        found, _ = reader.read_chunk(
            tmp_path / "store-float32-int8", chunks.store.fingerprint, bundle.name
        )
        np.testing.assert_array_equal(found, chunks.store.get(bundle.name))


@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize("stored", ["int4", "int4-half"])
def test_it_reads_packed_chunks(reader, tmp_path, rng, stored, ways):
    if ways > 1 and stored != "int4":
        pytest.skip("no two ranks choose the same tokens: test_dropping.py")
    layout, model = KVLayout(2, 2, 40, "float32", stored), fingerprint({"weights": "a model"})
    store = ChunkStore.open(tmp_path / "store", model, layout, mode="rw")
    ids = np.arange(150, dtype=np.int32)
    record = Provenance("isolated", content_id("tok", ids), context_id("isolated", ids[:0]))
    key = chunk_key(model, record.content_id, record.context_id)
    attempt = store.begin(key, 150, record, ways=ways)
    kv = rng.normal(size=layout.shape(150)).astype(np.float32)
    parts = [np.ascontiguousarray(part) for part in np.split(kv, ways, axis=3)]
    store.commit(attempt, [store.put_shard(attempt, i, part) for i, part in enumerate(parts)])
    found, record = reader.read_chunk(tmp_path / "store", model, key)
    assert record["stored"] == stored
    np.testing.assert_array_equal(found, store.get(key))


def test_it_reads_what_several_ranks_wrote(fill, reader, tmp_path):
    chunks, _ = fill("bfloat16", ways=2)
    for bundle, kv in zip(chunks.bundles, chunks.kv, strict=True):
        found, record = reader.read_chunk(
            tmp_path / "store-bfloat16-native", chunks.store.fingerprint, bundle.name
        )
        assert record["ways"] == 2
        np.testing.assert_array_equal(found, kv.astype(np.float32))


def test_it_reads_auxiliary_arrays(fill, reader, tmp_path):
    aux = {"importance": np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3)}
    chunks, _ = fill("bfloat16", aux=aux)
    key = chunks.bundles[0].name
    root = tmp_path / "store-bfloat16-native"
    _, record = reader.read_chunk(root, chunks.store.fingerprint, key)
    (attempt,) = root.glob(f"kv/*/*/{key}/{record['attempt']}")
    np.testing.assert_array_equal(reader.read_aux(attempt, record, "importance"), aux["importance"])


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_it_refuses_damaged_bytes(fill, reader, tmp_path, damage):
    chunks, _ = fill()
    key = chunks.bundles[0].name
    root = tmp_path / "store-bfloat16-native"
    (shard,) = root.glob(f"kv/*/*/{key}/*/c/0/0/0/0/0")
    data = bytearray(shard.read_bytes())
    data[9] ^= 1
    shard.write_bytes(data if damage == "flip" else data[:100])
    with pytest.raises(ValueError):
        reader.read_chunk(root, chunks.store.fingerprint, key)


def test_it_knows_the_names_of_chunks(reader):
    ids = np.array([3, 70_000, 1], np.int32)
    assert reader.content_id("digest", ids) == content_id("digest", ids)


def test_it_runs_as_a_program(fill, tmp_path):
    chunks, _ = fill()
    command = [sys.executable, FILE, tmp_path / "store-bfloat16-native"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(chunks.bundles)
    shutil.rmtree(tmp_path / "store-bfloat16-native")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == ""

"""Every vector index: exact results, filters, replacement, removal, reopening, other processes."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import RequestError, RetrievalError, StoreError
from jaxrag.library.retrieve.lance import KINDS, VectorIndex, kind_named

DIM = 12


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def index(kind, tmp_path):
    made = VectorIndex.open(tmp_path / "vectors", DIM, kind)
    yield made
    made.close()


def vectors(count, seed=0):
    return np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)


def expected(held, queries, k, allowed=None):
    """By the definition: ids of the k largest inner products, padded with -1."""
    ids = np.array(sorted(held if allowed is None else set(held) & set(allowed)), np.int64)
    out = np.full((len(queries), k), -1, np.int64)
    if len(ids):
        scores = queries @ np.stack([held[i] for i in ids]).T
        order = np.argsort(-scores, axis=1)[:, :k]
        out[:, : order.shape[1]] = ids[order]
    return out


def test_finds_the_largest_inner_products(index):
    data, queries = vectors(700), vectors(5, seed=1)
    ids = np.random.default_rng(2).permutation(5000)[:700].astype(np.int64)
    index.add(ids[:1], data[:1])
    index.add(ids[1:], data[1:])
    held = dict(zip(ids.tolist(), data, strict=True))
    found, scores = index.search(queries, 9)
    assert found.dtype == np.int64 and scores.dtype == np.float32
    assert found.tolist() == expected(held, queries, 9).tolist()
    products = np.einsum("qe,qke->qk", queries, np.array([[held[i] for i in r] for r in found]))
    np.testing.assert_allclose(scores, products, rtol=1e-5, atol=1e-5)
    assert index.ids().tolist() == sorted(ids.tolist())
    assert len(index) == 700


def test_vectors_are_given_back_by_id(index):
    data = vectors(40)
    index.add(np.arange(0, 80, 2), data)
    index.add(np.array([6]), data[:1] + 1)
    index.remove(np.array([4]))
    asked = np.array([20, 6, 0, 20])
    np.testing.assert_array_equal(index.get(asked), [data[10], data[0] + 1, data[0], data[10]])
    assert index.get(np.zeros(0, np.int64)).shape == (0, DIM)
    getters = [index.get, index.getter(1), index.getter(80)]
    for get in getters:
        np.testing.assert_array_equal(get(asked[1:3]), index.get(asked)[1:3])
        for missing in (4, 5, 1000):
            with refused(StoreError, missing):
                get(np.array([20, missing]))


def test_fewer_than_k_are_padded(index):
    empty, scores = index.search(vectors(2), 3)
    assert empty.tolist() == [[-1] * 3] * 2 and np.isneginf(scores).all()
    index.add(np.array([5]), vectors(1))
    found, scores = index.search(vectors(2), 3)
    assert found.tolist() == [[5, -1, -1]] * 2
    assert np.isneginf(scores[:, 1:]).all() and np.isfinite(scores[:, 0]).all()
    assert index.search(vectors(0), 3)[0].shape == (0, 3)


def test_what_a_killed_writer_left_among_the_marks_is_passed_over(index, tmp_path):
    index.add(np.arange(40), vectors(40))
    index.remove(np.arange(3))
    (marks,) = tmp_path.rglob("_deletions")
    (marks / ".tmpbZXKlI").write_bytes(b"")
    index.collect(0)
    assert index.ids().tolist() == list(range(3, 40))
    assert not index._marks()


def test_another_object_sees_a_change_at_its_next_search(kind, tmp_path):
    writer = VectorIndex.open(tmp_path / "v", DIM, kind)
    reader = VectorIndex.open(tmp_path / "v", DIM, kind, mode="r")
    data = vectors(6)
    for number in range(6):
        writer.add(np.array([number]), data[number : number + 1])
        assert reader.search(data, number + 2)[0].max() == number
        assert len(reader) == number + 1
    writer.remove(np.array([5]))
    assert reader.ids().tolist() == [0, 1, 2, 3, 4]
    writer.close()
    reader.close()


WRITER = """
import sys
from pathlib import Path
import numpy as np
from jaxrag.library.retrieve.lance import VectorIndex
folder, start = Path(sys.argv[1]), int(sys.argv[2])
index = VectorIndex.open(folder, 4, "lance")
print("ready", flush=True)
sys.stdin.readline()
for number in range(start, start + 12):
    index.add(np.array([number]), np.full((1, 4), number, np.float32))
    if number % 3 == 0:
        index.remove(np.array([number]))
index.close()
"""


def test_processes_write_while_one_reads(tmp_path):
    """Nothing acknowledged is lost, and a reader never sees a vector that nobody added."""
    reader = VectorIndex.open(tmp_path, 4, "lance")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(start)],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for start in (100, 200)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    running = True
    while running:
        running = any(process.poll() is None for process in processes)
        ids, scores = reader.search(np.ones((1, 4), np.float32), 50)
        for chunk_id, score in zip(ids[0], scores[0], strict=True):
            assert chunk_id == -1 or score == 4 * chunk_id
    for process in processes:
        process.communicate(timeout=300)
        assert process.returncode == 0
    written = [n for start in (100, 200) for n in range(start, start + 12) if n % 3]
    assert reader.ids().tolist() == written
    reader.close()


def test_refusals(kind, tmp_path):
    with refused(StoreError):
        VectorIndex.open(tmp_path / "none", DIM, kind, mode="r")
    assert not (tmp_path / "none").exists()
    index = VectorIndex.open(tmp_path / "v", DIM, kind)
    index.add(np.array([1]), vectors(1))
    for ids, rows, message in [
        (np.array([1, 2]), vectors(1), "2"),
        (np.array([-1]), vectors(1), "0"),
        (np.array([0.5]), vectors(1), "0"),
        (np.array([2, 2]), vectors(2), ""),
        (np.array([2]), vectors(1)[:, :5], "float32"),
        (np.array([2]), np.full((1, DIM), np.nan, np.float32), ""),
    ]:
        with refused(RequestError, message):
            index.add(ids, rows)
    with refused(RequestError, "float32"):
        index.search(vectors(1)[0], 3)
    with refused(RequestError, "k=0"):
        index.search(vectors(1), 0)
    assert index.ids().tolist() == [1]
    with refused(StoreError, "12"):
        VectorIndex.open(tmp_path / "v", DIM + 1, kind)
    reader = VectorIndex.open(tmp_path / "v", DIM, kind, mode="r")
    with refused(StoreError):
        reader.add(np.array([2]), vectors(1))
    with refused(StoreError):
        reader.remove(np.array([1]))


def test_equal_scores_are_in_order_of_id(tmp_path):
    index = VectorIndex.open(tmp_path, DIM, "exact")
    row = vectors(1)
    index.add(np.arange(40)[::-1].copy(), np.repeat(row, 40, axis=0))
    index.add(np.array([50]), 2 * row)
    assert index.search(row, 4)[0].tolist() == [[50, 0, 1, 2]]
    assert index.search(row, 3, np.arange(5, 50, 3))[0].tolist() == [[5, 8, 11]]


def test_unknown_name():
    with refused(RetrievalError, "'hnsw'"):
        kind_named("hnsw")


def test_a_missing_package_is_named(kind, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lancedb", None)
    with refused(RetrievalError):
        VectorIndex.open(tmp_path, DIM, kind)

"""Indexes that are approximate when large, made to be so with few rows: recall, growth, filters."""

import numpy as np
import pytest

from jaxrag.library.retrieve import lance
from jaxrag.library.retrieve.lance import VectorIndex

DIM, ROWS = 16, 2000


def clustered(seed, count):
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(0).standard_normal((20, DIM))
    rows = centres[rng.integers(0, 20, count)] + 0.3 * rng.standard_normal((count, DIM))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def recall(found, data, queries, k):
    best = np.argsort(-(queries @ data.T), axis=1)[:, :k]
    return np.mean(
        [len(set(a) & set(b)) / k for a, b in zip(found.tolist(), best.tolist(), strict=True)]
    )


@pytest.fixture(autouse=True)
def early(monkeypatch):
    monkeypatch.setattr(lance, "_INDEX_FROM", 1000)
    monkeypatch.setattr(lance, "_LISTED_IDS", 100)


def is_approximate(index):
    return "vector_idx" in [entry.name for entry in index._table.list_indices()]


def test_recall_growth_and_reopening(tmp_path):
    data, queries = clustered(1, 2 * ROWS), clustered(2, 30)
    index = VectorIndex.open(tmp_path, DIM)
    index.add(np.arange(500), data[:500])
    assert not is_approximate(index)
    index.add(np.arange(500, ROWS), data[500:ROWS])
    assert is_approximate(index)
    assert recall(index.search(queries, 10)[0], data[:ROWS], queries, 10) > 0.9
    for start in range(ROWS, 2 * ROWS, 500):  # rows that the clusters were not learned from
        index.add(np.arange(start, start + 500), data[start : start + 500])
    assert recall(index.search(queries, 10)[0], data, queries, 10) > 0.9
    index.remove(np.arange(0, ROWS, 2))
    assert (index.search(queries, 10)[0] % 2 == 1).sum() > 100
    assert not np.isin(index.search(queries, 10)[0], np.arange(0, ROWS, 2)).any()
    index.close()
    again = VectorIndex.open(tmp_path, DIM, mode="r")
    assert is_approximate(again)
    odd = np.concatenate([np.arange(1, ROWS, 2), np.arange(ROWS, 2 * ROWS)])
    found = np.searchsorted(odd, again.search(queries, 10)[0])
    assert recall(found, data[odd], queries, 10) > 0.9
    again.close()


def test_filtered_searches_find_as_many_as_there_are(tmp_path):
    data, queries = clustered(1, ROWS), clustered(2, 6)
    index = VectorIndex.open(tmp_path, DIM)
    index.add(np.arange(ROWS), data)
    for allowed in (np.arange(0, ROWS, 40), np.arange(0, ROWS, 3), np.array([5, 1999])):
        found, _ = index.search(queries, 20, allowed)
        assert np.isin(found[found >= 0], allowed).all()
        assert ((found >= 0).sum(1) == min(20, len(allowed))).all()
        best = allowed[np.argsort(-(queries @ data[allowed].T), axis=1)[:, :20]]
        share = np.mean(
            [
                len(set(a) & set(b)) / len(b)
                for a, b in zip(found.tolist(), best.tolist(), strict=True)
            ]
        )
        assert share > 0.9
    index.close()


def test_an_exact_index_compares_all(tmp_path):
    data, queries = clustered(1, ROWS), clustered(2, 30)
    index = VectorIndex.open(tmp_path, DIM, "exact")
    index.add(np.arange(ROWS), data)
    assert not is_approximate(index)
    assert recall(index.search(queries, 10)[0], data, queries, 10) == 1
    allowed = np.arange(0, ROWS, 3)
    found = index.search(queries, 10, allowed)[0]
    assert recall(np.searchsorted(allowed, found), data[allowed], queries, 10) == 1

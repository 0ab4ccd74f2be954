"""Indexes that are approximate when large, made to be so with few rows: recall, growth, filters."""

import numpy as np
import pytest

from jaxrag.library.retrieve.names import index_named

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


@pytest.fixture(params=["faiss", "lance"])
def name(request, monkeypatch):
    if request.param == "faiss":
        pytest.importorskip("faiss")
        from jaxrag.library.retrieve import faiss as module

        monkeypatch.setattr(module, "_IVF_FROM", 1000)
    else:
        pytest.importorskip("lancedb")
        from jaxrag.library.retrieve import lance as module

        monkeypatch.setattr(module, "_INDEX_FROM", 1000)
        monkeypatch.setattr(module, "_LISTED_IDS", 100)
    return request.param


def is_approximate(name, index):
    if name == "faiss":
        return index._is_trained()
    return "vector_idx" in [entry.name for entry in index._table.list_indices()]


def test_recall_growth_and_reopening(name, tmp_path):
    data, queries = clustered(1, 2 * ROWS), clustered(2, 30)
    index = index_named(name).open(tmp_path, DIM)
    index.add(np.arange(500), data[:500])
    assert not is_approximate(name, index)
    index.add(np.arange(500, ROWS), data[500:ROWS])
    assert is_approximate(name, index)
    assert recall(index.search(queries, 10)[0], data[:ROWS], queries, 10) > 0.9
    for start in range(ROWS, 2 * ROWS, 500):  # rows that the clusters were not learned from
        index.add(np.arange(start, start + 500), data[start : start + 500])
    assert recall(index.search(queries, 10)[0], data, queries, 10) > 0.9
    index.remove(np.arange(0, ROWS, 2))
    assert (index.search(queries, 10)[0] % 2 == 1).sum() > 100
    assert not np.isin(index.search(queries, 10)[0], np.arange(0, ROWS, 2)).any()
    index.close()
    again = index_named(name).open(tmp_path, DIM, mode="r")
    assert is_approximate(name, again)
    odd = np.concatenate([np.arange(1, ROWS, 2), np.arange(ROWS, 2 * ROWS)])
    found = np.searchsorted(odd, again.search(queries, 10)[0])
    assert recall(found, data[odd], queries, 10) > 0.9
    again.close()


def test_filtered_searches_find_as_many_as_there_are(name, tmp_path):
    data, queries = clustered(1, ROWS), clustered(2, 6)
    index = index_named(name).open(tmp_path, DIM)
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


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_damaged_inverted_file_is_made_again(tmp_path, monkeypatch, damage):
    pytest.importorskip("faiss")
    from jaxrag.library.retrieve import faiss as module

    monkeypatch.setattr(module, "_IVF_FROM", 1000)
    data = clustered(1, ROWS)
    index_named("faiss").open(tmp_path, DIM).add(np.arange(ROWS), data)
    whole = (tmp_path / "0.ivf").read_bytes()
    assert is_approximate("faiss", index_named("faiss").open(tmp_path, DIM, mode="r"))
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    (tmp_path / "0.ivf").write_bytes(whole[:1000] if damage == "cut" else flipped)
    reader = index_named("faiss").open(tmp_path, DIM, mode="r")
    assert not is_approximate("faiss", reader)
    assert reader.search(data[:5], 1)[0].ravel().tolist() == [0, 1, 2, 3, 4]
    assert is_approximate("faiss", index_named("faiss").open(tmp_path, DIM))
    assert (tmp_path / "0.ivf").read_bytes() not in (flipped, whole[:1000])

"""Indexes that are approximate when large, made to be so with few rows: recall, growth, filters."""

import numpy as np
import pytest

from jaxrag.library.retrieve import index_files, lance, probes
from jaxrag.library.retrieve.lance import VectorIndex
from jaxrag.library.retrieve.probes import Probes

DIM, ROWS, MANY = 16, 2000, 20_000


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


def test_partitions_are_added_until_enough_is_found():
    exact = [np.arange(10)] * 4

    def ask(partitions):
        return [np.arange(min(10, partitions // 4))] * 4

    assert probes.measured(7, 1000, exact, ask) == Probes(7, 40)
    assert probes.measured(7, 20, exact, ask) == Probes(7, 20)
    assert probes.measured(7, 1000, exact, lambda partitions: exact) == Probes(7, 8)


def test_what_was_measured_is_kept_and_a_damaged_file_tells_nothing(tmp_path):
    assert probes.read(tmp_path) is None
    probes.write(tmp_path, Probes(7, 40))
    assert probes.read(tmp_path) == Probes(7, 40)
    whole = (tmp_path / probes.FILE).read_bytes()
    for place in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            (tmp_path / probes.FILE).write_bytes(damaged)
            assert probes.read(tmp_path) in (None, Probes(7, 40))


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grown")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lance, "_ROWS_OF_PARTITION", 200)  # 100 partitions
        index = VectorIndex.open(folder, DIM)
        index.add(np.arange(MANY), rows())
    return folder


def rows():
    return np.random.default_rng(1).standard_normal((MANY, DIM)).astype(np.float32)


def test_vectors_without_clusters_get_more_partitions(grown):
    found = probes.read(grown)
    assert found.rows == MANY and found.partitions > 8
    index = VectorIndex.open(grown, DIM, mode="r")
    queries = np.random.default_rng(2).standard_normal((50, DIM)).astype(np.float32)
    assert recall(index.search(queries, 10)[0], rows(), queries, 10) >= 0.98
    index._probes = Probes(MANY, 1)
    assert recall(index.search(queries, 10)[0], rows(), queries, 10) < 0.9, "the number is used"


def test_rows_that_others_remove_meanwhile_are_not_compared(tmp_path, monkeypatch):
    """Another process may remove rows after the ids were read; an addition goes on."""
    data = clustered(1, ROWS)
    ids = VectorIndex.ids
    monkeypatch.setattr(
        VectorIndex, "ids", lambda self: np.concatenate(([10**6], ids(self), [10**6 + 1]))
    )
    index = VectorIndex.open(tmp_path, DIM)
    index.add(np.arange(ROWS), data)
    assert is_approximate(index)
    assert probes.read(tmp_path).rows == ROWS


def test_what_was_measured_for_another_recall_is_measured_again(tmp_path):
    index = VectorIndex.open(tmp_path, DIM)
    index.add(np.arange(ROWS), clustered(1, ROWS))
    index.close()
    known = Probes(ROWS, 3, 0.995)
    probes.write(tmp_path, known)
    assert probes.read(tmp_path) == known
    index = VectorIndex.open(tmp_path, DIM)
    index.add(np.array([ROWS]), clustered(2, 1))
    assert probes.read(tmp_path).recall == probes.RECALL


def test_removing_some_does_not_measure_again(tmp_path):
    index = VectorIndex.open(tmp_path, DIM)
    index.add(np.arange(ROWS), clustered(1, ROWS))
    for place in range(30):
        index.remove(np.arange(10 * place, 10 * place + 10))
    assert probes.read(tmp_path).rows == ROWS
    index.remove(np.arange(300, 600))
    index.close()
    index = VectorIndex.open(tmp_path, DIM)
    index.remove(np.array([600]))
    assert probes.read(tmp_path).rows == 1399


def test_without_the_file_every_partition_is_compared(grown):
    known = (grown / probes.FILE).read_bytes()
    (grown / probes.FILE).unlink()
    index = VectorIndex.open(grown, DIM, mode="r")
    queries = np.random.default_rng(2).standard_normal((50, DIM)).astype(np.float32)
    assert recall(index.search(queries, 10)[0], rows(), queries, 10) == 1
    (grown / probes.FILE).write_bytes(known)


def test_clustered_vectors_need_few(tmp_path, monkeypatch):
    monkeypatch.setattr(lance, "_ROWS_OF_PARTITION", 50)
    index = VectorIndex.open(tmp_path, DIM)
    index.add(np.arange(2000), clustered(1, 2000))
    assert probes.read(tmp_path).partitions < 40
    index.add(np.arange(2000, 2300), clustered(3, 300))
    assert probes.read(tmp_path).rows == 2000, "not measured at every change"
    index.close()
    index = VectorIndex.open(tmp_path, DIM)
    index.add(np.arange(2300, 2500), clustered(4, 200))
    assert probes.read(tmp_path).rows == 2500, "measured again where it has grown"
    index.close()


def flipped(path, rng, times):
    """The file with one bit exchanged, ``times`` times; as it was at the end."""
    whole = path.read_bytes()
    for _ in range(times):
        damaged = bytearray(whole)
        damaged[rng.integers(len(damaged))] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        yield
    path.write_bytes(whole)


def test_a_bit_of_an_index_changes_no_answer(tmp_path, monkeypatch):
    """LanceDB itself reads such an index without a word, and ranks by it."""
    monkeypatch.setattr(lance, "_ROWS_OF_PARTITION", 200)
    data, rng = clustered(1, 3000), np.random.default_rng(3)
    index = VectorIndex.open(tmp_path, DIM)
    index.add(np.arange(3000), data)
    index.close()
    queries = clustered(2, 20)
    expected = np.argsort(-(queries @ data.T), axis=1)[:, :10]
    files = [path for path in (tmp_path / "chunks.lance" / "_indices").rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"auxiliary.idx", "page_data.lance"}
    for path in [*files, tmp_path / index_files.FILE]:
        for _ in flipped(path, rng, 3):
            reader = VectorIndex.open(tmp_path, DIM, mode="r")
            assert not reader.trusted or path.name == index_files.FILE
            found = reader.search(queries, 10)[0]
            if not reader.trusted:
                np.testing.assert_array_equal(np.sort(found), np.sort(expected))
            assert recall(found, data, queries, 10) > 0.95
            few = reader.search(queries, 5, np.arange(0, 3000, 2))[0]
            assert (few % 2 == 0).all()
    assert VectorIndex.open(tmp_path, DIM, mode="r").trusted


@pytest.mark.parametrize("cause", ["a bit", "a kill before the record", "an index of before"])
def test_an_index_that_cannot_be_trusted_is_made_anew_at_the_next_change(tmp_path, cause):
    data, queries = clustered(1, 2100), clustered(2, 20)
    index = VectorIndex.open(tmp_path, DIM)
    index.add(np.arange(2000), data[:2000])
    index.close()
    (path, *_) = (tmp_path / "chunks.lance" / "_indices").rglob("auxiliary.idx")
    if cause == "a bit":
        for _ in flipped(path, np.random.default_rng(0), 1):
            index = VectorIndex.open(tmp_path, DIM)
    elif cause == "an index of before":
        (tmp_path / index_files.FILE).unlink()
        index = VectorIndex.open(tmp_path, DIM)
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(index_files, "record", lambda *_: None)
            index = VectorIndex.open(tmp_path, DIM)
            index._table.create_index("id", config=lance.lancedb_and_arrow()[0].index.BTree())
        index = VectorIndex.open(tmp_path, DIM)
    assert not index.trusted
    assert recall(index.search(queries, 10)[0], data[:2000], queries, 10) == 1
    index.add(np.arange(2000, 2100), data[2000:])
    assert index.trusted
    assert recall(index.search(queries, 10)[0], data, queries, 10) > 0.9
    index.close()
    assert VectorIndex.open(tmp_path, DIM, mode="r").trusted

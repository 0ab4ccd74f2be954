"""Searching: exact where it must be, as slow versions do, in threads, from saved indexes."""

import concurrent.futures
import functools
import sys

import numpy as np
import pytest
from index import search_heads
from refusal import refused

from jaxrag.base.errors import RetrievalError
from jaxrag.reuse.attention_index import (
    AttentionIndex,
    Exact,
    Hnsw,
    Ivf,
    ProjectedGraph,
    QueryLists,
    build,
    open_index,
)

SMALL = {"exact_below": 0, "min_queries": 1}
GRAPH = ProjectedGraph(degree=16, knn=40, ef=100, **SMALL)
LISTS = QueryLists(clusters=8, cap=200, knn=40, probes=2, **SMALL)
SPECS = {
    "exact": Exact(),
    "graph": GRAPH,
    "group graph": ProjectedGraph(degree=16, knn=40, ef=100, share="group", **SMALL),
    "lists": LISTS,
    "half lists": QueryLists(clusters=8, cap=200, knn=40, probes=2, storage="float16", **SMALL),
    "group lists": QueryLists(clusters=8, cap=300, knn=40, probes=2, share="group", **SMALL),
    "ivf": Ivf(clusters=16, probes=8, exact_below=0),
    "hnsw": Hnsw(links=8, ef_build=60, ef=100, storage="float32", exact_below=0),
}


@functools.cache
def searcher_of(name, head):
    return open_index(build(head.keys, head.train, SPECS[name]))


@pytest.fixture(params=SPECS)
def searcher(request, head):
    return searcher_of(request.param, head)


def test_scores_are_those_of_the_ids_and_fall(searcher, head):
    for number in range(5):
        queries = head.test[:, number]
        found = search_heads(searcher, queries, 10, count=True)
        assert found.ids.dtype == np.int32
        assert found.scores.dtype == np.float32
        for part in range(2):
            assert len(set(found.ids[part].tolist())) == 10
            true = head.keys[found.ids[part]] @ queries[part]
            np.testing.assert_allclose(found.scores[part], true, atol=2e-2)
            assert (np.diff(found.scores[part]) <= 0).all()
            assert 10 <= found.scanned[part] <= len(head.keys) + 16


def test_a_scan_misses_nothing_whatever_the_kind(searcher, head):
    for queries in head.test[:, :3]:
        for query in queries:
            found = searcher.scan(query, 10)
            scores = searcher.all_keys() @ query
            assert found.ids.dtype == np.int32 and found.scanned == len(head.keys)
            np.testing.assert_allclose(found.scores, np.sort(scores)[::-1][:10], rtol=1e-4)
            np.testing.assert_allclose(scores[found.ids], found.scores, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "least"),
    [("exact", 0.99), ("graph", 0.9), ("group graph", 0.9), ("lists", 0.75), ("hnsw", 0.9)],
)
def test_recall(head, recall_of, name, least):
    searcher = searcher_of(name, head)
    found = [
        search_heads(searcher, head.test[:, i], 10, count=True) for i in range(head.test.shape[1])
    ]
    for part in range(2):
        exact = head.best(head.test[part], 10)
        assert recall_of([one.ids[part] for one in found], exact) >= least
    if name != "exact":
        assert np.mean([one.scanned for one in found]) < 0.8 * len(head.keys)


def test_more_effort_scans_more(head, recall_of):
    for name in ("graph", "lists", "ivf", "hnsw"):
        searcher, scanned, quality = searcher_of(name, head), [], []
        for effort in (1, 4, 600):
            found = [
                search_heads(searcher, head.test[:, i], 10, effort=[effort] * 2, count=True)
                for i in range(20)
            ]
            scanned.append(np.mean([one.scanned for one in found]))
            quality.append(recall_of([one.ids[0] for one in found], head.best(head.test[0], 10)))
        assert scanned[0] <= scanned[1] < scanned[2]
        assert quality[0] <= quality[1] + 0.05 <= quality[2] + 0.1
        assert quality[2] >= 0.95


def test_all_the_keys_are_found_exactly(searcher, head):
    found = search_heads(searcher, head.test[:, 0], len(head.keys))
    for part in range(2):
        assert set(found.ids[part].tolist()) == set(range(len(head.keys)))
        true = np.sort(head.keys @ head.test[part, 0])[::-1]
        np.testing.assert_allclose(found.scores[part], true, atol=2e-2)
    assert found.scanned.tolist() == [len(head.keys)] * 2


def walk(links, entry, keys, query, width):
    """A best-first walk that keeps ``width`` keys: what it keeps, and how many it compared."""
    seen, pool, open_ = {entry}, [entry], [entry]
    score = keys @ query
    while open_:
        here = max(open_, key=lambda key: score[key])
        open_.remove(here)
        if len(pool) == width and score[here] < min(score[key] for key in pool):
            break
        for key in links[here]:
            if key < 0 or key in seen:
                continue
            seen.add(key)
            if len(pool) < width or score[key] > min(score[one] for one in pool):
                open_.append(key)
                pool = sorted([*pool, key], key=lambda one: -score[one])[:width]
    return sorted(pool, key=lambda key: -score[key]), len(seen)


def test_faiss_walks_our_links(head):
    index = build(
        head.keys, head.train, ProjectedGraph(degree=8, knn=20, ef=30, storage="float32", **SMALL)
    )
    searcher = open_index(index)
    for part in range(2):
        for number in range(5):
            queries = head.test[:, number]
            found = search_heads(searcher, queries, 20, effort=[30] * 2, count=True)
            kept, compared = walk(
                index.tables[f"links_{part}"],
                int(index.tables["entries"][part]),
                index.keys.codes,
                queries[part],
                30,
            )
            assert found.ids[part].tolist() == index.wanted[kept[:20]].tolist()
            assert abs(int(found.scanned[part]) - compared) <= 1  # the entry


def test_every_head_may_have_an_effort_of_its_own(head):
    for name in ("graph", "lists", "ivf"):
        searcher, query = searcher_of(name, head), head.test[:, 2]
        mixed = search_heads(searcher, query, 5, effort=[1, 9], count=True)
        for part, effort in enumerate((1, 9)):
            alone = search_heads(searcher, query, 5, effort=[effort] * 2, count=True)
            assert mixed.ids[part].tolist() == alone.ids[part].tolist()
            assert mixed.scanned[part] == alone.scanned[part]


def slow_lists(index, queries, k, probes):
    """The lists of the nearest centroids, scanned one key at a time."""
    rows, keys = index.rows(), index.keys.decode()
    for part, query in enumerate(queries):
        part = part if index.parts else 0
        order = np.argsort(-(index.tables["centroids"][part] @ query))[:probes]
        some = {int(key) for c in order for key in index.tables["table"][part, c] if key >= 0}
        best = sorted(some, key=lambda key: -float(keys[key] @ query))[:k]
        yield [int(rows[key]) for key in best], len(some) + index.tables["centroids"].shape[1]


@pytest.mark.parametrize("name", ["lists", "half lists", "group lists"])
@pytest.mark.parametrize(("k", "probes"), [(10, 2), (40, 1), (3, 8)])
def test_lists_agree_with_the_slow_version(head, name, k, probes):
    index = build(head.keys, head.train, SPECS[name])
    searcher = open_index(index)
    for number in range(4):
        queries = head.test[:, number]
        found = search_heads(searcher, queries, k, effort=[probes] * 2)
        for part, (expected, compared) in enumerate(slow_lists(index, queries, k, probes)):
            assert found.ids[part].tolist() == expected
            assert found.scanned[part] == compared


def test_lists_with_fewer_keys_than_asked_for(head):
    spec = QueryLists(clusters=64, cap=5, knn=5, probes=1, **SMALL)
    index = build(head.keys, head.train, spec)
    found = search_heads(open_index(index), head.test[:, 0], 50)
    assert found.ids.shape == (2, 50)
    assert ((found.ids < 0) == np.isneginf(found.scores)).all()
    assert (found.ids[:, 5:] == -1).all()
    assert (found.ids[:, 0] >= 0).all()


def test_all_keys_come_back_to_build_again(head):
    searcher = searcher_of("lists", head)
    keys = searcher.all_keys()
    np.testing.assert_array_equal(keys, head.keys)
    again = open_index(build(keys, head.train, LISTS))
    found, same = (
        search_heads(again, head.test[:, 0], 50),
        search_heads(searcher, head.test[:, 0], 50),
    )
    np.testing.assert_array_equal(found.ids, same.ids)


@pytest.mark.parametrize("storage", ["float16", "uint8"])
def test_small_storages_find_nearly_the_same(head, recall_of, storage):
    for kind, effort in ((Exact, {}), (ProjectedGraph, {"ef": 280}), (QueryLists, {"probes": 3})):
        small = {"knn": 40, **SMALL, **effort} if effort else {}
        index = build(head.keys, head.train, kind(storage=storage, **small))
        assert index.keys.nbytes < head.keys.nbytes
        found = [search_heads(open_index(index), head.test[:, i], 10).ids[0] for i in range(20)]
        exact = head.best(head.test[0], 10)
        if kind is QueryLists:  # what the lists hold, not how it is kept
            whole = open_index(build(head.keys, head.train, kind(**small)))
            exact = [search_heads(whole, head.test[:, i], 10).ids[0] for i in range(20)]
        assert recall_of(found, exact) >= 0.95


def test_graphs_of_a_group_share_one_storage(head):
    searcher = searcher_of("graph", head)
    storages = {int(engine.storage.this) for engine in searcher._engines}
    assert len(storages) == 1
    index = build(head.keys, head.train, GRAPH)
    assert searcher.nbytes == index.keys.nbytes + index.nbytes


def test_an_index_outlives_what_it_was_opened_from(head):
    index = build(head.keys, head.train, GRAPH)
    searcher = open_index(index)
    expected = search_heads(searcher, head.test[:, 0], 600)
    index.keys.codes[...] = 0
    index.tables["links_0"][...] = 0
    del index
    np.testing.assert_array_equal(search_heads(searcher, head.test[:, 0], 600).ids, expected.ids)


@pytest.mark.parametrize("name", SPECS)
def test_saved_and_loaded_it_answers_the_same(head, name, tmp_path):
    index = build(head.keys, head.train, SPECS[name])
    np.savez(tmp_path / "index.npz", **index.tables_to_arrays())
    with np.load(tmp_path / "index.npz") as arrays:
        loaded = AttentionIndex.from_tables(dict(arrays), head.keys)
    assert loaded.spec == index.spec
    assert loaded.note == index.note
    assert loaded.nbytes == index.nbytes
    np.testing.assert_array_equal(loaded.keys.codes, index.keys.codes)
    tables = loaded.tables_to_arrays()
    for name, array in index.tables_to_arrays().items():
        np.testing.assert_array_equal(tables.pop(name), array)
    assert not tables
    first, second = (search_heads(open_index(one), head.test[:, 3], 20) for one in (index, loaded))
    np.testing.assert_array_equal(first.ids, second.ids)
    np.testing.assert_array_equal(first.scores, second.scores)


def test_tables_go_over_keys_that_are_kept_elsewhere(head):
    index = build(head.keys, head.train, GRAPH)
    arrays = index.tables_to_arrays()
    assert sum(array.nbytes for array in arrays.values()) < index.nbytes + 600
    loaded = AttentionIndex.from_tables(arrays, head.keys)
    np.testing.assert_array_equal(loaded.keys.codes, index.keys.codes)
    with refused(RetrievalError, "100"):
        AttentionIndex.from_tables(arrays, head.keys[:100])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("links_1"), "links_0"),
        (lambda a: a.pop("wanted"), "'wanted'"),
        (lambda a: a.update(links_0=a["links_0"] + 600), "links_0"),
        (lambda a: a.update(head=a["head"][:9]), ""),
    ],
)
def test_damaged_arrays_are_refused(head, change, message):
    arrays = build(head.keys, head.train, GRAPH).tables_to_arrays()
    change(arrays)
    with refused(RetrievalError, message):
        AttentionIndex.from_tables(arrays, head.keys)


@pytest.mark.parametrize("name", SPECS)
def test_query_heads_are_searched_in_threads(head, name):
    searcher, queries = searcher_of(name, head), head.test
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        places = [(part, number) for number in range(queries.shape[1]) for part in range(2)]
        found = threads.map(lambda at: searcher.search_head(at[0], queries[at][None], 9), places)
    for (part, number), each in zip(places, found, strict=True):
        alone = search_heads(searcher, queries[:, number], 9)
        np.testing.assert_array_equal(each.ids[0], alone.ids[part])
        np.testing.assert_array_equal(each.scores[0], alone.scores[part])


def test_without_faiss_the_error_says_what_to_install(head, monkeypatch):
    index = build(head.keys, head.train, GRAPH)
    monkeypatch.setitem(sys.modules, "faiss", None)
    with refused(RetrievalError):
        open_index(index)


def test_where_a_graph_finds_fewer_keys_there_are_no_ids(head):
    """Not the last key in the place of each that is missing."""
    few = ProjectedGraph(degree=4, knn=8, ef=8, **SMALL)
    found = search_heads(open_index(build(head.keys, head.train, few)), head.test[:, 0], 590)
    missing = np.isneginf(found.scores)
    assert missing.any()
    np.testing.assert_array_equal(found.ids == -1, missing)
    for ids in found.ids:
        assert len(set(ids[ids >= 0].tolist())) == (ids >= 0).sum()

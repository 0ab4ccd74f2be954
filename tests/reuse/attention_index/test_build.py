"""What the builds make, against slow versions written from their descriptions."""

import collections
import sys

import jax
import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import RequestError, RetrievalError
from jaxrag.reuse.attention_index import (
    Exact,
    ProjectedGraph,
    QueryLists,
    build,
    graph,
    lists,
    nearest,
    nearest_on_device,
)
from jaxrag.reuse.attention_index import knn as knn_module

build_module = sys.modules["jaxrag.reuse.attention_index.build"]  # the function has its name


@pytest.mark.parametrize("k", [1, 7, 100])
def test_nearest_is_the_sorted_scores_whatever_the_blocks(head, k, monkeypatch):
    scores = head.test[0] @ head.keys.T
    expected = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    for queries, keys in ((1024, 16384), (3, 37), (7, 600)):
        monkeypatch.setattr(knn_module, "_QUERIES", queries)
        monkeypatch.setattr(knn_module, "_KEYS", keys)
        found = nearest(head.test[0], head.keys, k)
        np.testing.assert_array_equal(found.ids, expected)
        np.testing.assert_allclose(found.scores, -np.sort(-scores, axis=1)[:, :k], rtol=1e-5)


@pytest.mark.parametrize("k", [1, 7, 100])
def test_nearest_on_a_device_is_nearest(head, k, monkeypatch):
    expected = nearest(head.test[0], head.keys, k)
    for queries, keys in ((1024, 16384), (13, 37), (20, 256)):
        monkeypatch.setattr(knn_module, "_QUERIES", queries)
        monkeypatch.setattr(knn_module, "_KEYS", keys)
        found = nearest_on_device(head.test[0], head.keys, k)
        np.testing.assert_array_equal(found.ids, expected.ids)
        np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-5)
    with refused(RequestError, "k=601"):
        nearest_on_device(head.test[0], head.keys, 601)


def test_an_index_may_be_built_from_neighbours_found_on_a_device(head):
    spec = ProjectedGraph(degree=8, knn=10, ef=80, **SMALL)
    host = build(head.keys, head.train, spec)
    device = build(head.keys, head.train, spec, knn=nearest_on_device)
    np.testing.assert_array_equal(device.keys.codes, host.keys.codes)
    for name, array in host.tables_to_arrays().items():
        np.testing.assert_array_equal(device.tables_to_arrays()[name], array)


@pytest.mark.parametrize(("backend", "calls"), [("cpu", 0), ("gpu", 4), ("tpu", 4)])
def test_neighbours_are_found_where_the_accelerator_is(head, backend, calls, monkeypatch):
    """Of the training queries of both heads, and of those that the effort is chosen by."""
    spec = ProjectedGraph(degree=8, knn=10, target_recall=0.5, most_scanned=1.0, **SMALL)
    host = build(head.keys, head.train, spec, asked=head.test, k=10, knn=nearest)
    called = []

    def counted(*arguments):
        called.append(arguments)
        return nearest_on_device(*arguments)

    monkeypatch.setattr(build_module, "nearest_on_device", counted)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    made = build(head.keys, head.train, spec, asked=head.test, k=10)
    assert len(called) == calls
    for name, array in host.tables_to_arrays().items():
        np.testing.assert_array_equal(made.tables_to_arrays()[name], array)


def test_nearest_takes_the_smaller_row_among_equals():
    keys = np.ones((9, 2), np.float32)
    found = nearest(np.ones((2, 2), np.float32), keys, 9)
    assert found.ids.tolist() == [list(range(9))] * 2


def test_nearest_of_too_few_keys(head):
    with refused(RequestError, "k=601"):
        nearest(head.test[0], head.keys, 601)


def slow_projection(found, count, degree, span, top):
    """Links as ``ProjectedGraph`` describes them, one pair at a time."""
    met = [collections.Counter() for _ in range(count)]
    for ranked in found.tolist():
        for i, a in enumerate(ranked):
            for b in ranked[i + 1 : i + 1 + span]:
                met[a][b] += 1
                met[b][a] += 1
            for t in range(min(top, i)):
                met[a][ranked[t]] += 1
    links = np.full((count, degree), -1, np.int32)
    half = degree // 2
    for a, counter in enumerate(met):
        counter.pop(a, None)
        order = sorted(counter, key=lambda b: (-counter[b], b))
        if len(order) > degree:
            step = (len(order) - half) / (degree - half)
            order = order[:half] + [order[half + int(i * step)] for i in range(degree - half)]
        links[a, : len(order)] = order
    return links


@pytest.mark.parametrize(("degree", "span", "top"), [(64, 4, 4), (8, 4, 4), (6, 0, 2), (4, 3, 0)])
def test_projection(head, degree, span, top):
    found = nearest(head.train[0], head.keys, 20).ids
    links = graph.project(found, len(head.keys), degree, span, top)
    np.testing.assert_array_equal(links, slow_projection(found, len(head.keys), degree, span, top))


def test_clusters_are_unit_vectors_and_queries_are_with_the_nearest(head):
    centroids, owner = lists.cluster(head.train[0], 12, 8, 0)
    np.testing.assert_allclose(np.linalg.norm(centroids, axis=1), 1, rtol=1e-5)
    np.testing.assert_array_equal(owner, (head.train[0] @ centroids.T).argmax(1))
    first, _ = lists.cluster(head.train[0], 12, 0, 0)
    served = [(head.train[0] @ c.T).max(1).mean() for c in (first, centroids)]
    assert served[1] > served[0]
    again, _ = lists.cluster(head.train[0], 12, 8, 0)
    np.testing.assert_array_equal(centroids, again)


def test_there_are_no_more_clusters_than_queries_and_none_is_empty():
    same = np.ones((5, 3), np.float32)
    same[4] = [1, -1, 0]
    centroids, owner = lists.cluster(same, 8, 3, 0)
    assert centroids.shape == (5, 3)
    assert np.isfinite(centroids).all()
    assert owner.max() < 5
    assert owner[4] != owner[0]


@pytest.mark.parametrize("cap", [5, 1000])
def test_members_are_the_most_wanted_keys_of_each_cluster(head, cap):
    found = nearest(head.train[0], head.keys, 10).ids
    _, owner = lists.cluster(head.train[0], 6, 4, 0)
    table = lists.members(found, owner, 6, cap)
    for number, row in enumerate(table):
        counted = collections.Counter(found[owner == number].ravel().tolist())
        expected = sorted(counted, key=lambda key: (-counted[key], key))[:cap]
        assert [key for key in row.tolist() if key >= 0] == expected
    assert table.shape[1] <= cap


SMALL = {"exact_below": 0, "min_queries": 1}


@pytest.mark.parametrize(
    "spec",
    [ProjectedGraph(degree=8, knn=10, ef=80, **SMALL),
     QueryLists(clusters=6, cap=50, knn=10, probes=3, **SMALL)],
)  # fmt: skip
def test_wanted_keys_come_first_and_hottest(head, spec):
    index = build(head.keys, head.train, spec)
    met = np.zeros(len(head.keys), int)
    for queries in head.train:
        np.add.at(met, nearest(queries, head.keys, 10).ids, 1)
    assert set(index.wanted.tolist()) == set(np.flatnonzero(met).tolist())
    assert (np.diff(met[index.wanted]) <= 0).all()
    assert sorted(index.rows().tolist()) == list(range(len(head.keys)))
    np.testing.assert_array_equal(
        index.keys.decode(), head.keys[index.rows()].astype(index.keys.codes.dtype)
    )


def test_heads_of_a_group_share_the_keys_or_everything(head):
    apart = build(head.keys, head.train, ProjectedGraph(degree=8, knn=10, ef=80, **SMALL))
    assert apart.parts == 2
    assert apart.tables["links_0"].shape == apart.tables["links_1"].shape
    together = build(
        head.keys, head.train, ProjectedGraph(degree=8, knn=10, ef=80, share="group", **SMALL)
    )
    assert together.parts is None
    assert together.tables.keys() == {"entries", "links_0"}
    assert together.tables["links_0"].shape[1] == 16
    assert together.keys.nbytes == apart.keys.nbytes


def test_bytes_are_those_of_the_arrays(head):
    index = build(head.keys, head.train, ProjectedGraph(degree=8, knn=10, ef=80, **SMALL))
    wanted = len(index.wanted)
    assert index.nbytes == 2 * wanted * 8 * 4 + 2 * 4 + wanted * 4
    assert index.keys.nbytes == head.keys.size * 2


@pytest.mark.parametrize("kind", [ProjectedGraph, QueryLists])
def test_short_contexts_and_small_banks_are_exact_and_say_so(head, kind):
    short = build(head.keys, head.train, kind())
    assert isinstance(short.spec, Exact)
    assert short.note == "exact: 600 keys, fewer than exact_below=32768"
    few = build(head.keys, head.train, kind(exact_below=600))
    assert few.note == "exact: 256 training queries, fewer than min_queries=1024"
    none = build(head.keys, None, kind(exact_below=600))
    assert none.note == "exact: 0 training queries, fewer than min_queries=1024"
    assert few.keys.storage == kind().storage


def test_what_does_not_fit_is_refused(head):
    spec = ProjectedGraph(ef=280, **SMALL)
    with refused(RetrievalError, "2"):
        build(head.keys, head.train[..., :15], spec)
    with refused(RetrievalError, "600"):
        build(head.keys[:, 0], head.train, spec)
    with refused(RetrievalError, "0"):
        build(head.keys[:0], None, Exact())
    bad = head.keys.copy()
    bad[3, 3] = 70000
    with refused(RetrievalError, "storage='float32'"):
        build(bad, None, Exact())
    assert build(bad, None, Exact("float32")).keys.codes[3, 3] == 70000


@pytest.mark.parametrize("share", ["q_head", "group"])
def test_lists_without_keys_are_the_same_lists(head, share):
    spec = QueryLists(clusters=8, cap=300, knn=9, probes=2, share=share, **SMALL)
    index = build(head.keys, head.train, spec)
    bare = index.without_keys()
    assert len(bare) == 0 and bare.parts == index.parts and bare.without_keys() is bare
    members, starts = bare.tables["members"], bare.tables["starts"]
    assert members.dtype == np.int32 and members.min() >= 0
    for part, table in enumerate(index.tables["table"]):
        for cluster, row in enumerate(table):
            mine = members[starts[part, cluster] : starts[part, cluster + 1]]
            np.testing.assert_array_equal(mine, row[row >= 0])
    assert bare.nbytes < index.nbytes


def test_distinct_candidates_of_the_nearest_lists():
    centroids = np.eye(3, dtype=np.float32)
    table = np.array([[4, 1, -1], [1, 7, 2], [9, -1, -1]], np.int32)
    query = np.array([0.5, 1, 0.1], np.float32)
    assert lists.candidates(query, centroids, table, 2).tolist() == [1, 2, 4, 7]
    assert lists.candidates(query, centroids, table, 9).tolist() == [1, 2, 4, 7, 9]
    assert sorted(lists.nearest_lists(query, centroids, 2).tolist()) == [0, 1]

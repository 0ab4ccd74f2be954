"""The effort of a search: chosen for each head by queries that nothing was trained on."""

import dataclasses
import threading

import numpy as np
import pytest
from index import search_heads
from refusal import refused

from jaxrag.base.config import RopeConfig
from jaxrag.base.errors import ConfigError, RetrievalError
from jaxrag.reuse.attention_index import (
    AttentionIndex,
    Exact,
    Hnsw,
    Ivf,
    ProjectedGraph,
    QueryBank,
    QueryLists,
    build,
    effort,
    open_index,
    spread,
)

K = 10
OPEN = {
    "graph": ProjectedGraph(degree=16, knn=40, exact_below=0, min_queries=1, most_scanned=1.0),
    "lists": QueryLists(
        clusters=16, cap=300, knn=40, exact_below=0, min_queries=1, most_scanned=1.0
    ),
    "ivf": Ivf(clusters=20, exact_below=0, most_scanned=1.0),
    "hnsw": Hnsw(links=8, ef_build=60, storage="float32", exact_below=0, most_scanned=1.0),
}
ROPE = RopeConfig(10000.0, 16, False, None)


def recalls(head, searcher, effort):
    """Mean recall of the test queries by head, at the chosen effort or a given one."""
    return [
        np.mean(
            [
                len(set(row) & set(best)) / K
                for row, best in zip(
                    searcher.search_head(part, head.test[part], K, effort=effort[part]).ids,
                    head.best(head.test[part], K),
                    strict=True,
                )
            ]
        )
        for part in range(len(head.test))
    ]


@pytest.mark.parametrize("name", OPEN)
@pytest.mark.parametrize("target", [0.6, 0.9])
def test_it_is_the_least_on_its_ladder_that_reaches_the_target(head, name, target):
    spec = dataclasses.replace(OPEN[name], target_recall=target)
    index = build(head.keys, head.train, spec, asked=head.test, k=K)
    searcher = open_index(index)
    assert index.spec == spec and len(index.efforts) == 2 and not index.note
    assert min(recalls(head, searcher, index.efforts)) >= target
    ladder = effort._ladder(searcher, K, len(head.keys))
    for part, chosen in enumerate(index.efforts):
        if (at := ladder.index(chosen)) % effort._LEAP:  # else a leap found it enough
            below = [ladder[at - 1]] * 2
            assert recalls(head, searcher, below)[part] < target
    found = search_heads(searcher, head.test[:, 0], K, count=True)
    same = search_heads(searcher, head.test[:, 0], K, effort=index.efforts, count=True)
    np.testing.assert_array_equal(found.ids, same.ids)
    np.testing.assert_array_equal(found.scanned, same.scanned)


def test_an_effort_that_is_given_is_used(head):
    given = dataclasses.replace(OPEN["lists"], probes=3, target_recall=1.0)
    index = build(head.keys, head.train, given, asked=head.test, k=K)
    assert index.efforts == () and index.spec.probes == 3
    searcher = open_index(index)
    found = search_heads(searcher, head.test[:, 0], K)
    same = search_heads(searcher, head.test[:, 0], K, effort=[3] * 2)
    np.testing.assert_array_equal(found.ids, same.ids)


@pytest.mark.parametrize("name", OPEN)
def test_what_would_scan_too_much_is_exact_and_says_so(head, name):
    spec = dataclasses.replace(OPEN[name], target_recall=0.95, most_scanned=0.05)
    index = build(head.keys, head.train, spec, asked=head.test, k=K)
    assert isinstance(index.spec, Exact) and index.spec.storage == spec.storage
    assert index.note == (
        "exact: no search of most_scanned=0.05 of the 600 keys finds target_recall=0.95 of the "
        "best 10"
    )
    found = search_heads(open_index(index), head.test[:, 1], K)
    assert found.scanned.tolist() == [600, 600]


def test_one_head_that_needs_more_is_enough(head):
    """Heads of a group share the keys: the index is exact for all of them."""
    spec = dataclasses.replace(OPEN["lists"], most_scanned=0.5)
    easy = head.train[:, :20]  # what lists were made of
    asked = np.stack([easy[0], 3 * np.random.default_rng(0).standard_normal(easy[1].shape)])
    assert not build(head.keys, easy, spec, asked=easy, k=K).note
    assert build(head.keys, easy, spec, asked=asked.astype(np.float32), k=K).note


def test_without_queries_to_choose_by_it_is_exact(head):
    for spec in (OPEN["ivf"], OPEN["hnsw"]):
        index = build(head.keys, None, spec)
        assert isinstance(index.spec, Exact)
        assert index.note == (
            "exact: no queries to choose the effort of a search by; say ef or probes"
        )
    with refused(RetrievalError, "2"):
        build(head.keys, head.train, OPEN["graph"], asked=head.test[..., :15])


def test_more_keys_wanted_than_there_are(head):
    index = build(head.keys[:8], head.train, OPEN["graph"], asked=head.test, k=100)
    found = search_heads(open_index(index), head.test[:, 0], 8)
    assert sorted(found.ids[0].tolist()) == list(range(8))


@pytest.mark.parametrize("name", ["graph", "lists"])
def test_efforts_are_saved_and_checked(head, name):
    index = build(head.keys, head.train, OPEN[name], asked=head.test, k=K)
    arrays = index.tables_to_arrays()
    assert AttentionIndex.from_tables(arrays, head.keys).efforts == index.efforts
    for efforts, message in (
        ((), ""),
        ((5,), "5"),
        ((5, 0), "5"),
    ):
        odd = dataclasses.replace(index, efforts=efforts).tables_to_arrays()
        with refused(RetrievalError, message):
            AttentionIndex.from_tables(odd, head.keys)


def test_counts_are_not_disturbed_by_other_searches(head):
    """FAISS counts for the process: whoever counts does so while nobody else searches."""
    index = build(head.keys, head.train, dataclasses.replace(OPEN["graph"], ef=40))
    searcher, stop = open_index(index), threading.Event()
    alone = search_heads(searcher, head.test[:, 0], K, count=True).scanned

    def others():
        while not stop.is_set():
            search_heads(searcher, head.test[:, 1], K)

    threads = [threading.Thread(target=others) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(50):
            counted = search_heads(searcher, head.test[:, 0], K, count=True).scanned
            np.testing.assert_array_equal(counted, alone)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize(
    ("count", "held"), [(1, 0), (2, 1), (15, 7), (64, 8), (256, 16), (2048, 128), (8192, 512)]
)
def test_held_out_queries_are_runs_from_all_over_the_text(count, held):
    queries = np.arange(2 * count * 16, dtype=np.float32).reshape(2, count, 16)
    trained, asked = QueryBank(queries, 10 * np.arange(count, dtype=np.int32)).split()
    positions = () if asked is None else asked.positions // 10
    assert len(positions) == held
    assert sorted([*(trained.positions // 10), *positions]) == list(range(count))
    if asked is not None:
        np.testing.assert_array_equal(asked.queries, queries[:, positions])
        runs = np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1)
        if count >= 256:
            assert [len(run) for run in runs] == [held // 8] * 8
            assert np.abs(np.diff([run.mean() for run in runs]) - count / 8).max() <= 1


@pytest.mark.parametrize("logarithmic", [False, True])
def test_lessons_stand_where_questions_will(logarithmic):
    rng = np.random.default_rng(0)
    bank = QueryBank(rng.standard_normal((2, 64, 16)).astype(np.float32), np.arange(64))
    trained, held = bank.split()
    learned, asked = bank.lessons(ROPE, 100, 400, logarithmic=logarithmic)
    for part, got, how in ((trained, learned, logarithmic), (held, asked, False)):
        places = spread(len(part.positions), 100, 400, logarithmic=how)
        np.testing.assert_array_equal(got, part.at(ROPE, places))
    own, same = bank.lessons(ROPE, 100, 400, own=True, logarithmic=logarithmic)
    np.testing.assert_array_equal(own, trained.own(ROPE))
    np.testing.assert_array_equal(same, asked)
    learned, asked = bank.lessons(ROPE, 100, 101)
    np.testing.assert_array_equal(learned, trained.at(ROPE, 100))


@pytest.mark.parametrize("field", ["target_recall", "most_scanned"])
@pytest.mark.parametrize("value", [0, 1.5, "most", True, None])
def test_a_share_out_of_range_is_named(field, value):
    with refused(ConfigError, field):
        QueryLists(**{field: value})


@pytest.mark.parametrize("name", OPEN)
def test_the_last_queries_have_a_say_of_their_own(head, name):
    """Few of them do not drown in many others."""
    spec = dataclasses.replace(OPEN[name], target_recall=0.9)
    asked = np.repeat(head.test[:, :1], 32, axis=1)  # one query is soon content
    alone = build(head.keys, head.train, spec, asked=asked, k=K)
    both = build(head.keys, head.train, spec, asked=asked, last=head.test, k=K)
    only = build(head.keys, head.train, spec, last=head.test, k=K)
    assert min(recalls(head, open_index(both), both.efforts)) >= 0.9
    pairs = zip(both.efforts, alone.efforts, only.efforts, strict=True)
    assert all(one == max(few, many) for one, few, many in pairs)

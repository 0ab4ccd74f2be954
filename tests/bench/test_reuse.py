"""The reuse simulation: workloads as described, caches counted by the definition, files read."""

import collections
import dataclasses
import json

import numpy as np
import pytest
from reuse import (
    Options,
    TooFewPassages,
    Workload,
    chunk_store,
    main,
    make_workload,
    measure,
    prefix_cache,
    read_passages,
    report,
    run,
)

from jaxrag.errors import RequestError

LENGTHS = np.random.default_rng(3).integers(20, 200, 3000)


def options(**changes):
    return dataclasses.replace(Options(data="", sensitivity=False), **changes)


@pytest.fixture
def data(tmp_path):
    """Small files of the authors' formats."""
    (tmp_path / "deep").mkdir()
    texts = [f"passage {n} of {'words ' * (n % 7)}" for n in range(400)]
    rows = [
        {"id": n, "query": "q", "positive": texts[2 * n : 2 * n + 1], "negative": ["一二三四"]}
        for n in range(50)
    ]
    (tmp_path / "deep" / "en_fact.json").write_text("\n".join(map(json.dumps, rows)))
    rows = [{"question": "q", "ctxs": [{"title": "t", "text": text}]} for text in texts[50:300]]
    (tmp_path / "nq-open-oracle.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    corpus = {f"title {n}": [texts[n], " More."] for n in range(300, 400)}
    (tmp_path / "hotpotqa_train_corpus.json").write_text(json.dumps(corpus))
    return tmp_path


def test_queries_are_drawn_as_the_shares_say():
    work = make_workload(options(), LENGTHS)
    asked = collections.Counter(chunk for query in work.queries for chunk in query)
    assert all(len(set(query)) == len(query) == 5 for query in work.queries)
    assert len(work.queries) == 1000
    of_kb = sum(count for chunk, count in asked.items() if chunk in work.kb)
    assert of_kb / 5000 == pytest.approx(0.6, abs=0.03)
    once = sum(1 for chunk, count in asked.items() if chunk not in work.kb and count == 1)
    assert once >= 5000 * 0.1 * 0.9  # the unique ones are among them
    popular = [count for chunk, count in asked.most_common() if chunk in work.kb]
    assert popular[0] > 20 * popular[len(popular) // 2]
    again = make_workload(options(), LENGTHS)
    assert again.queries == work.queries
    assert make_workload(options(seed=1), LENGTHS).queries != work.queries


def test_without_shuffling_equal_sets_stand_in_equal_order():
    work = make_workload(options(shuffle=False, popularity=2.0), LENGTHS)
    orders = collections.defaultdict(set)
    for query in work.queries:
        orders[frozenset(query)].add(query)
    assert all(len(order) == 1 for order in orders.values())
    shuffled = make_workload(options(popularity=2.0), LENGTHS)
    assert prefix_cache(work).hits > prefix_cache(shuffled).hits


def test_figure_10_of_the_paper():
    """Query 1 asks b, query 2 asks a b, query 3 asks b a: a prefix cache finds b only."""
    a, b = 0, 1
    work = Workload(np.array([10, 1]), frozenset(), ((b,), (a, b), (b, a)))
    cached = prefix_cache(work)
    # b; a, then b again behind a; b found, a again behind b.
    assert (cached.hits, cached.prefills, cached.redundant) == (1, 4, 2)
    assert cached.stored == 1 + 10 + 1 + 10
    store = chunk_store(work)
    assert (store.hits, store.prefills, store.redundant) == (3, 2, 0)
    assert store.stored == 11


def test_two_stages_find_the_knowledge_base_and_copy_what_is_new():
    new, kb = 0, 1
    work = Workload(np.array([10, 1]), frozenset([kb]), ((kb, new), (new, kb), (kb, new)))
    served = prefix_cache(work, offline=True)
    assert (served.hits, served.prefills, served.redundant) == (4, 2, 1)
    assert served.stored == 1 + 10 + 10
    assert chunk_store(work).stored == 1 + 10


@pytest.mark.parametrize("offline", [False, True])
def test_prefix_cache_equals_a_set_of_whole_prefixes(offline):
    work = make_workload(options(queries=300, popularity=1.5), LENGTHS)
    seen, stored, hits = set(), 0, 0
    for query in work.queries:
        for end in range(1, len(query) + 1):
            chunk = query[end - 1]
            if query[:end] in seen or (offline and chunk in work.kb):
                hits += 1
            else:
                stored += work.tokens[chunk]
            seen.add(query[:end])
    served = prefix_cache(work, offline=offline)
    kb = work.tokens[list(work.kb)].sum() if offline else 0
    assert (served.hits, served.stored) == (hits, stored + kb)
    assert served.hits + served.prefills == 1500


def test_figures_follow_from_what_was_counted():
    figures = measure(options(), LENGTHS)
    work = make_workload(options(), LENGTHS)
    store, cached = chunk_store(work), prefix_cache(work)
    assert figures["asked"] == 5000
    assert figures["chunk_store"]["hit_rate"] == store.hits / 5000
    assert figures["prefix_cache"]["storage_reduction"] == 1 - store.stored / cached.stored
    assert figures["prefix_cache"]["avoided"] == 1 - store.prefills / cached.prefills
    reduced = figures["prefix_cache"]["storage_reduction_used"]
    assert reduced > figures["prefix_cache"]["storage_reduction"]
    assert figures["chunk_store"]["redundant"] == 0 < figures["prefix_cache"]["redundant"]
    assert 0 < figures["kb_chunks_used"] < figures["kb_chunks"]


def test_files_of_the_sets_are_found_and_read(data):
    sets = read_passages(data)
    assert {name: len(texts) for name, texts in sets.items()} == {
        "RGB en_fact": 51, "NQ": 250, "HotpotQA": 100,
    }  # fmt: skip
    assert sets["HotpotQA"][0].endswith(" More.")
    (data / "nq-open-oracle.jsonl").write_text('{"question": "q"}')
    with pytest.raises(RequestError, match=r"oracle\.jsonl is not the NQ file"):
        read_passages(data)


def test_run_counts_words_and_reports(data):
    result = run(options(data=str(data), queries=30, chunks_per_query=3, sensitivity=True))
    assert result["setting"]["queries"] == 30
    assert "data" not in result["setting"]  # the path of one machine
    assert json.loads(json.dumps(result)) == result
    shown = "\n".join(report(result))
    assert f"storage reduced by {result['prefix_cache']['storage_reduction']:.1%}" in shown
    named = {row["parameter"] for row in result["sensitivity"]}
    assert named == {"chunks_per_query", "popularity", "shuffle", "queries", "pool"}
    plain = next(
        row for row in result["sensitivity"]
        if (row["parameter"], row["value"]) == ("popularity", 1.0)
    )  # fmt: skip
    assert 0 < plain["hit_rate"] < 1
    assert plain["seeds"] == 5
    # 4000 queries of 3 ask for more unique passages than there are.
    assert not any(row["value"] == 4000 for row in result["sensitivity"])


def test_command_writes_the_result(data, tmp_path, capsys):
    out = tmp_path / "reuse.json"
    arguments = ["--data", str(data), "--queries", "20", "--no-sensitivity"]
    assert main([*arguments, "--out", str(out), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == json.loads(out.read_text(encoding="utf-8"))
    assert "sensitivity" not in shown
    assert main([*arguments, "--popularity", "-1"]) != 0
    assert "popularity=-1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"queries": 0}, "queries=0"),
        ({"kb_share": 0.8}, "kb_share=0.8 shared_share=0.3"),
        ({"kb_share": 0.0, "shared_share": 0.0}, "expected shares"),
        ({"pool": 0.0}, "pool=0.0"),
    ],
)
def test_workloads_that_cannot_be_are_refused(changes, message):
    with pytest.raises(RequestError, match=message):
        options(**changes)


def test_too_few_passages_and_no_data_are_refused(tmp_path):
    with pytest.raises(TooFewPassages, match="40 passages for 1000 queries"):
        measure(options(), LENGTHS[:40])
    with pytest.raises(RequestError, match="was found below it"):
        read_passages(tmp_path)

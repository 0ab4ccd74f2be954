"""Reuse beside a prefix cache: workloads as described, and the program beside definitions."""

import collections
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import reuse
from reuse import HITS, WAYS, main, make_tokenizer, report, run
from reuse_workload import (
    SEEDS,
    Options,
    TooFewPassages,
    Workload,
    chunk_store,
    make_workload,
    prefix_cache,
    read_passages,
    sensitivity,
)

from jaxrag.base.errors import KnowledgeBaseError, RequestError

LENGTHS = np.random.default_rng(3).integers(20, 200, 3000)


def options(**changes):
    return dataclasses.replace(Options(), **changes)


def of_chunks(kb, *queries, tokens=(10, 1)):
    """A workload of few chunks."""
    shared = {chunk for query in queries for chunk in query} - set(kb)
    return Workload(np.array(tokens), frozenset(kb), frozenset(shared), queries)


def made_up(folder):
    """Sixty short passages, as one of the sets."""
    words = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath")
    rng = np.random.default_rng(0)
    corpus = {str(n): [" ".join(rng.choice(words, rng.integers(30, 90)))] for n in range(60)}
    (folder / "hotpotqa_train_corpus.json").write_text(json.dumps(corpus))
    return folder


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
    work = of_chunks((), (b,), (a, b), (b, a))
    cached = prefix_cache(work)
    # b; a, then b again behind a; b found, a again behind b.
    assert (cached.hits, cached.computed, cached.redundant) == (1, 4, 2)
    assert cached.stored_tokens == cached.computed_tokens == 1 + 10 + 1 + 10
    store = chunk_store(work)
    assert (store.hits, store.computed, store.redundant) == (3, 2, 0)
    assert store.stored_tokens == store.computed_tokens == 11


def test_prefix_cache_equals_a_set_of_whole_prefixes():
    work = make_workload(options(queries=300, popularity=1.5), LENGTHS)
    seen, stored, hits = set(), 0, 0
    for query in work.queries:
        for end in range(1, len(query) + 1):
            if query[:end] in seen:
                hits += 1
            else:
                stored += work.tokens[query[end - 1]]
            seen.add(query[:end])
    served = prefix_cache(work)
    assert (served.hits, served.stored_tokens) == (hits, stored)
    assert served.hits + served.computed == 1500


def test_sensitivity_is_that_of_the_counters():
    rows = sensitivity(options(queries=100), LENGTHS[:900])
    assert {row["parameter"] for row in rows} == {
        "chunks_per_query", "popularity", "shuffle", "queries", "passages",
    }  # fmt: skip
    plain = next(row for row in rows if (row["parameter"], row["value"]) == ("shuffle", True))
    found = collections.defaultdict(list)
    for seed in range(SEEDS):
        work = make_workload(options(queries=100, seed=seed), LENGTHS[:900])
        store, cached = chunk_store(work), prefix_cache(work)
        unused = set(work.kb) - {chunk for query in work.queries for chunk in query}
        used = store.stored_tokens - sum(work.tokens[chunk] for chunk in unused)
        found["hit_rate"].append(store.hits / 500)
        found["avoided"].append(1 - store.computed / cached.computed)
        found["storage_reduction"].append(1 - store.stored_tokens / cached.stored_tokens)
        found["storage_reduction_used"].append(1 - used / cached.stored_tokens)
    for name, series in found.items():
        assert plain[name] == pytest.approx(np.mean(series))
        assert plain[f"{name}_deviation"] == pytest.approx(np.std(series, ddof=1))
    # 4000 queries ask for more unique passages than there are.
    assert not any(row["value"] == 4000 for row in rows)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Twelve queries of three chunks, with room for everything and with little."""
    folder = tmp_path_factory.mktemp("passages")
    asked = options(queries=12, chunks_per_query=3, popularity=1.5)
    return run(made_up(folder), asked, [512])


@pytest.mark.slow
def test_the_program_does_what_the_counters_say(result):
    assert result["counters"].pop("equal")
    for side in result["counters"].values():
        assert side["program"] == side["counted"]
    result["counters"]["equal"] = True
    program = result["counters"]["alternative_path"]["program"]
    assert program["hits"] > result["counters"]["prefix_cache"]["program"]["hits"]
    assert program["redundant"] == 0
    assert {row["seeds"] for row in result["sensitivity"]} == {SEEDS}


@pytest.mark.slow
def test_every_chunk_is_accounted_for(result):
    assert [pool["pool_tokens"] for pool in result["pools"]][1:] == [512]
    assert "data" not in json.dumps(result["setting"])  # the path of one machine
    for pool in result["pools"]:
        for name in WAYS:
            way, rows = pool[name], collections.Counter()
            for where, both in (
                (w, b) for of in pool[name]["found"].values() for w, b in of.items()
            ):
                rows["hit" if where.startswith(HITS) else "computed"] += both["tokens"]
                rows["chunks"] += both["chunks"]
            assert rows["chunks"] == result["asked"] == 36 == way["hits"] + way["computed"]
            assert rows["hit"] + rows["computed"] == result["asked_tokens"]
            assert rows["computed"] == way["computed_tokens"]
            assert way["token_hit_rate"] == pytest.approx(rows["hit"] / result["asked_tokens"])


@pytest.mark.slow
def test_what_was_made_offline_is_always_found(result):
    for pool in result["pools"]:
        assert set(pool["prefix_cache"]["found"]["kb"]) <= {"computed", "prefix hit, pool"}
        for name in ("two_stages", "alternative_path"):
            assert all(where.startswith(HITS) for where in pool[name]["found"]["kb"])
        uploads = {kind: set(pool["two_stages"]["found"][kind]) for kind in ("shared", "unique")}
        assert uploads["unique"] <= {"in place"}  # asked for once, and kept by no store
        assert uploads["shared"] <= {"in place", "prefix hit, pool"}
        assert set(pool["alternative_path"]["found"]["unique"]) <= {"encoded"}


@pytest.mark.slow
def test_a_small_pool_costs_the_store_no_hit(result):
    large, small = result["pools"]
    for name in ("hits", "computed", "stored_tokens"):
        assert small["alternative_path"][name] == large["alternative_path"][name]
    of_store = [
        sum(
            both["chunks"]
            for of in pool["alternative_path"]["found"].values()
            for where, both in of.items()
            if where.endswith("store")
        )
        for pool in (large, small)
    ]
    assert of_store[0] < of_store[1]
    assert small["prefix_cache"]["hits"] <= large["prefix_cache"]["hits"]
    assert small["prefix_cache"]["pool_tokens_in_use"] <= 512
    assert "storage_reduction" not in small["alternative_path"]  # the cache kept a part


@pytest.mark.slow
def test_storage_is_of_store_and_pool(result):
    ways = result["pools"][0]
    per_token = result["kv_bytes_per_token"]
    for way in (ways[name] for name in WAYS):
        assert way["stored_bytes"] == way["stored_tokens"] * per_token
    assert ways["prefix_cache"]["of_these_in_the_store"] == 0
    path, two = ways["alternative_path"], ways["two_stages"]
    assert path["of_these_in_the_store"] == path["stored_tokens"]
    assert two["of_these_in_the_store"] == result["kb_tokens"] + result["prefix_tokens"]
    reduced = 1 - path["stored_tokens"] / ways["prefix_cache"]["stored_tokens"]
    assert path["storage_reduction"] == reduced
    assert path["avoided"] == 1 - path["computed"] / ways["prefix_cache"]["computed"]


@pytest.mark.slow
def test_report_and_json(result):
    assert json.loads(json.dumps(result)) == result
    shown = "\n".join(report(result))
    path = result["pools"][0]["alternative_path"]
    assert f"keeps {1 - path['storage_reduction']:.2f} times what the prefix cache" in shown
    assert "counters, equal to the program above" in shown
    other = {**result, "counters": {"equal": False}, "sensitivity": None}
    assert "DIFFER" in list(report(other))[-1]


def test_what_does_not_add_up_is_refused():
    work = of_chunks((0, 1))
    kb = SimpleNamespace(add=lambda documents, progress: SimpleNamespace(chunks=1, skipped=()))
    with pytest.raises(KnowledgeBaseError, match="2 passages became 1 chunks"):
        reuse.fill(kb, work, ["a", "b"])
    kb = SimpleNamespace(
        stats=lambda walk: {"stored": {"orphans": 3}},
        gc=lambda grace_seconds: SimpleNamespace(chunks=2),
    )
    with pytest.raises(KnowledgeBaseError, match="gc freed 2 chunks: expected the 3"):
        reuse.collect(kb)


def test_a_pool_that_is_too_small_is_refused_at_once(tmp_path):
    with pytest.raises(RequestError, match="pool_tokens=48: expected room for the longest prompt"):
        run(made_up(tmp_path), options(queries=2, chunks_per_query=2), [48])


def test_the_tokenizer_spells_any_passage():
    tokenizer = make_tokenizer(["made up of few words", "and 一二三四"])
    for text in ("other words", "五六 \u00e9"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
def test_command_passes_its_options_and_writes_the_result(result, monkeypatch, tmp_path, capsys):
    calls = []
    monkeypatch.setattr(reuse, "run", lambda *arguments: calls.append(arguments) or result)
    out = tmp_path / "reuse.json"
    arguments = ["--data", "passages", "--queries", "3", "--chunks-per-query", "2", "--seed", "5"]
    arguments += ["--kb-share", "0.5", "--shared-share", "0.4", "--passages", "0.1", "--no-shuffle"]
    arguments += ["--popularity", "0.5", "--no-sensitivity", "--pool-tokens", "512,1024"]
    assert main([*arguments, "--out", str(out), "--json"]) == 0
    asked = Options(3, 2, 0.5, 0.4, 0.5, shuffle=False, passages=0.1, seed=5)
    assert calls == [(Path("passages"), asked, [512, 1024], False)]
    assert json.loads(capsys.readouterr().out) == json.loads(out.read_text(encoding="utf-8"))
    assert json.loads(out.read_text(encoding="utf-8")) == result
    assert main([*arguments, "--popularity", "-1"]) != 0
    assert "popularity=-1" in capsys.readouterr().err
    assert main([*arguments, "--pool-tokens", "much"]) != 0
    assert "--pool-tokens 'much': expected integers" in capsys.readouterr().err
    result = {**result, "counters": {**result["counters"], "equal": False}, "sensitivity": None}
    monkeypatch.setattr(reuse, "run", lambda *arguments: result)
    assert main(arguments) == 1
    assert "the counters DIFFER" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"queries": 0}, "queries=0"),
        ({"kb_share": 0.8}, "kb_share=0.8 shared_share=0.3"),
        ({"kb_share": 0.0, "shared_share": 0.0}, "expected shares"),
        ({"passages": 0.0}, "passages=0.0"),
    ],
)
def test_workloads_that_cannot_be_are_refused(changes, message):
    with pytest.raises(RequestError, match=message):
        options(**changes)


def test_too_few_passages_and_no_data_are_refused(tmp_path):
    with pytest.raises(TooFewPassages, match="40 passages for 1000 queries"):
        make_workload(options(), LENGTHS[:40])
    with pytest.raises(RequestError, match="was found below it"):
        read_passages(tmp_path)

"""Decode rules measured at small sizes: rows, bytes by formula, counts, and what it refuses."""

import dataclasses

import numpy as np
import pytest
from decode_rules import DecodeOptions, report, rules_of, run

from jaxrag.base.errors import ConfigError, RequestError
from jaxrag.kv.placement import AWAY, ON_DEVICE, KVPlacement
from jaxrag.reuse.attention_index import (
    Exact,
    Hnsw,
    Ivf,
    ProjectedGraph,
    QueryLists,
    build,
    open_index,
)
from jaxrag.reuse.decode import Dense, Flat, TopN, rule_from
from jaxrag.reuse.decode.footprint import index_bytes

SMALL = {"exact_below": 0, "min_queries": 1}
RULES = ("dense", "topn:n=8", "retrieval:k=600,sink=4,recent=16", "ivf:k=10,sink=4,recent=16")


@pytest.fixture(scope="module")
def result():
    return run(
        DecodeOptions(contexts=(1024,), rules=RULES, layers=2, question_tokens=64, steps=34, warm=1)
    )


@pytest.mark.slow
def test_rows(result):
    dense, topn, retrieval, ivf = result["rows"]
    assert [row["rule"] for row in result["rows"]] == list(RULES)
    for row in result["rows"]:
        assert row["context"] == 1024 and row["seconds"] >= row["best_seconds"] > 0
        assert row["cache_tokens"] >= 1024
        assert len(row["ids"]) == 1 + 1 + 34
    assert dense["formula_bytes"] == {
        "device": 1024 * result["kv_bytes_per_token"],
        "host": 0,
        "bus": 0,
    }
    # V of the second layer lies in host memory, in arrays as large as the formula says.
    whole = topn["cache_tokens"] * result["kv_bytes_per_token"]
    assert dense["device_bytes"] == whole and dense["host_bytes"] == 0
    assert (topn["device_bytes"], topn["host_bytes"]) == (whole * 3 // 4, whole // 4)
    # Few keys: both scan all of them, so nothing is missed.
    for row in (retrieval, ivf):
        assert len(row["index"]["blocks"]) == 2  # 32 steps, and 2
        for part in (row["index"], *row["index"]["blocks"]):
            assert part["scanned"] == 1.0
            assert part["recall"] == pytest.approx(1, abs=1e-3)  # keys of 16 bits: nearly ties
        assert row["index"]["keys"] == 1024 + 1 - 16 - 4
        assert any("32768" in note for note in row["index"]["notes"])
    lines = list(report(result))
    (by_block,) = (line for line in lines if line.startswith(f"1024 {RULES[3]}: recall by 32 "))
    assert by_block.count("%") == 2
    assert sum(line.strip().startswith("1024 ") for line in lines) >= 4


def test_formulas(tiny_config):
    config = tiny_config()  # 3 layers, 6 heads on 2 KV heads of 10, float32
    per_token = 2 * 3 * 2 * 10 * 4
    assert config.kv_bytes_per_token == per_token
    assert Dense().bytes(config, 100).device == 100 * per_token
    kcache = TopN(n=8, device_layers=1).bytes(config, 100)
    assert kcache.device == 100 * per_token - 100 * 2 * (2 * 10 * 4)
    assert kcache.host == 100 * per_token - kcache.device
    # layers, N rows a query head and one new row a KV head, dims, bytes
    assert kcache.bus == 2 * (8 * 6 + 2) * 10 * 4
    flat = Flat(k=5, sink=4, recent=16).bytes(config, 100, AWAY)
    assert flat.device == 20 * per_token and flat.host == 100 * (per_token + 8 + 2 * 3)
    assert Flat(k=5, sink=4, recent=16).bytes(config, 100) == Dense().bytes(config, 100)
    window = rule_from("static_window:sink=4,recent=16")
    assert window.bytes(config, 100, AWAY).device == flat.device
    with pytest.raises(RequestError, match="'flat' reads V of every layer on the device"):
        Flat().bytes(config, 100, KVPlacement(value_layers=1))
    with pytest.raises(RequestError, match="'topn' reads K and V on the device"):
        TopN().bytes(config, 100, AWAY)
    retrieval = rule_from("retrieval:sink=4,recent=16")
    rows = 80 * 2 * 3 * 10 * 4  # keys, KV heads, layers, dims, bytes: too few keys for lists
    assert index_bytes(retrieval.index, config, 80) == rows
    assert index_bytes(retrieval.index, config, 80, in_place=True) == 0
    assert retrieval.bytes(config, 100) == flat
    assert retrieval.bytes(config, 100, ON_DEVICE).host == rows
    listed = dataclasses.replace(retrieval.index, exact_below=0)
    lists = 256 * 4 * (2048 + 10) * 3 * 2 * 3  # clusters, bytes, keys and dims, heads, layers
    assert index_bytes(listed, config, 80, in_place=True) == lists
    assert index_bytes(listed, config, 80) == rows + 80 * 2 * 3 * 4 + lists
    graph = ProjectedGraph(exact_below=0)
    assert index_bytes(graph, config, 80) > rows // 2 + 80 * 2 * 3 * 3 * 64 * 4
    assert index_bytes(graph, config, 80, in_place=True) == index_bytes(graph, config, 80)


@pytest.mark.parametrize(
    "spec",
    [
        Exact("float32"),
        ProjectedGraph(degree=8, knn=200, ef=80, **SMALL),
        ProjectedGraph(degree=8, knn=200, ef=80, share="group", storage="float32", **SMALL),
        QueryLists(clusters=6, cap=50, knn=200, probes=2, **SMALL),
        QueryLists(
            clusters=6, cap=50, knn=200, probes=2, share="group", storage="float16", **SMALL
        ),
        Ivf(probes=8, exact_below=0),
        Hnsw(links=8, ef=80, storage="float32", exact_below=0),
    ],
    ids=repr,
)
def test_an_index_takes_no_more_than_the_formula(tiny_config, spec):
    config = tiny_config()
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((600, 10)).astype(np.float32)
    asked = rng.standard_normal((3, 100, 10)).astype(np.float32)
    real = open_index(build(keys, asked, spec)).nbytes * config.num_layers * config.num_kv_heads
    formula = index_bytes(spec, config, 600)  # which counts every key as wanted; most are
    assert real <= formula <= 1.2 * real


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: DecodeOptions(contexts=(1000,)), RequestError, "multiple of 512"),
        (lambda: DecodeOptions(contexts=(2048,)), RequestError, "above the 2048 question tokens"),
        (lambda: DecodeOptions(rules=("lru",)), ConfigError, "name='lru'"),
        (lambda: DecodeOptions(steps=0), RequestError, "steps=0"),
        (lambda: DecodeOptions(contexts=(4096,), rules=("flat:k=9000",)), RequestError, "k=9000"),
        (lambda: rules_of(""), ValueError, "expected names"),
    ],
)
def test_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_rules_of():
    assert rules_of("dense,flat") == ("dense", "flat")
    assert rules_of("dense;topn:n=8,renormalise=true") == ("dense", "topn:n=8,renormalise=true")
    assert rules_of("topn:n=8,renormalise=true") == ("topn:n=8,renormalise=true",)

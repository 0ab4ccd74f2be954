"""The sums of a plan: against slow sums, against each other, and against what was measured."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
from refusal import refused

from jaxrag.base.config import config_from_dict
from jaxrag.base.errors import ConfigError
from jaxrag.base.tables import read_toml
from jaxrag.measure.plan import formulas
from jaxrag.measure.plan.report import plan_record
from jaxrag.measure.plan.settings import (
    CorpusSize,
    EngineHardware,
    PlanSettings,
    QueryLoad,
    StorageTier,
    load_plan,
)
from jaxrag.measure.zoo import LLAMA_100M
from jaxrag.reuse.methods import METHODS

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"
PLANS = sorted(path.stem for path in (ROOT / "configs" / "plans").glob("*.toml"))


def settings(**changes):
    """A plan for a small model on one device; ``changes`` of its parts by name."""
    parts = {
        "model": "configs/models/synthetic-6m.toml",
        "corpus": CorpusSize(chunks=10_000, chunk_tokens=256),
        "queries": QueryLoad(rate=2.0, k=4, question_tokens=32, answer_tokens=64),
        "engine": EngineHardware(flops=1e12, utilisation=0.5, memory=1e9, bandwidth=1e11),
        "tiers": (
            StorageTier("host", bandwidth=1e10, bytes=1e10),
            StorageTier("store", bandwidth=1e9, latency=0.01),
        ),
    }
    return PlanSettings(**(parts | changes))


@pytest.fixture(scope="module")
def small():
    return config_from_dict(read_toml(ROOT / "configs" / "models" / "synthetic-6m.toml"))


@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0, 1.3])
@pytest.mark.parametrize("n", [1, 999, 1000, 1001, 50_000])
def test_harmonic_is_the_sum(n, exponent):
    slow = math.fsum(r**-exponent for r in range(1, n + 1))
    assert formulas.harmonic(n, exponent) == pytest.approx(slow, rel=1e-7)


def test_popular_shares_grow_from_nothing_to_all():
    shares = [formulas.popular_share(held, 10_000, 1.0) for held in (0, 1, 100, 5000, 10_000, 1e9)]
    assert shares == sorted(shares) and shares[0] == 0.0 and shares[-1] == shares[-2] == 1.0
    assert formulas.popular_share(2500, 10_000, 0.0) == pytest.approx(0.25)


def test_bytes_are_those_of_the_store(small):
    assert formulas.kv_token_bytes(small, "native") == small.kv_bytes_per_token
    heads = 2 * small.num_layers * small.num_kv_heads
    assert formulas.kv_token_bytes(small, "int8") == heads * (small.head_dim + 4)
    forms = [formulas.variants(METHODS[it]) for it in ("full_attention", "epic", "fusionrag")]
    assert forms == [0, 1, 2]


def test_a_method_that_computes_more_takes_longer(small):
    flops = [
        formulas.prefill_flops(METHODS[name], settings(), small)
        for name in ("turborag", "epic", "cacheblend", "full_attention")
    ]
    assert flops == sorted(flops) and len(set(flops)) == 4
    everything = METHODS["epic"].with_ratio(1.0)
    assert formulas.prefill_flops(everything, settings(), small) > 0.9 * flops[-1]


def test_tiers_hold_all_finds_and_slow_down(small):
    found = formulas.plan_method("turborag", settings(), small)
    assert [tier.name for tier in found.tiers] == ["pool", "host", "store", "computed"]
    assert sum(tier.share for tier in found.tiers) == pytest.approx(1.0)
    stored = [tier.first_token for tier in found.tiers[:3]]
    assert stored == sorted(stored) and stored[0] < found.first_token < stored[-1]
    assert found.tiers[1].chunks == pytest.approx(
        1e10 / (256 * formulas.kv_token_bytes(small, "int8"))
    )


def test_windows_are_loaded_kept_and_read_as_far_as_they_reach(small):
    """Of four layers three see 32 tokens of a prompt of 4 x 256 and a question of 32."""
    windowed = dataclasses.replace(
        small, num_layers=4, sliding_window=32, window_layers=(True, True, False, True)
    )
    whole = dataclasses.replace(windowed, sliding_window=None, window_layers=None)
    reuse, again = METHODS["turborag"], METHODS["cacheblend"]
    assert formulas.seen_tokens(windowed, 1056) == (1056 + 3 * 32) // 4
    assert formulas.seen_tokens(windowed, 20) == formulas.seen_tokens(whole, 20) == 20
    assert formulas.kept_tokens(again, windowed, 1056) == 1056
    plans = [formulas.plan_method("turborag", settings(), it) for it in (windowed, whole)]
    assert plans[0].token < plans[1].token and plans[0].first_token < plans[1].first_token
    assert plans[0].corpus_bytes == plans[1].corpus_bytes
    tight = settings(engine=dataclasses.replace(settings().engine, memory=1e8))
    rows = [formulas.decode_rows(reuse, tight, it) for it in (windowed, whole)]
    assert rows[0] > rows[1] == formulas.decode_rows(again, tight, windowed)


def test_engines_follow_the_rate_and_the_pool(small):
    busy = dataclasses.replace(settings().queries, rate=2000.0)
    few, many = (
        formulas.plan_method("turborag", settings(queries=it), small).engines
        for it in (settings().queries, busy)
    )
    assert few == 1 < many
    tight = dataclasses.replace(settings().engine, memory=3e7)
    none = formulas.plan_method("turborag", settings(engine=tight), small)
    assert none.engines is None


def on_cpu(question, context):
    """The machine of benchmarks/results, for a prompt of theirs."""
    settings, _ = load_plan("qwen2.5-0.5b-on-two-cores")
    return dataclasses.replace(
        settings,
        corpus=CorpusSize(chunks=10_000, chunk_tokens=512),
        queries=QueryLoad(
            rate=0.1, k=context // 512, question_tokens=question, answer_tokens=1, prefix_tokens=0
        ),
    )


@pytest.mark.parametrize("number", range(5))
def test_first_tokens_are_those_that_were_measured(number):
    measured = json.loads((RESULTS / "ttft-cpu-float32.json").read_text())
    row = measured["rows"][number]
    plan = on_cpu(measured["question_tokens"], row["context"])
    reuse = formulas.plan_method("turborag", plan, LLAMA_100M)
    full = formulas.plan_method("full_attention", plan, LLAMA_100M)
    for sums, seconds in (
        (full.first_token, row["seconds"]["full"]),
        (reuse.tiers[0].first_token, row["seconds"]["pool"]),
        (reuse.tiers[1].first_token, row["seconds"]["disk"]),
    ):
        assert 1 / 1.5 < sums / seconds < 1.5


def test_encoding_is_as_fast_as_measured():
    measured = json.loads((RESULTS / "ingest.json").read_text())
    plan = on_cpu(50, 512)
    seconds = formulas.compute_seconds(formulas.encode_flops(plan, LLAMA_100M), plan)
    each = measured["ingest"]["seconds"] / measured["chunks"]
    assert 1 / 1.5 < seconds / each < 1.5


def test_a_chunk_with_maps_is_as_large_and_as_slow_as_the_benchmark_counts():
    """The benchmark's sizes were written down apart from the plan's."""
    counted = json.loads((RESULTS / "recurrent-maps.json").read_text())["bytes"]
    [row] = [it for it in counted if (it["model"], it["tokens"]) == ("Qwen3.5-27B", 2048)]
    hardware = ["engine.flops=1e15", "engine.utilisation=0.4", "queries.rate=0.1"]
    for form, maps in row["maps"].items():
        plan, config = load_plan("qwen3.5-27b-on-one-h200", [f"maps={form}", *hardware])
        chunk = plan_record(plan, config)["chunk"]
        assert (chunk["map_bytes"], chunk["kv_bytes"]) == (maps, row["kv"])
        assert 1e3 * chunk["compute_seconds"] == pytest.approx(
            row["prefill_ms"]["400 TFLOP/s"], abs=0.05
        )
        tier, found = plan.tiers[0], formulas.plan_method("turborag", plan, config)
        read = (maps + row["kv"]) / tier.bandwidth
        assert chunk["read_seconds"][tier.name] == pytest.approx(read)
        assert [it.name for it in found.tiers] == ["host", "disk", "store", "computed"]
        assert found.corpus_bytes == plan.corpus.chunks * (maps + row["kv"])
        assert sum(it.share for it in found.tiers) == pytest.approx(1.0)
    assert formulas.decode_rows(METHODS["turborag"], plan, config) == 8 < plan.engine.rows
    states = 48 * 48 * 128 * 128 * 4
    assert formulas.state_bytes(config) == states
    whole = dataclasses.replace(config, recurrent=None)
    assert formulas.map_bytes(plan, whole) == formulas.state_bytes(whole) == 0
    for given in ("stored=int8", "maps=int4"):
        with refused(ConfigError, given.split("=")[0]):
            load_plan("qwen3.5-27b-on-one-h200", [given])


@pytest.mark.parametrize("name", PLANS)
def test_the_plans_that_come_along(name):
    settings, config = load_plan(name)
    for method in settings.methods:
        found = formulas.plan_method(method, settings, config)
        assert found.engines >= 1 and found.first_token > 0

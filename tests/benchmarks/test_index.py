"""The index benchmark on tiny heads: the generator, the knob, what is measured and printed."""

import dataclasses
import json

import attention_heads
import index
import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import ConfigError, RequestError
from jaxrag.reuse.attention_index import QueryLists, spec_from
from jaxrag.reuse.decode import DECODE_RULES, Retrieval

TINY = index.Options(
    contexts=(1200,),
    heads=("ivf24",),
    engines=("flat fp32", "flat fp16", "ivf fp16", "lists fp32"),
    k=20,
    train=200,
    ask=16,
    cold_bytes=1,
    searches=2,
    rounds=1,
)
SMALL = attention_heads.HeadSpec(seed=3, head_dim=32, model_dim=64, words=512, topics=16, group=2)


@pytest.fixture(scope="module")
def result():
    return index.measured(TINY)


@pytest.fixture(scope="module")
def heads():
    return attention_heads.draw(SMALL, 3000, train=500, ask=60)


def test_the_generator_gives_what_it_says(heads):
    assert heads.keys.shape == (3000 - 128 - 512, 32)
    assert heads.bank.queries.shape == (2, 500, 32)
    assert heads.asked.shape == (2, 60, 32)
    assert heads.bank.positions.min() >= 128
    assert heads.bank.positions.max() < 3000
    logits = heads.placed_queries() @ heads.placed_keys().T / 32**0.5
    np.testing.assert_allclose(logits.std(axis=2).mean(axis=1), 2.5, rtol=0.1)


def test_the_generator_is_deterministic_and_keeps_the_head(heads):
    again = attention_heads.draw(SMALL, 3000, train=500, ask=60)
    np.testing.assert_array_equal(again.keys, heads.keys)
    np.testing.assert_array_equal(again.asked, heads.asked)
    other = attention_heads.draw(SMALL, 3000, train=500, ask=60, stream=1)
    assert np.abs(other.keys - heads.keys).max() > 0.1
    longer = attention_heads.draw(SMALL, 4000, train=500, ask=60)
    means = [one.keys.mean(0) for one in (heads, longer, other)]  # its large channels
    assert np.corrcoef(means).min() > 0.95
    stranger = attention_heads.draw(dataclasses.replace(SMALL, seed=4), 3000, train=5, ask=5)
    assert abs(np.corrcoef(means[0], stranger.keys.mean(0))[0, 1]) < 0.8


def test_blocks_do_not_show(heads, monkeypatch):
    monkeypatch.setattr(attention_heads, "_BLOCK", 3060)
    whole = attention_heads.draw(SMALL, 3000, train=500, ask=60)
    assert whole.keys.shape == heads.keys.shape
    monkeypatch.setattr(attention_heads, "_BLOCK", 700)
    parts = attention_heads.draw(SMALL, 3000, train=500, ask=60)
    assert parts.keys.shape == heads.keys.shape
    assert parts.bank.queries.shape == heads.bank.queries.shape
    assert parts.asked.shape == heads.asked.shape
    np.testing.assert_array_equal(parts.bank.positions, heads.bank.positions)


def test_queries_lie_elsewhere_than_keys(heads):
    keys = heads.placed_keys().astype(np.float64)
    centre, inverse = keys.mean(0), np.linalg.inv(np.cov(keys.T))

    def distance(rows):
        return np.sqrt(np.einsum("nd,de,ne->n", rows - centre, inverse, rows - centre)).mean()

    assert distance(heads.placed_queries()[0]) > 3 * distance(keys)


def test_a_context_of_window_only_is_refused():
    with refused(ConfigError, "context=640"):
        attention_heads.draw(SMALL, 640, train=5, ask=5)


def test_what_is_measured_is_the_rule(heads):
    """Only the lengths at which an index is built, and how much what is compared with may scan."""
    for rule in index.ENGINES.values():
        default = DECODE_RULES[rule.name]()
        assert dataclasses.replace(rule, index=default.index, trained_at="answer") == default
        kind = type(rule.index)
        free = ("exact_below", "min_queries", "most_scanned", "storage", "share")
        changed = {name: getattr(rule.index, name) for name in free if hasattr(rule.index, name)}
        assert rule.index == dataclasses.replace(kind(), **changed)
    assert type(index.ENGINES["lists fp32"].index) is type(Retrieval().index)
    lists = index.ENGINES["lists fp32"]
    rule = dataclasses.replace(lists, queries=100, k=20)
    keys = heads.placed_keys()
    made = index.index_of(heads, rule, keys, 60)
    half = dataclasses.replace(
        heads,
        bank=dataclasses.replace(
            heads.bank, queries=heads.bank.queries[:, ::5], positions=heads.bank.positions[::5]
        ),
    )
    same = rule.index_head(keys, half.bank, heads.rope, heads.context, 60)
    np.testing.assert_array_equal(made.wanted, same.wanted)
    assert (made.note, made.efforts) == (same.note, same.efforts)


def test_blocks_of_steps():
    found = np.concatenate([np.ones((2, 32)), np.full((2, 32), 0.5), np.zeros((2, 3))], 1)
    assert index.of_blocks(found) == [1.0, 0.5, 0.0]


def test_every_engine_is_measured(result):
    assert [row["engine"] for row in result["rows"]] == list(TINY.engines)
    for row in result["rows"]:
        assert 0 < row["scanned"] <= 1.2
        assert 0.9 < row["recall"] <= 1
        assert len(row["recall_of_blocks"]) == 1
        assert len(row["recall_of_heads"]) == 4
        assert row["warm_us"] > 0
        assert row["cold_us"] > 0
        assert row["cold_heads"] == 4
    exact = result["rows"][0]
    assert exact["recall"] == 1
    assert (exact["key_bytes"], exact["index_bytes"], exact["scanned"]) == (512, 0, 1)
    rules = result["options"]["rules"]
    assert spec_from(rules["lists fp32"]["index"]) == QueryLists(exact_below=0, min_queries=1)
    assert json.loads(json.dumps(result))["rows"] == result["rows"]


def test_the_report_has_a_line_for_each(result):
    lines = list(index.report(result))
    for engine in TINY.engines:
        assert any(line.startswith(engine) for line in lines)
    assert any("1200 tokens, 560 keys" in line for line in lines)


def row(engine, context, cold_us, seconds=0.0):
    return {
        "head": "x", "engine": engine, "context": context, "cold_us": cold_us,
        "build_processor_seconds": seconds, "recall_of_heads": [1.0, 1.0],
        "efforts": [] if engine.startswith("flat") else [2, 2],
    }  # fmt: skip


def test_break_even_is_where_it_stays_cheaper():
    flat = [row("flat fp16", context, context / 100) for context in (1000, 2000, 4000)]
    lists = [
        row("lists fp32", 1000, 9),
        row("lists fp32", 2000, 21),
        row("lists fp32", 4000, 30, 2),
    ]
    (found,) = index.break_even(flat + lists)
    assert found["from_context"] == 4000
    assert found["searches"] == pytest.approx(1.0 / 10e-6)  # a second a head, 10 us saved
    never = index.break_even([*flat, row("lists fp32", 4000, 50, 2)])
    assert never == [{"head": "x", "engine": "lists fp32", "from_context": None, "searches": None}]


def test_slow_builds_are_left_out_of_long_contexts():
    options = dataclasses.replace(TINY, engines=("flat fp16", "hnsw fp32"), slow_up_to=1000)
    ((_, heads),) = index.generated(options)
    assert [row["engine"] for row in index.measure(heads, "ivf24", options)] == ["flat fp16"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": ("x",)}, "'x'"),
        ({"engines": ("x",)}, "'x'"),
        ({"contexts": ()}, ""),
        ({"contexts": (659,)}, "659"),
        ({"ask": 0}, "ask=0"),
        ({"rounds": 0}, "rounds=0"),
    ],
)
def test_options_that_cannot_be_measured(change, message):
    with refused(RequestError, message):
        dataclasses.replace(TINY, **change)


def test_the_command(tmp_path, capsys):
    out = tmp_path / "index.json"
    arguments = ["--heads", "mild", "--contexts", "900"]
    arguments += ["--engines", "flat fp16;lists fp32"]
    arguments += ["--k", "10", "--train", "50", "--ask", "4", "--cold-mb", "1", "--rounds", "1"]
    assert index.main([*arguments, "--out", str(out)]) == 0
    assert "lists fp32" in capsys.readouterr().out
    assert json.loads(out.read_text())["benchmark"] == "index"
    assert index.main([*arguments, "--contexts", "many"]) != 0
    assert "--contexts 'many': expected integers" in capsys.readouterr().err

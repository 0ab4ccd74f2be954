"""KCache's tables in miniature, at small sizes: who has pages, what is moved, whose answers."""

import dataclasses

import kcache
import pytest
from kcache import QUICK, Options, main, report, run
from refusal import refused

from jaxrag.base.errors import RequestError
from jaxrag.kv.placement import ON_DEVICE, KVPlacement
from jaxrag.measure.evals.long import run as eval_run


@pytest.fixture(scope="module")
def quick():
    """Of everything but the answers of trained weights."""
    return run(
        dataclasses.replace(
            QUICK,
            parts=("throughput", "traffic"),
            contexts=(512,),
            batches=(1, 4),
            prompts=(512,),
            n=8,
        )
    )


@pytest.mark.slow
def test_dense_is_out_of_pages_first(quick):
    config = QUICK.config()
    rows = {(row["rule"], row["batch"]): row for row in quick["throughput"]}
    run_of = {
        rule: [batch for name, batch in rows if name == rule and "refused" not in rows[name, batch]]
        for rule in ("dense", "topn")
    }
    assert run_of == {"dense": [1, 3], "topn": [1, 4]}
    assert "tokens" in rows["dense", 4]["refused"] and "\n" not in rows["dense", 4]["refused"]
    assert ("topn", 3) not in rows  # no batch of the list, and not its largest
    for (rule, batch), row in rows.items():
        assert row["device_bytes"] <= QUICK.device_bytes
        if "refused" in row:
            continue
        assert row["tokens_per_second"] == pytest.approx(batch / row["seconds_per_step"])
        wanted = 8 * config.num_heads * batch if rule == "topn" else 0
        assert row["rows_per_step"] == wanted
        assert row["brought_per_step"] == wanted * 64 * 4
    # What the device spares is on the host: V of one layer of two.
    topn, dense = rows["topn", 1], rows["dense", 1]
    assert topn["host_bytes"] == topn["device_bytes"] // 3 and dense["host_bytes"] == 0


@pytest.mark.slow
def test_what_is_moved(quick):
    (row,) = quick["traffic"]
    config = QUICK.config()
    assert row["host_v_bytes"] == row["prompt_tokens"] * config.kv_bytes_per_token // 4
    assert row["pushed_of_v"] == 1
    assert row["rows_of_n"] == 1 and row["brought_of_n_rows"] == 1
    assert row["calls_per_layer"] == 1
    assert 0 < row["distinct_share"] <= 1


def test_bytes_of_a_token():
    config = Options().config()
    assert ON_DEVICE.device_bytes(config, 1) == config.kv_bytes_per_token == 4096
    assert KVPlacement(value_layers=1).device_bytes(config, 1) == 4096 * 5 // 8
    assert KVPlacement(value_layers=0).device_bytes(config, 1) == 2048


def test_answers_by_layers_and_rows(monkeypatch):
    """Through the evaluation, whose answers are made up here."""
    asked = {}

    def answered(options):
        asked["options"] = options
        names = [method.name for method in options.resolved]
        score = {name: {"value": 0.1 * i, "low": 0.0, "high": 1.0} for i, name in enumerate(names)}
        cells = [
            {"method": name, "task": "kv_retrieval", "length": 1000, "score": score[name]}
            for name in names
        ]
        agreement = [
            {"method": name, "task": "kv_retrieval", "length": length, "share": score[name]}
            for name in names[1:]
            for length in (1000, None)
        ]
        kept = dict.fromkeys(("suite", "flavour", "tasks", "lengths", "questions", "seed", "model"))
        return kept | {
            "tasks": ["kv_retrieval"],
            "methods": dict.fromkeys(names),
            "cells": cells,
            "agreement": agreement,
        }

    monkeypatch.setattr(kcache, "run_eval", answered)
    result = run(dataclasses.replace(QUICK, parts=("quality",)))
    rules = [method.decode for method in asked["options"].resolved]
    assert rules[0].name == "dense"
    assert [(rule.device_layers, rule.n) for rule in rules[1:]] == [
        (0, 8),
        (0, 64),
        (1, 8),
        (1, 64),
    ]
    rows = result["quality"]["rows"]
    assert [(row["device_layers"], row["n"]) for row in rows] == [(0, 8), (0, 64), (1, 8), (1, 64)]
    assert [row["score"]["value"] for row in rows] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    lines = list(report(result))
    assert lines[-2].split() == ["L=0", "10.0", "20.0"]
    assert lines[-1].split() == ["L=1", "30.0", "40.0"]


@pytest.mark.slow
def test_answers_of_the_shipped_weights():
    assert kcache.run_eval is eval_run.run
    found = run(dataclasses.replace(QUICK, parts=("quality",)))["quality"]
    assert found["dense"]["kv_retrieval"]["value"] == 1
    assert [row["same_as_dense"]["value"] for row in found["rows"]] == [1, 1, 1, 1]


@pytest.mark.slow
def test_the_table_says_who_has_no_pages(quick):
    lines = [line for line in report(quick) if line.strip().startswith("512 ")]
    assert [line.split()[1] for line in lines] == ["1", "3", "4"]
    assert "no pages" in lines[-1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parts": ("speed",)}, "--parts speed"),
        ({"contexts": (500,)}, "500"),
        ({"steps": 9}, "steps=9"),
        ({"batches": (0,)}, "0"),
        ({"device_bytes": 0}, "device_bytes=0"),
        ({"device_layers": 2}, "device_layers=2"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes, message):
    with refused(RequestError, message):
        dataclasses.replace(QUICK, **changes)


def test_the_command_refuses_before_it_works(capsys, tmp_path):
    assert main(["--quick", "--out", str(tmp_path / "missing" / "x.json")]) != 0
    assert "its folder does not exist" in capsys.readouterr().err

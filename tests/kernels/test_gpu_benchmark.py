"""The GPU benchmark: its limits, what it makes of results, and that it runs on toy shapes."""

import argparse
import json
import sys

import gpu
import pytest


def test_all_stages_together_end_within_eight_minutes(capsys, monkeypatch):
    assert set(gpu.SECONDS) == set(gpu.STAGES)
    assert sum(gpu.SECONDS.values()) <= 480
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry-run", "--stage", "sweep"])
    assert gpu.main() == 0
    assert capsys.readouterr().out == "sweep: at most 35 s\n"


def test_a_stage_that_hangs_is_killed_and_leaves_what_it_had(tmp_path):
    args = argparse.Namespace(impl="xla", tiny=True, seconds=1)
    assert gpu.run_stage("llama", args)["failed"] == "killed after 1 s"
    kept = gpu.Kept(str(tmp_path / "stage.json"))
    kept["first"] = {"seconds": 1.0}
    kept["first"] |= {"ok": True}
    assert json.loads((tmp_path / "stage.json").read_text()) == {
        "first": {"seconds": 1.0, "ok": True}
    }


def test_a_stage_that_fails_says_why():
    args = argparse.Namespace(impl="pallas_triton", tiny=True, seconds=300)
    failed = gpu.run_stage("decode", args)["failed"]
    assert "the body 'pallas_triton' needs an NVIDIA GPU" in failed


def test_rates_are_put_beside_the_roofline():
    results = {
        "machine": {"bytes_per_second": 4e12, "flops_per_second": 8e14},
        "decode": {"b=1": {"seconds": 2e-3, "bytes_per_second": 3e12}},
        "sparse": {"peer": {"refused": "no such thing"}, "failed": "killed after 9 s"},
        "correctness": {"op": {"out": 0.5, "lse": 0.0, "ok": False}, "ok": False},
    }
    gpu.with_fractions(results)
    assert results["decode"]["b=1"]["of_roofline"] == 0.75
    assert "of_roofline" not in results["machine"]
    table = gpu.markdown(
        {"machine": {"device": "a chip", "commit": "abc"}, "impl": "xla", "stages": results}
    )
    assert "| decode | b=1 | 2.000 | 3 T/s | 75% |" in table
    assert "| sparse | peer: no such thing | | | |" in table
    assert "| sparse | failed: killed after 9 s | | | |" in table
    assert "| correctness | op: DIFFERS, out 5.0e-01 | | | |" in table


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama-3-8b", "mistral-7b"])
def test_end_to_end_on_a_toy(model):
    found = {}
    gpu.end_to_end(model, gpu.TINY, "xla", found)
    rows = ["64 + 5", "1 x (64 + 7)", "2 x (64 + 7)"]
    kinds = ["full prefill, {}", "0 %, {}", "15% again, {}", "0 %, {}, KV from host memory"]
    expected = {kind.format(row) for row in rows for kind in kinds}
    assert set(found) == expected | {f"decode, {row}" for row in rows[1:]}
    assert all(row["seconds"] > 0 for row in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["correctness", "topn", "segment"])
def test_stages_run_on_toy_shapes(stage):
    found = {}
    gpu.STAGES[stage](gpu.TINY, "pallas_interpret", found)
    assert found.pop("ok", True)
    assert any("seconds" in row or row.get("ok") for row in found.values())
    assert all(row.get("ok", True) for row in found.values())
    if stage == "segment":
        assert {"chunks", "causal", "causal with gradient", "dense xla"} <= set(found)

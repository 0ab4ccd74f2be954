"""The GPU benchmark: its limits, what it makes of results, and that it runs on toy shapes."""

import argparse
import json
import sys

import gpu
import pytest

from pallas_kernels import bodies


def test_two_commands_of_ten_minutes_run_all_stages(capsys, monkeypatch):
    assert list(gpu.SECONDS) == list(gpu.STAGES)
    first = list(gpu.STAGES).index("llama") + 1
    for half in (list(gpu.STAGES)[:first], list(gpu.STAGES)[first:]):
        assert sum(gpu.SECONDS[name] for name in half) <= 540
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


def test_defaults_are_what_was_measured():
    rows = {
        "decode, xla": {"op": "decode", "body": "xla", "ok": True, "scenes": {"2": 2.0, "4": 8.0}},
        "decode, wrong": {"op": "decode", "body": "pallas_mosaic", "ok": True, "scenes": {}},
        "ok": True,
    }
    fast = {"op": "decode", "body": "pallas_triton", "ok": True, "scenes": {"2": 3.0, "4": 4.0}}

    def chosen(**changes):
        kept = gpu.kept(rows | {"x": fast | changes}, "abc", {"jax": "0"})
        return bodies.fastest(kept["decode"])

    assert chosen() == "pallas_triton"
    assert chosen(ok=False) == "xla"
    assert chosen(scenes={"2": 1.0}) == "xla"  # not timed everywhere
    assert chosen(scenes={"2": 2.0, "4": 9.0}) == "xla"
    assert bodies.fastest({}) == "xla"


def test_a_device_that_was_not_measured_has_the_reference(monkeypatch):
    assert all(bodies.default_impl(op, "a chip of tomorrow") == "xla" for op in bodies.BODIES)
    fast = {"xla": {"ok": True, "seconds": {"2": 2.0}},
            "pallas_triton": {"ok": True, "seconds": {"2": 1.0}}}  # fmt: skip
    table = {"a chip": {"commit": "abc", "sparse_attention": fast}}
    monkeypatch.setattr(bodies, "_measured", lambda: table)
    assert bodies.default_impl("sparse_attention", "a chip") == "pallas_triton"
    assert bodies.default_impl("topn_attention", "a chip") == "xla"


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["correctness", "topn", "segment", "bodies"])
def test_stages_run_on_toy_shapes(stage):
    found = {}
    gpu.STAGES[stage](gpu.TINY, "pallas_interpret", found)
    assert found.pop("ok", True)
    assert any("seconds" in row or row.get("ok") for row in found.values())
    assert all(row.get("ok", True) for row in found.values())
    if stage == "bodies":
        assert all(len(row["scenes"]) >= 1 and "refused" not in row for row in found.values())
        assert {row["body"] for row in found.values()} == {"xla", "pallas_interpret"}
    if stage == "segment":
        assert {"chunks", "causal", "causal with gradient", "dense xla"} <= set(found)


@pytest.mark.slow
def test_the_engine_on_a_toy_keeps_law_13():
    found = {}
    gpu.stage_law13(gpu.TINY, "xla", found)
    assert found.pop("ok") and len(found) == 6
    found = {}
    gpu.stage_engine(gpu.TINY, "xla", found)
    assert found.pop("ok") and {"static", "inline", "asynchronous", "full"} <= set(found)

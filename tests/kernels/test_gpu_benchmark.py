"""The GPU benchmark: its limits, what it makes of results, and that it runs on toy shapes."""

import argparse
import dataclasses
import functools
import json
import signal
import sys
import tarfile
import time

import gpu
import gpu_goals
import gpu_peers
import gpu_real
import gpu_serve
import gpu_stages
import gpu_train
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_scenes import TINY, Shape, decoding, options, packed, paged

from jaxrag.train.config import load_config
from jaxrag.train.start import model_config
from pallas_kernels import bodies, segment_attention, sparse_attention

MACHINE = {"device": "a chip", "commit": "abc"}


def arguments(**given):
    """Arguments of the script, as its parser gives them."""
    return argparse.Namespace(
        **{"impl": "xla", "tiny": True, "seconds": 300, "seed": None, "work": "", "steps": None,
           "set": [], "out": None, "real": None, **given}
    )  # fmt: skip


def result_of(stages, **changes):
    shape = dataclasses.asdict(Shape())
    return {"machine": MACHINE, "impl": "xla", "shape": shape, "stages": stages} | changes


def test_four_commands_of_ten_minutes_run_all_stages(capsys, monkeypatch):
    stages = list(gpu.SECONDS)
    assert {*stages} == {*gpu.STAGES, gpu.SMOLLM2, *gpu.ALONE}
    assert stages[:5] == ["correctness", "law13", "smollm2", "machine", "bodies"]
    first, second = stages.index("llama") + 1, stages.index("sweep") + 1
    for part in (stages[:first], stages[first:second], *([name] for name in stages[second:])):
        assert sum(gpu.SECONDS[name] for name in part) <= 540
    assert all(f"\n    {name} " in gpu.__doc__ for name in stages)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry-run", "--stage", "sweep"])
    assert gpu.main() == 0
    assert capsys.readouterr().out == "sweep: at most 35 s\n"


def test_a_stage_that_hangs_is_killed_and_leaves_what_it_had(tmp_path):
    args = arguments(seconds=1)
    assert gpu.run_stage("llama", args)["failed"] == "killed after 1 s"
    kept = gpu.Kept(str(tmp_path / "stage.json"))
    kept["first"] = {"seconds": 1.0}
    kept["first"] |= {"ok": True}
    assert json.loads((tmp_path / "stage.json").read_text()) == {
        "first": {"seconds": 1.0, "ok": True}
    }


def test_a_stage_that_fails_says_why():
    args = arguments(impl="pallas_triton")
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
    table = gpu.markdown(result_of(results))
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
@pytest.mark.parametrize("stage", ["correctness", "topn", "segment", "bodies", "sparse", "decode"])
def test_stages_run_on_toy_shapes(stage):
    found = {}
    gpu.STAGES[stage](gpu.TINY, "pallas_interpret", found)
    assert found.pop("ok", True)
    assert found.pop("times_faster_than_best_dense", 1) > 0  # of the stage "sparse"
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


def test_goals_stand_beside_what_was_measured():
    stages = {
        "sparse": {"times_faster_than_best_dense": 6.0, "recomputed": {"of_roofline": 0.5}},
        "mosaic": {"recomputed 32768": {"of_roofline": 0.66}},
        "decode": {"b=1": {"of_roofline": 0.7}, "failed": "killed after 9 s"},
        "llama": {"0 %, 32768 + 50": {"seconds": 6.5e-3}},
        "rules": {"retrieval behind 32768": {"refused": "no memory"}},
        "ingest": {"behind 10 neighbours, measured": {"chunks_per_minute": 1234.0}},
    }
    lines = list(gpu_goals.goal_lines(Shape(), stages))

    def row(words):
        (found,) = [line for line in lines if words in line]
        return found

    assert row("over the best dense").endswith("| at least 5.5 times | 6 times | met |")
    assert row("of the matrix").endswith("| at least 65% | 66% | met |")
    assert row("1 x 32768, of the copy").endswith("| at least 75% | 70% | missed |")
    assert row("8 x 32768, of the copy").endswith("| at least 75% | not measured |  |")
    assert row("32768 + 50, 0 %").endswith("| at most 7 ms | 6.5 ms | met |")
    assert row("rule retrieval").endswith("|  | not measured |  |")
    assert row("ingest").endswith("|  | 1.23e+03 chunks/min |  |")


def test_every_place_of_a_goal_is_a_row_that_a_stage_writes():
    for goal in gpu_goals.goals_of(TINY):
        assert {stage for stage, _ in goal.places} <= set(gpu.STAGES), goal.what
    assert gpu_serve.RULES[2].startswith("topn") and gpu_serve.RULES[-1] == "retrieval"


def test_results_of_several_commands_are_one(tmp_path, capsys):
    machine = {"machine": {"bytes_per_second": 4e12, "flops_per_second": 8e14}}
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    first.write_text(json.dumps(result_of(machine)))
    decode = {"decode": {"b=1": {"seconds": 1e-3, "bytes_per_second": 3.2e12}}}
    second.write_text(json.dumps(result_of(decode)))
    assert gpu.print_goals([str(first), str(second)]) == 0
    said = capsys.readouterr().out
    assert "| decode | b=1 | 1.000 | 3.2 T/s | 80% |" in said
    assert "of the copy's rate | at least 75% | 80% | met |" in said
    second.write_text(json.dumps(result_of(decode, machine=MACHINE | {"device": "another"})))
    assert gpu.print_goals([str(first), str(second)]) == 2
    assert "'another' beside 'a chip'" in capsys.readouterr().err


def test_peers_compute_what_the_scene_asks():
    """On keys that no one rotates: positions 0 leave them as they are."""

    def plain(q, k, v, mask=None):
        return np.asarray(jax.nn.dot_product_attention(q, k, v, mask=mask), np.float32)

    close = functools.partial(np.testing.assert_allclose, atol=0.02)
    scene = decoding(paged(TINY, 128, 0.0, 1, 2, 0, apart=True))
    q, k, v = gpu_peers.contiguous(TINY, *scene)
    expected = plain(q[:, None], k, v)[:, 0]
    peers = gpu_peers.decode_peers(TINY)
    ran = [peer for name, peer in peers.items() if peer.call is not None and "pallas" in name]
    assert len(ran) == 2
    for peer in ran:
        close(np.asarray(peer.call(*peer.prepare(*scene)), np.float32), expected)

    scene = paged(TINY, 128, 0.15, 5, 1, 0)
    q, pool, table, at, rotary = scene.arguments
    still = dataclasses.replace(
        rotary, cos=jnp.ones_like(rotary.cos), sin=jnp.zeros_like(rotary.sin)
    )
    masked = gpu_peers.rows_and_mask(*scene.arguments)
    assert int(np.asarray(masked[-1]).sum()) == scene.pairs
    got, _ = sparse_attention(q, pool, table, at, still, **options(TINY), impl="xla")
    close(plain(*masked), np.asarray(got, np.float32))

    rows = packed(TINY, TINY.packed, seed=1)
    got, _ = segment_attention(*rows, scale=TINY.dim**-0.5, prefix_visible=True, impl="xla")
    close(plain(*gpu_peers.block_mask(*rows)), np.asarray(got, np.float32))


def test_a_peer_that_does_not_take_a_scene_says_why():
    found = {}
    peers = {
        "none": gpu_peers.Peer(refused="takes no pages"),
        "broken": gpu_peers.Peer(lambda x: x / jax.nn.no_such_thing),
        "fine": gpu_peers.Peer(lambda x: x + 1, lambda x: (2 * x,)),
    }
    gpu_stages.beside(found, peers, [(np.float32(1),)], flops=10.0)
    assert found["none"] == {"refused": "takes no pages"}
    assert found["broken"]["refused"].startswith("AttributeError: ")
    assert found["fine"]["flops_per_second"] > 0
    assert all(peer.refused or peer.call for peer in gpu_peers.sparse_peers().values())


def test_the_run_of_the_stage_train_is_a_block_wise_model_of_6m(tmp_path):
    plan = gpu_train.Training(tmp_path, seed=2, settings=("optimizer.steps=7000",))
    config = load_config(gpu_train.CONFIG, plan.assignments)
    assert plan.folder == tmp_path / "train-2"
    assert (config.model.seed, config.data.seed, config.optimizer.steps) == (2, 2001, 7000)
    model = model_config(config, planned=True)
    assert (model.num_layers, model.model_dim) == (8, 256)
    modes = [source.mode or config.data.mode for source in config.data.sources]
    assert modes == ["full"] * 7 + ["both"]


def test_a_stage_that_trains_stops_itself():
    told = []
    before = signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    try:
        with gpu_train.terminated_after(0.0):
            for _ in range(1000):
                if told:
                    break
                time.sleep(0.01)
        assert told
        with gpu_train.terminated_after(60.0):
            pass
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
def test_training_on_a_toy_goes_on_and_its_weights_are_kept(tmp_path):
    args = arguments(work=str(tmp_path), out=str(tmp_path / "found.json"), steps=1)
    first = gpu.run_stage("train", args)
    assert "failed" not in first and first["seed 0, run"]["stopped"] == "paused"
    assert not [name for name in first if "exact match" in name]
    args.steps = None
    second = gpu.run_stage("train", args)
    assert second["seed 0, run"]["stopped"] == "finished"
    assert second["seed 0, run"]["step"] == 3
    assert {f"seed 0, exact match, {read}" for read in ("full", "block", "composite")} <= set(
        second
    )
    (archive,) = gpu.keep_weights(args, ["train"])
    with tarfile.open(archive) as held:
        names = held.getnames()
    assert {"train-0/model/model.safetensors", "train-0/results.json"} <= set(names)


@pytest.mark.slow
def test_serving_on_a_toy():
    found = {}
    gpu.stage_serve(TINY, "xla", found)
    assert found.pop("ok")
    arms = {f"{arm} at 16/s" for arm in gpu_serve.ARMS}
    assert arms | {"law 13, alone and together over a link", "tokens of all arms"} <= set(found)
    files = [row for name, row in found.items() if "KV from files" in name]
    assert len(files) == 4 and all(row["seconds"] > 0 for row in files)
    assert found[f"{gpu_serve.ARMS[3]} at 16/s"]["read_bytes"] > 0


@pytest.mark.slow
def test_rules_and_ingest_on_a_toy():
    found = {}
    gpu.stage_rules(TINY, "xla", found)
    assert [row.get("kv") for row in found.values()] == ["device"] * 4 + ["host"] * 2
    kcache = found[f"{gpu_serve.RULES[2]} behind 512"]
    assert kcache["host_bytes"] > 0 and kcache["device_bytes"] > 0
    found = {}
    gpu.stage_ingest(TINY, "xla", found)
    assert [row["chunks_per_minute"] > 0 for row in found.values()] == [True] * 2


def test_what_is_brought_in_pieces_is_put_together(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_real, "WORK", tmp_path / "work")
    with pytest.raises(FileNotFoundError, match=r"no a\.gguf"):
        gpu_real.brought(tmp_path, "a.gguf")
    for piece, text in (("aa", b"12"), ("ab", b"3")):
        (tmp_path / f"a.gguf.{piece}").write_bytes(text)
    assert gpu_real.brought(tmp_path, "a.gguf").read_bytes() == b"123"
    assert gpu_real.brought(tmp_path / "gone", "a.gguf").read_bytes() == b"123"  # from then on


def test_adapters_come_back_without_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "WORK", tmp_path)
    args = arguments(out=str(tmp_path / "gpu.json"))
    assert gpu.keep_weights(args, [gpu.ADAPTERS, "llama"]) == []  # nothing was trained
    for name in ("run/checkpoints/3/state", "run/model/model.safetensors", "packets.safetensors"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"1")
    (archive,) = gpu.keep_weights(args, [gpu.ADAPTERS])
    with tarfile.open(archive) as kept:
        files = {it.name for it in kept.getmembers() if it.isfile()}
    assert files == {"adapters/run/checkpoints/3/state", "adapters/packets.safetensors"}


@pytest.mark.real
def test_a_pretrained_model_is_checked(tmp_path, monkeypatch):
    folder = gpu_real.ROOT / ".cache" / "models"
    if not (folder / gpu_real.MODEL).is_file():
        pytest.skip("no weights: `make real` fetches them")
    monkeypatch.setattr(gpu_real, "WORK", tmp_path)
    found = {}
    gpu_real.stage_smollm2(folder, "xla", found)
    assert found.pop("ok") and found.pop("logits, xla")["ok"]
    assert [row["share"] for row in found.values()] == [1.0]

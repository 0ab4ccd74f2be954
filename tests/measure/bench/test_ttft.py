"""The TTFT benchmark measures what it says, on a tiny model; no number is judged."""

import json
from collections import Counter
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import RequestError
from jaxrag.cli import main
from jaxrag.engine.progress import Progress
from jaxrag.engine.request import Prompt
from jaxrag.kv.store import ChunkStore
from jaxrag.measure.bench.options import TtftOptions
from jaxrag.measure.bench.ttft import report, run
from jaxrag.measure.bench.ttft_batch import measure_batches
from jaxrag.measure.bench.ttft_ratios import report_ratios, slopes
from jaxrag.measure.zoo import LLAMA_100M
from jaxrag.models.export import export_hf
from jaxrag.models.spec import init_params, num_params
from jaxrag.reuse.methods import METHODS


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, tiny_config):
    config = tiny_config(max_positions=2048)
    path = tmp_path_factory.mktemp("bench") / "model"
    export_hf(path, init_params(config, jax.random.key(0)), config)
    return str(path)


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch):
    monkeypatch.setattr("jaxrag.measure.machine.SETTLE_SECONDS", 0)


def test_default_model_has_100m_parameters():
    assert 99e6 < num_params(LLAMA_100M) < 101e6


def test_rows_hold_every_measurement(model_dir, tmp_path, capsys):
    out = tmp_path / "result.json"
    arguments = ["--contexts", "512,1024", "--repeats", "2", "--question-tokens", "7"]
    assert main(["bench", "ttft", "--model", model_dir, *arguments, "--out", str(out)]) == 0
    table = capsys.readouterr().out
    result = json.loads(out.read_text(encoding="utf-8"))
    assert [row["context"] for row in result["rows"]] == [512, 1024]
    for row in result["rows"]:
        assert set(row["seconds"]) == {"full", "pool", "disk", "cold"}
        assert all(seconds > 0 for seconds in row["seconds"].values())
        assert row["prompt_tokens"] == row["context"] + 7
        ratio = row["flops"]["full"] / row["flops"]["reuse"]
        assert ratio == pytest.approx(row["prompt_tokens"] / 7, rel=1e-6)
        assert str(row["context"]) in table
    assert result["machine"]["versions"]["jax"] == jax.__version__
    assert result["peer"] is None
    assert result["batches"] is None
    assert all("ratios" not in row and row["repeats"] == 2 for row in result["rows"])


@pytest.fixture
def reads(monkeypatch):
    """How many chunks every call to a store asked for."""
    counts = []

    def get_many(self, keys, get=ChunkStore.get_many, **rest):
        counts.append(len(keys))
        return get(self, keys, **rest)

    monkeypatch.setattr(ChunkStore, "get_many", get_many)
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fusionrag", "cacheblend"])
def test_a_method_that_recomputes_has_a_row_for_every_ratio(model_dir, reads, method):
    options = TtftOptions(
        model=model_dir, contexts=(1024,), question_tokens=7, method=method, repeats=(1,),
        ratios=(1.0, 0, 0.15),
    )  # fmt: skip
    result = run(options)
    # Cold, disk, and the disk at every ratio: both chunks, each alone, as they fill blocks.
    assert reads[-10:] == [1, 1] * 5
    [row] = result["rows"]
    none, some, all_ = row["ratios"]
    assert [it["ratio"] for it in row["ratios"]] == [0, 0.15, 1.0]
    # The first chunk is encoded behind the (empty) prefix: exact, so that 512 tokens remain.
    assert [it["recomputed_tokens"] for it in row["ratios"]] == [0, 154, 512]
    assert all_["recomputed_share"] == 0.5
    assert all_["same_first_token_as_full"]
    flops = row["flops"]
    assert none["flops"] == flops["reuse"] and not none["selection_flops"]
    assert some["selection_flops"] > 0 and not all_["selection_flops"]
    computed = (some["flops"] - some["selection_flops"]) / flops["full"]
    assert computed == pytest.approx((154 + 7) / row["prompt_tokens"], rel=1e-6)
    assert all_["flops_over_full"] == pytest.approx(519 / 1031, rel=1e-6)
    for it in row["ratios"]:
        assert set(it["seconds"]) == set(it["best_seconds"]) == {"pool", "disk"}
        assert it["full_over_pool"] == row["seconds"]["full"] / it["seconds"]["pool"]
    assert row["slope"]["flops"]["per_share"] > 0
    assert result["encoders"]["first"] == "after_prefix"
    lines = list(report(result))
    others = "neighbours are the other chunks" in lines[4]
    assert others == (method == "fusionrag")
    assert [line.split()[:3] for line in lines[6:9]] == [
        ["1024", "0", "0"], ["1024", "0.15", "154"], ["1024", "1", "512"],
    ]  # fmt: skip
    assert lines[9].startswith("slope at 1024: ")


@pytest.mark.slow
def test_batches_come_at_one_moment(model_dir, tmp_path, capsys):
    out = tmp_path / "result.json"
    arguments = ["--contexts", "512,1024", "--repeats", "1,2", "--question-tokens", "7"]
    arguments += ["--batch", "3,1", "--batch-context", "1024", "--batch-repeats", "2"]
    assert main(["bench", "ttft", "--model", model_dir, *arguments, "--out", str(out)]) == 0
    table = capsys.readouterr().out
    result = json.loads(out.read_text(encoding="utf-8"))
    assert [row["repeats"] for row in result["rows"]] == [1, 2]
    assert result["batches"]["context"] == 1024
    three, one = result["batches"]["rows"]
    single = result["rows"][1]["flops"]
    for row, size in ((three, 3), (one, 1)):
        assert (row["batch"], row["repeats"]) == (size, 2)
        assert row["compiled"] == []
        # Two chunks a request: none reused, all read, all found on the device.
        assert row["found"] == {
            "full": {"computed": 2 * size}, "disk": {"store": 2 * size}, "pool": {"pool": 2 * size},
        }  # fmt: skip
        assert row["flops"]["full"] == size * single["full"]
        assert row["flops"]["disk"] == row["flops"]["pool"] == size * single["reuse"]
        for name in ("last", "mean"):
            assert set(row[name]["seconds"]) == {"full", "disk", "pool"}
            seconds = row[name]["seconds"]
            assert row[name]["full_over_pool"] == seconds["full"] / seconds["pool"]
        for way, seconds in row["last"]["seconds"].items():
            assert 0 < row["mean"]["seconds"][way] <= seconds
    assert one["last"] == one["mean"]
    lines = table.splitlines()
    assert "batches of 1024-token contexts" in lines[-4]
    assert [line.split()[0] for line in lines[-2:]] == ["3", "1"]


def test_what_a_batch_is_told_is_raised():
    engine = SimpleNamespace(
        compiled=Counter(),
        iterate=lambda requests: [Progress(0, error=RequestError("no room"))],
    )
    prompt = Prompt(np.zeros(0, np.int32), (), np.zeros(1, np.int32))
    with refused(RequestError):
        measure_batches(
            engine, None, (METHODS["full_attention"], METHODS["turborag"]), [prompt],
            lambda prompt: None, sizes=(1,), repeats=1,
        )  # fmt: skip


def test_the_slope_is_that_of_the_line():
    times = {"full": 8.0}
    row = {
        "seconds": times,
        "flops": {"full": 100},
        "ratios": [
            {"recomputed_share": x, "seconds": {"pool": 1 + 4 * x, "disk": 2.0}, "flops": 50 * x}
            for x in (0, 0.25, 0.75)
        ],
    }
    found = slopes(row)
    assert found["pool"] == pytest.approx(
        {"per_share": 4.0, "at_zero": 1.0, "over_full": 0.5, "r_squared": 1.0}
    )
    assert found["disk"]["per_share"] == pytest.approx(0)
    assert found["flops"]["over_full"] == pytest.approx(0.5)
    assert slopes({**row, "ratios": row["ratios"][:1]}) is None


def test_a_method_with_a_number_of_its_own_is_measured_at_that():
    assert [m.recompute_ratio for m in TtftOptions(method="epic").recomputing()] == [None]
    assert [m.recompute_ratio for m in TtftOptions(method="fusionrag").recomputing()] == [0.15]
    assert not TtftOptions(method="turborag").recomputing()
    assert not TtftOptions(method="epic").plain().recomputes
    it = {
        "ratio": None, "recomputed_tokens": 32, "seconds": {"pool": 0.1, "disk": 0.2},
        "full_over_pool": 10.0, "full_over_disk": 5.0, "flops": 2e9, "selection_flops": 0,
        "flops_over_full": 0.25,
    }  # fmt: skip
    result = {
        "encoders": {"first": "isolated", "others": "isolated"},
        "rows": [{"context": 1024, "ratios": [it], "slope": None}],
    }
    *_, line = report_ratios(result)
    assert " ".join(line.split()) == "1024 own 32 100.0 200.0 10.0 5.0 2.00 0.00 25.0%"


def test_a_peer_that_cannot_run_is_named(model_dir):
    options = TtftOptions(
        model=model_dir, contexts=(512,), repeats=(1,), peer_python="no-such-python"
    )
    with refused(RequestError):
        run(options)


def test_a_peer_that_dies_is_named(model_dir, tmp_path, capfd):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no torch here >&2\nexit 7\n", encoding="utf-8")
    python.chmod(0o755)
    options = TtftOptions(model=model_dir, contexts=(512,), repeats=(1,), peer_python=str(python))
    with refused(RequestError, "7"):
        run(options)
    assert "no torch here" in capfd.readouterr().err


def test_ratios_that_are_no_numbers_are_refused(capsys):
    for option, text, words in (
        ("--recompute-ratios", "0,half", "'0,half': 'half' is no number from 0 to 1"),
        ("--contexts", "4,many", "'many': expected a number of tokens"),
        ("--batch", "4,many", "'4,many': expected integers such as"),
        ("--repeats", "4,many", "'4,many': expected integers such as"),
    ):
        with pytest.raises(SystemExit):
            main(["bench", "ttft", "--method", "epic", option, text])
        assert f"{option}: {words}" in capsys.readouterr().err


def test_report_shows_the_peer():
    row = {
        "context": 512,
        "seconds": {"full": 1.0, "pool": 0.1, "disk": 0.2, "cold": 0.3, "peer": 2.0},
        "full_over_pool": 10.0,
        "peer_over_full": 2.0,
        "peer_over_full_best": 2.5,
        "peer_over_pool": 20.0,
        "repeats": 3,
    }
    result = {
        "model": "m", "dtype": "float32", "method": "full_reuse", "question_tokens": 50,
        "rows": [row, {**row, "repeats": 1}], "batches": None, "peer": {"name": "transformers"},
    }  # fmt: skip
    lines = list(report(result))
    assert lines[0].endswith("medians of 3, 1")
    assert (
        "peer/pool" in lines[1]
        and "2000.0" in lines[2]
        and "20.0" in lines[2]
        and "2.50" in lines[2]
    )

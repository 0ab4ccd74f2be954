"""The TTFT benchmark measures what it says, on a tiny model; no number is judged."""

import dataclasses
import json

import jax
import pytest

from jaxrag.bench.ttft import LLAMA_100M, Options, report, run
from jaxrag.cli import main
from jaxrag.errors import RequestError
from jaxrag.models.export import export_hf
from jaxrag.models.spec import init_params, num_params


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, tiny_config):
    config = tiny_config(max_positions=2048)
    path = tmp_path_factory.mktemp("bench") / "model"
    export_hf(path, init_params(config, jax.random.key(0)), config)
    return str(path)


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


def test_a_peer_that_cannot_run_is_named(model_dir):
    options = Options(model=model_dir, contexts=(512,), repeats=1, peer_python="no-such-python")
    with pytest.raises(RequestError, match="no-such-python: cannot be run"):
        run(options)


def test_a_peer_that_dies_is_named(model_dir, tmp_path, capfd):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no torch here >&2\nexit 7\n", encoding="utf-8")
    python.chmod(0o755)
    options = Options(model=model_dir, contexts=(512,), repeats=1, peer_python=str(python))
    with pytest.raises(RequestError, match="the peer ended with exit code 7"):
        run(options)
    assert "no torch here" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "full_attention"}, "expected one that reuses"),
        ({"contexts": (500,)}, "multiples of 512"),
        ({"repeats": 0}, "must be positive"),
    ],
)
def test_bad_options_are_refused(change, message):
    with pytest.raises(RequestError, match=message):
        dataclasses.replace(Options(), **change)


def test_report_shows_the_peer():
    row = {
        "context": 512,
        "seconds": {"full": 1.0, "pool": 0.1, "disk": 0.2, "cold": 0.3, "peer": 2.0},
        "full_over_pool": 10.0,
        "peer_over_full": 2.0,
        "peer_over_full_best": 2.5,
        "peer_over_pool": 20.0,
    }
    result = {
        "model": "m", "dtype": "float32", "method": "full_reuse", "question_tokens": 50,
        "repeats": 3, "rows": [row], "peer": {"name": "transformers"},
    }  # fmt: skip
    lines = list(report(result))
    assert (
        "peer/pool" in lines[1]
        and "2000.0" in lines[2]
        and "20.0" in lines[2]
        and "2.50" in lines[2]
    )

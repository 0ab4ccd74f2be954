"""The TTFT benchmark measures what it says, on a tiny model; no number is judged."""

import json

import jax
import pytest
from refusal import refused

from jaxrag.base.errors import RequestError
from jaxrag.cli import main
from jaxrag.measure.bench.options import TtftOptions
from jaxrag.measure.bench.ttft import report, run
from jaxrag.measure.zoo import LLAMA_100M
from jaxrag.models.export import export_hf
from jaxrag.models.spec import init_params, num_params


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
    assert all(row["repeats"] == 2 for row in result["rows"])


def test_a_method_that_recomputes_does_so_at_its_own_ratio(model_dir):
    options = TtftOptions(
        model=model_dir, contexts=(1024,), question_tokens=7, method="fusionrag", repeats=(1,)
    )
    [row] = run(options)["rows"]
    # The first chunk is encoded behind the (empty) prefix: exact, so that 512 tokens remain.
    least = (154 + 7) / row["prompt_tokens"]
    assert least < row["flops"]["reuse"] / row["flops"]["full"] < 2 * least


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


def test_numbers_that_are_none_are_refused(capsys):
    for option, text, words in (
        ("--contexts", "4,many", "'many': expected a number of tokens"),
        ("--repeats", "4,many", "'4,many': expected integers such as"),
    ):
        with pytest.raises(SystemExit):
            main(["bench", "ttft", "--method", "epic", option, text])
        assert f"'{option}': {words}" in capsys.readouterr().err


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
        "rows": [row, {**row, "repeats": 1}], "peer": {"name": "transformers"},
    }  # fmt: skip
    lines = list(report(result))
    assert lines[0].endswith("medians of 3, 1")
    assert (
        "peer/pool" in lines[1]
        and "2000.0" in lines[2]
        and "20.0" in lines[2]
        and "2.50" in lines[2]
    )

"""The ingest benchmark measures what it says, on a tiny model; no number is judged."""

import dataclasses
import json

import pytest
from ingest_throughput import IngestOptions, main, report, run
from refusal import refused

from jaxrag.base.errors import RequestError


@pytest.mark.slow
def test_both_sides_run_the_same_tokens(model_dir, tmp_path, capsys):
    out = tmp_path / "result.json"
    sizes = ["--tokens", "700", "--chunk-tokens", "100", "--repeats", "1", "--stages", "1"]
    assert main(["--model", str(model_dir), *sizes, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["tokens"] >= 700
    assert result["chunks"] >= 7
    for name in ("plain", "ingest"):
        row = result[name]
        assert row["tokens_per_second"] == pytest.approx(result["tokens"] / row["seconds"])
        assert row["chunks_per_second"] == pytest.approx(result["chunks"] / row["seconds"])
        assert row["flop_utilisation"] > 0
        assert row["processor_seconds"] > 0
    ratio = result["plain"]["seconds"] / result["ingest"]["seconds"]
    assert result["ingest_over_plain"] == pytest.approx(ratio)
    assert f"{result['ingest_over_plain']:.1%} of the plain forward pass" in shown
    assert "\n".join(report(result)) in shown
    stages = dict(result["one stage after the other"])
    whole = stages.pop("seconds")
    assert set(stages) == {"prepare", "put", "commit", "encode and the rest"}
    assert all(value > 0 for value in stages.values())
    assert sum(stages.values()) == pytest.approx(whole)
    assert set(result["longest reading beside it, ms"]) == {"thread", "process"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"repeats": 0}, "repeats=0"),
        ({"tokens": 10}, "tokens=10"),
        ({"folder": "nowhere"}, ""),
        ({"neighbours": 0}, "neighbours=0"),
        ({"encoder": "magic"}, "'magic'"),
    ],
)
def test_bad_options_are_refused(change, message):
    with refused(RequestError, message):
        dataclasses.replace(IngestOptions(), **change)


@pytest.mark.slow
def test_result_counts_the_chunks_that_are_kept(model_dir):
    result = run(IngestOptions(model=str(model_dir), tokens=500, chunk_tokens=64, repeats=1))
    assert result["kv_bytes"] > 0
    assert result["chunks"] * 64 >= result["tokens"] - 64 * 3


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ["neighbours", "neighbours_joint"])
def test_chunks_behind_neighbours_are_timed_beside_their_flops(model_dir, encoder):
    sizes = {"tokens": 400, "chunk_tokens": 64, "repeats": 1, "neighbours": 2}
    result = run(IngestOptions(model=str(model_dir), encoder=encoder, **sizes))
    row = result["neighbours"]
    assert row["encoded"] == result["chunks"]
    assert row["chunks_per_minute"] == pytest.approx(60 * row["encoded"] / row["seconds"])
    # Behind two neighbours of its length, a chunk attends to 5 times the pairs it has by itself, or
    # 9 times if these run too; weights are multiplied with 1 or 3 times the tokens.
    low, high = (3, 9.5) if encoder == "neighbours_joint" else (1, 5.5)
    assert low < row["flops_ratio"] < high
    assert row["time_over_flops"] == pytest.approx(row["time_ratio"] / row["flops_ratio"])
    assert f"{encoder} 2: {row['chunks_per_minute']:.1f} chunks/min" in "\n".join(report(result))

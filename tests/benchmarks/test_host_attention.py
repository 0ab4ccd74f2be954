"""The benchmark of the host's part of attention on tiny heads."""

import json

import host_attention
import pytest

RULES = (
    "dense;flat:k=20;retrieval:k=20,index=lists,index.exact_below=0,index.min_queries=1"
    ";ivf:k=20,index=ivf,index.exact_below=0,index.most_scanned=1.0"
)


def test_every_rule_is_measured(capsys, tmp_path):
    out = tmp_path / "out.json"
    asked = ["--contexts", "1500", "--head-dim", "32", "--ask", "40", "--cold-mb", "1", "--rules"]
    assert host_attention.main([*asked, RULES, "--threads", "1", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert [row["rule"] for row in result["rows"]] == RULES.split(";")
    dense, flat, lists, ivf = result["rows"]
    for row in (dense, flat):
        assert row["recall"] is None and row["host_bytes"] == 1 and row["layer_us"] > 0
    for row in (lists, ivf):
        assert row["recall"] >= 0.9 and len(row["recall_of_blocks"]) == 2
        assert 0 < row["scanned"] <= 1.2
    assert ivf["host_bytes"] > 1 and lists["attend_us"] > 0 < lists["search_us"]
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 5 and printed[1].startswith("dense ")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--heads", "ivf99", "heads 'ivf99': expected some of ivf24, ivf41, mild"),
        ("--rules", "static_window", "nothing is read outside its static pattern"),
        ("--out", "/nowhere/x.json", "its folder does not exist"),
    ],
)
def test_what_cannot_be_measured_is_one_line(capsys, option, value, message):
    asked = ["--contexts", "1000", "--head-dim", "16", "--ask", "2", option, value]
    assert host_attention.main(asked) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("jaxrag: error") == 1

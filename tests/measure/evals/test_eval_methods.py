"""`jaxrag eval methods`: one small run of it, and what it refuses."""

import json

import pytest

from jaxrag.cli import main

TASK = ("--num-questions", 6, "--chunks", 3, "--batch-size", 4)


@pytest.mark.slow
def test_every_cell_is_measured_and_ratio_1_answers_as_full_attention(village_dir, tmp_path):
    out, tables = tmp_path / "result.json", tmp_path / "tables.md"
    arguments = ("--methods", "fusionrag", "--recompute-ratios", "0,1", "--encoder", "own", *TASK)
    given = ("--model", village_dir, *arguments, "--out", out, "--markdown", tables, "--json")
    assert main([str(a) for a in ("eval", "methods", *given)]) == 0
    result, shown = json.loads(out.read_text()), tables.read_text()
    full, _, _, fusion = result["cells"]
    assert [(c["method"], c["encoder"], c["ratio"]) for c in result["cells"]] == [
        ("full_attention", None, None),
        ("full_reuse", "after_prefix", None),
        ("fusionrag", "neighbours", 0.0),
        ("fusionrag", "neighbours", 1.0),
    ]
    assert [cell["encoded_tokens"] for cell in result["cells"]] == [0] * 4
    hops = [result["questions"].get(name, 0) for name in ("1 hop", "2 hops", "unknown")]
    assert sum(hops) == result["questions"]["all"] == 6
    assert "| fusionrag | neighbours |" in shown and "Normalised F1" in shown
    assert fusion["as_full_attention"]["value"] == 1
    for metric in ("exact_match", "f1"):
        assert fusion[metric] == full[metric]
    same = result["differences"][-1]
    assert (same["a"], same["b"]) == ("fusionrag:neighbours:1.0", "full_attention")
    assert same["difference"]["all"]["value"] == 0
    assert full["recomputed"] == 1 and 0 < fusion["recomputed"] < 1  # the first chunk is exact


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--methods", "turborag", "--recompute-ratios", "0.1"), "none of the methods"),
        (("--encoder", "isolated"), "--encoder isolated"),
        (("--chunks", "six"), "--chunks six"),
        (("--out", "no/where.json"), "--out no/where.json"),
    ],
)
def test_bad_options_are_refused_before_a_model_is_read(capsys, arguments, words):
    assert main(["eval", "methods", "--model", "nowhere", *arguments]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("part", ["most", "1.5", "-1", "nan", "1e-1", "2"])
def test_what_is_no_ratio_is_bad_usage(capsys, part):
    with pytest.raises(SystemExit):
        main(["eval", "methods", "--model", "nowhere", "--recompute-ratios", f"0,{part}"])
    assert f"'{part}' is no number from 0 to 1, such as 0.15" in capsys.readouterr().err

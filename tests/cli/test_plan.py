"""`jaxrag plan` as a program."""

import json

import pytest

from jaxrag.cli import main

PLAN = "llama-3-8b-on-one-h200"


def test_tables(tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert main(["plan", PLAN, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    for words in (
        "stored KV of 10,000,000 chunks",
        "time to first token",
        "engines",
        "jaxrag/measure/plan/formulas.py",
    ):
        assert words in printed
    record = json.loads(out.read_text())
    assert [one["method"] for one in record["methods"]] == record["settings"]["methods"]


def test_half_the_bytes_in_int8(capsys):
    sizes = []
    for stored in ("native", "int8"):
        assert main(["plan", PLAN, "--set", f"stored={stored}", "--json"]) == 0
        sizes.append(json.loads(capsys.readouterr().out)["methods"][0]["corpus_bytes"])
    assert sizes[1] / sizes[0] == pytest.approx((128 + 4) / 256)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["nowhere"], "no such plan"),
        ([PLAN, "--set", "queries.rate=0"], "queries.rate=0"),
        ([PLAN, "--out", "nowhere/plan.json"], "its folder does not exist"),
    ],
)
def test_bad_input_is_one_line(given, words, capsys):
    assert main(["plan", *given]) == 1
    said = capsys.readouterr()
    assert words in said.err and said.err.count("\n") == 1 and not said.out

"""`jaxrag eval`: a run of it, and one line for everything that can go wrong."""

import json
import shutil

import pytest


def test_synthetic_writes_what_it_prints(jaxrag, village_dir, tmp_path):
    out, tables = tmp_path / "result.json", tmp_path / "tables.md"
    code, printed, err = jaxrag(
        "synthetic", "--model", f"a={village_dir}", "--model", f"b={village_dir}",
        "--num-questions", 12, "--chunks", "2-3", "--compare", "a:block,b:block",
        "--set", "relations=2", "--set", "headers=0.5",
        "--out", out, "--markdown", tables, "--json",
    )  # fmt: skip
    assert (code, err) == (0, "")
    result = json.loads(printed)
    assert result == json.loads(out.read_text())
    assert result["questions"]["all"] == 12
    assert result["task"]["chunks"] == [2, 3] and result["task"]["split"] == "test"
    assert result["task"]["relations"] == 2 and result["task"]["headers"] == 0.5
    assert [(c["model"], c["read"]) for c in result["cells"]] == [
        (model, read) for model in "ab" for read in ("full", "block", "composite")
    ]
    assert result["models"]["a"]["weights"] == result["models"]["b"]["weights"]
    assert result["machine"]["versions"]["jax"]
    same = [row for row in result["differences"] if (row["a"], row["b"]) == ("a:block", "b:block")]
    assert same[0]["difference"]["all"]["value"] == 0
    assert "| questions |  | 12 |" in tables.read_text()


def test_synthetic_prints_tables(jaxrag, village_dir, monkeypatch):
    monkeypatch.setattr("jaxrag.models.text.progress._SECONDS", 0)  # as if it took long
    code, out, err = jaxrag(
        "synthetic", "--model", f"small={village_dir}", "--num-questions", 5,
        "--read", "block",
    )  # fmt: skip
    assert code == 0
    assert "exact match in %, 5 questions" in out
    assert "shortcut" in out and "small" in out
    assert "100%" in err  # of the progress bar


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ["--model NAME=DIR"]),
        (("--model", "DIR"), ["--model DIR: expected NAME=DIR"]),
        (("--model", "a=nowhere"), ["nowhere"]),
        (("--model", "a=x", "--model", "a=y"), ["'a' already"]),
        (("--model", "a=x", "--num-questions", "0"), ["--num-questions 0"]),
        (("--model", "a=x", "--read", "full,diagonal"), ["diagonal", "composite"]),
        (("--model", "a=x", "--chunks", "six"), ["--chunks six"]),
        (("--model", "a=x", "--chunks", "6-4"), ["chunks=(6, 4)"]),
        (("--model", "a=x", "--set", "colour=1"), ["colour"]),
        (("--model", "a=x", "--set", "relations=99"), ["relations=99"]),
        (("--model", "a=x", "--compare", "a"), ["--compare a", "MODEL:READ"]),
        (("--model", "a=x", "--out", "no/where.json"), ["--out no/where.json", "folder"]),
        (("--model", "a=x", "--markdown", "no/where.md"), ["--markdown", "folder"]),
    ],
)
def test_synthetic_refuses_bad_options(refused, arguments, words):
    refused("synthetic", *arguments, words=words)


def test_synthetic_refuses_models_that_cannot_be_asked(refused, village_dir, model_dir, tmp_path):
    ask = ("--num-questions", 2)
    named = ("--template", "chat")
    refused("synthetic", "--model", f"a={model_dir}", *named, *ask, words=["no chat template"])
    bare = shutil.copytree(village_dir, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    refused("synthetic", "--model", f"a={bare}", *ask, words=["tokenizer.json"])
    empty = tmp_path / "empty"
    empty.mkdir()
    refused("synthetic", "--model", f"a={empty}", *ask, words=["empty"])
    refused(
        "synthetic", "--model", f"a={village_dir}", "--template", "plian", *ask, words=["'plian'"]
    )

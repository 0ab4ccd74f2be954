"""`jaxrag eval needle|ruler|infinitebench`: a run of each, and one line for what can go wrong."""

import json

import pytest

from jaxrag.tasks.long.scores import string_match_all


def test_needle_writes_what_it_prints(jaxrag, village_dir, village_model, tmp_path):
    out, text = tmp_path / "x.json", tmp_path / "x.md"
    code, printed, err = jaxrag(
        "needle", "--model", village_dir, "--flavour", "village", "--contexts", "70",
        "--depths", "0,1", "--num-questions", 1, "--chunk-tokens", 32, "--methods", "turborag",
        "--batch-size", 2, "--max-new-tokens", 1, "--out", out, "--markdown", text,
        "--json",
    )  # fmt: skip
    assert (code, err) == (0, "")
    result = json.loads(printed)
    assert result == json.loads(out.read_text())
    assert "| turborag | 70 |" in text.read_text()
    assert (result["suite"], result["lengths"], result["depths"]) == ("needle", [70], [0, 1])
    assert result["machine"]["versions"]["jax"] and result["model"]["weights"]
    assert [item["depth"] for item in result["items"]] == [0, 1]
    for item in result["items"]:
        answer = item["answers"]["turborag"]
        assert item["scores"]["turborag"] == string_match_all(answer, item["expected"])
        assert item["chunks"] == 2


def test_prompts_are_written_without_asking(jaxrag, village_dir, tmp_path):
    path = tmp_path / "prompts.jsonl"
    code, printed, _ = jaxrag(
        "infinitebench", "--model", village_dir, "--flavour", "village", "--contexts", "90",
        "--num-questions", 3, "--split", "train", "--prompts", path,
    )  # fmt: skip
    assert (code, printed) == (0, f"{path}: 6 prompts\n")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["task"] for row in rows] == ["passkey"] * 3 + ["kv_retrieval"] * 3
    assert all(row["answers"][0] in row["chunks"][0] for row in rows)


@pytest.mark.slow
def test_ruler_asks_a_model_of_any_words(jaxrag, model_dir, tmp_path):
    story = tmp_path / "story.txt"
    story.write_text("The rain fell. Nobody saw it. The cat slept on, and the dog did too. " * 5)
    code, printed, err = jaxrag(
        "ruler", "--model", model_dir, "--template", "plain", "--contexts", 600,
        "--num-questions", 1, "--tasks", "niah_single_2,niah_multikey_3,vt", "--filler", story,
        "--max-new-tokens", 4,
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert "RULER's tasks in words of our own" in printed
    for task in ("niah_single_2", "niah_multikey_3", "vt"):
        assert task in printed
    assert "paired" not in printed


@pytest.mark.parametrize("name", ["needle", "ruler", "infinitebench"])
def test_every_help_has_an_example(jaxrag, name):
    code, out, err = jaxrag(name, "--help")
    assert (code, err) == (0, "")
    assert f"example: jaxrag eval {name} " in " ".join(out.split())


GIVEN = ("--model", "nowhere", "--contexts")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("needle", *GIVEN, "4k", "--depths", "1.5"), ["--depths 1.5", "0 to 1"]),
        (("needle", *GIVEN, "4k", "--out", "no/where.json"), ["--out no/where.json", "folder"]),
        (("needle", *GIVEN, "4k", "--markdown", "no/x.md"), ["--markdown", "folder"]),
        (("needle", *GIVEN, "4k", "--prompts", "no/x.jsonl"), ["--prompts", "folder"]),
        (("needle", *GIVEN, "4k", "--methods", "turbo"), ["'turbo'", "turborag"]),
        (("needle", *GIVEN, "4k"), ["nowhere"]),
        (("ruler", *GIVEN, "4k", "--tasks", "qa_1"), ["--tasks qa_1", "niah_single_1"]),
        (("ruler", *GIVEN, "4k", "--num-questions", "0"), ["--num-questions 0"]),
        (("infinitebench", *GIVEN, "4k", "--flavour", "village", "--tasks", "number_string"),
         ["number_string", "passkey, kv_retrieval"]),
    ],
)  # fmt: skip
def test_bad_options_are_refused(refused, arguments, words):
    refused(*arguments, words=words)


def test_models_that_cannot_be_asked_are_refused(refused, village_dir, model_dir, tmp_path):
    village = ("--model", village_dir)
    refused("needle", *village, "--contexts", 100, words=["lacks 'secret'", "village flavour"])
    own = ("--flavour", "village", "--contexts")
    refused("needle", *village, *own, "1k", words=["--contexts 1024", "context of 1024", "1016"])
    refused("needle", *village, *own, 20, words=["length 20", "ask for a longer one"])
    refused("needle", *village, *own, 100, "--chunk-tokens", 4, words=["chunks of 4 tokens"])
    refused("needle", *village, *own, 100, "--template", "plian", words=["'plian'"])
    refused("ruler", *village, *own, 300, "--tasks", "majority", words=["length 300", "longer one"])
    refused("ruler", *village, *own, 600, "--answers", 17, words=["--answers 17", "at most 16"])
    refused("ruler", "--model", model_dir, "--contexts", 300, words=["length 300", "longer one"])
    missing = tmp_path / "none.txt"
    refused("ruler", "--model", model_dir, "--contexts", 600, "--template", "plain",
            "--filler", missing, words=["none.txt", "cannot be read"])  # fmt: skip

"""`jaxrag eval needle|ruler|infinitebench`: a run of each, and one line for what can go wrong."""

import json

import pytest

from jaxrag.cli import main
from jaxrag.cli.eval_long import grouped
from jaxrag.serve.generate import generate
from jaxrag.tasks.long.scores import string_match_all


@pytest.fixture
def jaxrag(capsys):
    """Run `jaxrag eval` in this process: exit code, stdout, stderr."""

    def call(*arguments):
        try:
            code = main(["eval", *map(str, arguments)])
        except SystemExit as leaving:
            code = leaving.code
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def refused(jaxrag):
    """What must fail with one line on stderr that holds these words."""

    def call(*arguments, words):
        code, out, err = jaxrag(*arguments)
        assert (code, out) == (1, "")
        assert err.startswith("jaxrag: error: ") and err.count("\n") == 1, err
        for word in words:
            assert word in err

    return call


def test_needle_writes_what_it_prints(jaxrag, village_dir, village_model, tmp_path):
    pytest.importorskip("matplotlib")
    out, text, picture = (tmp_path / name for name in ("x.json", "x.md", "x.png"))
    code, printed, err = jaxrag(
        "needle", "--model", village_dir, "--flavour", "village", "--contexts", "70",
        "--depths", "0,1", "--num-questions", 1, "--chunk-tokens", 32, "--methods", "turborag",
        "--batch-size", 2, "--max-new-tokens", 1, "--out", out, "--markdown", text,
        "--heatmap", picture, "--json",
    )  # fmt: skip
    assert (code, err) == (0, "")
    result = json.loads(printed)
    assert result == json.loads(out.read_text())
    assert picture.stat().st_size > 5000 and "| turborag | 70 |" in text.read_text()
    assert (result["suite"], result["lengths"], result["depths"]) == ("needle", [70], [0, 1])
    assert result["machine"]["versions"]["jax"] and result["model"]["weights"]
    assert [item["depth"] for item in result["items"]] == [0, 1]
    for item in result["items"]:
        answer = item["answers"]["turborag"]
        assert item["scores"]["turborag"] == string_match_all(answer, item["expected"])
        assert item["chunks"] == 2


def test_single_questions_can_be_left_out(jaxrag, village_dir):
    code, printed, _ = jaxrag(
        "needle", "--model", village_dir, "--flavour", "village", "--contexts", "70", "--depths",
        "0.5", "--num-questions", 1, "--max-new-tokens", 1, "--no-items", "--json",
    )  # fmt: skip
    result = json.loads(printed)
    assert code == 0 and "items" not in result and len(result["cells"]) == 1


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
def test_answers_are_those_of_generate(jaxrag, village_dir, village_model, village_frame):
    from jaxrag.measure.evals.long.plan import plan
    from jaxrag.measure.evals.options import LongOptions

    methods = ("full_attention", "turborag", "epic")
    code, printed, _ = jaxrag(
        "infinitebench", "--model", village_dir, "--flavour", "village", "--contexts", "90,150",
        "--num-questions", 2, "--chunk-tokens", 40, "--methods", ",".join(methods),
        "--batch-size", 3, "--json",
    )  # fmt: skip
    assert code == 0
    result = json.loads(printed)
    options = LongOptions(
        suite="infinitebench", flavour="village", model="", lengths=(90, 150), questions=2,
        chunk_tokens=40, methods=methods,
    )  # fmt: skip
    frame = type(village_frame)(village_model.tokenizer, village_model.template, 40)
    items = plan(options, frame, 1024, progress=False)
    for method in methods:
        for item, row in zip(items, result["items"], strict=True):
            own = generate(item.fitted.case.question, documents=item.fitted.chunks,
                           model=village_model, method=method, max_new_tokens=8)  # fmt: skip
            assert row["answers"][method] == own.text
    assert len({row["answers"]["turborag"] for row in result["items"]}) > 1
    assert "paired difference" not in printed and result["differences"]


@pytest.mark.slow
def test_rules_that_attend_to_everything_answer_as_dense(jaxrag, village_dir):
    rules = (
        "dense",
        "static_window:sink=64,recent=192",
        "flat:k=200",
        "topn:n=256,renormalise=true",
    )
    code, printed, err = jaxrag(
        "needle", "--model", village_dir, "--flavour", "village", "--contexts", "100",
        "--depths", "0,1", "--num-questions", 2, "--batch-size", 4,
        *(word for rule in rules for word in ("--decode", rule)), "--json",
    )  # fmt: skip
    assert (code, err) == (0, "")
    for item in json.loads(printed)["items"]:
        assert len(item["answers"]) == 4 and len(set(item["answers"].values())) == 1


@pytest.mark.slow
def test_values_in_host_memory_change_no_answer(jaxrag, village_dir, monkeypatch):
    from jaxrag.measure.evals.long import run as running

    layers = {}
    resolve = running.resolve

    def resolved(ask, **arguments):
        layers[ask.method.name] = arguments["model"].placement.value_layers
        return resolve(ask, **arguments)

    monkeypatch.setattr(running, "resolve", resolved)
    asked = (
        "infinitebench", "--model", village_dir, "--flavour", "village", "--contexts", "100,150",
        "--num-questions", 3, "--batch-size", 3, "--decode", "dense", "--decode",
        "topn:n=24,device_layers=1", "--json",
    )  # fmt: skip
    results = []
    for extra in ((), ("--host-values",)):
        code, printed, err = jaxrag(*asked, *extra)
        assert (code, err) == (0, "")
        results.append(json.loads(printed))
        assert layers["full_attention, dense"] is None
        assert layers["full_attention, topn:n=24,device_layers=1"] == (1 if extra else None)
    device, host = results
    assert (device["host_values"], host["host_values"]) == (False, True)
    assert [one["answers"] for one in host["items"]] == [one["answers"] for one in device["items"]]


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
    assert "by the fifth of the haystack" in printed and "paired" not in printed


@pytest.mark.slow
def test_ruler_in_the_village(jaxrag, village_dir, tmp_path):
    text = tmp_path / "x.md"
    code, printed, err = jaxrag(
        "ruler", "--model", village_dir, "--flavour", "village", "--contexts", "300,560",
        "--tasks", "vt,copy", "--num-questions", 2, "--max-new-tokens", 3, "--batch-size", 2,
        "--decode", "dense", "--decode", "few=topn:n=8", "--host-values", "--markdown", text,
        "--json",
    )  # fmt: skip
    assert (code, err) == (0, "")
    result = json.loads(printed)
    assert result["tasks"] == ["vt", "copy"] and len(result["items"]) == 8
    assert [(cost["method"], cost["length"], cost["read"]) for cost in result["costs"]] == [
        ("full_attention, dense", 300, None),
        ("full_attention, dense", 560, None),
        ("full_attention, few", 300, 8),
        ("full_attention, few", 560, 8),
    ]
    dense, far = (cost["bytes"] for cost in result["costs"][1::2])
    assert far["device"] + far["host"] == dense["device"] > far["device"] and far["bus"]
    assert "Cost of a generated token" in text.read_text()


@pytest.mark.parametrize("name", ["needle", "ruler", "infinitebench"])
def test_every_help_has_an_example(jaxrag, name):
    code, out, err = jaxrag(name, "--help")
    assert (code, err) == (0, "")
    assert f"example: jaxrag eval {name} " in " ".join(out.split())


GIVEN = ("--model", "nowhere", "--contexts")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("needle", *GIVEN, "4k", "--depths", "0,half"), ["--depths half"]),
        (("needle", *GIVEN, "4k", "--depths", "1.5"), ["--depths 1.5", "0 to 1"]),
        (("needle", *GIVEN, "4k", "--heatmap", "x.txt"), ["x.txt", ".png"]),
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


def test_notes_that_differ_in_numbers_are_printed_once():
    notes = ["3 chunk(s), 40 tokens, encoded", "3 chunk(s), 51 tokens, encoded", "an index scans"]
    assert grouped(notes) == [
        "3 chunk(s), 40 tokens, encoded (and 1 more with other numbers)",
        "an index scans",
    ]

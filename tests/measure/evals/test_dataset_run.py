"""Data sets put to a model: scores, resuming, shards, and documents that do not fit."""

import copy
import dataclasses
import json

import numpy as np
import pytest
from dataset_fixtures import CACHEBLEND, NQ, RGB, write
from refusal import refused

from jaxrag.base.errors import ConfigError, RequestError
from jaxrag.cli import main
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.measure.evals.asked import ITEMS
from jaxrag.measure.evals.datasets import run as running
from jaxrag.measure.evals.datasets.asking import InProcess
from jaxrag.measure.evals.datasets.near import NearStudy
from jaxrag.measure.evals.datasets.options import DatasetOptions, NearOptions
from jaxrag.measure.evals.datasets.report import notes, tables
from jaxrag.measure.evals.datasets.run import run
from jaxrag.measure.evals.metrics import METRICS
from jaxrag.models.model import load_model

METHODS = ("full_attention", "turborag")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sets")


@pytest.fixture(scope="module")
def options(folder, model_dir):
    """NQ-open's fixture, three documents to a question."""
    return DatasetOptions(
        "nq_open", (str(write("nq_open", folder)),), methods=METHODS, documents=3,
        max_new_tokens=3, model=str(model_dir), out=str(folder / "nq.json"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def result(options):
    return run(options, progress=False)


def lines_of(options):
    with open(options.out + ITEMS, encoding="utf-8") as file:
        return {line["id"]: line for line in map(json.loads, file)}


def test_earlier_questions_stand_before_the_question(result, options, folder):
    """Their tokens are in every method's prompt; at ratio 1 all of it is full attention."""
    again = dataclasses.replace(
        options, earlier=2, number=2, methods=("full_attention", "turborag", "cacheblend"),
        ratios=(1.0,), out=str(folder / "talk.json"),
    )  # fmt: skip
    found, alone = run(again, progress=False), lines_of(options)
    for number, line in lines_of(again).items():
        tokens = {one["prompt_tokens"] for one in line["methods"].values()}
        assert len(tokens) == 1
        assert tokens.pop() > alone[number]["methods"]["turborag"]["prompt_tokens"]
    near = {row["method"]: row["kl"]["value"] for row in found["methods"]}
    assert near["cacheblend 1"] < 1e-5 < near["turborag"]


def test_every_method_answers_the_same_prompt(result, options):
    for line in lines_of(options).values():
        answers = line["methods"]
        assert list(answers) == list(METHODS)
        assert len({answers[name]["prompt_tokens"] for name in METHODS}) == 1
        total = {sum(answers[name]["counts"].values()) for name in METHODS}
        assert len(total) == 1 and answers["turborag"]["counts"]["reused"] == total.pop()
        assert all(answers[name]["ttft"] <= 600 for name in METHODS)
    assert [row["method"] for row in result["methods"]] == list(METHODS)


@pytest.mark.parametrize(("name", "more"), [("nq_open", {"documents": 3}), ("rgb_en", {})])
def test_how_many_are_asked_does_not_change_the_prompts(folder, name, more):
    """So a run may go on with more of them."""
    asked = DatasetOptions(name, (str(write(name, folder)),), model="none", **more)
    every = running.items_of(asked)
    few = running.items_of(dataclasses.replace(asked, number=2))
    assert few == every[: len(few)] and len({item.sample for item in few}) == 2
    assert len(every) > len(few) == 2 * len(every) / len({item.sample for item in every})


def test_scores_are_those_of_the_answers(result, options):
    items = {item.id: item for item in running.items_of(options)}
    assert result["metrics"] == ["subspan", "exact_match", "f1"]
    for row in result["methods"]:
        for name in result["metrics"]:
            each = [
                METRICS[name](line["methods"][row["method"]]["text"].split("\n")[0].strip(),
                              items[key].answers)
                for key, line in lines_of(options).items()
            ]  # fmt: skip
            assert row["scores"][name]["all"]["value"] == pytest.approx(np.mean(each))
            assert row["scores"][name]["all"]["n"] == len(NQ)


def test_what_is_reported(result):
    assert result["questions"] == len(NQ) and result["checked"] == "real file"
    assert result["asked"] == (
        "NQ-open, Lost in the Middle (real file): 8 questions, 0 skipped, 0 of them cut: 0 of 24 "
        "documents left out"
    )
    full, turbo = result["methods"]
    assert "neighbours" not in result  # no method sees any
    assert full["reuse"] == 0 and turbo["reuse"] == 1 and turbo["flops"] < full["flops"]
    assert full["minus_first"]["f1"]["all"]["value"] == 0
    titles = [table.title for table in tables(result)]
    assert "f1 minus that of full_attention on the same questions, in points" in titles
    assert sum(len(table.rows) == 1 + len(METHODS) for table in tables(result)) == 3
    assert len(list(tables(result))[-1].rows) == 1 + len(METHODS) * len(result["groups"])
    said = list(notes(result))
    assert said[0] == "8 questions are few: intervals are too narrow below some 30"
    assert any("random gold passages" in note for note in said)


def test_a_killed_run_goes_on(options, result, folder, monkeypatch):
    """What is finished is not asked again, whatever follows it in the file."""
    path = folder / "nq.json"
    whole = (folder / f"nq.json{ITEMS}").read_bytes()
    kept = whole.splitlines(keepends=True)
    other = dataclasses.replace(options, out=str(folder / "again.json"))
    settings = f"{path}{ITEMS}.settings.json"
    (folder / f"again.json{ITEMS}").write_bytes(b"".join(kept[:3]) + kept[3][:20])
    with open(settings, "rb") as file:
        (folder / f"again.json{ITEMS}.settings.json").write_bytes(file.read())
    asked = []
    answer = InProcess.answer

    def counted(self, method, item):
        asked.append(item.id)
        return answer(self, method, item)

    monkeypatch.setattr(InProcess, "answer", counted)
    found = run(other, progress=False)
    assert sorted(set(asked)) == [json.loads(line)["id"] for line in kept[3:]]
    for name in ("scores", "minus_first", "reuse", "tokens", "flops"):
        assert [row[name] for row in found["methods"]] == [row[name] for row in result["methods"]]


def test_other_settings_do_not_go_on(options, result):
    with refused(ConfigError):
        run(dataclasses.replace(options, methods=("turborag",)), progress=False)


def test_shards_are_the_whole(options, result, folder):
    parts = [str(folder / f"part{n}.json") for n in range(2)]
    for n, path in enumerate(parts):
        one = run(dataclasses.replace(options, shard=f"{n}/2", out=path), progress=False)
        assert one["questions"] == len(NQ) / 2
    whole = dataclasses.replace(
        options, finished=tuple(path + ITEMS for path in parts), out=str(folder / "whole.json")
    )
    found = run(whole, progress=False)
    assert found["questions"] == len(NQ)
    for name in ("scores", "minus_first", "tokens"):
        assert [row[name] for row in found["methods"]] == [row[name] for row in result["methods"]]
    with refused(ConfigError, "--finished nowhere"):
        run(dataclasses.replace(whole, finished=("nowhere",)), progress=False)


def test_documents_that_do_not_fit_are_left_out_whole(folder, model_dir):
    record = dict(CACHEBLEND[0])
    long, short = "tea " * 300, "salt " * 40
    texts = [short, short, long, short]
    record["ctxs"] = [{"title": "", "text": text} for text in texts]
    hopeless = {**record, "ctxs": [{"title": "", "text": "tea " * 3000}]}
    path = folder / "long.json"
    path.write_text(json.dumps([record, hopeless]), encoding="utf-8")
    options = DatasetOptions(
        "cacheblend_musique", (str(path),), methods=METHODS[:2], max_new_tokens=2,
        model=str(model_dir), out=str(folder / "long-result.json"),
    )  # fmt: skip
    found = run(options, progress=False)
    kept, left = lines_of(options).values()
    assert 0 < kept["left_out"] < 4
    assert left["id"] == "1" and left["skipped"] == "no document fits into the model's context"
    assert (found["questions"], found["questions_cut"], found["left_out"]) == (
        1, 1, kept["left_out"],
    )  # fmt: skip
    assert found["skipped"] == {"no document fits into the model's context": 1}
    assert any("1 questions were skipped" in note for note in notes(found))


def test_groups_are_scored_apart_and_refusals_count_at_noise_one(folder, model_dir, monkeypatch):
    texts = {"0@0": "hills and a box", "0@1": "of the insufficient information"}
    options = DatasetOptions(
        "rgb_en", (str(write("rgb_en", folder)),), methods=("full_attention",), noise=(0.0, 1.0),
        max_new_tokens=2, model=str(model_dir),
    )  # fmt: skip
    answer = InProcess.answer

    def said(self, method, item):
        found = answer(self, method, item)
        return dataclasses.replace(found, text=texts.get(item.id, "nothing"))

    monkeypatch.setattr(InProcess, "answer", said)
    found = run(options, progress=False)
    [row] = found["methods"]
    values = {name: it["value"] for name, it in row["scores"]["rgb"].items()}
    assert values == pytest.approx({"all": 1 / 3, "noise 0": 1 / 3, "noise 1": 1 / 3})
    refused = {name: it["value"] for name, it in row["scores"]["refuses"].items()}
    assert refused == pytest.approx({"all": 1 / 6, "noise 0": 0, "noise 1": 1 / 3})
    assert len(RGB) == 3
    assert list(row["by_group"]) == ["noise 0", "noise 1"]
    costs = [row["by_group"][name]["prompt_tokens"]["value"] for name in row["by_group"]]
    assert min(costs) <= row["prompt_tokens"]["value"] <= max(costs)
    [table] = [it for it in tables(found) if it.rows[0][1] == "prompt tokens"]
    assert [line[0] for line in table.rows[1:]] == [
        "full_attention", "full_attention, noise 0", "full_attention, noise 1",
    ]  # fmt: skip


def test_a_knowledge_base_keeps_the_kv_of_documents(options, result, folder, text_model):
    KnowledgeBase.open(folder / "kb", text_model, template="plain").close()
    found = run(
        dataclasses.replace(
            options, kb=str(folder / "kb"), out=str(folder / "kb.json"), number=3, documents=2
        ),
        progress=False,
    )
    again = run(
        dataclasses.replace(
            options, kb=str(folder / "kb"), out=str(folder / "kb2.json"), number=3, documents=2
        ),
        progress=False,
    )
    turbo = [it["methods"][1] for it in (found, again)]
    assert turbo[0]["scores"] == turbo[1]["scores"]
    lines = lines_of(dataclasses.replace(options, out=str(folder / "kb2.json")))
    assert all(line["methods"]["turborag"]["counts"]["encoded"] == 0 for line in lines.values())


@pytest.mark.parametrize("source", ["corpus", "prompt"])
def test_where_neighbours_come_from_and_what_is_computed_again(options, folder, source):
    asked = dataclasses.replace(
        options, methods=("full_reuse", "fusionrag", "cache_craft"), number=4, neighbours=source,
        max_new_tokens=2, out=str(folder / f"{source}.json"),
    )  # fmt: skip
    found = run(asked, progress=False)
    rows = {row["method"]: row for row in found["methods"]}
    for row in rows.values():
        tokens = row["tokens"]
        assert row["recomputed"] == pytest.approx(tokens["recomputed"] / sum(tokens.values()))
    assert rows["full_reuse"]["recomputed"] == 0 < rows["cache_craft"]["recomputed"] <= 1
    head, *cost = list(tables(found))[-1].rows
    shown = {line[0]: line[head.index("again, %")] for line in cost}
    assert shown["cache_craft"] == f"{100 * rows['cache_craft']['recomputed']:.1f}"
    if source == "prompt":
        assert found["neighbours"] == {"from": "prompt", "oracle": True}
        assert found["asked"].endswith("neighbours: the prompt's own other passages, an oracle")
        assert any("an oracle" in note for note in notes(found))
        with refused(ConfigError, asked.out):
            run(dataclasses.replace(asked, neighbours="corpus"), progress=False)
        return
    told = found["neighbours"]  # of the whole file, not of four questions
    assert (told["from"], told["name"], told["passages"]) == (
        "corpus", "nq_open (nq_open.json)", len(NQ),
    )  # fmt: skip
    assert "the most similar of 8 passages of nq_open (nq_open.json)" in found["asked"]


@pytest.fixture(scope="module")
def chosen(options, folder):
    """A selector at a ratio, and its control."""
    asked = dataclasses.replace(
        options, methods=("full_attention", "full_reuse", "cacheblend"), ratios=(0.3,), number=3,
        controls=True, answer_tokens=3, out=str(folder / "chosen.json"),
    )  # fmt: skip
    return asked, run(asked, progress=False)


def test_beside_a_selector_stands_chance(chosen):
    """As many tokens, of the same chunks as they are stored; only which ones differs."""
    _, found = chosen
    names = ["full_attention", "full_reuse", "cacheblend 0.3", "cacheblend 0.3 (random)"]
    assert [row["method"] for row in found["methods"]] == names
    rows = dict(zip(names, found["methods"], strict=True))
    own, random = rows[names[2]], rows[names[3]]
    assert own["tokens"] == random["tokens"] and own["tokens"]["recomputed"] > 0
    assert own["kl"]["value"] != random["kl"]["value"]
    less = own["minus_control"]["kl"]
    assert less["value"] == pytest.approx(own["kl"]["value"] - random["kl"]["value"])
    assert less["low"] <= less["value"] <= less["high"] and less["needed"] >= 1
    assert not any("minus_control" in row for row in (*found["methods"][:2], random))
    full = rows["full_attention"]
    assert full["kl"]["value"] == 0 == full["gold_minus_full"]["value"]
    assert full["same_tokens"]["value"] == full["same_answer"]["value"] == 1
    shown = {table.title.split(":")[0]: table.rows for table in tables(found)}
    near = shown["beside full_attention"]
    assert [row[0] for row in near if "gold at" not in row[0]] == ["method", *names[1:]]
    _, beside, *_ = next(it for title, it in shown.items() if title.startswith("minus that of as"))
    assert beside[0] == names[2] and beside[2] == f"{less['needed']:,}"
    takes = "questions that a difference"
    assert not any(title.startswith(takes) for title in shown)  # no answer is right by any method
    other = copy.deepcopy(found)
    other["methods"][2]["minus_first"]["f1"]["all"]["needed"] = 1234
    [sizes] = [table.rows for table in tables(other) if table.title.startswith(takes)]
    assert [row[0] for row in sizes[1:]] == names[1:]
    assert sizes[2] == [names[2], "", "", "1,234"] and sizes[0][3] == "f1"


def test_it_is_as_near_as_by_eval_near(chosen):
    """On the data set's own prompt the two measure the same."""
    asked, _ = chosen
    own = {field.name: getattr(asked, field.name) for field in dataclasses.fields(asked)}
    methods = ("full_reuse", "cacheblend")
    study = NearStudy.open(NearOptions(**own | {"methods": methods}), load_model(asked.model))
    for item in running.items_of(asked):
        near, line = study.measure(item), lines_of(asked)[item.id]
        assert line["methods"]["full_attention"]["gold"] == pytest.approx(near["full"]["gold"])
        assert list(near["methods"]) == list(line["methods"])[1:]
        for name, there in near["methods"].items():
            here = line["methods"][name]
            assert here["kl"] == pytest.approx(there["kl"], abs=1e-6)
            assert here["gold"] == pytest.approx(there["gold"], abs=1e-4)
            assert here["same"] == there["same"]


def test_unknown_names_are_refused_before_anything_is_read(options):
    metric = dataclasses.replace(options, metrics=("bleu",), model="nowhere")
    with refused(RequestError, "--metric bleu"):
        run(metric, progress=False)
    method = dataclasses.replace(options, methods=("magic",), model="nowhere")
    with refused(RequestError, "'magic'"):
        run(method, progress=False)


def test_the_command(options, folder, capsys):
    out, page = folder / "c.json", folder / "c.md"
    command = [
        "eval", "dataset", "nq_open", "--data", options.data[0], "--model", options.model,
        "--method", "turborag", "--num", "2", "--max-new-tokens", "2", "--out", str(out),
        "--markdown", str(page), "--metric", "subspan",
    ]  # fmt: skip
    assert main(command) == 0
    printed = capsys.readouterr()
    assert "NQ-open, Lost in the Middle (real file): 2 questions" in printed.out
    assert "note: 2 questions are few" in printed.err
    assert json.loads(out.read_text())["machine"]["versions"]
    assert "| turborag |" in page.read_text()
    bad = [*command[:-1], "bleu"]
    assert main(bad) == 1
    assert capsys.readouterr().err.startswith("jaxrag: error: --metric bleu: expected one of")
    assert main(["eval", "dataset", "nq", "--data", "x", "--model", "y"]) == 1
    assert "data set 'nq': expected one of rgb_en" in capsys.readouterr().err

"""The account of a run: which prompts, whose answers, compared with what; tables and picture."""

import dataclasses
import json
import re
import types

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import ConfigError, RequestError
from jaxrag.measure.evals.asked import ITEMS
from jaxrag.measure.evals.long import run as running
from jaxrag.measure.evals.long.plan import plan
from jaxrag.measure.evals.long.report import tables
from jaxrag.measure.evals.options import LongOptions
from jaxrag.measure.evals.statistics import difference, share
from jaxrag.measure.table import page
from jaxrag.tasks.long.case import Frame
from jaxrag.tasks.world import split_of
from jaxrag.train.samples import SampleWriter

NEEDLE = LongOptions(
    suite="needle",
    flavour="village",
    model="village",
    lengths=(200, 120),
    depths=(0, 0.5, 1),
    methods=("full_attention", "turborag"),
    questions=4,
    chunk_tokens=40,
)
RETRIEVAL = dataclasses.replace(NEEDLE, suite="infinitebench", questions=10)


def a_reply(text, notes=()):
    said = {"text": text, "token_ids": [*text.encode()], "finish_reason": "stop"}
    return types.SimpleNamespace(**said, timings={"per_token": 0.5}, notes=[*notes])


@pytest.fixture
def asked(monkeypatch, village_model):
    """``asked(options, right)``: the result of a run whose answers are known.

    ``right(method, item)`` says which are right. Also the plan, and by method the requests that
    were asked, in the order of the plan.
    """

    def measure(options, right, out=None):
        tokenizer = village_model.tokenizer
        frame = Frame(tokenizer, village_model.template, options.chunk_tokens)
        items = plan(options, frame, village_model.config.max_positions, progress=False)
        asked = {method.name: [None] * len(items) for method in options.resolved}

        def answered(questions, rows):
            assert len(questions) <= rows == options.batch_size
            return [answer(question) for question in questions]

        def answer(question):
            name = question.method.name
            (place,) = [i for i, item in enumerate(items) if is_of(question, item)]
            asked[name][place] = question
            words = items[place].fitted.case.expected[0] if right(name, items[place]) else "She"
            return a_reply(words, [*question.settings.notes, "a note"])

        def is_of(request, item):
            prompt, case = request.prompt, item.fitted.case
            return (
                prompt.num_tokens == item.length
                and request.max_new_tokens == 8
                and case.needles[0] in tokenizer.decode(np.concatenate(prompt.chunks))
                and case.question in tokenizer.decode(prompt.final)
            )

        monkeypatch.setattr(running, "load_model", lambda path, dtype, mesh: village_model)
        monkeypatch.setattr(running, "answered", answered)
        return running.run(options, progress=False, out=out), items, asked

    return measure


def shallow(method, item):
    """Full attention is always right, the other method in the second half."""
    return method == "full_attention" or item.depth >= 0.5


def test_a_killed_run_goes_on(asked, tmp_path):
    """What is finished is not asked again, and the whole is what it would have been."""
    out = tmp_path / "needle.json"
    whole, *_ = asked(NEEDLE, shallow, str(out))
    kept = tmp_path / f"needle.json{ITEMS}"
    lines = kept.read_bytes().splitlines(keepends=True)
    assert len(lines) == len(whole["items"])
    kept.write_bytes(b"".join(lines[:5]) + lines[5][:20])
    again, _, requests = asked(NEEDLE, shallow, str(out))
    assert again == whole
    done = {int(json.loads(line)["id"]) for line in lines[:5]}
    for own in requests.values():
        assert {i for i, one in enumerate(own) if one is None} == done
    with refused(ConfigError, "options"):
        asked(dataclasses.replace(NEEDLE, seed=8), shallow, str(out))


def test_a_plan_is_every_length_task_and_depth(village_frame):
    items = plan(NEEDLE, village_frame, 1024, progress=False)
    shape = [(item.length, item.depth) for item in items]
    assert shape == [(n, d) for n in (200, 120) for d in (0, 0.5, 1) for _ in range(4)]
    assert len({item.fitted.case.needles for item in items}) == len(items)
    fewer = plan(dataclasses.replace(NEEDLE, lengths=(120,)), village_frame, 1024, progress=False)
    assert [i.fitted.case.needles for i in fewer] == [i.fitted.case.needles for i in items[12:]]
    other = plan(dataclasses.replace(NEEDLE, seed=8), village_frame, 1024, progress=False)
    assert other[0].fitted.case.needles != items[0].fitted.case.needles


def test_needles_of_other_suites_spread_evenly(village_frame):
    items = plan(RETRIEVAL, village_frame, 1024, progress=False)
    own = [item.depth for item in items if (item.task, item.length) == ("passkey", 120)]
    assert own == pytest.approx(np.arange(0.05, 1, 0.1))


def test_every_method_gets_the_same_prompts(asked, village_model):
    _, items, found = asked(NEEDLE, shallow)
    assert list(found) == ["full_attention", "turborag"]
    for requests in found.values():
        for item, request in zip(items, requests, strict=True):
            assert request.prompt.num_tokens == item.length
            words = village_model.tokenizer.decode(np.concatenate(request.prompt.chunks))
            assert item.fitted.case.needles[0] in words and len(request.prompt.chunks) > 1
            asked_for = village_model.tokenizer.decode(request.prompt.final)
            assert item.fitted.case.question in asked_for


def test_every_figure_is_of_the_prompts_it_names(asked):
    result, items, _ = asked(NEEDLE, shallow)
    full = np.ones(24)
    turbo = np.array([item.depth >= 0.5 for item in items], np.float64)
    length = np.array([item.length for item in items])
    for method, scores in (("full_attention", full), ("turborag", turbo)):
        for n in NEEDLE.lengths:
            rows = length == n
            (cell,) = [c for c in result["cells"] if (c["method"], c["length"]) == (method, n)]
            assert cell["score"] == share(scores[rows], np.arange(12))._asdict()
            for depth in NEEDLE.depths:
                (cell,) = [c for c in result["grid"] if (c["method"], c["length"], c["depth"]) ==
                           (method, n, depth)]  # fmt: skip
                assert cell["score"]["n"] == 4
                assert cell["score"]["value"] == (method == "full_attention" or depth >= 0.5)
    assert len(result["grid"]) == 12
    (one, two) = result["differences"]
    assert one["method"] == two["method"] == "turborag" and one["minus"] == "full_attention"
    expected = difference(turbo[:12], full[:12], np.arange(12))
    assert one["length"] == 200 and one["difference"] == expected._asdict()
    assert json.loads(json.dumps(result, allow_nan=False))["seed"] == 7
    assert result["notes"]["full_attention"] == ["a note"]
    assert len(result["notes"]["turborag"]) == 2  # this model was not trained to read blocks


def test_agreement_counts_the_same_answers_right_or_wrong(asked):
    methods = ("full_attention", "turborag", "fusionrag")
    options = dataclasses.replace(NEEDLE, methods=methods)
    right = {"full_attention": (0.5, 1), "turborag": (0.5, 1), "fusionrag": (0, 0.5, 1)}
    result, _, _ = asked(options, lambda method, item: item.depth in right[method])
    found = {(c["method"], c["length"]): c["share"] for c in result["agreement"]}
    lengths = (*NEEDLE.lengths, None)
    assert set(found) == {(name, length) for name in methods[1:] for length in lengths}
    same = np.array([depth > 0 for depth in NEEDLE.depths for _ in range(4)])
    for length in NEEDLE.lengths:
        assert found["turborag", length] == share(np.ones(12), np.arange(12))._asdict()
        assert found["fusionrag", length] == share(same, np.arange(12))._asdict()
    assert found["fusionrag", None]["value"] == pytest.approx(2 / 3)
    assert found["fusionrag", None]["n"] == 24
    assert {cell["with"] for cell in result["agreement"]} == {"full_attention"}
    (agreement,) = [table for table in tables(result) if "token by token" in table.title]
    assert agreement.rows[0] == ["task", "method", "200", "120", "all"]
    assert agreement.rows[2][:2] == ["needle", "fusionrag"]
    assert agreement.rows[2][-1].startswith("66.7 [")


@pytest.mark.parametrize("change", [{"token_ids": [1]}, {"finish_reason": "length"}])
def test_answers_agree_in_tokens_and_in_how_they_end(change):
    one = a_reply("an answer")
    assert running._same(one, a_reply("an answer", notes=["another"]))
    assert not running._same(one, types.SimpleNamespace(**vars(one) | change))


def test_tables_show_the_figures(asked):
    result, _, _ = asked(NEEDLE, shallow)
    scores, grid, differences, costs, _ = tables(result)
    assert scores.rows[0] == ["task", "method", "200", "120"]
    assert scores.rows[2][:2] == ["needle", "turborag"] and scores.rows[2][2].startswith("66.7 [")
    assert grid.rows[0] == ["method", "tokens", "0 %", "50 %", "100 %"]
    assert grid.rows[3:] == [["turborag", "200", "0", "100", "100"],
                             ["turborag", "120", "0", "100", "100"]]  # fmt: skip
    assert differences.rows[1][2].startswith("-33.3 [")
    assert costs.rows[0] == ["method", "reads", "200, ms", "120, ms", "200, kB", "120, kB"]
    assert costs.rows[1][:4] == ["full_attention", "all", "500.00", "500.00"]
    text = page(tables(result))
    assert "village flavour" in text and "chunks of up to 40 tokens" in text
    retrieval, _, _ = asked(dataclasses.replace(RETRIEVAL, chunk_tokens=None), shallow)
    assert retrieval["grid"] == [] and retrieval["depths"] is None
    scores, differences, costs, agreement = tables(retrieval)
    assert [row[:2] for row in scores.rows[1:]] == [
        [task, method]
        for task in ("passkey", "kv_retrieval")
        for method in ("full_attention", "turborag")
    ]
    assert "as one chunk" in scores.title
    for table in (scores, differences, costs, agreement):
        assert {len(row) for row in table.rows} == {len(table.rows[0])}


def test_every_method_answers_under_every_decode_rule(asked):
    rules = ("dense", "static_window:sink=4,recent=16")
    options = dataclasses.replace(NEEDLE, decode=rules, questions=1)
    assert [(m.name, m.encoder, m.decode.name) for m in options.resolved] == [
        ("full_attention, dense", None, "dense"),
        ("full_attention, static_window:sink=4,recent=16", None, "static_window"),
        ("turborag, dense", "isolated", "dense"),
        ("turborag, static_window:sink=4,recent=16", "isolated", "static_window"),
    ]
    names = [method.name for method in options.resolved]
    result, _, found = asked(options, lambda method, item: "window" not in method)
    assert list(result["methods"]) == names == list(found)
    scores = {cell["method"]: cell["score"]["value"] for cell in result["cells"]}
    assert scores == dict(zip(names, (1, 0, 1, 0), strict=True))


def test_prompts_can_be_trained_on(monkeypatch, village_model):
    monkeypatch.setattr(running, "load_model", lambda path, dtype, mesh: village_model)
    options = dataclasses.replace(NEEDLE, split="train", lengths=(150,), depths=(0.5,))
    rows = running.prompts(options, progress=False)
    writer = SampleWriter(village_model.tokenizer, village_model.template, 1, "", "")
    for row in rows:
        sample = writer.write(row)
        assert sample.num_shared + len(sample.finals[0].question) == 150 == row["length"]
        assert sum(row["answers"][0] in chunk for chunk in row["chunks"]) == 1
        assert (row["task"], row["depth"]) == ("needle", 0.5)
    asked = {re.findall(r"([A-Z]\w+) ([A-Z]\w+)", row["question"])[-1] for row in rows}
    assert len(asked) == 4 and {split_of(*name) for name in asked} == {"train"}


def test_a_length_beyond_the_context_is_refused_before_any_prompt(village_frame):
    options = dataclasses.replace(NEEDLE, lengths=(100, 1020))
    with refused(RequestError, "--contexts 1020"):
        plan(options, village_frame, 1024, progress=False)


def test_what_a_method_refuses_is_refused_before_any_work(asked, monkeypatch, village_model):
    config = dataclasses.replace(village_model.config, sliding_window=16)
    windowed = dataclasses.replace(village_model, config=config)
    options = dataclasses.replace(NEEDLE, methods=("full_attention", "turborag_composite"))
    monkeypatch.setattr(running, "load_model", lambda path, dtype, mesh: windowed)
    with refused(RequestError):
        running.run(options, progress=False)

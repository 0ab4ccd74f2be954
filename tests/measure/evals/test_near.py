"""`jaxrag eval near`: KL and agreement to full attention, by method, encoder and primer."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from dataset_fixtures import write
from refusal import refused

from jaxrag.base.errors import ConfigError, RequestError
from jaxrag.cli import main
from jaxrag.measure.evals.datasets.near import NearStudy, arms_of, run, tables
from jaxrag.measure.evals.datasets.options import NearOptions
from jaxrag.measure.evals.datasets.run import items_of
from jaxrag.measure.evals.gate import forced_along, forced_logits
from jaxrag.measure.evals.statistics import bootstrapped
from jaxrag.models.export import export_hf
from jaxrag.models.model import load_model
from jaxrag.serve.conversation import Passage
from jaxrag.serve.questions import prepare


@pytest.fixture(scope="module")
def primers(tmp_path_factory):
    """Two short ones."""
    folder, paths = tmp_path_factory.mktemp("primers"), []
    for name in ("weir", "mill"):
        paths.append(folder / f"{name}.toml")
        text = f'[[passages]]\ntitle = "{name}"\ntext = "A {name} is built of stone."\n'
        paths[-1].write_text(text)
    return tuple(map(str, paths))


@pytest.fixture(scope="module")
def options(tmp_path_factory, model_dir, primers):
    folder = tmp_path_factory.mktemp("near")
    return NearOptions(
        "nq_open", (str(write("nq_open", folder)),), model=str(model_dir), documents=3, number=3,
        methods=("full_reuse", "primed", "primed_fusion"), primers=primers, template="plain",
        answer_tokens=4, out=str(folder / "near.json"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def result(options):
    return run(options, progress=False)


NAMES = ["full_reuse", "primed weir", "primed mill", "primed_fusion weir", "primed_fusion mill"]


def test_every_method_is_measured_behind_every_primer(result):
    assert [row["method"] for row in result["rows"]] == NAMES
    first, *others = result["rows"]
    assert first["kl_over_first"] == {"value": 1, "low": 1, "high": 1}
    assert first["kl_minus_first"] == {"value": 0, "low": 0, "high": 0, "needed": None}
    for row in result["rows"]:
        assert row["kl"]["low"] <= row["kl"]["value"] <= row["kl"]["high"]
        assert row["kl"]["value"] > 1e-6
        assert 0 <= row["same_tokens"]["value"] <= 1
        assert (row["recomputed"] > 0) == ("fusion" in row["method"])
    assert len({row["kl"]["value"] for row in result["rows"]}) == 5
    assert {row["bytes_per_token"] for row in others} == {first["bytes_per_token"]}
    [table] = tables(result)
    assert [row[0] for row in table.rows[1:]] == NAMES


def test_a_method_that_computes_everything_is_full_attention(options):
    study = NearStudy.open(options, load_model(str(options.model)))
    arm = study.arms["primed_fusion mill"]
    whole = dataclasses.replace(arm, method=arm.method.with_ratio(1))
    [item, *_] = items_of(options)
    line = dataclasses.replace(study, arms={"whole": whole}).measure(item)
    found = line["methods"]["whole"]
    assert max(found["kl"]) < 1e-8 and all(found["same"])
    assert found["text"] == line["full"]["text"] and found["recomputed"] == 1
    assert found["gold"] == pytest.approx(line["full"]["gold"], abs=1e-4)


def test_other_weights_are_compared_with_those_they_came_from(options, model_dir, tmp_path):
    """Full attention itself is a row then, and of the same weights nothing is between them."""
    other = tmp_path / "other"
    model = load_model(str(model_dir))
    moved = jax.tree.map(lambda x: x * 1.01, model.params.layers)
    export_hf(other, model.params.replace(layers=moved), model.config, model_dir)
    asked = dataclasses.replace(
        options, methods=("full_attention", "full_reuse"), number=1, out=str(tmp_path / "n.json")
    )
    rows = {}
    for name in (model_dir, other):
        own = dataclasses.replace(asked, reference=str(name), out=f"{asked.out}.{name.name}")
        rows[name] = run(own, progress=False)["rows"]
    full, reuse = rows[model_dir]
    assert full["kl"]["value"] < 1e-9 and full["recomputed"] == 1 and full["bytes_per_token"] == 0
    assert reuse["kl"]["value"] > 1e-6
    assert rows[other][0]["kl"]["value"] > 1e-8
    with refused(ConfigError, asked.out):  # its lines are of another reference
        run(dataclasses.replace(asked, reference=str(other), out=f"{asked.out}.{model_dir.name}"))
    shutil.copytree(model_dir, tmp_path / "spelled")
    path = tmp_path / "spelled" / "tokenizer.json"
    path.write_text(path.read_text() + " ")
    with refused(RequestError, "spelled"):
        run(dataclasses.replace(asked, reference=str(tmp_path / "spelled")), progress=False)


@pytest.mark.parametrize("arm", ["full_reuse", "primed_fusion mill"])
def test_answers_along_one_prefill_are_as_each_alone(options, arm):
    study = NearStudy.open(options, load_model(str(options.model)))
    [item, *_] = items_of(options)
    settings = study.arms[arm]
    ready = prepare(settings, item.question, passages_of(study, item))
    answers = [[7, 9, 11, 13], [21], [], [30, 31, 32]]
    together, count = forced_along(settings.model, ready, answers)
    for answer, found in zip(answers, together, strict=True):
        [alone], again = forced_logits(settings, [ready], [answer])
        np.testing.assert_allclose(found, alone, rtol=1e-5, atol=1e-5)
        assert again == count and len(found) == len(answer) + 1


def test_encoders_take_the_place_of_a_methods_own(options):
    asked = dataclasses.replace(
        options, methods=("cacheblend", "epic"), encoders=("after_prefix", "primed")
    )
    weir, mill = (f"cacheblend primed {name}" for name in ("weir", "mill"))
    assert list(arms_of(asked)) == ["cacheblend after_prefix", weir, mill, "epic"]
    assert arms_of(asked)[mill].primer == options.primers[1]


def test_what_cannot_be_compared_is_refused(options, result):
    with refused(ConfigError, options.out):  # what is kept there was asked without
        run(dataclasses.replace(options, earlier=1), progress=False)
    with refused(RequestError, "full_attention"):
        arms_of(dataclasses.replace(options, methods=("full_attention",)))
    with refused(RequestError, "'primed weir'"):
        arms_of(dataclasses.replace(options, methods=("primed",), primers=options.primers[:1] * 2))
    with refused(RequestError, "--answer-tokens"):
        dataclasses.replace(options, answer_tokens=0)
    with refused(RequestError, "--neighbours all"):
        dataclasses.replace(options, neighbours="all")


@pytest.mark.parametrize("source", ["corpus", "prompt"])
def test_neighbours_are_of_the_whole_file_or_of_the_prompt_when_asked(options, tmp_path, source):
    asked = dataclasses.replace(
        options, methods=("full_reuse", "fusionrag"), number=1, neighbours=source,
        out=str(tmp_path / "near.json"),
    )  # fmt: skip
    found = run(asked, progress=False)
    [table] = tables(found)
    if source == "prompt":
        assert found["neighbours"] == {"from": "prompt", "oracle": True}
        assert table.title.endswith("the prompt's own other passages, an oracle")
    else:
        assert found["neighbours"] == {
            "from": "corpus", "name": "nq_open (nq_open.json)", "passages": 8, "by": "bm25",
            "top_n": 10,
        }  # fmt: skip
        assert table.title.endswith("the most similar of 8 passages of nq_open (nq_open.json)")
    other = {"corpus": "prompt", "prompt": "corpus"}[source]
    with refused(ConfigError, asked.out):  # what was measured behind others is not gone on from
        run(dataclasses.replace(asked, neighbours=other), progress=False)
    study = NearStudy.open(asked, load_model(str(options.model)))
    [item, *_] = items_of(dataclasses.replace(asked, number=None))
    prompt = prepare(study.arms["fusionrag"], item.question, passages_of(study, item)).prompt
    assert {len(it) for it in prompt.neighbours} == {2 if source == "prompt" else 7}
    assert "neighbours" not in run(options, progress=False)  # no method of it sees any


def passages_of(study, item):
    encode = study.model.text_tokenizer().encode
    return [Passage(encode(text)[: study.options.chunk_tokens], title) for title, text in
            item.documents]  # fmt: skip


def test_the_command_prints_one_object(options, result, capsys):
    flags = [f"--method={it}" for it in options.methods] + [
        f"--primer={it}" for it in options.primers
    ]
    command = [
        "eval", "near", "nq_open", f"--data={options.data[0]}", f"--model={options.model}",
        "--num=3", "--passages=3", "--answer-tokens=4", "--template=plain",
        f"--out={options.out}", "--json", *flags,
    ]  # fmt: skip
    assert main(command) == 0
    assert [row["method"] for row in json.loads(capsys.readouterr().out)["rows"]] == NAMES


def test_an_interval_is_of_resampled_prompts(rng):
    values = rng.normal(2, 1, 400)
    found = bootstrapped(values, 3)
    assert found["value"] == pytest.approx(values.mean())
    half = 1.96 * values.std() / np.sqrt(400)
    assert found["high"] - found["value"] == pytest.approx(half, rel=0.1)
    assert found["value"] - found["low"] == pytest.approx(half, rel=0.1)
    ratio = bootstrapped(3 * values, 3, over=values)
    assert ratio["low"] == pytest.approx(3) == ratio["high"]

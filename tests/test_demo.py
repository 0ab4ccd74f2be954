"""`jaxrag demo`: what it reports, when it fails, and what it unpacks."""

import json
import shutil
import tomllib
from pathlib import Path

import jax
import pytest

from jaxrag import cli
from jaxrag.base.config import config_from_dict
from jaxrag.base.tables import read_toml
from jaxrag.cli import demo, handbook
from jaxrag.cli.output import columns
from jaxrag.engine.engine import engine_of
from jaxrag.measure.evals.metrics import holds
from jaxrag.models.export import export_hf
from jaxrag.models.reading import Reading
from jaxrag.models.spec import init_params
from jaxrag.models.text.prompts import template_named

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def random_models(tmp_path_factory):
    """All sets of weights, random."""
    directory = tmp_path_factory.mktemp("models")
    path = ROOT / "configs" / "models" / "synthetic-0.8m.toml"
    sizes = {**read_toml(path), "num_layers": 1}
    template = template_named(str(ROOT / "configs" / "templates" / "short.toml"))
    contexts = {"full": 1024, "dual": 1024, "long-dual": 4352}
    for seed, (name, context) in enumerate(contexts.items()):
        config = config_from_dict({**sizes, "max_positions": context}, str(path))
        params = init_params(config, jax.random.key(seed))
        tokenizer = ROOT / "configs" / "tokenizers" / "synthetic"
        reading = Reading(("reordered",))
        export_hf(directory / name, params, config, tokenizer, template=template, reading=reading)
    return directory


@pytest.mark.slow
def test_it_counts_answers_and_fails_where_they_are_wrong(
    random_models, tmp_path, capsys, monkeypatch
):
    given = ["--models", str(random_models), "--work", str(tmp_path), "--json"]
    assert cli.main(["demo", *given]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert (shown["passed"], shown["questions"], shown["encoded"]) == (False, 8, 0)
    saved = shown["saved"]
    assert saved["questions"] == 8 and saved["reused_tokens"] == saved["passage_tokens"] > 12_000
    assert saved["times_sooner"] == saved["ttft"]["full_attention"] / saved["ttft"]["turborag"]
    assert {row["kind"] for row in shown["asked"]} == {"hop1", "cross", "latest", "hop2", "unknown"}
    for row in shown["asked"]:
        full, turbo, block = (row["results"][method] for method in demo.METHODS)
        assert turbo["counts"]["reused"] == full["counts"]["recomputed"] > 0
        assert turbo["token_ids"] == block["token_ids"]
        assert turbo["notes"] == full["notes"] == []
    monkeypatch.setattr(demo, "NEEDED", 0)
    assert cli.main(["demo", *given[:-1]]) == 0
    out = capsys.readouterr().out
    assert "passage tokens reused" in out.splitlines()[-3]
    assert "13 documents, 16 chunks" in out
    assert "encoded 0 chunk tokens at question time:\neverything came from" in out
    assert out.count(" of 8 ") >= 4
    assert max(map(columns, out.replace(str(tmp_path), ".").splitlines())) <= 80


def test_missing_models_are_one_line(tmp_path, capsys):
    assert cli.main(["demo", "--models", str(tmp_path), "--work", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "no such model directory" in err


@pytest.mark.slow
def test_something_encoded_at_question_time_is_a_failure(
    random_models, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(demo, "NEEDED", 0)
    ask = demo._ask

    def lose_the_store(kb, rows, k, *methods):
        kb.store.delete([key for d in kb.documents() for key in kb._catalog.keys(d.id)["isolated"]])
        engine_of(kb.model).forget()
        return ask(kb, rows, k, *methods)

    monkeypatch.setattr(demo, "_ask", lose_the_store)
    assert (
        cli.main(["demo", "--models", str(random_models), "--work", str(tmp_path), "--json"]) == 1
    )
    assert json.loads(capsys.readouterr().out)["encoded"] > 0


@pytest.mark.slow
def test_the_shipped_model_answers_every_question(tmp_path, capsys):
    assert cli.main(["demo", "--work", str(tmp_path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["right"]["dual"] == dict.fromkeys(demo.METHODS, 8)
    assert shown["right"]["full"]["turborag"] < shown["right"]["full"]["full_attention"]


def test_it_unpacks_a_folder_like_a_checkout(tmp_path, capsys):
    assert cli.main(["demo", "--unpack", str(tmp_path / "new"), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)["unpacked"]
    assert [Path(path).name for path in made] == ["checkpoints", "configs", "examples"]
    for name in (
        "checkpoints/synthetic-0.8m/dual/model.safetensors",
        "configs/templates/short.toml",
        "examples/village/kora-felell.md",
    ):
        made_of = tmp_path / "new" / name
        assert not made_of.is_symlink() and made_of.read_bytes() == (ROOT / name).read_bytes()
    assert cli.main(["demo", "--unpack", str(tmp_path / "new")]) == 1
    assert "checkpoints is there already; name another folder" in capsys.readouterr().err


def test_the_version(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0
    with open(ROOT / "pyproject.toml", "rb") as file:
        version = tomllib.load(file)["project"]["version"]
    assert capsys.readouterr().out == f"jaxrag {version}\n"


def test_a_manual_is_asked_with_a_model_of_yours(tmp_path, capsys, monkeypatch):
    """Both ways, question by question; a model that says not how it is asked is refused."""
    shipped = ROOT / "checkpoints" / "synthetic-0.8m" / "dual"
    given = ["--work", str(tmp_path / "work"), "--k", "2", "--json"]
    assert cli.main(["demo", "--model", str(shipped), *given]) == 1
    assert "no chat template" in capsys.readouterr().err
    shutil.copytree(shipped, tmp_path / "model")
    turn = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(turn)
    monkeypatch.setattr(handbook, "HANDBOOK", ROOT / "examples" / "village")
    monkeypatch.setattr(handbook, "QUESTIONS", ROOT / "examples" / "village-questions.jsonl")
    for number in ("first", "second"):
        assert cli.main(["demo", "--model", str(tmp_path / "model"), *given]) == 0, number
        shown = json.loads(capsys.readouterr().out)
        assert shown["questions"] == len(shown["asked"]) == 8
        assert shown["computed"]["reuse"] == 0 < shown["computed"]["full_attention"]
        for one in shown["asked"]:
            ways = ("full_attention", "reuse")
            assert one["right"] == {w: holds(one[w]["text"], one["answers"]) for w in ways}
    assert cli.main(["demo", "--model", str(tmp_path / "model"), *given[:-1]]) == 0
    said = capsys.readouterr().out
    assert "0 encoded" in said and f"Right: {shown['right']['full_attention']} of 8" in said

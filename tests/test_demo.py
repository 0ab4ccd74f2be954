"""scripts/demo.py: what it reports, and when it fails."""

import importlib.util
import json
from pathlib import Path

import jax
import pytest

from jaxrag.config import config_from_dict
from jaxrag.engine.engine import engine_of
from jaxrag.models.export import export_hf
from jaxrag.models.reading import Reading
from jaxrag.models.spec import init_params
from jaxrag.tables import read_toml
from jaxrag.text.prompts import template_named

ROOT = Path(__file__).parents[1]


@pytest.fixture
def demo():
    spec = importlib.util.spec_from_file_location("demo", ROOT / "scripts" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def random_models(tmp_path_factory):
    """Both sets of weights, random."""
    directory = tmp_path_factory.mktemp("models")
    path = ROOT / "configs" / "models" / "synthetic-0.8m.toml"
    config = config_from_dict({**read_toml(path), "num_layers": 1}, str(path))
    template = template_named(str(ROOT / "configs" / "templates" / "short.toml"))
    for seed, name in enumerate(("full", "dual")):
        params = init_params(config, jax.random.key(seed))
        tokenizer = ROOT / "configs" / "tokenizers" / "synthetic"
        reading = Reading(("reordered",))
        export_hf(directory / name, params, config, tokenizer, template=template, reading=reading)
    return directory


@pytest.mark.slow
def test_it_counts_answers_and_fails_where_they_are_wrong(
    demo, random_models, tmp_path, capsys, monkeypatch
):
    given = ["--models", str(random_models), "--work", str(tmp_path), "--json"]
    assert demo.main(given) == 1
    shown = json.loads(capsys.readouterr().out)
    assert (shown["passed"], shown["questions"], shown["encoded"]) == (False, 8, 0)
    assert {row["kind"] for row in shown["asked"]} == {"hop1", "cross", "latest", "hop2", "unknown"}
    for row in shown["asked"]:
        full, turbo, block = (row["results"][method] for method in demo.METHODS)
        assert turbo["counts"]["reused"] == full["counts"]["recomputed"] > 0
        assert turbo["token_ids"] == block["token_ids"]
        assert turbo["notes"] == full["notes"] == []
    monkeypatch.setattr(demo, "NEEDED", 0)
    assert demo.main(given[:-1]) == 0
    out = capsys.readouterr().out
    assert "13 documents, 16 chunks" in out
    assert "encoded 0 chunk tokens at question time: everything came from" in out
    assert out.count(" of 8 ") >= 4


def test_missing_models_are_one_line(demo, tmp_path, capsys):
    assert demo.main(["--models", str(tmp_path), "--work", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "no such model directory" in err


@pytest.mark.slow
def test_something_encoded_at_question_time_is_a_failure(
    demo, random_models, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(demo, "NEEDED", 0)
    ask = demo._ask

    def lose_the_store(kb, rows, k):
        kb.store.delete([key for d in kb.documents() for key in kb._catalog.keys(d.id)["isolated"]])
        engine_of(kb.model).forget()
        return ask(kb, rows, k)

    monkeypatch.setattr(demo, "_ask", lose_the_store)
    assert demo.main(["--models", str(random_models), "--work", str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["encoded"] > 0


@pytest.mark.slow
def test_the_shipped_model_answers_every_question(demo, tmp_path, capsys):
    assert demo.main(["--work", str(tmp_path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["right"]["dual"] == dict.fromkeys(demo.METHODS, 8)
    assert shown["right"]["full"]["turborag"] < shown["right"]["full"]["full_attention"]

"""Models made deeper by scripts/grow_model.py, and the one that grew."""

import sys
from pathlib import Path

import grow_model
import jax
import pytest

from jaxrag import generate
from jaxrag.models.export import export_hf
from jaxrag.models.model import load_model
from jaxrag.models.reading import Reading
from jaxrag.models.spec import init_params

DEEP = Path(__file__).parents[2] / "checkpoints" / "synthetic-2.3m"
DOCUMENTS = ["Kora Felell lives in Tondorf. Kora Felell keeps a goat."]


@pytest.fixture
def small(tmp_path, tiny_config, tokenizer_dir):
    config = tiny_config(vocab_size=600, num_layers=2)
    params = init_params(config, jax.random.key(3))
    reading = Reading(("reordered",))
    export_hf(tmp_path / "small", params, config, tokenizer_dir, reading=reading)
    return tmp_path / "small"


def grown(monkeypatch, *given):
    monkeypatch.setattr(sys, "argv", ["grow_model.py", *map(str, given)])
    return grow_model.main()


def test_a_deeper_model_says_what_it_grew_from_says(small, tmp_path, monkeypatch):
    assert grown(monkeypatch, small, tmp_path / "deep", "--layers", 6) == 0
    models = [load_model(path, cache_tokens=512) for path in (small, tmp_path / "deep")]
    assert [it.config.num_layers for it in models] == [2, 6]
    assert models[0].reading == models[1].reading
    asked = {"documents": ["Wool is sold."], "method": "turborag", "max_new_tokens": 16}
    questions = ["Who has the salt?", "What is wool?", "Who sold it?"]
    first, second = (generate(questions, model=it, **asked) for it in models)
    assert [it.token_ids for it in first] == [it.token_ids for it in second]
    assert len({tuple(it.token_ids) for it in first}) > 1


def test_layers_that_are_no_multiple_are_refused(small, tmp_path, monkeypatch, capsys):
    assert grown(monkeypatch, small, tmp_path / "deep", "--layers", 5) == 1
    assert "5 layers are not a multiple of the model's 2" in capsys.readouterr().err
    assert not (tmp_path / "deep").exists()


@pytest.mark.parametrize(
    ("weights", "method"), [("deep-dual", "turborag"), ("deep-full", "full_attention")]
)
def test_the_deep_weights_answer(weights, method):
    model = load_model(DEEP / weights, cache_tokens=2048)
    assert (model.config.num_layers, model.config.max_positions) == (12, 4352)
    assert model.reading.block_positions == (("reordered",) if method == "turborag" else ())
    answer = generate(
        "Which animal does Kora Felell keep?", model=model, documents=DOCUMENTS, method=method
    )
    assert answer.text.strip() == "goat"

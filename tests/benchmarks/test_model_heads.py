"""Heads taken from a model: what its attention sees, measured like generated ones."""

import dataclasses
import json
from pathlib import Path

import index
import index_measure
import model_heads
import numpy as np
import pytest

from jaxrag.base.errors import RequestError
from jaxrag.models.model import random_model
from jaxrag.reuse.attention_index import rotated

OPTIONS = index_measure.Options(
    contexts=(60, 90), engines=("flat fp32", "lists fp32"), k=5, train=40, ask=8, sink=4, recent=6,
    cold_bytes=1, searches=1, rounds=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tiny_config):
    return random_model(tiny_config())


def test_every_head_of_every_context_in_order(model):
    ids = np.random.default_rng(0).integers(model.config.vocab_size, size=98)
    names = []
    for name, heads in model_heads.model_heads(model, ids, OPTIONS):
        names.append((heads.context, name))
        assert heads.keys.shape == (heads.context - 10, model.config.head_dim)
        assert heads.first == 4
        group = model.config.num_heads // model.config.num_kv_heads
        assert heads.asked.shape == (group, 8, model.config.head_dim)
        assert heads.bank.positions[0] == 4
        assert heads.bank.positions[-1] == heads.context - 1
    per = [
        f"{n}.{h}" for n in range(model.config.num_layers) for h in range(model.config.num_kv_heads)
    ]
    assert names == [(context, name) for context in (60, 90) for name in per]


def test_queries_and_keys_are_the_projections(model):
    ids = np.random.default_rng(1).integers(model.config.vocab_size, size=20)
    queries, keys = model_heads.queries_and_keys(model, ids)
    layers = model.params.layers
    x = np.asarray(model.params.embed)[ids].astype(np.float64)
    x /= np.sqrt((x**2).mean(-1, keepdims=True) + model.config.norm_eps)
    x *= np.asarray(layers.attn_norm)[0]
    for found, weight in ((queries[0], layers.q), (keys[0], layers.k)):
        expected = np.einsum("td,dnh->tnh", x, np.asarray(weight)[0])
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_heads_ask_in_the_order_of_the_group(model):
    ids = np.random.default_rng(2).integers(model.config.vocab_size, size=98)
    queries, keys = model_heads.queries_and_keys(model, ids)
    group = model.config.num_heads // model.config.num_kv_heads
    found = dict(
        model_heads.model_heads(model, ids, dataclasses.replace(OPTIONS, contexts=(90,)), [1])
    )
    assert set(found) == {f"1.{head}" for head in range(model.config.num_kv_heads)}
    for head in range(model.config.num_kv_heads):
        heads = found[f"1.{head}"]
        np.testing.assert_array_equal(heads.keys, keys[1, 4:84, head])
        for part in range(group):
            mine = queries[1, 90:, head * group + part]
            np.testing.assert_array_equal(heads.asked[part], mine)
            placed = rotated(mine, np.arange(90, 98), model.config.rope)
            np.testing.assert_array_equal(heads.placed_queries()[part], placed)


def test_they_are_measured_like_generated_heads(model):
    ids = np.random.default_rng(3).integers(model.config.vocab_size, size=98)
    result = index_measure.run(OPTIONS, model_heads.model_heads(model, ids, OPTIONS, [0]))
    assert len(result["rows"]) == 2 * 2 * model.config.num_kv_heads
    assert result["rows"][0]["head"] == "0.0"
    assert all(row["recall"] > 0.5 for row in result["rows"])


def test_what_cannot_be_dumped(model):
    with pytest.raises(RequestError, match="97 tokens: expected 98, the longest context and --ask"):
        model_heads.model_heads(model, np.zeros(97, int), OPTIONS)
    with pytest.raises(RequestError, match="layer 9: expected 0 to"):
        model_heads.model_heads(model, np.zeros(98, int), OPTIONS, [9])
    config = dataclasses.replace(model.config, sliding_window=16)
    windowed = dataclasses.replace(model, config=config)
    with pytest.raises(RequestError, match="sliding window of 16 tokens"):
        model_heads.model_heads(windowed, np.zeros(98, int), OPTIONS)


def test_the_command_says_which_model_and_text(tmp_path, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "result.json"
    text.write_text("The home of Kora Felell is Ninven. She works as a smith. " * 6)
    model = Path(__file__).parents[2] / "checkpoints" / "synthetic-0.8m" / "full"
    arguments = ["--model", str(model), "--text", str(text), "--layers", "0"]
    arguments += ["--contexts", "40", "--ask", "8", "--sink", "2", "--recent", "4", "--k", "3"]
    arguments += ["--engines", "flat fp32", "--cold-mb", "1", "--rounds", "1", "--out", str(out)]
    assert index.main(arguments) == 0
    assert "head 0.3, 40 tokens, 34 keys" in capsys.readouterr().out
    options = json.loads(out.read_text())["options"]
    assert (options["model"], options["text"]) == (str(model), "text.txt")
    assert "heads" not in options

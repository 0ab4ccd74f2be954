"""benchmarks/explain.py: its numbers against slow oracles, its pictures, and what it refuses."""

import json
import sys

import jax
import numpy as np
import pytest
from explain import (
    COMPARED,
    distribution,
    left_by_layer,
    main,
    method_to_explain,
    question_attention,
    report,
)
from explain_plots import PICTURES, draw

from jaxrag import KnowledgeBase, load_model
from jaxrag.base.errors import RequestError
from jaxrag.base.types import Tokens
from jaxrag.engine.direct import map_request, unmap
from jaxrag.engine.engine import engine_of
from jaxrag.engine.request import Prompt, Request
from jaxrag.library.documents import Document
from jaxrag.models.decoder import forward
from jaxrag.models.model import random_model
from jaxrag.models.rope import place
from jaxrag.models.segments import lay_out
from jaxrag.reuse.select import KvDeviation, RandomTokens, SelectionBatch, layer_deviations

pytestmark = pytest.mark.slow

WORDS = ["harbour", "lantern", "river", "market", "bridge", "oven", "glass", "salt", "garden"]


def a_prompt(rng, prefix=5, chunks=(19, 33, 16), final=7):
    def ids(count):
        return rng.integers(3, 101, count).astype(np.int32)

    return Prompt(ids(prefix), tuple(map(ids, chunks)), ids(final))


@pytest.fixture(scope="module")
def kb_dir(tmp_path_factory, model_dir):
    """A knowledge base of a few texts about the same things."""
    folder = tmp_path_factory.mktemp("explain") / "kb"
    rng = np.random.default_rng(5)
    texts = [" ".join(rng.choice(WORDS, 30)) for _ in range(4)]
    with KnowledgeBase.open(folder, model=load_model(model_dir, cache_tokens=4096)) as kb:
        kb.add([Document(f"doc{i}", text) for i, text in enumerate(texts)])
    return folder


@pytest.fixture(scope="module")
def explained(kb_dir, tmp_path_factory):
    """What the program wrote for one question: the folder and the numbers."""
    out = tmp_path_factory.mktemp("explained") / "pictures"
    arguments = ["--kb", str(kb_dir), "--question", "Where is the lantern of the market?"]
    assert main([*arguments, "--k", "3", "--out", str(out)]) == 0
    return out, json.loads((out / "explain.json").read_text(encoding="utf-8"))


def test_deviation_by_layer_is_what_the_selector_measures(tiny_config, rng):
    model = random_model(tiny_config(), cache_tokens=1024)
    prompt = a_prompt(rng)
    method = method_to_explain("full_reuse", 0.3)
    mapped = map_request(
        engine_of(model).runner, Request(prompt, engine_of(model).memory, method, 1), 0
    )
    try:
        k, v = layer_deviations(model, engine_of(model).runner.cache, mapped.scene)
        assert k.shape == v.shape == (3, 68)
        for layer, part, values in ((1, "k", k[1]), (2, "kv", (k + v)[2])):
            selector = KvDeviation(layers=(layer,), part=part, keep_fresh=False)
            cache = engine_of(model).runner.cache
            [(same, _)] = selector.observe(SelectionBatch(model, cache, [mapped.scene]))
            np.testing.assert_allclose(values, same, rtol=1e-4, atol=1e-9)
    finally:
        unmap(engine_of(model).runner, mapped)
    assert k[0].max() < 1e-9 and v[0].max() < 1e-9  # layer 0 knows no context
    assert (k + v)[:, :19].max() < 1e-9  # the first chunk stands where it was encoded
    assert (k + v)[1:, 19:].min() > 1e-6


@pytest.mark.parametrize(
    "family", [pytest.param("llama", marks=pytest.mark.slow), "mistral", "glm"]
)
@pytest.mark.parametrize("independent", [False, True])
def test_question_attention_is_the_softmax_of_its_scores(tiny_config, family, independent, rng):
    model = random_model(tiny_config(family), cache_tokens=512)
    prompt = a_prompt(rng)
    found = question_attention(model, prompt, independent)
    config, length = model.config, prompt.num_tokens
    layout = lay_out(5, (19, 33, 16), 7)
    order, segments = np.arange(length), layout.segments
    see = order[None] <= order[:, None]
    if independent:
        see &= (segments[None] == segments[:, None]) | (segments == 2)[:, None]
    if config.sliding_window:
        see &= order[:, None] - order[None] < config.sliding_window
    group = config.num_heads // config.num_kv_heads

    def dense(layer, window, q, k, v, tokens, cache):
        q, k = (place(x, tokens.positions, model.rope(length), config.rope) for x in (q, k))
        scores = jax.numpy.einsum("btnh,bsnh->bnts", q, k.repeat(group, 2)) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jax.numpy.where(see, scores, -jax.numpy.inf), -1)
        out = jax.numpy.einsum("bnts,bsnh->btnh", weights, v.repeat(group, 2))
        return out, cache, weights[:, :, -7:].mean((1, 2))

    ids = jax.numpy.asarray(np.concatenate((prompt.prefix, *prompt.chunks, prompt.final)))[None]
    tokens = Tokens(ids, jax.numpy.arange(length)[None], jax.numpy.full_like(ids, 2))
    _, _, expected = forward(model.params, config, tokens, None, dense)
    np.testing.assert_allclose(found, expected[:, 0], rtol=2e-4, atol=1e-7)
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-5)


def test_where_tokens_lie():
    found = distribution(np.array([0, 9, 10, 29, 30, 31]), [10, 20, 2])
    assert found["by_chunk"] == [2, 2, 2]
    assert found["share_of_chunk"] == [0.2, 0.1, 1.0]
    assert found["within_chunk"] == [3, 0, 0, 0, 0, 1, 0, 0, 0, 2]
    assert distribution(np.zeros(0, int), [3])["within_chunk"] == [0] * 10


def test_what_an_oracle_leaves():
    deviation = np.array([[5.0, 5, 5, 5], [1, 4, 2, 3], [0, 0, 0, 0]])
    assert left_by_layer(deviation, 1) == [None, 0.6, None]
    assert left_by_layer(deviation, 4) == [None, 0.0, None]


def test_the_numbers_fit_together(explained):
    _, result = explained
    chunks = result["chunks"]
    count = sum(chunk["tokens"] for chunk in chunks)
    assert len(chunks) == 3 and result["prompt_tokens"]["chunks"] == count
    assert [chunk["exact"] for chunk in chunks] == [True, False, False]
    assert [chunk["encoder"] for chunk in chunks] == ["after_prefix", "neighbours", "neighbours"]
    assert any("encoded" in note for note in result["notes"])  # the base holds isolated chunks only
    assert result["recompute_ratio"] == 0.15
    budget = result["selection"]["budget"]
    assert budget == -(-15 * count // 100)
    assert not result["selection"]["refused"]
    assert [it["selector"] for it in result["selection"]["selectors"]] == list(COMPARED)
    for it in result["selection"]["selectors"]:
        assert sum(it["by_chunk"]) == sum(it["within_chunk"]) == len(it["tokens"]) <= budget
        assert it["by_chunk"][0] == 0  # its KV is exact
        assert it["selector"] == "first_k" or len(it["tokens"]) == budget
    for it in result["attention"].values():
        sums = np.sum(it["chunks"], 1) + it["prefix"] + it["final"]
        np.testing.assert_allclose(sums, 1, rtol=1e-4)
        assert np.sum(it["tokens"]) == pytest.approx(np.mean(np.sum(it["chunks"], 1)), rel=1e-4)
    assert result["attention"]["full"]["chunks"][0] == pytest.approx(
        result["attention"]["independent"]["chunks"][0], rel=1e-4
    )  # layer 0
    assert result["attention"]["full"]["chunks"][1] != pytest.approx(
        result["attention"]["independent"]["chunks"][1], rel=1e-4
    )
    lines = report(result)
    assert any(line.split()[:1] == ["kv_deviation"] for line in lines)


def test_pictures_show_the_numbers(explained, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    out, result = explained
    assert {path.name for path in out.iterdir()} == {
        "explain.json",
        *(f"{n}.png" for n in PICTURES),
    }
    again = {path.stem: path for path in draw(result, tmp_path)}
    for name in PICTURES:
        drawn = image.imread(out / f"{name}.png")
        assert (drawn == image.imread(again[name])).all()  # the same numbers, the same picture
    result = json.loads(json.dumps(result))
    result["deviation"]["k"][1] = result["deviation"]["k"][1][::-1]
    result["selection"]["selectors"][0]["tokens"] = [0]
    result["attention"]["full"]["tokens"][0] = 0.5
    for path in draw(result, tmp_path):
        assert (image.imread(path) != image.imread(out / path.name)).any(), path


def test_json_is_what_the_folder_holds(kb_dir, tmp_path, capsys):
    """A prompt of one exact chunk: nothing deviates, nothing is chosen, and it still is drawn."""
    arguments = ["--kb", str(kb_dir), "--question", "lantern", "--method", "full_reuse"]
    arguments += ["--k", "1", "--recompute-ratio", "0.5", "--out", str(tmp_path), "--json"]
    assert main([*arguments]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads((tmp_path / "explain.json").read_text(encoding="utf-8"))
    assert [it["tokens"] for it in result["selection"]["selectors"]] == [[]] * len(COMPARED)
    assert result["question"] == "lantern"


@pytest.mark.slow
def test_selectors_that_the_model_is_too_small_for_are_named(word_model_dir, tmp_path, capsys):
    with KnowledgeBase.open(tmp_path / "kb", model=load_model(word_model_dir)) as kb:
        kb.add([Document(str(i), f"the job of Kora Felell is {i} weaver .") for i in range(3)])
    arguments = ["--kb", str(tmp_path / "kb"), "--question", "What does Kora Felell work as ?"]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "note: kv_deviation was left out: kv_deviation: layer 1 is compared" in printed
    assert (tmp_path / "out" / "critical-tokens.png").is_file()


@pytest.mark.parametrize(
    ("method", "ratio", "message"),
    [
        ("full_attention", None, "reuses nothing that could be explained"),
        ("turborag_composite", None, "composite positions overlap; choose turborag"),
        ("fusionrag", 0.0, "expected a number between 0 and 1"),
        ("fusionrag", 1.0, "expected a number between 0 and 1"),
        ("fastrag", None, "'fastrag': expected one of full_attention"),
    ],
)
def test_methods_without_anything_to_explain_are_refused(method, ratio, message):
    with pytest.raises(RequestError, match=message):
        method_to_explain(method, ratio)


def test_the_ratio_is_the_methods_own_where_it_has_one():
    assert method_to_explain("turborag", None).recompute_ratio == 0.15
    assert method_to_explain("cacheblend", 0.4).recompute_ratio == 0.4
    method = method_to_explain("fusionrag", None)
    assert (method.encoder, method.first_encoder) == ("neighbours", "after_prefix")
    assert method.selector == RandomTokens()


def test_what_cannot_be_written_is_refused_before_the_work(tmp_path, capsys, monkeypatch):
    arguments = ["--kb", str(tmp_path / "none"), "--question", "q"]
    assert main([*arguments, "--out", str(tmp_path / "a" / "b")]) == 1
    assert "No such file or directory; name a folder" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*arguments, "--out", str(tmp_path)]) == 1
    assert "`pip install matplotlib` does it" in capsys.readouterr().err

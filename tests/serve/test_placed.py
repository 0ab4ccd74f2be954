"""Methods that free device memory: models are loaded for them, or the answer says what is not."""

import dataclasses
from pathlib import Path

import pytest

from jaxrag import generate
from jaxrag.base.config import ModelOptions
from jaxrag.base.errors import ConfigError, RequestError
from jaxrag.base.sharding import make_mesh
from jaxrag.cli.command import command, from_fields, parse
from jaxrag.cli.opening import load, method_of
from jaxrag.cli.options import GENERATION, model_options
from jaxrag.engine.engine import engine_of
from jaxrag.kv.placement import AWAY, ON_DEVICE, KVPlacement
from jaxrag.models.model import random_model
from jaxrag.reuse.decode import Retrieval, TopN
from jaxrag.reuse.methods import METHODS, method_named
from jaxrag.serve.compatibility import placed, unplaced

FUSIONRAG_KCACHE = Path(__file__).parents[2] / "configs" / "methods" / "fusionrag_kcache.toml"
TEXTS = ["Salt is carried to the village by mules every second week.", "Tea grows on the hills."]
QUESTION = "Who carries the salt to the village?"


@pytest.fixture
def loaded(model_dir):
    """``loaded(*options)``: the model as `jaxrag ask` loads it, and the method."""

    def make(*options):
        asking = command("ask", print, "ask", None, model_options(kv=True), GENERATION)
        pool = ["--model", str(model_dir), "--cache-tokens", "2048"]
        args = parse(asking, [*pool, *map(str, options)])
        method = method_of(args)
        return load(args.model, from_fields(ModelOptions, args), method), method

    return make


def test_where_methods_are_meant_to_have_keys_and_values():
    by_default = {"kcache": KVPlacement(value_layers=1), "retrieval_attention": AWAY}
    for name, method in METHODS.items():
        assert method.decode.placement == by_default.get(name, ON_DEVICE)
    assert method_named(str(FUSIONRAG_KCACHE)).decode.placement == by_default["kcache"]
    third = dataclasses.replace(METHODS["fusionrag"], decode=TopN(device_layers=3))
    assert third.decode.placement == KVPlacement(value_layers=3)


@pytest.mark.parametrize(
    ("options", "kv", "layers"),
    [
        (("--method", "kcache"), "device", 1),
        (("--method", FUSIONRAG_KCACHE), "device", 1),
        (("--decode", "topn:device_layers=0"), "device", 0),
        (("--method", "turborag"), "device", None),
        (("--method", "kcache", "--decode", "dense"), "device", None),
        (("--method", "kcache", "--kv", "device"), "device", None),
        (("--method", "cacheblend", "--decode", "topn"), "device", None),  # reads V on the device
        (("--method", "cacheblend", "--decode", "topn", "--recompute-ratio", "0"), "device", 1),
        (("--method", "kcache", "--mesh", "1,1,2"), "device", 1),
        (("--method", "retrieval_attention"), "host", None),
        (("--decode", "ivf"), "host", None),
        (("--decode", "flat"), "device", None),
        (("--method", "retrieval_attention", "--kv", "device"), "device", None),
        (("--method", "full_attention", "--kv", "host"), "host", None),
        (("--method", "fusionrag", "--decode", "retrieval"), "device", None),  # reads cached K
        (("--method", "retrieval_attention", "--mesh", "1,1,2"), "host", None),
    ],
    ids=str,
)
def test_a_model_is_loaded_for_the_method(loaded, options, kv, layers):
    model, method = loaded(*options)
    assert model.placement == KVPlacement(kv, layers)
    told = [note for note in unplaced(model, method) if "frees no device memory" in note]
    frees = not method.decode.placement.on_device
    assert bool(told) == (frees and model.placement.on_device)


def test_what_the_user_says_wins(loaded):
    model, method = loaded("--method", "kcache", "--value-layers", 0)
    assert model.placement == KVPlacement(value_layers=0)
    with pytest.raises(RequestError, match="device_layers=1, .* value_layers=0; make them equal"):
        generate(QUESTION, documents=TEXTS, model=model, method=method)


@pytest.mark.parametrize(
    "method", ["kcache", pytest.param(str(FUSIONRAG_KCACHE), marks=pytest.mark.slow)]
)
def test_the_answer_is_that_of_values_on_the_device_and_needs_less_there(loaded, method):
    options = {"documents": TEXTS, "neighbours": "prompt", "max_new_tokens": 8}
    far, resolved = loaded("--method", method)
    near, _ = loaded("--method", method, "--kv", "device")
    ours, expected = (generate(QUESTION, model=m, method=resolved, **options) for m in (far, near))
    assert ours.token_ids == expected.token_ids
    of_far, of_near = (engine_of(model).runner.cache.pool.v.nbytes for model in (far, near))
    assert of_far * near.config.num_layers == of_near
    assert not any("frees no device memory" in note for note in ours.notes)
    (note,) = (note for note in expected.notes if "frees no device memory" in note)
    assert note == (
        f"{resolved.name} frees no device memory, as the model was loaded with K and V on the "
        "device: load_model(..., value_layers=1) frees it"
    )


def refusal(model, method):
    """Of a model that cannot be placed for the method; the note says the same."""
    with pytest.raises((ConfigError, RequestError)) as caught:
        placed(model, method)
    assert unplaced(model, method) == (
        f"{method.name} frees no device memory, as {method.decode.placement} is refused: "
        f"{caught.value}",
    )
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_cannot_be_placed_is_told_with_the_reason(text_model, tiny_config):
    kcache = METHODS["kcache"]
    by_kernels = dataclasses.replace(text_model.config, kernels="pallas_interpret")
    model = dataclasses.replace(text_model, config=by_kernels)
    assert "kernels='pallas_interpret' read " in refusal(model, kcache)
    sharded = random_model(tiny_config(), mesh=make_mesh(1, 1, 4), cache_tokens=1024)
    assert "2 KV heads of the model do not divide" in refusal(sharded, kcache)
    blend = dataclasses.replace(METHODS["cacheblend"], decode=TopN())
    assert "selector 'kv_deviation' reads V" in refusal(text_model, blend)
    searched = dataclasses.replace(METHODS["fusionrag"], decode=Retrieval())
    assert "selector 'query_guided' reads cached KV" in refusal(text_model, searched)
    assert "do not divide over 4" in refusal(sharded, METHODS["retrieval_attention"])
    layers = text_model.config.num_layers
    every = dataclasses.replace(kcache, decode=TopN(device_layers=layers))
    assert f"the model has {layers} layers; choose fewer" in refusal(text_model, every)


def test_nothing_is_said_of_methods_that_free_nothing_by_design(text_model):
    for name in ("full_attention", "turborag", "fusionrag"):
        assert unplaced(text_model, METHODS[name]) == ()
        assert placed(text_model, METHODS[name]) is text_model
    away = dataclasses.replace(text_model, placement=AWAY)
    for name in ("kcache", "retrieval_attention"):
        assert placed(away, METHODS[name]) is away
    far = dataclasses.replace(text_model, placement=KVPlacement(value_layers=1))
    assert placed(far, METHODS["kcache"]) is far and unplaced(far, METHODS["kcache"]) == ()

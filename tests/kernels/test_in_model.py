"""The laws through the kernels: a whole model with interpreted bodies answers as the reference."""

import dataclasses

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.config import config_from_dict, config_to_dict
from jaxrag.base.errors import ConfigError
from jaxrag.base.sharding import make_mesh
from jaxrag.engine.engine import engine_of
from jaxrag.engine.prompt_inspection import inspect_prompts
from jaxrag.engine.request import Prompt, Request
from jaxrag.models.model import random_model
from jaxrag.models.segments import lay_out
from jaxrag.reuse.decode import TopN
from jaxrag.reuse.methods import METHODS
from jaxrag.serve.generate import generate


@pytest.fixture(scope="module")
def models(tiny_config):
    """The same weights with the reference bodies and with the interpreted kernels."""
    config = tiny_config(num_layers=2)
    return {
        kernels: random_model(dataclasses.replace(config, kernels=kernels), cache_tokens=1024)
        for kernels in ("xla", "pallas_interpret")
    }


def a_prompt(rng, *chunks):
    def ids(n):
        return rng.integers(3, 101, n).astype(np.int32)

    return Prompt(ids(5), tuple(map(ids, chunks)), ids(9))


def online(model, method, prompt):
    method = METHODS[method] if isinstance(method, str) else method
    request = Request(prompt, engine_of(model).memory, method, 1)
    [logits] = inspect_prompts(
        engine_of(model), [request], lambda *seen: np.asarray(seen[2].logits)[0]
    )
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("method", ["turborag", "turborag_composite", "epic", "ape"])
def test_prefill_equals_the_reference(rng, models, method):
    prompt = a_prompt(rng, 37, 20, 1)
    got, expected = (
        online(models[kernels], method, prompt) for kernels in ("pallas_interpret", "xla")
    )
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_law_2_cached_equals_packed(rng, models):
    model, prompt = models["pallas_interpret"], a_prompt(rng, 37, 20)
    whole = np.concatenate((prompt.prefix, *prompt.chunks, prompt.final))[None]
    layout = lay_out(5, [37, 20], 9, "reordered")
    packed = model.logits(whole, layout.positions[None], layout.segments[None])[0, -1]
    np.testing.assert_allclose(online(model, "turborag", prompt), packed, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_generated_tokens_are_the_same(rng, models):
    prompt = a_prompt(rng, 30, 20)
    answers = [
        generate(
            prompt.final, documents=list(prompt.chunks), model=model, max_new_tokens=6
        ).token_ids
        for model in models.values()
    ]
    assert answers[0] == answers[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        METHODS["cacheblend"],
        dataclasses.replace(METHODS["fusionrag"], encoder="isolated", first_encoder=None),
    ],
    ids=["kv_deviation", "query_guided"],
)
def test_recomputed_tokens_equal_the_reference(rng, models, method):
    """Laws 3 and 4: the selectors choose the same, and what is computed again is the same."""
    prompt = a_prompt(rng, 37, 20, 30)
    got, expected = (
        online(models[kernels], method, prompt) for kernels in ("pallas_interpret", "xla")
    )
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_kcache_decodes_the_same_tokens(rng, models):
    prompt = a_prompt(rng, 30, 20)
    rule = TopN(n=9, device_layers=1)
    answers = [
        generate(
            prompt.final,
            documents=list(prompt.chunks),
            model=model,
            method="full_reuse",
            decode=rule,
            max_new_tokens=6,
        ).token_ids
        for model in models.values()
    ]
    assert answers[0] == answers[1]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 1, 2), (1, 1, 4)])
def test_law_11_kernels_on_a_mesh_answer_as_on_one_device(rng, tiny_config, models, sizes):
    config = models["xla"].config
    many = random_model(
        dataclasses.replace(config, kernels="pallas_interpret"),
        mesh=make_mesh(*sizes),
        cache_tokens=1024,
    )
    assert many.config.kernel_mesh is many.mesh
    documents = [[int(t) for t in rng.integers(3, 101, n)] for n in (30, 17)]
    questions = [[int(t) for t in rng.integers(3, 101, n)] for n in (9, 4)]
    results = [
        generate(questions, documents=documents, model=m, method="turborag", max_new_tokens=4)
        for m in (models["xla"], many)
    ]
    assert [r.token_ids for r in results[0]] == [r.token_ids for r in results[1]]


@pytest.mark.slow
def test_layers_of_two_kinds_on_a_mesh_answer_as_on_one_device(rng, tiny_config):
    """With windows in one kind, and chunks at several places."""
    config = tiny_config("gemma3", num_layers=2)
    one = random_model(config, cache_tokens=1024)
    kernels = dataclasses.replace(config, kernels="pallas_interpret")
    many = random_model(kernels, mesh=make_mesh(1, 1, 2), cache_tokens=1024)
    documents = [[int(t) for t in rng.integers(3, 101, n)] for n in (30, 17)]
    question = [int(t) for t in rng.integers(3, 101, 9)]
    asked = {"documents": documents, "method": "full_reuse", "max_new_tokens": 4}
    answers = [generate(question, model=it, **asked).token_ids for it in (one, many)]
    assert answers[0] == answers[1]


def test_kernels_are_in_no_file_and_no_key(tiny_config):
    config = tiny_config()
    other = dataclasses.replace(config, kernels="pallas_interpret")
    assert config_to_dict(config) == config_to_dict(other)
    assert config_from_dict(config_to_dict(other)) == config
    for name in ("kernels", "kernel_mesh"):
        with refused(ConfigError, name):
            config_from_dict({**config_to_dict(config), name: "xla"})


def test_unknown_kernels_are_refused(tiny_config):
    with refused(ConfigError, "kernels='cuda'"):
        tiny_config(kernels="cuda")
    with refused(ConfigError):
        random_model(tiny_config(kernels="pallas_triton"), cache_tokens=1024)

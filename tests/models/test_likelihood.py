"""The log-likelihood of a text is that of the packed forward, whatever its length is rounded to."""

import dataclasses

import jax
import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import EngineError, RequestError
from jaxrag.models import likelihood
from jaxrag.models.likelihood import likelihoods
from jaxrag.models.model import random_model


@pytest.fixture(scope="module")
def models(tiny_config):
    return {
        name: random_model(tiny_config(name, **changes))
        for name, changes in (("llama", {}), ("mistral", {"sliding_window": 20}))
    }


@pytest.mark.parametrize(("family", "length"), [("llama", 1), ("llama", 70), ("mistral", 64)])
def test_it_is_that_of_the_packed_forward(models, rng, family, length):
    model = models[family]
    ids = rng.integers(3, 101, length)
    found = likelihoods(model, ids, 4)
    expected = np.asarray(jax.nn.log_softmax(model.logits(ids[None])[0]))
    assert found.chosen.dtype == np.float32 and found.chosen.shape == (length - 1,)
    follows = expected[np.arange(length - 1), ids[1:]]
    np.testing.assert_allclose(found.chosen, follows, atol=1e-4, rtol=0)
    best = np.argsort(-expected, axis=-1, kind="stable")[:, :4]
    np.testing.assert_array_equal(found.top_ids, best)
    ranked = np.take_along_axis(expected, best, axis=-1)
    np.testing.assert_allclose(found.top, ranked, atol=1e-4, rtol=0)


def test_long_texts_are_unembedded_in_pieces(models, rng, monkeypatch):
    ids = rng.integers(3, 101, 100)
    whole = likelihoods(models["llama"], ids)
    monkeypatch.setattr(likelihood, "_PIECE", 32)
    jax.clear_caches()
    pieces = likelihoods(models["llama"], ids)
    np.testing.assert_allclose(pieces.chosen, whole.chosen, atol=1e-5, rtol=0)
    np.testing.assert_array_equal(pieces.top_ids, whole.top_ids)


def test_texts_of_one_bucket_share_a_program(models, rng):
    likelihoods(models["llama"], rng.integers(3, 101, 90))
    before = likelihood._likelihoods._cache_size()
    for length in (65, 100, 128):
        likelihoods(models["llama"], rng.integers(3, 101, length))
    assert likelihood._likelihoods._cache_size() == before


def test_what_cannot_be_scored(models, rng):
    model = models["llama"]
    too_long = model.config.max_positions + 1
    with refused(RequestError, too_long):
        likelihoods(model, rng.integers(3, 101, too_long))
    with refused(RequestError):
        likelihoods(model, np.zeros(0, np.int32))
    broken = jax.tree.map(lambda x: x * np.nan, model.params)
    with refused(EngineError):
        likelihoods(dataclasses.replace(model, params=broken), rng.integers(3, 101, 9))

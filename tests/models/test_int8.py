"""Weights as int8 for decode steps: what is rounded, what is not, and who reads them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrag import METHODS, load_model
from jaxrag.base.errors import ConfigError, ModelError, RequestError
from jaxrag.base.sharding import make_mesh
from jaxrag.engine.engine import engine_of
from jaxrag.engine.request import Prompt, Request
from jaxrag.models import memory
from jaxrag.models.int8 import int8_product, quantised
from jaxrag.models.spec import num_params


def test_only_the_weights_are_rounded(rng):
    weight = rng.normal(size=(96, 2, 8)).astype(np.float32)
    weight[:, 1, 3] = 0
    held = quantised(weight, 1)
    assert held.values.dtype == jnp.int8 and held.outer == (2, 8)
    rounded = np.float64(held.values).T * np.float64(held.scale)
    assert np.abs(rounded - weight.reshape(96, -1)).max() <= np.abs(weight).max() / 127 / 2
    for rows in (1, 4):
        x = rng.normal(size=(rows, 96)) * np.logspace(-3, 3, rows)[:, None]
        x[0, 5] = 1000 * np.abs(x[0]).max()  # an outlier, beside which int8 alone leaves nothing
        right = x @ rounded
        out = jax.jit(int8_product)(jnp.array(x, jnp.float32), held)
        error = np.abs(out - right).max(1) / np.abs(x).max(1)
        assert error.max() < 96 * np.abs(rounded).max() / 254 / 254


def test_a_row_of_zeros_is_zero():
    held = quantised(np.ones((4, 3), np.float32), 1)
    np.testing.assert_array_equal(int8_product(jnp.zeros((1, 4)), held), np.zeros((1, 3)))


def test_a_row_that_holds_nan_gives_nan_and_the_others_do_not():
    held = quantised(np.ones((4, 3), np.float32), 1)
    out = int8_product(jnp.array([[1, np.nan, 1, 1], [1, 1, 1, 1.0]]), held)
    assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decode_reads_int8_and_prefill_does_not(model_dir, dtype):
    plain = load_model(model_dir, dtype=dtype, cache_tokens=1024)
    small = plain.decoding_with("int8")
    assert small.fingerprint == plain.fingerprint
    ids = np.arange(5, 30, dtype=np.int32)
    np.testing.assert_array_equal(plain.logits(ids[None]), small.logits(ids[None]))
    head = small.decoder(64, weights="decode").params.lm_head
    assert head.values.dtype == jnp.int8 and head.values.shape == (600, small.config.model_dim)
    logprobs = []
    for model in (plain, small):
        engine = engine_of(model)
        prompt = Prompt(np.zeros(0, np.int32), (), ids)
        request = Request(prompt, engine.memory, METHODS["full_attention"], 4)
        logprobs.append([it for one in engine.iterate([request]) for it in one.logprobs])
    assert logprobs[0][0] == logprobs[1][0]  # of prefill
    assert logprobs[0][1] != logprobs[1][1]
    np.testing.assert_allclose(*logprobs, atol=0.05)


def test_a_copy_without_room_is_refused(model_dir, monkeypatch):
    model = load_model(model_dir, cache_tokens=64)
    config = model.config
    room = 64 * config.kv_bytes_per_token + num_params(config)
    monkeypatch.setattr(memory, "available_bytes", lambda: room - 1)
    with pytest.raises(ModelError, match="decode_weights='int8' keeps .* lower cache_tokens"):
        model.decoding_with("int8")
    monkeypatch.setattr(memory, "available_bytes", lambda: room)
    assert model.decoding_with("int8").decode_weights == "int8"


def test_only_on_one_cpu(model_dir):
    with pytest.raises(ConfigError, match="decode_weights='int8': only for one CPU"):
        load_model(model_dir, mesh=make_mesh(1, 1, 1)).decoding_with("int8")
    with pytest.raises(RequestError, match="decode_weights='int4': expected"):
        load_model(model_dir).decoding_with("int4")

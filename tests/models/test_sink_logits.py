"""Sink logits: one a head in the softmax's denominator, once, wherever attention is finished."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrag.base.types import FINAL, Partial, Tokens
from jaxrag.kv.cache import PAGE, PagePool, PageTable
from jaxrag.models.attention import PackedAttend, merge, with_sink_logits
from jaxrag.models.decoder import forward
from jaxrag.models.model import random_model
from jaxrag.models.rope import place
from jaxrag.models.taps import ChunkMassAttend, Tap, attention_received
from jaxrag.train.step import decays

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def parts_of(scores, values, *cuts):
    """Attention of each run of the keys: scores [N, S], values [S, N, H]."""
    parts = []
    for some in np.split(np.arange(scores.shape[1]), cuts):
        lse = jax.nn.logsumexp(scores[:, some], -1)
        out = jnp.einsum("ns,snh->nh", jnp.exp(scores[:, some] - lse[:, None]), values[some])
        parts.append(Partial(out, lse))
    return parts


@pytest.mark.parametrize("cuts", [(), (5,), (1, 2, 11)])
def test_it_is_a_key_without_a_value_however_keys_are_split(rng, cuts):
    scores = jnp.asarray(rng.normal(size=(6, 13)), jnp.float32)
    values = jnp.asarray(rng.normal(size=(13, 6, 4)), jnp.float32)
    sink_logits = jnp.asarray(2 * rng.normal(size=6), jnp.float32)
    weights = jax.nn.softmax(jnp.concatenate((scores, sink_logits[:, None]), 1))[:, :-1]
    expected = jnp.einsum("ns,snh->nh", weights, values)
    found = with_sink_logits(merge(parts_of(scores, values, *cuts)), sink_logits)
    np.testing.assert_allclose(found, expected, **CLOSE)
    assert np.abs(expected - merge(parts_of(scores, values)).out).max() > 0.05


def test_without_sinks_nothing_is_touched_and_nothing_seen_stays_nothing():
    part = Partial(jnp.zeros((1, 1, 2, 3)), jnp.full((1, 1, 2), -jnp.inf))
    assert with_sink_logits(part, None) is part.out
    value, gradient = jax.value_and_grad(lambda s: with_sink_logits(part, s).sum())(jnp.zeros(2))
    assert value == 0
    np.testing.assert_array_equal(gradient, 0)


def test_their_gradient_is_that_of_the_definition(rng, tiny_config):
    config = tiny_config("llama", sink_logits=True, num_layers=1)
    model = random_model(config)
    ids = jnp.asarray(rng.integers(0, 101, (1, 9)), jnp.int32)
    at = jnp.arange(9, dtype=jnp.int32)[None]
    tokens = Tokens(ids, at, jnp.full_like(at, FINAL))
    packed = PackedAttend(config, model.rope(9), prefix_visible=False)

    def plain(*heads):
        return packed(*heads)

    def defined(layer, window, q, k, v, tokens, cache):
        """With them in the softmax itself, and an lse by which none takes anything behind."""
        q, k = (place(x, at, model.rope(9), config.rope) for x in (q, k))
        k, v = (jnp.repeat(x, config.group_size, 2) for x in (k, v))
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) * config.head_dim**-0.5
        scores = jnp.where(at[0] <= at[0][:, None], scores, -jnp.inf)
        own = jnp.broadcast_to(defined.sink_logits[:, None, None], (6, 9, 1))[None]
        weights = jax.nn.softmax(jnp.concatenate((scores, own), -1))[..., :-1]
        out = jnp.einsum("bnts,bsnh->btnh", weights, v)
        return Partial(out, jnp.full(out.shape[:-1], jnp.inf)), cache, None

    def loss(sink_logits, attend):
        defined.sink_logits = sink_logits[0]
        layers = model.params.layers.replace(sink_logits=sink_logits if attend is plain else None)
        params = model.params.replace(layers=layers)
        return (forward(params, config, tokens, None, attend)[0] ** 3).sum()

    sink_logits = model.params.layers.sink_logits
    assert sink_logits.shape == (1, 6)
    graded = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    found, expected = (graded(sink_logits, attend) for attend in (plain, defined))
    assert np.abs(expected[1]).min() > 1e-4
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)


def test_shares_of_attention_are_what_sinks_leave(rng, tiny_config):
    config = tiny_config("llama", sink_logits=True)
    model = random_model(config)
    rope = model.rope(12)
    ids = jnp.asarray(rng.integers(0, 101, (1, 12)), jnp.int32)
    at = jnp.arange(12, dtype=jnp.int32)[None]
    tokens = Tokens(ids, at, jnp.full_like(at, FINAL))
    columns = jnp.asarray([[0] * 5 + [1] * 4 + [-1] * 3])
    attend = ChunkMassAttend(config, rope, columns, model.params.layers.sink_logits)
    _, sums, _ = forward(model.params, config, tokens, jnp.zeros((1, 12, 2)), attend)

    def heads(q, k, v):
        return place(q, at, rope, config.rope)[0], place(k, at, rope, config.rope)[0]

    tap = Tap(PackedAttend(config, rope, True), heads)
    _, _, (q, k) = forward(model.params, config, tokens, None, tap)
    k = np.repeat(k, config.group_size, 2)
    scores = np.einsum("ltnh,lsnh->lnts", q, k) * config.head_dim**-0.5
    weights = np.exp(np.where(np.tri(12, dtype=bool), scores, -np.inf))
    own = np.exp(np.asarray(model.params.layers.sink_logits))[..., None, None]
    weights /= weights.sum(-1, keepdims=True) + own
    shares = weights.mean(1).sum(0)  # over heads, then layers
    np.testing.assert_allclose(sums[0, :, 0], shares[:, :5].sum(-1), **CLOSE)
    np.testing.assert_allclose(sums[0, :, 1], shares[:, 5:9].sum(-1), **CLOSE)


def test_attention_received_is_what_the_last_layers_sinks_leave(rng, tiny_config):
    """Of one query in one head over one page: all that is left of a weight of 1."""
    model = random_model(tiny_config("llama", sink_logits=True, num_heads=1, num_kv_heads=1))
    pool = PagePool(*(jnp.asarray(rng.normal(size=(3, PAGE, 1, 10)), jnp.float32),) * 2)
    table = PageTable(*(jnp.zeros((1, 1), jnp.int32),) * 2, jnp.arange(PAGE)[None])
    q, at = jnp.asarray(rng.normal(size=(1, 1, 1, 10)), jnp.float32), jnp.full((1, 1), PAGE)
    given = (pool, table, jnp.zeros((1, 1), jnp.int32), q, at)
    found = attention_received(model.decoder(64), *given, causal=True)
    turned = place(q, at, model.rope(64), model.config.rope)[0, 0, 0]
    keys = place(pool.k[2:], jnp.zeros((1, PAGE), jnp.int32), model.rope(64), model.config.rope)
    lse = jax.nn.logsumexp(keys[0, :, 0] @ turned * 10**-0.5)
    kept = jax.nn.sigmoid(lse - model.params.layers.sink_logits[2, 0])
    assert 0.01 < kept < 0.99
    np.testing.assert_allclose(found.sum(), kept, **CLOSE)


def test_they_do_not_decay(tiny_config):
    mask = decays(random_model(tiny_config("gpt_oss")).params)
    assert not (mask.layers.sink_logits or mask.layers.router_bias or mask.layers.up_bias)
    assert mask.layers.router
    assert mask.layers.up

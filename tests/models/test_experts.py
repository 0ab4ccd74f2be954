"""Models with experts: who goes where, the products, their gradients, and what is counted."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusal import refused

from jaxrag.base.config import ExpertsConfig, config_from_dict, config_to_dict
from jaxrag.base.errors import ConfigError
from jaxrag.base.sharding import make_mesh
from jaxrag.models import FAMILIES, experts
from jaxrag.models.experts import by_ragged_dot, by_tiles, experts_mlp, routed
from jaxrag.models.flops import block_attention_flops, forward_flops
from jaxrag.models.model import Model, random_model
from jaxrag.models.spec import LayerParams, num_active_params, num_params
from jaxrag.train.config import LoraPart
from jaxrag.train.lora import adapter_specs

DIM, WIDTH = 11, 7
CLAMP = (1.3, 0.9)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
# tokens, experts, experts of a token: fewer pairs than experts, a tile of one row and of several
SIZES = [(1, 9, 2), (3, 4, 4), (37, 3, 2), (300, 6, 1)]


def weights_of(rng, count, biases):
    shapes = {"gate": (DIM, WIDTH), "up": (DIM, WIDTH), "down": (WIDTH, DIM)}
    if biases:
        shapes |= {"gate_bias": (WIDTH,), "up_bias": (WIDTH,), "down_bias": (DIM,)}
    return {
        name: jnp.asarray(rng.normal(size=(count, *shape)), jnp.float32)
        for name, shape in shapes.items()
    }


def choice(rng, tokens, count, active):
    chosen = np.array([rng.permutation(count)[:active] for _ in range(tokens)], np.int32)
    return rng.uniform(0.1, 1, (tokens, active)).astype(np.float32), chosen


def one_by_one(x, share, chosen, weights, form):
    """Every token through each of its experts, in float64."""
    w = {name: np.asarray(it, np.float64) for name, it in weights.items()}
    out = np.zeros(x.shape)
    for token, numbers in enumerate(chosen):
        for part, e in zip(share[token], numbers, strict=True):
            if not 0 <= e < len(w["gate"]):
                continue
            gate, up = (
                x[token] @ w[name][e] + w.get(f"{name}_bias", np.zeros(e + 1))[e]
                for name in ("gate", "up")
            )
            if form == "silu":
                hidden = gate / (1 + np.exp(-gate)) * up
            elif form == "gelu_tanh":
                cubed = (2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)
                hidden = gate / 2 * (1 + np.tanh(cubed)) * up
            else:
                alpha, limit = form
                gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
                hidden = gate / (1 + np.exp(-alpha * gate)) * (up + 1)
            out[token] += part * (hidden @ w["down"][e] + w.get("down_bias", np.zeros(e + 1))[e])
    return out


@pytest.mark.parametrize("form", ["silu", "gelu_tanh", CLAMP])
@pytest.mark.parametrize(("tokens", "count", "active"), SIZES)
@pytest.mark.parametrize("mix", [by_tiles, by_ragged_dot])
def test_every_form_is_one_token_at_a_time(rng, mix, tokens, count, active, form):
    weights = weights_of(rng, count, form == CLAMP)
    x = rng.normal(size=(tokens, DIM)).astype(np.float32)
    share, chosen = choice(rng, tokens, count, active)
    out = mix(jnp.asarray(x), jnp.asarray(share), jnp.asarray(chosen), weights, form)
    np.testing.assert_allclose(out, one_by_one(x, share, chosen, weights, form), **CLOSE)


@pytest.mark.parametrize("mix", [by_tiles, by_ragged_dot])
def test_experts_that_are_elsewhere_add_nothing(rng, mix):
    weights = weights_of(rng, 3, True)
    x = rng.normal(size=(40, DIM)).astype(np.float32)
    share, chosen = choice(rng, 40, 8, 3)
    out = mix(jnp.asarray(x), jnp.asarray(share), jnp.asarray(chosen - 2), weights, CLAMP)
    np.testing.assert_allclose(out, one_by_one(x, share, chosen - 2, weights, CLAMP), **CLOSE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_meets_its_experts_in_blocks(rng, monkeypatch, dtype):
    shapes = {"gate": (16, 12), "up": (16, 12), "down": (12, 16), "up_bias": (12,)}
    weights = {
        name: jnp.asarray(rng.normal(size=(7, *shape)), dtype) for name, shape in shapes.items()
    }
    share, chosen = map(jnp.asarray, choice(rng, 3, 7, 2))
    x = jnp.asarray(rng.normal(size=(3, 16)), dtype)
    given = (x, share, chosen, weights, "silu")
    whole, plain = by_tiles(*given), by_ragged_dot(*given)
    monkeypatch.setattr(experts, "_BLOCK", 100)
    program = str(jax.make_jaxpr(lambda *it: by_tiles(*it, "silu"))(*given[:4]))
    parts = {"float32": 8, "bfloat16": 4}[dtype]  # of 768 bytes and of 384
    assert f"[{7 * parts},{16 // parts},12]" in program
    close = CLOSE if dtype == "float32" else {"rtol": 0.03, "atol": 0.06}
    for expected in (whole, plain):
        np.testing.assert_allclose(by_tiles(*given), expected, **close)


def test_gradients_of_tiles(rng):
    tokens, count, active = 37, 5, 2
    weights = weights_of(rng, count, True)
    x = jnp.asarray(rng.normal(size=(tokens, DIM)), jnp.float32)
    share, chosen = map(jnp.asarray, choice(rng, tokens, count, active))
    towards = jnp.asarray(rng.normal(size=x.shape), jnp.float32)

    def gradients(mix):
        def loss(x, share, weights):
            return (mix(x, share, chosen, weights, CLAMP) * towards).sum()

        return jax.grad(loss, (0, 1, 2))(x, share, weights)

    for ours, plain in zip(
        jax.tree.leaves(gradients(by_tiles)), jax.tree.leaves(gradients(by_ragged_dot)), strict=True
    ):
        assert np.abs(plain).max() > 0.01
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-4)


def test_a_token_goes_to_its_most_likely_experts(rng):
    router = {"weight": jnp.asarray(rng.normal(size=(DIM, 6)), jnp.float32)}
    router["bias"] = jnp.asarray(rng.normal(size=6), jnp.float32)
    x = jnp.asarray(rng.normal(size=(9, DIM)), jnp.float32)
    share, chosen = routed(x, router, ExpertsConfig(6, 2, normalise=False, router_bias=True))
    chances = jax.nn.softmax(x @ router["weight"] + router["bias"])
    np.testing.assert_array_equal(chosen, np.argsort(-chances, axis=1)[:, :2])
    np.testing.assert_allclose(share, np.take_along_axis(np.asarray(chances), chosen, 1), **CLOSE)
    whole, _ = routed(x, router, ExpertsConfig(6, 2, normalise=True, router_bias=True))
    np.testing.assert_allclose(whole, share / share.sum(1, keepdims=True), **CLOSE)
    np.testing.assert_allclose(whole.sum(1), 1, **CLOSE)


def test_routing_is_in_float32_whatever_the_weights_are(rng):
    experts = ExpertsConfig(6, 2, normalise=True)
    x = jnp.asarray(rng.normal(size=(64, DIM)), jnp.bfloat16)
    router = {"weight": jnp.asarray(rng.normal(size=(DIM, 6)), jnp.bfloat16)}
    wide = {"weight": router["weight"].astype(jnp.float32)}
    for got, expected in zip(
        routed(x, router, experts), routed(x.astype(jnp.float32), wide, experts), strict=True
    ):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("family", "sizes", "count"),
    [("gpt_oss", (2, 1, 3), 6), ("qwen3_moe", (1, 1, 2), 6), ("qwen3_moe", (1, 2, 2), 5)],
)
def test_spread_over_a_mesh_it_is_the_same(rng, tiny_config, family, sizes, count):
    config = tiny_config(family, num_kv_heads=6)
    experts = dataclasses.replace(config.experts, count=count, active=3)
    config = dataclasses.replace(config, experts=experts)
    alone = random_model(config)
    spread = random_model(config, mesh=make_mesh(*sizes))
    assert spread.config.kernel_mesh is spread.mesh
    held = spread.params.layers.gate.addressable_shards[0].data.shape
    divided = count % sizes[2] == 0
    assert held[1] == (count // sizes[2] if divided else count)
    ids = rng.integers(0, config.vocab_size, (2, 19), dtype=np.int32)
    np.testing.assert_allclose(spread.logits(ids), alone.logits(ids), rtol=1e-4, atol=2e-5)


def test_gradients_over_a_mesh_are_the_same(rng, tiny_config):
    config = tiny_config("mixtral", experts=ExpertsConfig(6, 2, normalise=True))
    p = random_model(config).params.layers
    p = jax.tree.map(lambda leaf: leaf[0], p)
    x = jnp.asarray(rng.normal(size=(4, 5, config.model_dim)), jnp.float32)
    towards = jnp.asarray(rng.normal(size=x.shape), jnp.float32)

    def gradients(config):
        def loss(x, p):
            return (experts_mlp(x, p, config) * towards).sum()

        return jax.jit(jax.grad(loss, (0, 1)))(x, p)

    spread = gradients(dataclasses.replace(config, kernel_mesh=make_mesh(2, 1, 3)))
    d_x, d_p = gradients(config)
    assert isinstance(d_p, LayerParams)
    for name in ("router", "gate", "up", "down"):
        assert np.abs(getattr(d_p, name)).max() > 1e-3
    for got, expected in zip(jax.tree.leaves(spread), jax.tree.leaves((d_x, d_p)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_what_is_counted(tiny_config):
    config = tiny_config("qwen3_moe")
    plain = dataclasses.replace(config, experts=None)
    experts, dim, width, layers = config.experts, config.model_dim, config.mlp_dim, 3
    one, router = 3 * dim * width, dim * experts.count
    rest = num_params(plain) - layers * one
    assert num_params(config) == rest + layers * (experts.count * one + router)
    assert num_active_params(config) == rest + layers * (experts.active * one + router)
    assert num_active_params(plain) == num_params(plain)
    more = 2 * layers * ((experts.active - 1) * one + router)
    for count in (block_attention_flops, lambda c, n: forward_flops(c, [(n, 5)], 1)):
        assert count(config, 7) - count(plain, 7) == 7 * more


def test_a_config_without_experts_says_nothing_of_them(tiny_config):
    assert "experts" not in config_to_dict(tiny_config())
    for family in ("mixtral", "qwen3_moe"):
        config = tiny_config(family)
        values = config_to_dict(config)
        assert values["experts"]["count"] == config.experts.count
        assert config_from_dict(values) == config
        # Stored KV is found by these: a field that came later is not among them.
        assert [*values["experts"]] == ["count", "active", "normalise", "router_bias", "clamp"]


@pytest.mark.parametrize(
    ("family", "keys", "words"),
    [
        ("qwen3_moe", {"mlp_only_layers": [3]}, "mlp_only_layers=[3]"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ("qwen3_moe", {"num_experts": 0}, "experts=0"),
        ("qwen3_moe", {"num_experts": 1 << 20}, "experts=1048576"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob=1"),
        ("mixtral", {"num_experts_per_tok": 9}, "active experts=9"),
        ("mixtral", {"layer_types": ["sliding_attention"]}, "sliding_attention"),
    ],
)
def test_refusals(family, keys, words):
    with refused(ConfigError) as caught:
        FAMILIES[family].read_config(keys)
    assert words in str(caught.value)


def test_what_experts_do_not_go_with(tiny_config):
    model = random_model(tiny_config("mixtral"))
    with refused(ConfigError, "decode_weights='int8': not for a model with experts"):
        model.decoding_with("int8")
    assert isinstance(model, Model)
    with refused(ConfigError, "experts take no adapters"):
        adapter_specs(model.config, LoraPart(rank=2, alpha=2.0, targets=("q", "up")))
    assert set(adapter_specs(model.config, LoraPart(2, 2.0, ("q", "o")))) == {"q", "o"}

"""What config.json means: the families' defaults, RoPE in both spellings, and what is refused."""

import dataclasses
import math

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.config import LinearScaling, Llama3Scaling, NoRotation, YarnScaling
from jaxrag.base.errors import ConfigError
from jaxrag.models import FAMILIES
from jaxrag.models.family import TensorRule
from jaxrag.models.spec import param_specs


def read(family, **keys):
    return FAMILIES[family].read_config(keys)


@pytest.mark.parametrize("family", [it for it in FAMILIES if it != "gemma4"])
def test_config_round_trips_through_config_json(family, tiny_config):
    config = tiny_config(family, eos_ids=(2, 5), bos_id=None, dtype="bfloat16")
    assert FAMILIES[family].read_config(FAMILIES[family].write_config(config)) == config


@pytest.mark.parametrize(
    "scaling",
    [
        LinearScaling(2.5),
        Llama3Scaling(8.0, 1.0, 4.0, 8192),
        YarnScaling(4.0, 32768, 31.0, 1.5, 1.1386, False),
    ],
)
def test_rope_scaling_round_trips(scaling, tiny_config):
    config = tiny_config("qwen3")
    config = dataclasses.replace(config, rope=dataclasses.replace(config.rope, scaling=scaling))
    assert FAMILIES["qwen3"].read_config(FAMILIES["qwen3"].write_config(config)) == config


def test_every_partial_rotary_dim_survives_the_round_trip(tiny_config):
    config = tiny_config("glm")
    for head_dim in range(2, 260):
        for rotary_dim in range(2, head_dim + 1, 2):
            rope = dataclasses.replace(config.rope, rotary_dim=rotary_dim)
            wanted = dataclasses.replace(config, head_dim=head_dim, rope=rope)
            hf = FAMILIES["glm"].write_config(wanted)
            factor = hf["rope_parameters"]["partial_rotary_factor"]
            assert int(head_dim * factor) == rotary_dim


def test_families_differ_in_what_a_missing_key_means():
    assert read("mistral").sliding_window == 4096
    assert read("mistral", sliding_window=None).sliding_window is None
    assert read("llama", hidden_size=96, num_attention_heads=4).head_dim == 24
    assert read("qwen3", hidden_size=96).head_dim == 128
    assert read("llama").num_kv_heads == 32
    assert read("mistral").num_kv_heads == 8
    assert read("mistral", num_key_value_heads=None).num_kv_heads == 32
    assert read("glm").rope.rotary_dim == 64
    assert read("glm", partial_rotary_factor=0.25).rope.rotary_dim == 32
    assert read("glm", eos_token_id=None).eos_ids == (151329, 151336, 151338)
    assert read("llama", eos_token_id=None).eos_ids == ()
    assert read("glm4").norm_eps == 1.5625e-7


@pytest.mark.parametrize("divisor", [1.0, 3.0, 8.0, 0.7, 13.3, 49.0])
def test_the_divisor_of_logits_survives_the_round_trip(divisor):
    config = read("granite", logits_scaling=divisor, attention_multiplier=0.0078125)
    assert (config.logit_scale, config.score_scale) == (1 / divisor, 0.0078125)
    assert FAMILIES["granite"].read_config(FAMILIES["granite"].write_config(config)) == config


def test_olmo_3_scales_the_rotation_of_its_global_layers():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = read("olmo3", num_hidden_layers=5, rope_scaling=scaling)
    assert config.rope_layers == (1, 1, 1, 0, 1)
    assert (config.sliding_window, config.window_layers) == (4096, (True, True, True, False, True))
    assert [rope.theta for rope in config.ropes] == [500_000.0] * 2
    assert isinstance(config.rope.scaling, YarnScaling) and config.rope_of(0).scaling is None
    assert read("olmo3").rope_layers is None  # all rotate alike


@pytest.mark.parametrize(
    ("keys", "kinds", "windows"),
    [
        ({}, (0, 0, 0, 1, 0), None),
        ({"no_rope_layer_interval": 2}, (0, 1, 0, 1, 0), None),
        ({"no_rope_layers": [1] * 7}, None, None),
        ({"no_rope_layers": [0] * 5}, None, None),
        ({"sliding_window": 9}, (0, 0, 0, 1, 0), None),
        (
            {"sliding_window": 9, "use_sliding_window": True},
            (0, 0, 0, 1, 0),
            (False, False, False, True, False),
        ),
    ],
)
def test_layers_of_smollm3_without_rotation(keys, kinds, windows):
    config = read("smollm3", num_hidden_layers=5, **keys)
    assert (config.rope_layers, config.window_layers) == (kinds, windows)
    assert config.rope.theta == 2_000_000.0 and config.tie_embeddings
    none = [isinstance(config.rope_of(layer).scaling, NoRotation) for layer in range(5)]
    assert none == ([bool(it) for it in kinds] if kinds else [keys["no_rope_layers"][0] == 0] * 5)
    assert FAMILIES["smollm3"].read_config(FAMILIES["smollm3"].write_config(config)) == config


def test_a_granite_4_may_be_without_positions():
    keys = {"layer_types": ["attention"] * 32, "num_local_experts": 0}
    bare, rotary = (
        read("granite4", **keys, position_embedding_type=kind) for kind in ("nope", "rope")
    )
    assert bare.rope.scaling == NoRotation() and rotary.rope.scaling is None
    assert bare.mlp_dim == 1024
    assert read("granite4", **FAMILIES["granite4"].write_config(bare)) == bare


def test_biases_and_norms_per_family():
    llama = read("llama", attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)
    assert (read("qwen2").qkv_bias, read("qwen2").o_bias) == (True, False)
    assert read("qwen3", attention_bias=True).o_bias
    assert (read("glm").qkv_bias, read("glm").o_bias, read("glm").post_norms) == (
        True,
        False,
        False,
    )
    assert not read("glm4", attention_bias=False).qkv_bias
    assert read("glm4").post_norms
    assert read("qwen3").qk_norm


@pytest.mark.parametrize(
    ("keys", "window", "layers"),
    [
        ({}, None, None),
        ({"sliding_window": 64}, None, None),
        ({"use_sliding_window": True, "max_window_layers": 4}, None, None),
        ({"use_sliding_window": True, "max_window_layers": 0}, 4096, None),
        (
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3},
            64,
            (False, False, False, True),
        ),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 64,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            64,
            (True, False, True, False),
        ),
    ],
)
def test_qwen_windows(keys, window, layers):
    config = read("qwen2", num_hidden_layers=4, **keys)
    assert (config.sliding_window, config.window_layers) == (window, layers)


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 7.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 7.0, "factor": 2.0}},
        {"rope_theta": 9, "rope_parameters": {"type": "linear", "rope_theta": 7, "factor": 2}},
    ],
)
def test_rope_spellings(keys):
    rope = read("llama", **keys).rope
    assert (rope.theta, rope.scaling) == (7.0, LinearScaling(2.0))


@pytest.mark.parametrize(
    ("keys", "factor", "attention_factor"),
    [
        ({"factor": 4.0}, 4.0, 0.1 * math.log(4) + 1),
        ({"factor": None}, 8.0, 0.1 * math.log(8) + 1),  # max positions / original
        ({"factor": 0.5}, 0.5, 1.0),
        ({"factor": 4.0, "attention_factor": 1.7}, 4.0, 1.7),
        (
            {"factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.4},
            4.0,
            (0.07 * math.log(4) + 1) / (0.04 * math.log(4) + 1),
        ),
        ({"factor": 4.0, "mscale": 0.7}, 4.0, 0.1 * math.log(4) + 1),
    ],
)
def test_yarn_factors(keys, factor, attention_factor):
    scaling = {"type": "yarn", "original_max_position_embeddings": 256, **keys}
    got = read("llama", max_position_embeddings=2048, rope_scaling=scaling).rope.scaling
    assert isinstance(got, YarnScaling)
    assert (got.factor, got.beta_fast, got.beta_slow, got.truncate) == (factor, 32, 1, True)
    assert got.attention_factor == pytest.approx(attention_factor, rel=1e-12)


def test_original_length_beside_the_rope_settings_wins():
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    rope = read("llama", rope_scaling=scaling, original_max_position_embeddings=128).rope
    assert rope.scaling.original_max_positions == 128


@pytest.mark.parametrize(
    ("family", "keys", "words"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ("llama", {"rope_scaling": {"rope_type": "longrope"}}, "'longrope'"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "'factor'"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": -1}}, "factor=-1"),
        ("llama", {"rope_scaling": {"type": "default", "mrope_section": [1]}}, "mrope_section"),
        (
            "llama",
            {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 5e-324}},
            "original_max_position_embeddings=5e-324",
        ),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama", {"sliding_window": 64}, "sliding_window=64"),
        ("llama", {"hidden_size": "64"}, "hidden_size='64'"),
        ("llama", {"hidden_size": 100}, "hidden_size=100"),
        ("llama", {"attention_bias": "no"}, "attention_bias='no'"),
        ("llama", {"dtype": "float64"}, "dtype='float64'"),
        ("llama", {"num_hidden_layers": 0}, "num_layers=0"),
        ("llama", {"num_key_value_heads": 5}, "num_kv_heads=5"),
        ("llama", {"attention_multiplier": 0.5}, "attention_multiplier=0.5"),
        ("granite", {"attention_multiplier": 0}, "attention_multiplier=0"),
        ("granite", {"residual_multiplier": 1e30}, "residual_scale=1e+30"),
        ("granite", {"logits_scaling": 2.0**-40}, "logit_scale=1099511627776.0"),
        ("granite", {"embedding_multiplier": None}, "embedding_multiplier=None"),
        ("granite", {"sliding_window": 64}, "sliding_window=64"),
        ("granite4", {}, "layer_types contains 'mamba'"),
        ("granite4", {"layer_types": ["attention"]}, "num_local_experts=8"),
        ("olmo2", {"sliding_window": 64}, "sliding_window=64"),
        ("olmo3", {"layer_types": ["full_attention"]}, "1 entries for 32 layers"),
        ("olmo3", {"layer_types": ["chunked_attention"] * 32}, "chunked_attention"),
        ("olmo3", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters={'rope_type'"),
        ("olmo3", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers=[1, 0]"),
        ("smollm3", {"no_rope_layers": [2] * 36}, "no_rope_layers=[2, 2"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval=0"),
        ("mistral", {"layer_types": ["full_attention"]}, "full_attention"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 32}, "chunked_attention"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 32}, "use_sliding_window=False"),
        ("qwen2", {"layer_types": ["full_attention"]}, "1 entries for 32 layers"),
        ("glm", {"sliding_window": 64}, "sliding_window=64"),
        ("glm", {"eos_token_id": [1, "x"]}, "eos_token_id"),
    ],
)
def test_refusals_name_the_key_and_its_value(family, keys, words):
    with refused(ConfigError) as caught:
        read(family, **keys)
    assert words in str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_of_a_family_has_one_tensor_rule(family, tiny_config):
    paths = [path for rule in FAMILIES[family].tensors for path in rule.paths]
    assert len(paths) == len(set(paths))
    specs = param_specs(tiny_config(family))
    layers = {f"layers.{name}" for name, spec in vars(specs.layers).items() if spec is not None}
    assert layers <= set(paths)


def test_tensor_rule_shapes():
    rule = TensorRule("x.{layer}", ("layers.o",), "d (n h) -> n h d")
    assert rule.file_shape((6, 10, 24)) == (24, 60)
    assert (rule.repeats, rule.name((3,))) == (1, "x.3")
    fused = TensorRule("x.{layer}.{expert}", ("layers.gate", "layers.up"), "(p f) d -> d f")
    assert fused.file_shape((24, 37)) == (74, 24)
    assert (fused.repeats, fused.name((3, 5))) == (2, "x.3.5")


@pytest.mark.parametrize("pattern", ["(p f) d -> d f", "d (f p) -> d f", "d f p -> d f"])
def test_what_lies_fused_comes_apart_and_together(rng, pattern):
    rule = TensorRule("x", ("layers.gate", "layers.up"), pattern)
    parts = [rng.normal(size=(3, 4)) for _ in "ab"]
    stored = rule.joined(parts)
    assert stored.shape == rule.file_shape((3, 4))
    for number, part in enumerate(parts):
        np.testing.assert_array_equal(rule.taken(stored, number, (3, 4)), part)
    first = {"(p f) d -> d f": parts[0].T, "d (f p) -> d f": parts[0][:, :1]}.get(pattern)
    if first is not None:
        np.testing.assert_array_equal(stored[: len(first), : first.shape[1]], first)

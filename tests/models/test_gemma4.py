"""Gemma 4: what its config.json says, how its heads are arranged, and what is refused."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from refusal import refused
from safetensors.numpy import load_file, save_file

from jaxrag.base.config import ExpertsConfig, InParts, config_from_dict, config_to_dict
from jaxrag.base.errors import ConfigError, ModelError
from jaxrag.base.rotary import frequencies
from jaxrag.models import FAMILIES
from jaxrag.models.arranged import _places
from jaxrag.models.checkpoint import load_checkpoint
from jaxrag.models.decoder import heads_of, layer_of, rms_norm
from jaxrag.models.digest import params_digest
from jaxrag.models.export import convert, export_hf
from jaxrag.models.flops import forward_flops
from jaxrag.models.hf import load_hf
from jaxrag.models.hf_config import text_part
from jaxrag.models.spec import num_active_params, num_params

GOLDEN = Path(__file__).parents[1] / "goldens" / "gemma4"
LARGE = {  # as the 31B is published, of what is read
    "attention_bias": False, "attention_k_eq_v": True, "enable_moe_block": False,
    "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256, "hidden_size": 5376,
    "hidden_size_per_layer_input": 0, "intermediate_size": 21504, "num_attention_heads": 32,
    "num_global_key_value_heads": 4, "num_hidden_layers": 60, "num_key_value_heads": 16,
    "num_kv_shared_layers": 0, "sliding_window": 1024, "use_bidirectional_attention": "vision",
    "use_double_wide_mlp": False,
}  # fmt: skip


def read(**keys):
    return FAMILIES["gemma4"].read_config({**LARGE, **keys})


def test_the_config_of_the_31b():
    outer = {"text_config": LARGE, "dtype": "bfloat16", "eos_token_id": [1, 106]}
    config = FAMILIES["gemma4"].read_config(text_part(outer))
    local = tuple((i + 1) % 6 > 0 for i in range(60))
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 8, 512)
    assert config.window_layers == local
    assert config.own_kv_heads == tuple(16 if it else 4 for it in local)
    assert config.head_parts == tuple(2 if it else 1 for it in local)
    assert config.rope_of(0).scaling == InParts(2, 128)
    assert config.rope_of(5).scaling == InParts(1, 64)
    assert (config.rope_of(0).theta, config.rope_of(5).theta) == (1e4, 1e6)
    assert (config.score_scale, config.score_cap, config.logit_cap) == (1.0, None, 30.0)
    assert config.own_kv_share == pytest.approx(11 / 12)  # of 10 in 60 layers half are copies
    assert config.eos_ids == (1, 106)
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config


def test_the_config_of_the_26b():
    experts = {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
    config = read(
        enable_moe_block=True, num_attention_heads=16, num_key_value_heads=8, hidden_size=2816,
        num_global_key_value_heads=2, num_hidden_layers=30, intermediate_size=2112, **experts,
    )  # fmt: skip
    assert config.experts == ExpertsConfig(128, 8, normalise=True, beside=704)
    assert (config.num_kv_heads, config.head_dim, config.mlp_dim) == (4, 512, 2112)
    beside = num_params(config) - num_params(dataclasses.replace(config, experts=None))
    met = num_params(config) - num_active_params(config)
    assert beside == 30 * (128 * 3 * 2816 * 704 + 2816 * 128 + 2 * 2816)
    assert met == 30 * 120 * 3 * 2816 * 704
    mlp = (8 * 704 + 2112) * 3 * 2816 + 2816 * 128
    qkvo = 2816 * 512 * (2 * 16 + 2 * 4)
    assert forward_flops(config, [(1, 0)], 0) == 30 * 2 * (mlp + qkvo + 2 * 16 * 512)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input=256"),  # E2B, E4B
        ({"hidden_size_per_layer_input": None, "num_kv_shared_layers": 20}, "num_kv_shared_layers"),
        ({"enable_moe_block": True, "num_experts": 128}, "moe_intermediate_size"),
        ({"use_bidirectional_attention": "all"}, "'all'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"layer_types": ["sliding_attention"] * 60}, "the last has to be full_attention"),
        ({"global_head_dim": 384}, "global_head_dim=384"),
        ({"num_global_key_value_heads": 5}, "num_global_key_value_heads=5"),
        ({"num_attention_heads": 48, "num_global_key_value_heads": 3}, "3 KV heads of 512"),
        ({"per_layer_config": {"3": {"head_dim": 512}}}, "per_layer_config"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "'yarn'"),
    ],
    ids=lambda it: "" if isinstance(it, dict) else it,
)
def test_what_is_not_computed_is_refused(keys, named):
    with refused(ConfigError, named):
        read(**keys)


def test_a_head_of_parts_has_the_angles_of_each():
    local, whole = (read().rope_of(layer) for layer in (0, 5))
    each = 1e4 ** -(np.arange(0, 256, 2) / 256)
    np.testing.assert_allclose(frequencies(local), np.tile(each, 2), rtol=1e-12)
    first = 1e6 ** -(np.arange(0, 128, 2) / 512)
    np.testing.assert_allclose(frequencies(whole)[:64], first, rtol=1e-12)
    assert not frequencies(whole)[64:].any()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "own", "parts"),
    [(8, 2, 4, 2), (8, 2, 1, 1), (8, 1, 1, 2), (32, 8, 16, 2), (12, 3, 12, 4), (8, 2, 2, 2)],
)  # fmt: skip
def test_every_query_is_where_its_key_is(tiny_config, heads, kv_heads, own, parts):
    config = tiny_config("llama", num_heads=heads, num_kv_heads=kv_heads)
    queries, keys = _places(config, own, parts)
    assert sorted(queries[queries >= 0]) == list(range(heads))
    for head, place in enumerate(queries):
        [part] = np.flatnonzero(place >= 0)
        assert place[part] == head
        assert keys[head * kv_heads // heads, part] == head * own // heads
    assert (np.bincount(keys.ravel()) == kv_heads * parts // own).all()


def test_heads_are_normed_by_themselves(tiny_config, random_params, rng):
    config = tiny_config("gemma4")
    params = random_params(config)
    x = jnp.asarray(rng.normal(size=(1, 3, 24)), jnp.float32)
    for layer, parts in enumerate(config.head_parts):
        p = layer_of(params, layer)
        v = jnp.einsum("btd,dkh->btkh", rms_norm(x, p.attn_norm, config), p.v)
        each = np.asarray(v).reshape(1, 3, 2, 2, parts, -1)  # halves of each part
        each = each / np.sqrt((each**2).mean((-3, -1), keepdims=True) + config.norm_eps)
        found = heads_of(x, p, config, layer)[2]
        np.testing.assert_allclose(found, each.reshape(v.shape), rtol=1e-4, atol=1e-5)
    assert config.head_parts == (2, 1, 2)


def test_norms_multiply_in_float32(tiny_config, rng):
    config = tiny_config("gemma4", dtype="bfloat16")
    x, weight = (rng.normal(size=shape).astype(jnp.bfloat16) for shape in ((5, 24), (24,)))
    wide = x.astype(np.float32)
    wide /= np.sqrt((wide**2).mean(-1, keepdims=True) + np.float32(config.norm_eps))
    wanted = (wide * weight.astype(np.float32)).astype(jnp.bfloat16)
    assert (np.asarray(rms_norm(x, weight, config)) != wanted).mean() < 0.05
    plain = dataclasses.replace(config, wide_norms=False)
    assert (np.asarray(rms_norm(x, weight, plain)) != wanted).mean() > 0.15


@pytest.mark.parametrize("kind", ["text", "images"])
def test_tensors_in_other_shapes_and_left_over_are_refused(kind, tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    tensors, at = load_file(path), "model.layers."
    if kind == "images":
        text = json.loads((GOLDEN / "config.json").read_text())
        outer = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4",
                 "dtype": text.pop("dtype"), "text_config": text}  # fmt: skip
        (tmp_path / "m" / "config.json").write_text(json.dumps(outer))
        at = "model.language_model.layers."
        tensors = {
            key.replace("model.", "model.language_model.", 1): it for key, it in tensors.items()
        }
        tensors["model.vision_tower.a.weight"] = np.ones(3, np.float32)
        tensors["model.embed_vision.a.weight"] = np.ones(3, np.float32)
    save_file(tensors, path)
    config, params, _ = load_hf(tmp_path / "m")
    wanted, theirs, _ = load_hf(GOLDEN)
    assert config == wanted
    np.testing.assert_array_equal(params.layers.q, theirs.layers.q)
    for name, it, said in (
        ("0.self_attn.k_proj.weight", np.ones((12, 24), np.float32), "[12, 24]"),
        ("0.self_attn.q_norm.weight", np.ones(12, np.float32), "[12]"),
        ("1.self_attn.v_proj.weight", np.ones((12, 24), np.float32), "attention_k_eq_v"),
        ("0.self_attn.v_proj.weight", None, "is missing"),
        ("1.layer_scalar", None, "is missing"),
    ):
        other = {**tensors, at + name: it}
        save_file({key: value for key, value in other.items() if value is not None}, path)
        with refused(ModelError, said):
            load_hf(tmp_path / "m")


def test_what_is_folded_into_experts_is_of_its_size(tmp_path):
    shutil.copytree(GOLDEN.parent / "gemma4_experts", tmp_path / "m")
    path, at = tmp_path / "m" / "model.safetensors", "model.layers.2."
    tensors = load_file(path)
    for name, it, said in (
        ("router.scale", None, "is missing"),
        ("router.per_expert_scale", np.ones(1, np.float32), "[1]"),
        ("pre_feedforward_layernorm_2.weight", np.ones(5, np.float32), "[5]"),
        ("experts.down_proj", np.ones((5, 17, 24), np.float32), "[5, 17, 24]"),
    ):
        other = {**tensors, at + name: it}
        save_file({key: value for key, value in other.items() if value is not None}, path)
        with refused(ModelError, at + name, said):
            load_hf(tmp_path / "m")


def test_it_is_not_written_as_a_hugging_face_directory(tmp_path):
    """But as a checkpoint, as it lies in memory."""
    config, params, _ = load_hf(GOLDEN)
    with refused(ConfigError, "arranged in one shape"):
        export_hf(tmp_path / "out", params, config)
    assert not (tmp_path / "out").exists()
    convert(GOLDEN, tmp_path / "ours")
    again, restored, _ = load_checkpoint(tmp_path / "ours")
    assert again == config
    assert params_digest(restored) == params_digest(params)

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
from jaxrag.base.errors import ConfigError, ModelError, RequestError
from jaxrag.base.rotary import frequencies
from jaxrag.kv.cache import empty_pool
from jaxrag.kv.placement import AWAY, KVPlacement
from jaxrag.models import FAMILIES
from jaxrag.models.arranged import _places
from jaxrag.models.checkpoint import load_checkpoint
from jaxrag.models.decoder import heads_of, layer_of, rms_norm
from jaxrag.models.digest import params_digest
from jaxrag.models.export import convert, export_hf
from jaxrag.models.flops import forward_flops
from jaxrag.models.hf import load_hf
from jaxrag.models.hf_config import text_part
from jaxrag.models.model import Model
from jaxrag.models.spec import num_active_params, num_params, require_trainable
from jaxrag.reuse.decode import Dense, Quest
from jaxrag.reuse.encode import encode_chunks

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


def test_the_config_of_the_e2b():
    keys = {
        "num_hidden_layers": 35, "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 256, "hidden_size": 1536, "intermediate_size": 6144,
        "num_attention_heads": 8, "num_key_value_heads": 1, "attention_k_eq_v": False,
        "sliding_window": 512, "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    }  # fmt: skip
    config = read(**keys)
    assert (config.num_layers, config.num_kv_layers, config.input_dim) == (35, 15, 256)
    shared = ((13,) * 4 + (14,)) * 4
    assert config.kv_sources == (*range(15), *shared)
    assert config.global_layers == (4, 9, 14)
    assert config.page_parts == 5
    assert [config.mlp_dim_of(it) for it in (14, 15)] == [6144, 12288]
    assert (config.num_kv_heads, config.head_dim) == (1, 512)
    assert config.kv_bytes_per_token == 2 * 15 * 512 * 4  # the dtype is not said: float32
    assert config.own_kv_share == pytest.approx((12 / 2 + 3) / 15)
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config
    qo, kv = 2 * 35 * 8 * 512, 2 * 15 * 512
    mlp = 3 * (15 * 6144 + 20 * 12288)
    inputs = 2 * 35 * 256
    norms = 4 * 35 + 35  # of width D
    vectors = 512 * (35 + 15) + 256 + 35
    table = 262_144 * 35 * 256
    assert (
        num_params(config)
        == 1536 * (qo + kv + mlp + inputs + norms + 35 * 256 + 262_144 + 1) + vectors + table
    )
    whole = forward_flops(config, [(1, 0)], 0)
    attended = 2 * 2 * 35 * 8 * 512
    assert whole == 2 * 1536 * (qo + kv + mlp + inputs + 35 * 256) + attended
    layers = ({"use_double_wide_mlp": False}, {"num_kv_shared_layers": 0}, {"hidden_size": 2560})
    for change in layers:
        assert read(**{**keys, **change}) != config
    assert read(**{**keys, "num_kv_shared_layers": 0}).shared_mlp_dim is None


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"num_kv_shared_layers": 60}, "shared_layers=60"),
        ({"num_kv_shared_layers": 55}, "shared_layers=55"),  # none before them is global
        ({"num_kv_shared_layers": -1}, "shared_layers=-1"),
        ({"num_kv_shared_layers": 2, "enable_moe_block": True}, "enable_moe_block=True"),
        ({"hidden_size_per_layer_input": -3}, "input_dim=-3"),
        (
            {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 128},
            "vocab_size_per_layer_input=128",
        ),
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


SHARED = GOLDEN.parent / "gemma4_shared"


def test_layers_that_share_have_no_use_for_k_and_v_of_their_own(tmp_path):
    """Published files have some, which nothing reads; all else is required."""
    shutil.copytree(SHARED, tmp_path / "m")
    path, at = tmp_path / "m" / "model.safetensors", "model.layers.6."
    tensors = load_file(path)
    wanted = load_hf(SHARED)[1]
    assert at + "self_attn.k_proj.weight" not in tensors
    for name in ("k_proj", "v_proj", "k_norm"):
        tensors[f"{at}self_attn.{name}.weight"] = np.ones((3, 5), np.float32)
    save_file(tensors, path)
    params = load_hf(tmp_path / "m")[1]
    assert params_digest(params) == params_digest(wanted)
    assert (params.sharing.k, params.sharing.v, params.sharing.k_norm) == (None,) * 3
    assert len(params.layers.k) == 4 and len(params.sharing.q) == 3
    assert params.sharing.gate.shape == (3, 24, 74)
    for name, it, said in (
        (at + "mlp.gate_proj.weight", np.ones((37, 24), np.float32), "[37, 24]"),
        (at + "per_layer_input_gate.weight", None, "is missing"),
        ("model.layers.3.self_attn.k_proj.weight", None, "is missing"),
        ("model.embed_tokens_per_layer.weight", None, "is missing"),
    ):
        other = {**tensors, name: it}
        save_file({key: value for key, value in other.items() if value is not None}, path)
        with refused(ModelError, name, said):
            load_hf(tmp_path / "m")


def test_a_checkpoint_has_layers_that_share(tmp_path):
    config, params, _ = load_hf(SHARED)
    convert(SHARED, tmp_path / "ours")
    again, restored, _ = load_checkpoint(tmp_path / "ours")
    assert (again, params_digest(restored)) == (config, params_digest(params))


def test_layers_that_share_are_not_served_from_the_host_and_not_trained():
    config = load_hf(SHARED)[0]
    for placement in (AWAY, KVPlacement(value_layers=1)):
        with refused(ConfigError, str(placement), "K and V of another"):
            placement.check(config, None)
    with refused(ConfigError, "are not trained"):
        require_trainable(config)
    unwindowed = dataclasses.replace(
        config, sliding_window=None, window_layers=None, rope_layers=None, more_ropes=()
    )
    with refused(RequestError, "'quest'", "3 layers of this model take K and V of others"):
        Quest().check(unwindowed)
    Dense().check(unwindowed)


def test_only_the_layers_that_have_kv_keep_any():
    config, params, _ = load_hf(SHARED)
    model = Model(config=config, params=params, tokenizer=None, digest="d", cache_tokens=64)
    assert model.kv_layout.num_layers == 4
    pool = empty_pool(config, 3)
    assert pool.k.shape[0] == 4 * 3
    pages = np.array([0, 2])
    rows = [np.asarray(pool.rows(layer, pages, 4)).tolist() for layer in range(7)]
    assert rows[:4] == [[0, 2], [3, 5], [6, 8], [9, 11]]
    assert rows[4:] == [rows[2], rows[3], rows[2]]
    [(_, kv)] = encode_chunks(model, "isolated", pages[:0], [np.arange(5, 9)])
    assert kv.shape == (4, 2, 4, 2, 12)

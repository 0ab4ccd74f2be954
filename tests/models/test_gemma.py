"""Gemma 2 and 3: what config.json says, how it rounds, and the forms that files have."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from gguf_files import write
from refusal import refused
from safetensors.numpy import load_file, save_file

from jaxrag.base.config import LinearScaling, RopeConfig
from jaxrag.base.errors import ConfigError, ModelError
from jaxrag.models import FAMILIES
from jaxrag.models.decoder import embedded, rms_norm
from jaxrag.models.digest import params_digest
from jaxrag.models.hf import load_config, load_hf
from jaxrag.models.hf_config import text_part
from jaxrag.models.spec import by_name

GOLDEN = Path(__file__).parents[1] / "goldens" / "gemma3"
LOCAL = RopeConfig(10_000.0, 256, False, None)


def read(**keys):
    return FAMILIES["gemma3"].read_config(text_part(keys))


def test_a_config_of_the_size_of_4b_says_little():
    """As it is published: below ``text_config``, without most of what it is."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }  # fmt: skip
    config = read(text_config=text, eos_token_id=[1, 106], torch_dtype="bfloat16")
    assert (config.vocab_size, config.num_heads, config.num_kv_heads) == (262_208, 8, 4)
    assert config.rope == RopeConfig(1e6, 256, False, LinearScaling(8.0))
    assert config.more_ropes == (LOCAL,)
    assert config.rope_layers == tuple(int((i + 1) % 6 > 0) for i in range(34))
    assert config.window_layers == tuple(map(bool, config.rope_layers))
    assert (config.sliding_window, config.dtype) == (1024, "bfloat16")
    assert (config.bos_id, config.eos_ids) == (2, (1, 106))
    assert config.tie_embeddings
    assert config.embedding_scale == 2560**0.5
    assert config.attention_scale == 1 / 16


def test_a_config_of_gemma_2_of_the_size_of_2b():
    """As it is published, of which transformers reads no ``hidden_act``."""
    config = FAMILIES["gemma2"].read_config(
        {
            "attention_bias": False, "attn_logit_softcapping": 50.0, "hidden_size": 2304,
            "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh", "num_hidden_layers": 26,
            "intermediate_size": 9216, "query_pre_attn_scalar": 256, "rope_theta": 10000.0,
            "sliding_window": 4096, "torch_dtype": "bfloat16",
        }
    )  # fmt: skip
    assert config.window_layers == (True, False) * 13
    assert (config.sliding_window, config.rope) == (4096, LOCAL)
    assert (config.score_cap, config.logit_cap) == (50.0, 30.0)
    assert (config.attention_scale, config.embedding_scale) == (1 / 16, 48.0)
    assert not config.qk_norm
    assert FAMILIES["gemma2"].read_config({}) == dataclasses.replace(config, dtype="float32")
    without = FAMILIES["gemma2"].read_config({"attn_logit_softcapping": None})
    assert (without.score_cap, without.logit_cap) == (None, 30.0)
    with refused(ConfigError, "final_logit_softcapping=0"):
        FAMILIES["gemma2"].read_config({"final_logit_softcapping": 0})


def test_a_gguf_file_of_gemma_2(tmp_path):
    golden = GOLDEN.parent / "gemma2"
    config, params, _ = load_hf(write(tmp_path / "model.gguf", golden))
    wanted, theirs, _ = load_hf(golden)
    assert config == wanted
    for name, leaf in by_name(params).items():
        np.testing.assert_allclose(leaf, by_name(theirs)[name], atol=1e-6, err_msg=name)
    large = {"gemma2.block_count": 46, "gemma2.attention.head_count": 4}
    large |= {"gemma2.final_logit_softcapping": 0.0}
    large = load_config(write(tmp_path / "large.gguf", golden, metadata=large))
    assert (large.attention_scale, large.logit_cap) == (6**-0.5, None)  # 24 / 4


def test_layers_of_one_kind():
    alike = {"num_hidden_layers": 2, "hidden_size": 16}
    near = read(layer_types=["sliding_attention"] * 2, **alike)
    assert (near.rope, near.more_ropes, near.rope_layers) == (LOCAL, (), None)
    assert (near.sliding_window, near.window_layers) == (4096, None)
    far = read(sliding_window_pattern=1, **alike)
    assert (far.rope.theta, far.more_ropes, far.rope_layers) == (1e6, (), None)
    assert (far.sliding_window, far.window_layers) == (None, None)
    for config in (near, far):
        written = FAMILIES["gemma3"].write_config(config)
        assert FAMILIES["gemma3"].read_config(written) == config


@pytest.mark.parametrize(
    "keys",
    [
        {"hidden_activation": "gelu"},
        {"use_bidirectional_attention": True},
        {"attn_logit_softcapping": 50.0},
        {"final_logit_softcapping": 30.0},
        {"layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2},
        {"sliding_window": None},
        {"rope_parameters": {"rope_theta": 1e4}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_what_is_not_computed_is_refused(keys):
    with refused(ConfigError, next(iter(keys)).replace("rope_scaling", "dynamic")):
        read(**keys)


def test_norms_and_embeddings_round_as_they_were_trained(tiny_config, random_params, rng):
    """In bfloat16: once behind 1 + weight; and the root of the width before it multiplies."""
    config = tiny_config("gemma3", dtype="bfloat16")
    narrow = jnp.bfloat16
    x, weight = (rng.normal(size=shape).astype(narrow) for shape in ((5, 24), (24,)))
    wide = x.astype(np.float32)
    wide /= np.sqrt((wide**2).mean(-1, keepdims=True) + np.float32(config.norm_eps))
    wanted = (wide * (1 + weight.astype(np.float32))).astype(narrow)
    got = np.asarray(rms_norm(x, weight, config))
    np.testing.assert_allclose(got.astype(float), wanted.astype(float), rtol=0.004)
    assert (got != wanted).mean() < 0.05
    twice = (wide.astype(narrow) * (1 + weight)).astype(narrow)
    assert (got != twice).mean() > 0.2
    params = random_params(config)
    ids = np.arange(7)[None]
    by = np.asarray(24**0.5, narrow).astype(np.float32)
    rows = np.asarray(params.embed)[ids].astype(np.float32)
    wanted = (rows * by).astype(narrow)
    np.testing.assert_array_equal(np.asarray(embedded(params, config, ids)), wanted)
    assert (wanted != (rows * np.float32(24**0.5)).astype(narrow)).any()


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_of_a_model_that_sees_images_the_text_is_read(prefix, tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "both")
    text = json.loads((GOLDEN / "config.json").read_text())
    outer = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
        "dtype": text.pop("dtype"), "text_config": text, "vision_config": {"image_size": 896},
    }  # fmt: skip
    (tmp_path / "both" / "config.json").write_text(json.dumps(outer))
    tensors = load_file(GOLDEN / "model.safetensors")
    inside = {prefix + key.removeprefix("model."): it for key, it in tensors.items()}
    images = ("vision_tower.a.weight", "model.multi_modal_projector.b.weight")
    seen, path = dict.fromkeys(images, np.ones(3, np.float32)), tmp_path / "both/model.safetensors"
    save_file({**inside, **seen}, path)
    config, params, _ = load_hf(tmp_path / "both")
    wanted, theirs, _ = load_hf(GOLDEN)
    assert config == wanted
    assert params_digest(params) == params_digest(theirs)
    save_file({**inside, "other.weight": seen[images[0]]}, path)
    with refused(ModelError, "'other.weight'"):
        load_hf(tmp_path / "both")


def test_a_gguf_file(tmp_path):
    """Of which norms are 1 + weight, and most is said by the architecture alone."""
    own = {"gemma3.attention.sliding_window_pattern": 2, "gemma3.rope.freq_base_swa": 30.0}
    path = write(tmp_path / "model.gguf", GOLDEN, metadata=own)
    config, params, _ = load_hf(path)
    wanted, theirs, _ = load_hf(GOLDEN)
    assert config == wanted
    for name, leaf in by_name(params).items():
        np.testing.assert_allclose(leaf, by_name(theirs)[name], atol=1e-6, err_msg=name)
    plain = load_config(write(tmp_path / "plain.gguf", GOLDEN))
    assert (plain.rope_layers, plain.rope.theta) == (None, 10_000.0)  # all of 3 layers are local
    large = {"gemma3.block_count": 62, "gemma3.attention.head_count": 4}
    large = load_config(write(tmp_path / "large.gguf", GOLDEN, metadata=large))
    assert large.attention_scale == 6**-0.5  # 24 / 4

"""The recipe of CONTRIBUTING.md: a model family is one ``Family`` and one line of FAMILIES."""

import dataclasses
import json

import jax
import numpy as np

from jaxrag.models import FAMILIES
from jaxrag.models.export import export_hf
from jaxrag.models.family import DECODER, GATED_MLP, QKV_BIAS, Family, TensorRule
from jaxrag.models.hf_config import Defaults, read_decoder, write_decoder
from jaxrag.models.model import load_model
from jaxrag.models.spec import init_params

DEFAULTS = Defaults(
    vocab_size=500,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=None,
    head_dim=None,
    max_position_embeddings=128,
    rms_norm_eps=1e-6,
    bos_token_id=1,
    eos_token_ids=(2,),
)


def read_config(hf):
    """A toy has biases on q, k and v, and no key says so."""
    return read_decoder(hf, "toy", DEFAULTS, qkv_bias=True)


def write_config(config):
    return write_decoder(config, "ToyForCausalLM", "toy")


def renamed(rule):
    """Its embedding has another name in the file."""
    key = rule.key.replace("model.embed_tokens", "model.words")
    return TensorRule(key, rule.paths, rule.pattern)


TOY = Family(
    name="toy",
    architecture="ToyForCausalLM",
    model_type="toy",
    read_config=read_config,
    write_config=write_config,
    tensors=tuple(map(renamed, DECODER + QKV_BIAS + GATED_MLP)),
)


def test_a_new_family_loads_and_answers_as_its_parameters_do(monkeypatch, tmp_path, tiny_config):
    monkeypatch.setitem(FAMILIES, "toy", TOY)  # the one line
    toy = dataclasses.replace(tiny_config("qwen2", tie_embeddings=False), family="toy")
    params = init_params(toy, jax.random.key(1))
    export_hf(tmp_path / "toy", params, toy)
    written = json.loads((tmp_path / "toy" / "config.json").read_text())
    assert (written["model_type"], written["architectures"]) == ("toy", ["ToyForCausalLM"])

    # The same parameters as the family it is made after.
    same = dataclasses.replace(toy, family="qwen2")
    export_hf(tmp_path / "qwen2", params, same)
    toy_model, model = (load_model(tmp_path / name) for name in ("toy", "qwen2"))
    assert toy_model.config == toy
    ids = np.array([[5, 9, 2, 77, 31]], np.int32)
    np.testing.assert_array_equal(toy_model.logits(ids), model.logits(ids))

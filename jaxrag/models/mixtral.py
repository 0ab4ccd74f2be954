"""Mixtral: Mistral with experts in place of the MLP."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrag.base.config import ExpertsConfig, ModelConfig
from jaxrag.models.family import DECODER, Family, TensorRule
from jaxrag.models.hf_config import (
    Defaults,
    read_decoder,
    read_int,
    read_optional_int,
    require_layer_types,
    write_decoder,
)

_DEFAULTS = Defaults(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=None,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_ids=(2,),
    rope_theta=1_000_000.0,
)
_BLOCK = "model.layers.{layer}.block_sparse_moe."
_EXPERT = _BLOCK + "experts.{expert}."


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """A window, where there is one, is that of every layer."""
    window = read_optional_int(hf, "sliding_window", None)
    require_layer_types(hf, "sliding_attention" if window else "full_attention", "mixtral")
    config = read_decoder(hf, "mixtral", _DEFAULTS, sliding_window=window)
    experts = ExpertsConfig(
        count=read_int(hf, "num_local_experts", 8),
        active=read_int(hf, "num_experts_per_tok", 2),
        normalise=True,
    )
    return dataclasses.replace(config, experts=experts)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Inverse of ``read_config``."""
    assert config.experts is not None
    return {
        **write_decoder(config, FAMILY.architecture, FAMILY.model_type),
        "sliding_window": config.sliding_window,
        "num_local_experts": config.experts.count,
        "num_experts_per_tok": config.experts.active,
    }


FAMILY = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    read_config=read_config,
    write_config=write_config,
    tensors=(
        *DECODER,
        TensorRule(_BLOCK + "gate.weight", ("layers.router",), "e d -> d e"),
        TensorRule(_EXPERT + "w1.weight", ("layers.gate",), "f d -> d f"),
        TensorRule(_EXPERT + "w3.weight", ("layers.up",), "f d -> d f"),
        TensorRule(_EXPERT + "w2.weight", ("layers.down",), "d f -> f d"),
    ),
)

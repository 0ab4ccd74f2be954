"""Qwen3 with experts in place of the MLP, in every layer."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrag.base.config import ExpertsConfig, ModelConfig
from jaxrag.base.errors import ConfigError
from jaxrag.models.family import DECODER, EXPERTS, O_BIAS, QK_NORM, QKV_BIAS, Family
from jaxrag.models.hf_config import (
    Defaults,
    read_bool,
    read_decoder,
    read_int,
    read_optional_int,
    require_layer_types,
    write_decoder,
)

_DEFAULTS = Defaults(
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=24,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=None,
    max_position_embeddings=32768,
    rms_norm_eps=1e-6,
    bos_token_id=None,
    eos_token_ids=(),
)
_DEFAULT_WINDOW = 4096


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """``mlp_dim`` is ``moe_intermediate_size``; layers without experts are refused."""
    for key, uniform in (("mlp_only_layers", (None, [])), ("decoder_sparse_step", (1,))):
        if hf.get(key, uniform[0]) not in uniform:
            raise ConfigError(
                f"config.json: {key}={hf[key]!r:.200}: layers with and without experts in one "
                "model are not supported"
            )
    window = None
    if read_bool(hf, "use_sliding_window", False):
        window = read_optional_int(hf, "sliding_window", _DEFAULT_WINDOW)
    require_layer_types(hf, "sliding_attention" if window else "full_attention", "qwen3_moe")
    bias = read_bool(hf, "attention_bias", False)
    config = read_decoder(
        hf, "qwen3_moe", _DEFAULTS, qkv_bias=bias, o_bias=bias, qk_norm=True, sliding_window=window
    )
    experts = ExpertsConfig(
        count=read_int(hf, "num_experts" if "num_experts" in hf else "num_local_experts", 128),
        active=read_int(hf, "num_experts_per_tok", 8),
        normalise=read_bool(hf, "norm_topk_prob", False),
    )
    width = read_int(hf, "moe_intermediate_size", 768)
    return dataclasses.replace(config, experts=experts, mlp_dim=width)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Inverse of ``read_config``."""
    assert config.experts is not None
    return {
        **write_decoder(config, FAMILY.architecture, FAMILY.model_type),
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "attention_bias": config.qkv_bias,
        "moe_intermediate_size": config.mlp_dim,
        "num_experts": config.experts.count,
        "num_experts_per_tok": config.experts.active,
        "norm_topk_prob": config.experts.normalise,
    }


FAMILY = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    read_config=read_config,
    write_config=write_config,
    tensors=DECODER + QKV_BIAS + O_BIAS + QK_NORM + EXPERTS,
)

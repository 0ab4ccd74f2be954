"""Qwen3 (dense): RMSNorm on every head of q and k before the rotation; windows as in Qwen2."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrag.base.config import ModelConfig
from jaxrag.models.family import DECODER, GATED_MLP, O_BIAS, QK_NORM, QKV_BIAS, Family
from jaxrag.models.hf_config import read_bool, read_decoder, read_num_layers, write_decoder
from jaxrag.models.qwen2 import DEFAULTS as QWEN2_DEFAULTS
from jaxrag.models.qwen2 import read_windows, write_windows

_DEFAULTS = dataclasses.replace(QWEN2_DEFAULTS, head_dim=128)


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """A missing ``head_dim`` is 128, whatever the width of the model."""
    num_layers = read_num_layers(hf, _DEFAULTS.num_hidden_layers)
    window, layers = read_windows(hf, num_layers)
    bias = read_bool(hf, "attention_bias", False)
    return read_decoder(
        hf,
        "qwen3",
        _DEFAULTS,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        sliding_window=window,
        window_layers=layers,
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Inverse of ``read_config``."""
    return {
        **write_decoder(config, FAMILY.architecture, FAMILY.model_type),
        **write_windows(config),
        "attention_bias": config.qkv_bias,
    }


FAMILY = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    read_config=read_config,
    write_config=write_config,
    tensors=DECODER + QKV_BIAS + O_BIAS + QK_NORM + GATED_MLP,
)

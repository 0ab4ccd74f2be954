"""gpt-oss: experts with biases and a clamped SwiGLU, a sink logit of every head, windows in turn.

Weights are as transformers writes them, or as they are published, those of experts in MXFP4.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrag.base.config import ExpertsConfig, ModelConfig
from jaxrag.models.family import DECODER, EXPERTS, O_BIAS, QKV_BIAS, Family, TensorRule
from jaxrag.models.hf_config import (
    Defaults,
    read_bool,
    read_decoder,
    read_float,
    read_int,
    write_decoder,
)
from jaxrag.models.qwen2 import read_windows, write_windows

_DEFAULTS = Defaults(
    vocab_size=201088,
    hidden_size=2880,
    intermediate_size=2880,
    num_hidden_layers=36,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    bos_token_id=None,
    eos_token_ids=(),
    rope_theta=150_000.0,
)
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_TURNS = ("sliding_attention", "full_attention")
_WINDOW = 128
_QUANTISED = "quantization_config"
_LAYER = "model.layers.{layer}."
_EXPERTS = _LAYER + "mlp.experts."
_ONE = _EXPERTS + "{expert}."
_ATTENTION = (*DECODER, *QKV_BIAS, *O_BIAS)


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Without ``layer_types`` every other layer has the window, the first among them."""
    num_layers = read_int(hf, "num_hidden_layers", _DEFAULTS.num_hidden_layers)
    kinds = hf.get("layer_types") or [_TURNS[i % 2] for i in range(num_layers)]
    window, layers = read_windows(
        {
            "use_sliding_window": True,
            "sliding_window": hf.get("sliding_window", _WINDOW),
            "layer_types": kinds,
        },
        num_layers,
    )
    bias = read_bool(hf, "attention_bias", True)
    mxfp4 = isinstance(it := hf.get(_QUANTISED), Mapping) and it.get("quant_method") == "mxfp4"
    if hf.get("rope_scaling") is None and hf.get("rope_parameters") is None:
        hf = {**hf, "rope_parameters": _ROPE}
    config = read_decoder(
        hf,
        "gpt_oss",
        _DEFAULTS,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        sliding_window=window,
        window_layers=layers,
        understood=(_QUANTISED,) if mxfp4 else (),
    )
    experts = ExpertsConfig(
        count=read_int(hf, "num_local_experts", 128),
        active=read_int(hf, "num_experts_per_tok", 4),
        normalise=True,  # it is a softmax over the chosen ones
        router_bias=True,
        clamp=(read_float(hf, "swiglu_alpha", 1.702), read_float(hf, "swiglu_limit", 7.0)),
    )
    return dataclasses.replace(config, experts=experts, sink_logits=True)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Inverse of ``read_config``."""
    assert config.experts is not None
    assert config.experts.clamp is not None
    alpha, limit = config.experts.clamp
    return {
        **write_decoder(config, FAMILY.architecture, FAMILY.model_type),
        **write_windows(config),
        "attention_bias": config.qkv_bias,
        "num_local_experts": config.experts.count,
        "num_experts_per_tok": config.experts.active,
        "swiglu_alpha": alpha,
        "swiglu_limit": limit,
    }


FAMILY = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    read_config=read_config,
    write_config=write_config,
    tensors=(
        *_ATTENTION,
        TensorRule(_LAYER + "self_attn.sinks", ("layers.sink_logits",), "n -> n"),
        TensorRule(_LAYER + "mlp.router.weight", ("layers.router",), "e d -> d e"),
        TensorRule(_LAYER + "mlp.router.bias", ("layers.router_bias",), "e -> e"),
        TensorRule(_EXPERTS + "gate_up_proj", ("layers.gate", "layers.up"), "e d (f p) -> e d f"),
        TensorRule(
            _EXPERTS + "gate_up_proj_bias",
            ("layers.gate_bias", "layers.up_bias"),
            "e (f p) -> e f",
        ),
        TensorRule(_EXPERTS + "down_proj", ("layers.down",), "e f d -> e f d"),
        TensorRule(_EXPERTS + "down_proj_bias", ("layers.down_bias",), "e d -> e d"),
    ),
    apart=(
        *_ATTENTION,
        *EXPERTS,
        TensorRule(_LAYER + "self_attn.sinks.weight", ("layers.sink_logits",), "n -> n"),
        TensorRule(_LAYER + "mlp.gate.bias", ("layers.router_bias",), "e -> e"),
        TensorRule(_ONE + "gate_proj.bias", ("layers.gate_bias",), "f -> f"),
        TensorRule(_ONE + "up_proj.bias", ("layers.up_bias",), "f -> f"),
        TensorRule(_ONE + "down_proj.bias", ("layers.down_bias",), "d -> d"),
    ),
)

"""OLMo 2 and OLMo 3: norms behind attention and MLP alone; that of q and k is over all heads.

In OLMo 3 three of four layers have a sliding window, and the scaling of the rotary embedding is for
the others.
"""

import dataclasses
from collections import ChainMap
from collections.abc import Mapping
from typing import Any, cast

from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import ConfigError
from jaxrag.models.family import (
    DECODER,
    GATED_MLP,
    JOINT_QK_NORM,
    O_BIAS,
    QKV_BIAS,
    Family,
    TensorRule,
)
from jaxrag.models.hf_config import (
    Defaults,
    read_bool,
    read_decoder,
    read_num_layers,
    read_rope,
    refuse_windows,
    write_decoder,
    write_rope,
)
from jaxrag.models.qwen2 import read_windows, write_windows

_DEFAULTS = Defaults(
    vocab_size=50304,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=None,
    head_dim=None,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    bos_token_id=None,
    eos_token_ids=(50279,),
)
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_THETA, _WINDOW, _EVERY = 500_000.0, 4096, 4


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """OLMo 2's; ``attention_bias`` puts a bias on all four projections of the attention."""
    refuse_windows(hf, "olmo2")
    return _read(hf, "olmo2")


def _read(hf: Mapping[str, Any], family: str, **more: Any) -> ModelConfig:
    bias = read_bool(hf, "attention_bias", False)
    config = read_decoder(
        hf, family, _DEFAULTS, qkv_bias=bias, o_bias=bias, qk_norm=True, post_norms=True
    )
    return dataclasses.replace(config, pre_norms=False, joint_qk_norm=True, **more)


def read_config_3(hf: Mapping[str, Any]) -> ModelConfig:
    """Every fourth layer is without a window, unless ``layer_types`` says otherwise."""
    num_layers = read_num_layers(hf, _DEFAULTS.num_hidden_layers)
    every = [_LOCAL if (i + 1) % _EVERY else _GLOBAL for i in range(num_layers)]
    kinds = hf.get("layer_types") or every
    given = {"sliding_window": hf.get("sliding_window", _WINDOW), "layer_types": kinds}
    window, layers = read_windows({"use_sliding_window": True, **given}, num_layers)
    stated = hf.get("rope_parameters") or {}
    if stated and not {_GLOBAL, _LOCAL} & stated.keys():
        raise ConfigError(f"config.json: rope_parameters={stated!r}: expected {_GLOBAL} in it")
    scaling = hf.get("rope_scaling") or {}
    theta = {"rope_theta": hf.get("rope_theta", _THETA)}
    plain = ChainMap({"rope_scaling": None, "rope_parameters": theta}, cast(dict[str, Any], hf))
    config = _read(plain, "olmo3", sliding_window=window, window_layers=layers)
    own = {_GLOBAL: scaling, _LOCAL: {}}
    ropes = {
        kind: read_rope(
            {"rope_parameters": {**theta, **(stated.get(kind) or {}), **own[kind]}},
            head_dim=config.head_dim,
            max_positions=config.max_positions,
        )
        for kind in sorted(set(kinds))
    }
    several = list(dict.fromkeys(ropes.values()))
    at = tuple(several.index(ropes[kind]) for kind in kinds)
    return dataclasses.replace(
        config,
        rope=several[0],
        more_ropes=tuple(several[1:]),
        rope_layers=at if several[1:] else None,
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Inverse of ``read_config``."""
    return {
        **write_decoder(config, OLMO2.architecture, OLMO2.model_type),
        "attention_bias": config.qkv_bias,
    }


def write_config_3(config: ModelConfig) -> dict[str, Any]:
    """Inverse of ``read_config_3``."""
    windows = write_windows(config)
    del windows["use_sliding_window"]
    kinds = windows["layer_types"]
    ropes = {kind: config.rope_of(kinds.index(kind)) for kind in kinds}
    return {
        **write_decoder(config, OLMO3.architecture, OLMO3.model_type),
        **windows,
        "attention_bias": config.qkv_bias,
        "rope_parameters": {kind: write_rope(it, config.head_dim) for kind, it in ropes.items()},
    }


_LAYER = "model.layers.{layer}."
_NORMS = (
    TensorRule(_LAYER + "post_attention_layernorm.weight", ("layers.post_attn_norm",), "d -> d"),
    TensorRule(_LAYER + "post_feedforward_layernorm.weight", ("layers.post_mlp_norm",), "d -> d"),
)
_NONE = ("layers.attn_norm",), ("layers.mlp_norm",)
_TENSORS = (
    *(rule for rule in DECODER if rule.paths not in _NONE),
    *(_NORMS + QKV_BIAS + O_BIAS + JOINT_QK_NORM + GATED_MLP),
)
OLMO2 = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    read_config=read_config,
    write_config=write_config,
    tensors=_TENSORS,
)
OLMO3 = Family(
    name="olmo3",
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    read_config=read_config_3,
    write_config=write_config_3,
    tensors=_TENSORS,
)

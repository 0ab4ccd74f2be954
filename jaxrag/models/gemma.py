"""Gemma 3: windows in most layers, which rotate by other angles than the layers without one.

Norms multiply by 1 + weight, embeddings are multiplied by the root of their width. Of the models
that see images the text part is read.
"""

import dataclasses
from collections import ChainMap
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from jaxrag.base.config import ModelConfig, RopeConfig
from jaxrag.base.errors import ConfigError
from jaxrag.models.family import DECODER, GATED_MLP, O_BIAS, QK_NORM, QKV_BIAS, Family, TensorRule
from jaxrag.models.hf_config import (
    Defaults,
    read_bool,
    read_decoder,
    read_int,
    read_num_layers,
    read_positive,
    read_rope,
    write_decoder,
    write_rope,
)
from jaxrag.models.qwen2 import read_windows, write_windows

_DEFAULTS = Defaults(
    vocab_size=262_208,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=131_072,
    rms_norm_eps=1e-6,
    bos_token_id=2,
    eos_token_ids=(1,),
)
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_WINDOW, _PATTERN = 4096, 6
_ACTIVATION = "gelu_pytorch_tanh"
_SCALAR = "query_pre_attn_scalar"


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Every sixth layer is without a window, unless ``layer_types`` says otherwise."""
    num_layers = read_num_layers(hf, _DEFAULTS.num_hidden_layers)
    pattern = read_int(hf, "sliding_window_pattern", _PATTERN)
    every = [_LOCAL if pattern < 1 or (i + 1) % pattern else _GLOBAL for i in range(num_layers)]
    layer_types = hf.get("layer_types") or every
    plain = ChainMap({"rope_parameters": None, "rope_scaling": None}, cast(dict[str, Any], hf))
    config = read_gemma(plain, "gemma3", _DEFAULTS, layer_types)
    kinds = {kind: _read_rope(hf, kind) for kind in sorted(set(layer_types))}
    ropes = list(kinds.values())
    return dataclasses.replace(
        config,
        qk_norm=True,
        rope=ropes[0],
        more_ropes=tuple(ropes[1:]),
        rope_layers=tuple(map(list(kinds).index, layer_types)) if ropes[1:] else None,
    )


def read_gemma(
    hf: Mapping[str, Any],
    family: str,
    defaults: Defaults,
    layer_types: Sequence[str],
    understood: Collection[str] = (),
) -> ModelConfig:
    """What Gemmas have in common; ``understood`` as in ``read_decoder``."""
    activation = hf.get("hidden_activation", _ACTIVATION)
    if activation != _ACTIVATION:
        raise ConfigError(
            f"config.json: hidden_activation={activation!r:.200}: only {_ACTIVATION!r} is supported"
        )
    both_ways = hf.get("use_bidirectional_attention")
    if both_ways not in (None, False, "vision"):  # between the parts of an image
        raise ConfigError(
            f"config.json: use_bidirectional_attention={both_ways!r:.200} is not supported"
        )
    num_layers = read_num_layers(hf, defaults.num_hidden_layers)
    windows = {"use_sliding_window": True, "sliding_window": hf.get("sliding_window", _WINDOW)}
    window, layers = read_windows({**windows, "layer_types": layer_types}, num_layers)
    bias = read_bool(hf, "attention_bias", False)
    own: dict[str, Any] = {"hidden_act": "silu"}
    own["tie_word_embeddings"] = read_bool(hf, "tie_word_embeddings", True)
    config = read_decoder(
        ChainMap(own, cast(dict[str, Any], hf)), family, defaults, qkv_bias=bias, o_bias=bias,
        post_norms=True, sliding_window=window, window_layers=layers,
        understood=(_SCALAR, *understood),
    )  # fmt: skip
    return dataclasses.replace(
        config,
        activation="gelu_tanh",
        unit_norms=True,
        embedding_scale=config.model_dim**0.5,
        attention_scale=read_positive(hf, _SCALAR, 256) ** -0.5,
    )


def _read_rope(hf: Mapping[str, Any], kind: str) -> RopeConfig:
    """Of the layers of a kind, in the form of transformers 5 or 4."""
    given = hf.get("rope_parameters") or {}
    if given and not {_GLOBAL, _LOCAL} & given.keys():
        raise ConfigError(f"config.json: rope_parameters={given!r}: expected {_GLOBAL} in it")
    local = kind == _LOCAL
    theta = hf.get("rope_local_base_freq", 1e4) if local else hf.get("rope_theta", 1e6)
    scaling = {} if local else hf.get("rope_scaling") or {}
    return read_rope(
        {"rope_parameters": {"rope_theta": theta, **(given.get(kind) or {}), **scaling}},
        head_dim=read_int(hf, "head_dim", 256),
        max_positions=read_int(hf, "max_position_embeddings", _DEFAULTS.max_position_embeddings),
        partial_rotary_factor=1.0,
        interleaved=False,
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Inverse of ``read_config``."""
    hf = write_gemma(config, FAMILY)
    named = zip(hf["layer_types"], range(config.num_layers), strict=True)
    ropes = {kind: write_rope(config.rope_of(at), config.head_dim) for kind, at in named}
    return {**hf, "rope_parameters": ropes}


def write_gemma(config: ModelConfig, family: Family) -> dict[str, Any]:
    """Inverse of ``read_gemma``."""
    hf = write_decoder(config, family.architecture, family.model_type)
    windows = write_windows(config)
    del hf["hidden_act"], windows["use_sliding_window"]
    return {
        **hf,
        **windows,
        "sliding_window": config.sliding_window or _WINDOW,
        "hidden_activation": _ACTIVATION,
        "attention_bias": config.qkv_bias,
        _SCALAR: round(config.score_scale**-2),
    }


_LAYER = "model.layers.{layer}."
_NORMS = (
    TensorRule(_LAYER + "post_attention_layernorm.weight", ("layers.post_attn_norm",), "d -> d"),
    TensorRule(_LAYER + "pre_feedforward_layernorm.weight", ("layers.mlp_norm",), "d -> d"),
    TensorRule(_LAYER + "post_feedforward_layernorm.weight", ("layers.post_mlp_norm",), "d -> d"),
)
TENSORS = (
    *(rule for rule in DECODER if rule.paths != ("layers.mlp_norm",)),
    *(_NORMS + QKV_BIAS + O_BIAS + GATED_MLP),
)
FAMILY = Family(
    name="gemma3",
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    read_config=read_config,
    write_config=write_config,
    tensors=TENSORS + QK_NORM,
    needs_bos=True,
    within=("Gemma3ForConditionalGeneration",),
)

"""SmolLM3: Llama, of which some layers, every fourth by default, have no rotary embedding."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrag.base.config import ModelConfig, NoRotation
from jaxrag.base.errors import ConfigError
from jaxrag.models.family import Family
from jaxrag.models.hf_config import (
    Defaults,
    read_bool,
    read_decoder,
    read_int,
    read_num_layers,
    write_decoder,
)
from jaxrag.models.llama import FAMILY as LLAMA
from jaxrag.models.qwen2 import read_windows, write_windows

_DEFAULTS = Defaults(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=11008,
    num_hidden_layers=36,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=None,
    max_position_embeddings=32768,
    rms_norm_eps=1e-6,
    bos_token_id=128000,
    eos_token_ids=(128001,),
    rope_theta=2_000_000.0,
    tie_word_embeddings=True,
)
_EVERY = 4


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """``no_rope_layers`` has 1 for a layer that rotates; windows are by default where it has 0."""
    num_layers = read_num_layers(hf, _DEFAULTS.num_hidden_layers)
    every = read_int(hf, "no_rope_layer_interval", _EVERY)
    rotates = hf.get("no_rope_layers")
    if rotates is None:
        if every < 1:
            raise ConfigError(f"config.json: no_rope_layer_interval={every}: expected 1 or more")
        rotates = [int((i + 1) % every != 0) for i in range(num_layers)]
    if len(rotates) < num_layers or not {*rotates} <= {0, 1}:
        raise ConfigError(
            f"config.json: no_rope_layers={rotates!r:.200}: expected 0 or 1 for each of "
            f"{num_layers} layers"
        )
    rotates = [bool(rotated) for rotated in rotates[:num_layers]]
    window, layers = None, None
    if read_bool(hf, "use_sliding_window", False) and hf.get("sliding_window") is not None:
        kinds = ["full_attention" if rotated else "sliding_attention" for rotated in rotates]
        given = {"use_sliding_window": True, "sliding_window": hf["sliding_window"]}
        kinds = hf.get("layer_types") or kinds
        window, layers = read_windows({**given, "layer_types": kinds}, num_layers)
    bias = read_bool(hf, "attention_bias", False)
    config = read_decoder(
        hf,
        "smollm3",
        _DEFAULTS,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=read_bool(hf, "mlp_bias", False),
        sliding_window=window,
        window_layers=layers,
    )
    none = dataclasses.replace(config.rope, scaling=NoRotation())
    if all(rotates):
        return config
    if not any(rotates):
        return dataclasses.replace(config, rope=none)
    bare = tuple(int(not rotated) for rotated in rotates)
    return dataclasses.replace(config, more_ropes=(none,), rope_layers=bare)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Inverse of ``read_config``."""
    ropes = [config.rope_of(layer) for layer in range(config.num_layers)]
    rotates = [int(not isinstance(rope.scaling, NoRotation)) for rope in ropes]
    plain = dataclasses.replace(config.rope, scaling=None)
    rotary = next((rope for rope, used in zip(ropes, rotates, strict=True) if used), plain)
    single = dataclasses.replace(config, rope=rotary, more_ropes=(), rope_layers=None)
    return {
        **write_decoder(single, FAMILY.architecture, FAMILY.model_type),
        **write_windows(config),
        "no_rope_layers": rotates,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
    }


FAMILY = Family(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    read_config=read_config,
    write_config=write_config,
    tensors=LLAMA.tensors,
)

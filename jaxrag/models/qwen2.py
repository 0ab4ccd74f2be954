"""Qwen2 and Qwen2.5: bias on q, k and v; some layers may use a sliding window."""

from collections.abc import Mapping
from typing import Any

from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import ConfigError
from jaxrag.models.family import DECODER, GATED_MLP, QKV_BIAS, Family
from jaxrag.models.hf_config import (
    Defaults,
    read_bool,
    read_decoder,
    read_int,
    read_num_layers,
    read_optional_int,
    write_decoder,
)

DEFAULTS = Defaults(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=22016,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=None,
    max_position_embeddings=32768,
    rms_norm_eps=1e-6,
    bos_token_id=None,
    eos_token_ids=(),
)
_DEFAULT_WINDOW = 4096
_DEFAULT_GLOBAL_LAYERS = 28
_LAYER_KINDS = {"full_attention": False, "sliding_attention": True}


def read_windows(
    hf: Mapping[str, Any], num_layers: int
) -> tuple[int | None, tuple[bool, ...] | None]:
    """The sliding window and the layers that use it, as (sliding_window, window_layers).

    ``layer_types`` names them; without it every layer from ``max_window_layers`` on has the window.
    """
    window = None
    if read_bool(hf, "use_sliding_window", False):
        window = read_optional_int(hf, "sliding_window", _DEFAULT_WINDOW)
    kinds = hf.get("layer_types")
    if kinds is None:
        first = read_int(hf, "max_window_layers", _DEFAULT_GLOBAL_LAYERS)
        layers = tuple(window is not None and i >= first for i in range(num_layers))
    else:
        unknown = sorted({str(kind) for kind in kinds} - set(_LAYER_KINDS))
        if unknown:
            raise ConfigError(
                f"config.json: layer_types contains {unknown[0]!r}; expected "
                f"{' or '.join(_LAYER_KINDS)}"
            )
        layers = tuple(_LAYER_KINDS[kind] for kind in kinds)
        if len(layers) != num_layers:
            raise ConfigError(
                f"config.json: layer_types has {len(layers)} entries for {num_layers} layers"
            )
    if not any(layers):
        return None, None
    if window is None:
        raise ConfigError(
            "config.json: layer_types contains 'sliding_attention', but use_sliding_window="
            f"{hf.get('use_sliding_window', False)} and sliding_window={hf.get('sliding_window')}"
        )
    return window, None if all(layers) else layers


def write_windows(config: ModelConfig) -> dict[str, Any]:
    """Inverse of ``read_windows``."""
    uses = config.window_layers or (config.sliding_window is not None,) * config.num_layers
    return {
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "layer_types": ["sliding_attention" if used else "full_attention" for used in uses],
    }


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Biases are part of the family; no key switches them off."""
    num_layers = read_num_layers(hf, DEFAULTS.num_hidden_layers)
    window, layers = read_windows(hf, num_layers)
    return read_decoder(
        hf, "qwen2", DEFAULTS, qkv_bias=True, sliding_window=window, window_layers=layers
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Inverse of ``read_config``."""
    return {
        **write_decoder(config, FAMILY.architecture, FAMILY.model_type),
        **write_windows(config),
    }


FAMILY = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    read_config=read_config,
    write_config=write_config,
    tensors=DECODER + QKV_BIAS + GATED_MLP,
)

"""Granite (dense): Llama with constants on embeddings, scores, residuals and logits.

A model of Granite 4 of which no layer is recurrent or has experts is one, under other names.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxrag.base.config import ModelConfig, NoRotation
from jaxrag.base.errors import ConfigError
from jaxrag.models import llama
from jaxrag.models.family import DECODER, O_BIAS, QKV_BIAS, Family, TensorRule
from jaxrag.models.hf_config import (
    SCALES,
    read_bool,
    read_decoder,
    read_int,
    read_positive,
    refuse_windows,
    write_decoder,
)

_ATTENTION = {"attention", "full_attention"}
_WIDTH = "shared_intermediate_size"


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """A missing multiplier is 1, that of the scores too."""
    refuse_windows(hf, "granite")
    return _read(hf, "granite", read_bool(hf, "mlp_bias", False))


def _read(hf: Mapping[str, Any], family: str, mlp_bias: bool) -> ModelConfig:
    bias = read_bool(hf, "attention_bias", False)
    config = read_decoder(
        hf,
        family,
        llama.DEFAULTS,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=mlp_bias,
        understood=SCALES,
    )
    embedding, attention, residual, logits = (read_positive(hf, key, 1.0) for key in SCALES)
    return dataclasses.replace(
        config,
        embedding_scale=embedding,
        attention_scale=attention,
        residual_scale=residual,
        logit_scale=1 / logits,
    )


def read_config_4(hf: Mapping[str, Any]) -> ModelConfig:
    """It rotates only where ``position_embedding_type`` says so."""
    others = sorted({str(kind) for kind in hf.get("layer_types") or ("mamba",)} - _ATTENTION)
    if others:
        raise ConfigError(
            f"config.json: layer_types contains {others[0]!r}: recurrent layers keep a state, and "
            "no KV of tokens"
        )
    if read_int(hf, "num_local_experts", 8):
        raise ConfigError(
            f"config.json: num_local_experts={hf.get('num_local_experts', 8)}: a Granite 4 with "
            "experts is not supported"
        )
    config = _read(hf, "granite4", mlp_bias=False)
    kind = hf.get("position_embedding_type")
    if kind not in (None, "nope", "rope"):
        raise ConfigError(
            f"config.json: position_embedding_type={kind!r:.200}: expected 'rope', 'nope' or null"
        )
    rope = config.rope if kind == "rope" else dataclasses.replace(config.rope, scaling=NoRotation())
    return dataclasses.replace(config, mlp_dim=read_int(hf, _WIDTH, 1024), rope=rope)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Inverse of ``read_config``."""
    return {**_written(config, GRANITE), "mlp_bias": config.mlp_bias}


def write_config_4(config: ModelConfig) -> dict[str, Any]:
    """Inverse of ``read_config_4``."""
    bare = isinstance(config.rope.scaling, NoRotation)
    rotary = dataclasses.replace(config.rope, scaling=None) if bare else config.rope
    return {
        **_written(dataclasses.replace(config, rope=rotary), GRANITE_4),
        "layer_types": ["attention"] * config.num_layers,
        "position_embedding_type": "nope" if bare else "rope",
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "mamba_n_heads": 1,  # which transformers holds against the width, though nothing has it
        _WIDTH: config.mlp_dim,
    }


def _written(config: ModelConfig, family: Family) -> dict[str, Any]:
    divisor = 1 / config.logit_scale
    if 1 / divisor != config.logit_scale:  # the quotient was rounded
        near = (math.nextafter(divisor, to) for to in (0.0, math.inf))
        divisor = next((it for it in near if 1 / it == config.logit_scale), divisor)
    scales = (config.embedding_scale, config.score_scale, config.residual_scale, divisor)
    return {
        **write_decoder(config, family.architecture, family.model_type),
        "attention_bias": config.qkv_bias,
        **dict(zip(SCALES, scales, strict=True)),
    }


GRANITE = Family(
    name="granite",
    architecture="GraniteForCausalLM",
    model_type="granite",
    read_config=read_config,
    write_config=write_config,
    tensors=llama.FAMILY.tensors,
)
_MLP = "model.layers.{layer}.shared_mlp."
GRANITE_4 = Family(
    name="granite4",
    architecture="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    read_config=read_config_4,
    write_config=write_config_4,
    tensors=(
        *(DECODER + QKV_BIAS + O_BIAS),
        TensorRule(_MLP + "input_linear.weight", ("layers.gate", "layers.up"), "(p f) d -> d f"),
        TensorRule(_MLP + "output_linear.weight", ("layers.down",), "d f -> f d"),
    ),
)

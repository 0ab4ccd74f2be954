"""Granite (dense): Llama with constants on embeddings, scores, residuals and logits."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxrag.base.config import ModelConfig
from jaxrag.models import llama
from jaxrag.models.family import Family
from jaxrag.models.hf_config import (
    SCALES,
    read_bool,
    read_decoder,
    read_positive,
    refuse_windows,
    write_decoder,
)


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """A missing multiplier is 1, that of the scores too."""
    refuse_windows(hf, "granite")
    bias = read_bool(hf, "attention_bias", False)
    config = read_decoder(
        hf,
        "granite",
        llama.DEFAULTS,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=read_bool(hf, "mlp_bias", False),
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


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Inverse of ``read_config``."""
    divisor = 1 / config.logit_scale
    if 1 / divisor != config.logit_scale:  # the quotient was rounded
        near = (math.nextafter(divisor, to) for to in (0.0, math.inf))
        divisor = next((it for it in near if 1 / it == config.logit_scale), divisor)
    scales = (config.embedding_scale, config.score_scale, config.residual_scale, divisor)
    return {
        **write_decoder(config, FAMILY.architecture, FAMILY.model_type),
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        **dict(zip(SCALES, scales, strict=True)),
    }


FAMILY = Family(
    name="granite",
    architecture="GraniteForCausalLM",
    model_type="granite",
    read_config=read_config,
    write_config=write_config,
    tensors=llama.FAMILY.tensors,
)

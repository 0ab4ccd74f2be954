"""Gemma 2: scores and logits within caps, and a window in every other layer."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrag.base.config import ModelConfig
from jaxrag.models.family import Family
from jaxrag.models.gemma import TENSORS, read_gemma, write_gemma
from jaxrag.models.hf_config import Defaults, read_num_layers, read_positive

_DEFAULTS = Defaults(
    vocab_size=256_000,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=8192,
    rms_norm_eps=1e-6,
    bos_token_id=2,
    eos_token_ids=(1,),
)
_KINDS = ("sliding_attention", "full_attention")
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """The first layer has a window, unless ``layer_types`` says otherwise."""
    num_layers = read_num_layers(hf, _DEFAULTS.num_hidden_layers)
    layer_types = hf.get("layer_types") or [_KINDS[i % 2] for i in range(num_layers)]
    config = read_gemma(hf, "gemma2", _DEFAULTS, layer_types, understood=_CAPS)
    scores, logits = (
        None if hf.get(key, 0) is None else read_positive(hf, key, default)
        for key, default in _CAPS.items()
    )
    return dataclasses.replace(config, score_cap=scores, logit_cap=logits)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Inverse of ``read_config``."""
    caps = zip(_CAPS, (config.score_cap, config.logit_cap), strict=True)
    return {**write_gemma(config, FAMILY), **dict(caps)}


FAMILY = Family(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    read_config=read_config,
    write_config=write_config,
    tensors=TENSORS,
    needs_bos=True,
)

"""Mistral 7B and its kin: no biases, one sliding window for all layers or none.

Of Mistral Small 3.1 and 3.2, which see images, the text part is read.
"""

from collections.abc import Mapping
from typing import Any

from jaxrag.base.config import ModelConfig
from jaxrag.models.family import DECODER, GATED_MLP, Family
from jaxrag.models.hf_config import (
    Defaults,
    read_decoder,
    read_optional_int,
    require_layer_types,
    write_decoder,
)

_DEFAULTS = Defaults(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=None,
    max_position_embeddings=131072,
    rms_norm_eps=1e-6,
    bos_token_id=1,
    eos_token_ids=(2,),
)
_DEFAULT_WINDOW = 4096


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """A missing ``sliding_window`` is 4096 tokens; null is none."""
    window = read_optional_int(hf, "sliding_window", _DEFAULT_WINDOW)
    kind = "full_attention" if window is None else "sliding_attention"
    require_layer_types(hf, kind, "mistral")
    return read_decoder(hf, "mistral", _DEFAULTS, sliding_window=window)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Inverse of ``read_config``."""
    return {
        **write_decoder(config, FAMILY.architecture, FAMILY.model_type),
        "sliding_window": config.sliding_window,
    }


FAMILY = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    model_type="mistral",
    read_config=read_config,
    write_config=write_config,
    tensors=DECODER + GATED_MLP,
    within=("Mistral3ForConditionalGeneration",),
)

"""GLM-4 in two forms: ``glm`` (GLM-4-9B) and ``glm4`` (GLM-4-0414, with norms after each block).

Both rotate the first half of every head, pairing neighbouring dimensions, and store the gate and up
projections of the MLP fused.
"""

import functools
from collections.abc import Mapping
from typing import Any

from jaxrag.base.config import ModelConfig
from jaxrag.models.family import DECODER, FUSED_MLP, POST_NORMS, QKV_BIAS, Family
from jaxrag.models.hf_config import Defaults, read_bool, read_decoder, refuse_windows, write_decoder

_EOS_IDS = (151329, 151336, 151338)
_DEFAULTS = Defaults(
    vocab_size=151552,
    hidden_size=4096,
    intermediate_size=13696,
    num_hidden_layers=40,
    num_attention_heads=32,
    num_key_value_heads=2,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1.5625e-7,
    bos_token_id=None,
    eos_token_ids=_EOS_IDS,
    partial_rotary_factor=0.5,
)


def read_config(hf: Mapping[str, Any], family: str) -> ModelConfig:
    """``attention_bias`` (default true) concerns q, k and v; the output has none."""
    refuse_windows(hf, family)
    if hf.get("eos_token_id") is None:  # here, and only here, null means the default
        hf = {**hf, "eos_token_id": list(_EOS_IDS)}
    return read_decoder(
        hf,
        family,
        _DEFAULTS,
        qkv_bias=read_bool(hf, "attention_bias", True),
        post_norms=family == "glm4",
        interleaved=True,
    )


def write_config(config: ModelConfig, architecture: str) -> dict[str, Any]:
    """Inverse of ``read_config``."""
    hf = write_decoder(config, architecture, config.family)
    rope = {"partial_rotary_factor": 1.0, **hf["rope_parameters"]}
    return {**hf, "rope_parameters": rope, "attention_bias": config.qkv_bias}


GLM = Family(
    name="glm",
    architecture="GlmForCausalLM",
    model_type="glm",
    read_config=functools.partial(read_config, family="glm"),
    write_config=functools.partial(write_config, architecture="GlmForCausalLM"),
    tensors=DECODER + QKV_BIAS + FUSED_MLP,
)
GLM4 = Family(
    name="glm4",
    architecture="Glm4ForCausalLM",
    model_type="glm4",
    read_config=functools.partial(read_config, family="glm4"),
    write_config=functools.partial(write_config, architecture="Glm4ForCausalLM"),
    tensors=DECODER + QKV_BIAS + FUSED_MLP + POST_NORMS,
)

"""Llama 2, 3 and 3.x, and the models that share their form (Yi)."""

from collections.abc import Mapping
from typing import Any

from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import ConfigError
from jaxrag.models.family import DECODER, GATED_MLP, MLP_BIAS, O_BIAS, QKV_BIAS, Family
from jaxrag.models.hf_config import Defaults, read_bool, read_decoder, refuse_windows, write_decoder

DEFAULTS = Defaults(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=None,
    head_dim=None,
    max_position_embeddings=2048,
    rms_norm_eps=1e-6,
    bos_token_id=1,
    eos_token_ids=(2,),
)


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """``attention_bias`` puts a bias on all four projections of the attention."""
    refuse_windows(hf, "llama")
    bias = read_bool(hf, "attention_bias", False)
    return read_decoder(
        hf,
        "llama",
        DEFAULTS,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=read_bool(hf, "mlp_bias", False),
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Inverse of ``read_config``."""
    if config.model_dim % config.num_heads:
        raise ConfigError(
            f"model_dim={config.model_dim} is not a multiple of num_heads={config.num_heads}: "
            "transformers refuses such a Llama; export it as another family"
        )
    return {
        **write_decoder(config, FAMILY.architecture, FAMILY.model_type),
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
    }


FAMILY = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    model_type="llama",
    read_config=read_config,
    write_config=write_config,
    tensors=DECODER + QKV_BIAS + O_BIAS + GATED_MLP + MLP_BIAS,
)

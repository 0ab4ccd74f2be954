"""Qwen3-Next and Qwen3.5: three layers of four keep a state (Gated DeltaNet), the others attend.

What attends has an output gate, norms of queries and keys, and turns a quarter of a head.
Qwen3-Next and Qwen3.5-MoE have experts in place of the MLP, and one that all tokens go through.
"""

import dataclasses
import functools
from collections import ChainMap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from jaxrag.base.config import ExpertsConfig, ModelConfig
from jaxrag.base.errors import ConfigError
from jaxrag.base.recurrent import RecurrentConfig
from jaxrag.models.family import DECODER, EXPERTS, GATED_MLP, QK_NORM, Family, TensorRule
from jaxrag.models.hf_config import (
    Defaults,
    read_bool,
    read_decoder,
    read_int,
    read_num_layers,
    write_decoder,
)

if TYPE_CHECKING:
    from jaxrag.models.tensor_files import StoredTensor

_NEXT = Defaults(
    vocab_size=151_936,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=48,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    max_position_embeddings=32_768,
    rms_norm_eps=1e-6,
    bos_token_id=None,
    eos_token_ids=(),
    partial_rotary_factor=0.25,
)
_DENSE = dataclasses.replace(
    _NEXT,
    vocab_size=248_320,
    hidden_size=4096,
    intermediate_size=12_288,
    num_hidden_layers=32,
    num_key_value_heads=4,
)
_MOE = dataclasses.replace(_NEXT, vocab_size=248_320, num_hidden_layers=40)
_STATE, _ATTENDS = "linear_attention", "full_attention"
_SIZES = {  # of RecurrentConfig
    "key_heads": ("linear_num_key_heads", 16),
    "value_heads": ("linear_num_value_heads", 32),
    "key_dim": ("linear_key_head_dim", 128),
    "value_dim": ("linear_value_head_dim", 128),
    "width": ("linear_conv_kernel_dim", 4),
}
# Of tokens of text the positions of all sections are one, so that they change nothing.
_SECTIONS = ("mrope_section", "mrope_interleaved")


def _read(hf: Mapping[str, Any], name: str, defaults: Defaults, experts: bool) -> ModelConfig:
    if read_bool(hf, "attention_bias", False):
        raise ConfigError(f"config.json: attention_bias=True is not supported for {name} models")
    rope = hf.get("rope_parameters")
    if isinstance(rope, Mapping):
        rope = {key: it for key, it in rope.items() if key not in _SECTIONS}
    plain = ChainMap({"rope_parameters": rope}, cast(dict[str, Any], hf))
    num_layers = read_num_layers(hf, defaults.num_hidden_layers)
    every = read_int(hf, "full_attention_interval", 4)
    if every < 1:
        raise ConfigError(f"config.json: full_attention_interval={every}: expected 1 or more")
    kinds = hf.get("layer_types") or [
        _STATE if (i + 1) % every else _ATTENDS for i in range(num_layers)
    ]
    if unknown := sorted({str(it) for it in kinds} - {_STATE, _ATTENDS}):
        raise ConfigError(
            f"config.json: layer_types contains {unknown[0]!r}: expected {_STATE} and {_ATTENDS}"
        )
    config = dataclasses.replace(
        read_decoder(plain, name, defaults, qk_norm=True),
        unit_norms=True,
        output_gate=True,
        recurrent=RecurrentConfig(
            layers=tuple(it == _STATE for it in kinds),
            fused=name == "qwen3_next",
            **{field: read_int(hf, key, size) for field, (key, size) in _SIZES.items()},
        ),
    )
    return _with_experts(hf, config) if experts else config


def _with_experts(hf: Mapping[str, Any], config: ModelConfig) -> ModelConfig:
    nexts = config.family == "qwen3_next"
    for key, uniform in (("mlp_only_layers", (None, [])), ("decoder_sparse_step", (None, 1))):
        if hf.get(key) not in uniform:
            raise ConfigError(
                f"config.json: {key}={hf[key]!r}: layers with and without experts in one model "
                "are not supported"
            )
    experts = ExpertsConfig(
        count=read_int(hf, "num_experts", 512 if nexts else 256),
        active=read_int(hf, "num_experts_per_tok", 10 if nexts else 8),
        normalise=read_bool(hf, "norm_topk_prob", True) if nexts else True,
        shared=read_int(hf, "shared_expert_intermediate_size", 512),
    )
    width = read_int(hf, "moe_intermediate_size", 512)
    return dataclasses.replace(config, experts=experts, mlp_dim=width)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Of any of the three the ``config.json`` that gives the config back."""
    recurrent, experts, family = config.recurrent, config.experts, _ALL[config.family]
    assert recurrent is not None
    values = {
        **write_decoder(config, family.architecture, family.model_type),
        "attention_bias": False,
        "layer_types": [_STATE if it else _ATTENDS for it in recurrent.layers],
        **{key: getattr(recurrent, field) for field, (key, _) in _SIZES.items()},
    }
    if experts is None:
        return values
    return values | {
        "moe_intermediate_size": config.mlp_dim,
        "num_experts": experts.count,
        "num_experts_per_tok": experts.active,
        "norm_topk_prob": experts.normalise,
        "shared_expert_intermediate_size": experts.shared,
    }


def _experts_apart(
    tensors: "Mapping[str, StoredTensor]", config: ModelConfig
) -> "Mapping[str, StoredTensor]":
    """Experts of a layer in one tensor as a tensor of each."""
    from jaxrag.models.arranged import experts_apart  # it brings NumPy

    return experts_apart(tensors, config)


_MLP = "model.layers.{layer}.mlp."
_MIXER = "model.layers.{layer}.linear_attn."
_QUERIES = "model.layers.{layer}.self_attn.q_proj.weight"
_ATTENTION = (
    *(it for it in DECODER if it.key != _QUERIES),
    TensorRule(_QUERIES, ("layers.q", "layers.attn_gate"), "(n p h) d -> d n h"),
    *QK_NORM,
)
_SHARED = (
    TensorRule(_MLP + "shared_expert.gate_proj.weight", ("layers.shared_gate",), "f d -> d f"),
    TensorRule(_MLP + "shared_expert.up_proj.weight", ("layers.shared_up",), "f d -> d f"),
    TensorRule(_MLP + "shared_expert.down_proj.weight", ("layers.shared_down",), "d f -> f d"),
    TensorRule(_MLP + "shared_expert_gate.weight", ("layers.shared_share",), "o d -> d o"),
)
_RECURRENT = (
    TensorRule(_MIXER + "conv1d.weight", ("layers.conv",), "c o w -> c o w"),
    TensorRule(_MIXER + "dt_bias", ("layers.decay_bias",), "v -> v"),
    TensorRule(_MIXER + "A_log", ("layers.decay_log",), "v -> v"),
    TensorRule(_MIXER + "norm.weight", ("layers.out_norm",), "h -> h"),
    TensorRule(_MIXER + "out_proj.weight", ("layers.out",), "d (v h) -> v h d"),
)
_FUSED = (
    TensorRule(_MIXER + "in_proj_qkvz.weight", ("layers.mixed",), "(k e) d -> d k e"),
    TensorRule(_MIXER + "in_proj_ba.weight", ("layers.rate", "layers.decay"), "(k p r) d -> d k r"),
)
_APART = (
    TensorRule(_MIXER + "in_proj_qkv.weight", ("layers.qkv",), "c d -> d c"),
    TensorRule(_MIXER + "in_proj_z.weight", ("layers.out_gate",), "(v h) d -> d v h"),
    TensorRule(_MIXER + "in_proj_b.weight", ("layers.rate",), "(k r) d -> d k r"),
    TensorRule(_MIXER + "in_proj_a.weight", ("layers.decay",), "(k r) d -> d k r"),
)


def _family(
    name: str, architecture: str, defaults: Defaults, tensors: tuple[TensorRule, ...]
) -> Family:
    text, experts = "" if name == "qwen3_next" else "_text", EXPERTS[0] in tensors
    return Family(
        name=name,
        architecture=f"{architecture}ForCausalLM",
        model_type=name + text,
        read_config=functools.partial(_read, name=name, defaults=defaults, experts=experts),
        write_config=write_config,
        tensors=_ATTENTION + _RECURRENT + tensors,
        ignored=("mtp.*",),
        within=(f"{architecture}ForConditionalGeneration",) if text else (),
        arrange=_experts_apart if experts else None,
    )


NEXT = _family("qwen3_next", "Qwen3Next", _NEXT, _FUSED + EXPERTS + _SHARED)
DENSE = _family("qwen3_5", "Qwen3_5", _DENSE, _APART + GATED_MLP)
MOE = _family("qwen3_5_moe", "Qwen3_5Moe", _MOE, _APART + EXPERTS + _SHARED)
_ALL = {it.name: it for it in (NEXT, DENSE, MOE)}

"""Gemma 4: layers with a window have other heads than those without, as have their angles.

KV has one shape in all layers here, so that heads are arranged as they are loaded (arranged.py).
So are the weights of experts, which hold some vectors that stand before and behind them. The last
layers of E2B and E4B have no K and V and attend to those of others; there each layer has an input
of its own, too, of the token and its embedding.
"""

import dataclasses
from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from jaxrag.base.config import ExpertsConfig, InParts, ModelConfig, RopeConfig
from jaxrag.base.errors import ConfigError
from jaxrag.models.family import QK_NORM, Family, TensorRule
from jaxrag.models.gemma import TENSORS, read_gemma
from jaxrag.models.hf_config import (
    Defaults,
    read_bool,
    read_int,
    read_num_layers,
    read_optional_int,
    read_positive,
)

if TYPE_CHECKING:
    from jaxrag.models.tensor_files import StoredTensor

_DEFAULTS = Defaults(
    vocab_size=262_144,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=30,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=131_072,
    rms_norm_eps=1e-6,
    bos_token_id=2,
    eos_token_ids=(1,),
)
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_CAP = "final_logit_softcapping"
_ROPES: dict[str, dict[str, Any]] = {
    _GLOBAL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    _LOCAL: {"rope_type": "default", "rope_theta": 1e4},
}


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Every sixth layer and the last are global, unless ``layer_types`` says otherwise."""
    if read_bool(hf, "attention_bias", False):
        raise ConfigError("config.json: attention_bias=True is not supported for gemma4 models")
    if hf.get("rope_scaling"):
        raise ConfigError(
            f"config.json: rope_scaling={hf['rope_scaling']!r:.200} is not supported for gemma4 "
            "models; give every kind of layer its own in rope_parameters"
        )
    num_layers = read_num_layers(hf, _DEFAULTS.num_hidden_layers)
    every = [_LOCAL if (i + 1) % 6 and i < num_layers - 1 else _GLOBAL for i in range(num_layers)]
    kinds = list(hf.get("layer_types") or every)
    if kinds[-1:] != [_GLOBAL]:
        raise ConfigError(f"config.json: layer_types={kinds[-1:]!r}: the last has to be {_GLOBAL}")
    plain = ChainMap(
        {"rope_parameters": None, "rope_scaling": None},
        {"sliding_window": hf.get("sliding_window", 512)},
        cast(dict[str, Any], hf),
    )
    config = read_gemma(plain, "gemma4", _DEFAULTS, kinds, understood=(_CAP,))
    sizes = {
        _LOCAL: (config.head_dim, config.num_kv_heads),
        _GLOBAL: _global_heads(hf, config, kinds),
    }
    sizes = {kind: sizes[kind] for kind in sorted(set(kinds))}
    head_dim = max(size for size, _ in sizes.values())
    if any(head_dim % size for size, _ in sizes.values()):
        raise ConfigError(
            f"config.json: head_dim={config.head_dim}, global_head_dim={head_dim}: expected a "
            "multiple of the other"
        )
    num_kv_heads = max(-(-count * size // head_dim) for size, count in sizes.values())
    for size, count in sizes.values():
        if num_kv_heads * (head_dim // size) % count:
            raise ConfigError(
                f"config.json: {count} KV heads of {size} do not divide {num_kv_heads} of "
                f"{head_dim}, which layers of the other kind have"
            )
    shared, input_dim = _read_shared(hf, config)
    ropes = [_read_rope(hf, kind, size, head_dim) for kind, (size, _) in sizes.items()]
    return dataclasses.replace(
        config,
        head_dim=head_dim,
        num_kv_heads=num_kv_heads,
        keys_as_values=read_bool(hf, "attention_k_eq_v", False),
        own_kv_heads=tuple(sizes[kind][1] for kind in kinds),
        rope=ropes[0],
        more_ropes=tuple(ropes[1:]),
        rope_layers=tuple(map(list(sizes).index, kinds)) if ropes[1:] else None,
        qk_norm=True,
        value_norm=True,
        layer_scales=True,
        unit_norms=False,
        wide_norms=True,
        attention_scale=1.0,
        experts=_read_experts(hf) if read_bool(hf, "enable_moe_block", False) else None,
        logit_cap=None if hf.get(_CAP) is None else read_positive(hf, _CAP, 0),
        shared_layers=shared,
        shared_mlp_dim=2 * config.mlp_dim
        if shared and read_bool(hf, "use_double_wide_mlp", False)
        else None,
        input_dim=input_dim,
    )


def _read_shared(hf: Mapping[str, Any], config: ModelConfig) -> tuple[int, int | None]:
    """How many layers take K and V of others, and the width of every layer's own input."""
    shared = read_int(hf, "num_kv_shared_layers", 0)
    if shared and read_bool(hf, "enable_moe_block", False):
        raise ConfigError(
            f"config.json: num_kv_shared_layers={shared} with enable_moe_block=True: expected "
            "layers that take K and V of others, or experts"
        )
    input_dim = read_optional_int(hf, "hidden_size_per_layer_input", 256) or None
    rows = read_int(hf, "vocab_size_per_layer_input", _DEFAULTS.vocab_size)
    if input_dim is not None and rows != config.vocab_size:
        raise ConfigError(
            f"config.json: vocab_size_per_layer_input={rows}: expected vocab_size="
            f"{config.vocab_size}"
        )
    return shared, input_dim


def _read_experts(hf: Mapping[str, Any]) -> ExpertsConfig:
    count, active, width = (
        read_optional_int(hf, key, None)
        for key in ("num_experts", "top_k_experts", "moe_intermediate_size")
    )
    if count is None or active is None or width is None:
        raise ConfigError(
            "config.json: enable_moe_block=True needs num_experts, top_k_experts and "
            "moe_intermediate_size"
        )
    return ExpertsConfig(count, active, normalise=True, beside=width)


def _global_heads(
    hf: Mapping[str, Any], config: ModelConfig, kinds: Sequence[str]
) -> tuple[int, int]:
    """Size and number of KV heads of layers without a window, as published or as saved again."""
    count, stated = config.num_kv_heads, hf.get("per_layer_config")
    if stated is not None:
        by_layer = {key.lstrip("0") or "0": its for key, its in stated.items()}
        own = [by_layer.get(str(layer), {}) for layer in range(len(kinds))]
        shared = [own[-1] if kind == _GLOBAL else {} for kind in kinds]
        if own != shared or not {"head_dim", "num_key_value_heads"} >= own[-1].keys():
            raise ConfigError(
                f"config.json: per_layer_config={stated!r:.200}: expected heads of all "
                f"{_GLOBAL} layers, alike"
            )
        size = read_int(own[-1], "head_dim", config.head_dim)
        count = read_int(own[-1], "num_key_value_heads", count)
    else:
        size = read_int(hf, "global_head_dim", 512)
        if read_bool(hf, "attention_k_eq_v", False):
            named = read_optional_int(hf, "num_global_key_value_heads", None)
            count = count if named is None else named
    if size < 2 or size % 2 or count < 1 or config.num_heads % count:
        raise ConfigError(
            f"config.json: global_head_dim={size}, num_global_key_value_heads={count}: expected an "
            f"even size, and a number that divides {config.num_heads} heads"
        )
    return size, count


def _read_rope(hf: Mapping[str, Any], kind: str, size: int, head_dim: int) -> RopeConfig:
    given: Any = (hf.get("rope_parameters") or _ROPES).get(kind)
    expected = {"rope_type", "rope_theta", "partial_rotary_factor"}
    named = given.get("rope_type") if isinstance(given, Mapping) else None
    if named != _ROPES[kind]["rope_type"] or not expected >= given.keys():
        raise ConfigError(
            f"config.json: rope_parameters.{kind}={given!r:.200}: expected rope_type "
            f"{_ROPES[kind]['rope_type']!r}, rope_theta and no scaling"
        )
    turning = size // 2
    if kind == _GLOBAL:
        share = read_positive(given, "partial_rotary_factor", 1.0)
        turning = min(int(share * size // 2), turning)
    elif given.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"config.json: rope_parameters.{kind} turns whole heads")
    theta = read_positive(given, "rope_theta", 1e4)
    return RopeConfig(theta, head_dim, False, InParts(head_dim // size, turning))


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Not possible: raises ConfigError."""
    raise ConfigError(
        "a gemma4 model has its heads arranged in one shape, which no Hugging Face directory has; "
        "keep the directory that it is from, or a jaxrag checkpoint"
    )


def _arrange(
    tensors: "Mapping[str, StoredTensor]", config: ModelConfig
) -> "Mapping[str, StoredTensor]":
    from jaxrag.models.arranged import arranged  # it brings NumPy, which no help text waits for

    return arranged(tensors, config)


_LAYER = "model.layers.{layer}."
_POST = _LAYER + "post_feedforward_layernorm_"
_OWN = (
    TensorRule("model.embed_tokens_per_layer.weight", ("input_embed",), "v (l i) -> v l i"),
    TensorRule("model.per_layer_model_projection.weight", ("input_proj",), "(l i) d -> d l i"),
    TensorRule("model.per_layer_projection_norm.weight", ("input_norm",), "i -> i"),
    TensorRule(_LAYER + "per_layer_input_gate.weight", ("layers.input_gate",), "i d -> d i"),
    TensorRule(_LAYER + "per_layer_projection.weight", ("layers.input_out",), "d i -> i d"),
    TensorRule(_LAYER + "post_per_layer_input_norm.weight", ("layers.post_input_norm",), "d -> d"),
    TensorRule(_LAYER + "layer_scalar", ("layers.layer_scale",), "s -> s"),
    TensorRule(_LAYER + "router.proj.weight", ("layers.router",), "e d -> d e"),
    TensorRule(
        _LAYER + "experts.gate_up_proj",
        ("layers.expert_gate", "layers.expert_up"),
        "e (p f) d -> e d f",
    ),
    TensorRule(_LAYER + "experts.down_proj", ("layers.expert_down",), "e d f -> e f d"),
    TensorRule(_POST + "1.weight", ("layers.post_dense_norm",), "d -> d"),
    TensorRule(_POST + "2.weight", ("layers.post_expert_norm",), "d -> d"),
)
FAMILY = Family(
    name="gemma4",
    architecture="Gemma4ForCausalLM",
    model_type="gemma4_text",
    read_config=read_config,
    write_config=write_config,
    tensors=TENSORS + QK_NORM + _OWN,
    needs_bos=True,
    within=("Gemma4ForConditionalGeneration",),
    arrange=_arrange,
)

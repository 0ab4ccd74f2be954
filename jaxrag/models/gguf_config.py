"""What ``config.json`` of a model in a GGUF file would say, from its metadata.

What llama.cpp would compute otherwise than the families here is refused by its key.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

from jaxrag.base.config import Llama3Scaling, RopeConfig
from jaxrag.base.errors import ModelError
from jaxrag.base.gguf import Header, read_header
from jaxrag.base.rotary import frequencies
from jaxrag.models.gguf import (
    ARCHITECTURES,
    GEMMAS,
    ROPE_FREQS,
    Numbers,
    architecture_of,
    tensors_of,
)
from jaxrag.models.text.gguf import ending_ids

# Layers; of the sizes that there are, these alone have scores by the width of a model.
_GEMMA_27B = {"gemma2": 46, "gemma3": 62}


# Granite's constants, by their names in config.json; 0 is as none.
_SCALES = {
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


_PARTLY = ("glm4", "chatglm")  # that rotate a part of a head
_CAPS = {  # Gemma 2's, as in config.json, and what llama.cpp takes where there is none
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


# Keys of another arithmetic, with the values that leave the result as it is.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "expert_shared_count": (0,),
    "expert_weights_scale": (0, 1),
    "expert_gating_func": (0, 1),
    "use_parallel_residual": (False,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "attention.causal": (True,),
    "attention.scale": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.temperature_scale": (0,),
    "rope.scaling.attn_factor": (0, 1),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
}


def read_gguf_config(path: Path) -> dict[str, Any]:
    """What ``config.json`` of the model would hold, from metadata and the shapes of tensors.

    Raises ModelError for a file that is truncated or inconsistent, and for an architecture, a type
    of tensors or a rotary scaling that is not read.
    """
    header = read_header(path)
    architecture = architecture_of(header)
    tensors = tensors_of(header)
    number = Numbers(header, architecture)
    heads, width = number.whole("attention.head_count"), number.whole("embedding_length")
    head_dim = number.whole("attention.key_length", width // heads)
    number.require("attention.value_length", (head_dim,))
    rotary = number.whole("rope.dimension_count", head_dim)
    if architecture not in _PARTLY or not 0 < rotary <= head_dim:
        number.require("rope.dimension_count", (head_dim,))
    if architecture == "granite":  # llama.cpp's switch for models that do not rotate
        number.require("rope.scaling.finetuned", (True,))
    if header.numbers(f"{architecture}.rope.dimension_sections").any():
        raise ModelError(
            f"{header.path}: {architecture}.rope.dimension_sections is there, positions of "
            "several kinds, which are not supported; take a model of text alone"
        )
    scales = _scales(number, head_dim) if architecture == "granite" else {}
    gemma2 = architecture == "gemma2"
    for key, neutral in _UNSUPPORTED.items():
        if not ((scales and key in _SCALES.values()) or (gemma2 and key in _CAPS)):
            number.require(key, neutral)
    experts = _experts(number, architecture)
    window = number.whole("attention.sliding_window", 4096 if gemma2 else 0)
    if window and architecture not in ("llama", "mistral", "olmo2", "gpt-oss", *GEMMAS):
        number.require("attention.sliding_window", (0,))
    kind = ARCHITECTURES[architecture]
    if architecture == "llama" and (window or experts):  # all that sets them apart from a Llama
        kind = "MixtralForCausalLM" if experts else ARCHITECTURES["mistral"]
    matrices = {tensor.identity[1] for tensor in tensors.values() if len(tensor.shape) > 1}
    bos = header.number("tokenizer.ggml.bos_token_id", -1)
    embed = tensors.get("model.embed_tokens.weight")
    rope = _rope(header, number, head_dim)
    own: dict[str, Any] = {"rope_parameters": rope}
    if architecture in GEMMAS:
        large = number.whole("block_count") == _GEMMA_27B[architecture]
        scalar = width // heads if large else head_dim
        own = {**_of_gemma(number, rope, architecture), "query_pre_attn_scalar": scalar}
    elif architecture == "gpt-oss" and rope["rope_type"] != "default":
        own = {"rope_parameters": {**rope, "truncate": False}}  # as published
    elif architecture in _PARTLY:
        own = {"rope_parameters": {**rope, "partial_rotary_factor": rotary / head_dim}}
    elif window and architecture == "olmo2":
        kind, own = "Olmo3ForCausalLM", _of_olmo3(header, rope)
    return {
        **own,
        **experts,
        "architectures": [kind],
        "vocab_size": 0 if embed is None else embed.shape[0],
        "hidden_size": width,
        "intermediate_size": number.whole("feed_forward_length"),
        "num_hidden_layers": number.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": number.whole("context_length"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in tensors,
        "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in tensors,
        "sliding_window": window or None,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "bos_token_id": None if bos == -1 else bos,
        "eos_token_id": ending_ids(header),
        "dtype": "float32" if matrices == {"F32"} else "bfloat16",
        **scales,
    }


def _of_gemma(number: "Numbers", rope: dict[str, Any], architecture: str) -> dict[str, Any]:
    """What it says of itself beside the rest."""
    if architecture == "gemma2":
        caps = {key: number(key, default) or None for key, default in _CAPS.items()}
        return {"rope_parameters": rope, **caps}
    local = {"rope_type": "default", "rope_theta": number("rope.freq_base_swa", 10_000.0)}
    return {
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
        "sliding_window_pattern": number.whole("attention.sliding_window_pattern", 6),
    }


def _of_olmo3(header: Header, rope: dict[str, Any]) -> dict[str, Any]:
    """An OLMo 2 with windows, in all layers but every fourth, unless the file says in which."""
    local = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    said = header.numbers("olmo2.attention.sliding_window_pattern").tolist()
    kinds = ["sliding_attention" if it else "full_attention" for it in said]
    return {
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
        "layer_types": kinds or None,
    }


def _experts(number: "Numbers", architecture: str) -> dict[str, Any]:
    """Of a model with experts what ``config.json`` says of them."""
    count = number.whole("expert_count", 0)
    if not count and architecture not in ("qwen3moe", "gpt-oss"):
        return {}
    used = {"num_experts_per_tok": number.whole("expert_used_count")}
    if architecture == "qwen3moe":
        return {
            **used,
            "num_experts": count,
            "moe_intermediate_size": number.whole("expert_feed_forward_length"),
            "norm_topk_prob": True,  # llama.cpp divides by their sum, always
        }
    if architecture not in ("llama", "gpt-oss"):
        number.require("expert_count", (0,))
    return {**used, "num_local_experts": count}


def _scales(number: Numbers, head_dim: int) -> dict[str, float]:
    found = {name: number(key, 0) or 1.0 for name, key in _SCALES.items()}
    return {**found, "attention_multiplier": number("attention.scale", 0) or head_dim**-0.5}


def _rope(header: Header, number: Numbers, head_dim: int) -> dict[str, Any]:
    """The rotary settings, as ``read_rope`` reads them."""
    theta = number("rope.freq_base", 10_000.0)
    kind = number.text("rope.scaling.type", "linear")
    factor = number("rope.scaling.factor", number("rope.scale_linear", 0)) or 1.0
    original = number.whole("rope.scaling.original_context_length", 0)
    scaled: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    if kind not in ("none", "linear", "yarn"):
        raise ModelError(
            f"{header.path}: rope.scaling.type={kind!r:.80} is not supported; none, linear, yarn "
            "and Llama 3's are read"
        )
    if kind != "none" and factor != 1:
        scaled |= {"rope_type": kind, "factor": factor}
    if scaled["rope_type"] == "yarn":
        named = {"original_max_position_embeddings": original or None,
                 "beta_fast": number("rope.scaling.yarn_beta_fast", 0) or None,
                 "beta_slow": number("rope.scaling.yarn_beta_slow", 0) or None}  # fmt: skip
        scaled |= {key: value for key, value in named.items() if value is not None}
    usual = 0.1 * math.log(factor) + 1 if kind == "yarn" and factor > 1 else 1.0
    stated = number("rope.scaling.yarn_attn_factor", 0)
    if stated not in (0, 1) and not math.isclose(stated, usual, rel_tol=1e-4):
        number.require("rope.scaling.yarn_attn_factor", (usual,))
    if ROPE_FREQS not in header.tensors:
        return scaled
    plain = RopeConfig(theta=theta, rotary_dim=head_dim, interleaved=False, scaling=None)
    return {**scaled, **_llama3(header, plain, original or 8192)}


def _llama3(header: Header, plain: RopeConfig, original: int) -> dict[str, Any]:
    """Llama 3's scaling, of which a file has only by what it divides each frequency."""
    stored = tensors_of(header)[ROPE_FREQS].view()
    given = Llama3Scaling(
        factor=float(stored.max()),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_positions=original,
    )
    expected = frequencies(plain) / frequencies(dataclasses.replace(plain, scaling=given))
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
        raise ModelError(
            f"{header.path}: {ROPE_FREQS} is not Llama 3's scaling with low_freq_factor=1, "
            f"high_freq_factor=4 and original_max_position_embeddings={original}; take the model "
            "as a Hugging Face directory"
        )
    fields = dataclasses.asdict(given)
    original = fields.pop("original_max_positions")
    return {"rope_type": "llama3", "original_max_position_embeddings": original, **fields}

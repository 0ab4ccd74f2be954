"""The tiny models of which ``make_goldens.py`` makes goldens."""

import dataclasses
from typing import Any

import torch

COMMON: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 256,
    "rms_norm_eps": 0.03,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.5}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "beta_fast": 8.0,
    "beta_slow": 0.5,
    "original_max_position_embeddings": 256,
}
YARN_MSCALE = {**YARN, "truncate": False, "mscale": 1.3, "mscale_all_dim": 0.6}
GLM_ROPE = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
MIXTRAL = {"num_local_experts": 5, "num_experts_per_tok": 2}
QWEN3_MOE = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 17}
GPT_OSS = {
    "num_hidden_layers": 3,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
    "swiglu_alpha": 1.3,
    "swiglu_limit": 0.9,
    "rope_parameters": {**YARN, "truncate": False, "original_max_position_embeddings": 24},
}
GLM_SIZES = {"head_dim": 12, "rope_parameters": GLM_ROPE, "eos_token_id": [2, 7]}
SCALES = {
    "embedding_multiplier": 1.7,
    "attention_multiplier": 0.21,
    "residual_multiplier": 0.6,
    "logits_scaling": 3.0,
}
GEMMA2 = {
    "num_hidden_layers": 3,
    "sliding_window": 5,
    "query_pre_attn_scalar": 10,
    "attn_logit_softcapping": 1.7,
    "final_logit_softcapping": 4.0,
}
GEMMA4 = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "global_head_dim": 12,
    "sliding_window": 5,
    "final_logit_softcapping": 6.0,
    "hidden_size_per_layer_input": 0,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 100.0,
            "partial_rotary_factor": 0.5,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
    },
}
GEMMA4_SHARED = {
    **GEMMA4,
    "num_hidden_layers": 7,
    "layer_types": [
        "sliding_attention",
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "full_attention",
    ],
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 14,
    "vocab_size_per_layer_input": COMMON["vocab_size"],
    "num_key_value_heads": 2,
}
HYBRID = {
    "num_hidden_layers": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.6},
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
    "linear_conv_kernel_dim": 3,
}
HYBRID_EXPERTS = {**QWEN3_MOE, "shared_expert_intermediate_size": 13}
GEMMA_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = {
    "num_hidden_layers": 3,
    "layer_types": GEMMA_KINDS,
    "sliding_window": 5,
    "query_pre_attn_scalar": 10,
    "rope_parameters": {
        "full_attention": LINEAR,
        "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
    },
}
OLMO3 = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": YARN,
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}


@dataclasses.dataclass(frozen=True)
class Golden:
    """One model to make: its family, what differs from COMMON, and how it is saved."""

    name: str
    model_type: str
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    max_shard_size: str = "1GB"
    # Lengths of the prefix, three chunks and the final block in each row; the rest of it is empty.
    rows: tuple[tuple[int, tuple[int, ...], int], ...] = ((3, (4, 6, 2), 5), (2, (5, 1, 4), 4))
    omit: tuple[str, ...] = ()  # keys of COMMON that are left to the family's default


GOLDENS = (
    Golden("llama", "llama"),
    Golden("llama_tied", "llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    Golden("llama_bias", "llama", {"attention_bias": True, "mlp_bias": True}),
    Golden("llama_linear", "llama", {"rope_parameters": LINEAR}),
    Golden("llama_llama3", "llama", {"rope_parameters": LLAMA3}),
    Golden("llama_yarn", "llama", {"rope_parameters": YARN}),
    Golden("llama_sharded_bf16", "llama", {}, torch.bfloat16, "16KB"),
    Golden("llama_fp16", "llama", {"num_key_value_heads": 3}, torch.float16),
    Golden("mistral_window", "mistral", {"sliding_window": 5}),
    Golden("mistral_yarn", "mistral", {"sliding_window": None, "rope_parameters": YARN_MSCALE}),
    Golden(
        "qwen2",
        "qwen2",
        {"num_attention_heads": 3, "num_key_value_heads": 1},
        omit=("head_dim",),
    ),
    Golden(
        "qwen2_mixed_window",
        "qwen2",
        {
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
        },
    ),
    Golden("qwen3", "qwen3"),
    Golden("mixtral", "mixtral", MIXTRAL),
    Golden("mixtral_window", "mixtral", {**MIXTRAL, "sliding_window": 5}),
    Golden("qwen3_moe", "qwen3_moe", QWEN3_MOE),
    Golden(
        "qwen3_moe_normalised",
        "qwen3_moe",
        {**QWEN3_MOE, "norm_topk_prob": True, "attention_bias": True, "num_experts": 7},
    ),
    Golden("qwen3_next", "qwen3_next", {**HYBRID, **HYBRID_EXPERTS, "norm_topk_prob": True}),
    Golden(
        "qwen3_5",
        "qwen3_5_text",
        {
            **HYBRID,
            "num_hidden_layers": 5,
            "layer_types": ["linear_attention"] * 3 + ["full_attention", "linear_attention"],
            "linear_conv_kernel_dim": 4,
            "linear_num_key_heads": 3,
            "tie_word_embeddings": True,
        },
        rows=((9, (70, 6, 3), 66), (2, (5, 61, 4), 40)),
    ),
    Golden("qwen3_5_moe", "qwen3_5_moe_text", {**HYBRID, **HYBRID_EXPERTS}),
    Golden("gpt_oss", "gpt_oss", GPT_OSS),
    Golden(
        "gpt_oss_global",
        "gpt_oss",
        {**GPT_OSS, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
    ),
    Golden("glm", "glm", GLM_SIZES),
    Golden("glm4", "glm4", GLM_SIZES),
    Golden("gemma2", "gemma2", {**GEMMA2, "rope_parameters": LINEAR}),
    Golden(
        "gemma2_bf16",
        "gemma2",
        {
            **GEMMA2,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "query_pre_attn_scalar": 7,
            "attn_logit_softcapping": None,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "num_attention_heads": 4,
        },
        torch.bfloat16,
    ),
    Golden("gemma3", "gemma3_text", GEMMA),
    Golden(
        "gemma3_pattern_bf16",
        "gemma3_text",
        {
            "num_hidden_layers": 4,
            "sliding_window_pattern": 2,
            "sliding_window": 6,
            "query_pre_attn_scalar": 7,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "num_attention_heads": 4,
        },
        torch.bfloat16,
        omit=("rope_parameters",),
    ),
    Golden(
        "gemma4",
        "gemma4_text",
        {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    Golden(
        "gemma4_experts",
        "gemma4_text",
        {
            **GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 2,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 17,
        },
    ),
    Golden(
        "gemma4_bf16",
        "gemma4_text",
        {
            **GEMMA4,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "tie_word_embeddings": False,
        },
        torch.bfloat16,
    ),
    Golden("gemma4_shared", "gemma4_text", GEMMA4_SHARED),
    Golden(
        "gemma4_shared_bf16",
        "gemma4_text",
        {
            **GEMMA4_SHARED,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "use_double_wide_mlp": False,
        },
        torch.bfloat16,
    ),
    Golden("olmo2", "olmo2"),
    Golden(
        "olmo2_bias",
        "olmo2",
        {"attention_bias": True, "num_attention_heads": 4, "num_key_value_heads": 4},
        omit=("head_dim",),
    ),
    Golden("olmo3", "olmo3", {**OLMO3, "sliding_window": 5}),
    Golden(
        "olmo3_every_fourth",
        "olmo3",
        {"num_hidden_layers": 4, "sliding_window": 6},
        omit=("rope_parameters",),
    ),
    Golden(
        "smollm3",
        "smollm3",
        {"num_hidden_layers": 4, "tie_word_embeddings": False, "rope_parameters": YARN},
    ),
    Golden(
        "smollm3_window",
        "smollm3",
        {
            "num_hidden_layers": 3,
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 6,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    Golden("granite", "granite", SCALES),
    Golden(
        "granite4",
        "granitemoehybrid",
        {
            **SCALES,
            "intermediate_size": 19,
            "shared_intermediate_size": 37,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "layer_types": ["attention"] * 2,
            "position_embedding_type": "rope",
            "mamba_n_heads": 4,
            "time_step_limit": None,
        },
    ),
    Golden(
        "granite_bias",
        "granite",
        {
            **SCALES,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "num_attention_heads": 4,
            "logits_scaling": 0.7,
            "rope_parameters": LLAMA3,
        },
        omit=("head_dim",),
    ),
)

"""Make tests/goldens/published.json: the ``config.json`` of models as they are published.

The sizes and constants are those of the models; transformers' own configuration classes write them,
and in the older form too where a model has one text part alone. Nothing of jaxrag is imported here.
Run it where torch and transformers are installed:

    python scripts/make_published_configs.py
"""

import json
import math
from pathlib import Path
from typing import Any

import transformers
from make_goldens import config_v4

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA = {
    "vocab_size": 128_256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": LLAMA3,
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
}
LOCAL = {"rope_type": "default", "rope_theta": 10_000.0}
GEMMA = {
    "vocab_size": 262_144,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "max_position_embeddings": 32_768,
    "query_pre_attn_scalar": 256,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": LOCAL,
    },
}
GEMMA_8X = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": LOCAL,
}
YARN_GPT_OSS = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
GPT_OSS = {
    "rope_parameters": YARN_GPT_OSS,
    "eos_token_id": 200_002,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
OLMO = {
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 100_257,
}
THETA_5 = {"rope_type": "default", "rope_theta": 500_000.0}
GRANITE = {
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "tie_word_embeddings": True,
}
MISTRAL_SMALL = {
    "vocab_size": 131_072,
    "hidden_size": 5120,
    "intermediate_size": 32_768,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
}


def rope(theta: float) -> dict[str, Any]:
    """Without scaling."""
    return {"rope_type": "default", "rope_theta": theta}


def newest(architecture: str, name: str, **values: Any) -> dict[str, Any]:
    """A model's config in the form of transformers 5 alone."""
    config = getattr(transformers, name)(**values, architectures=[architecture], dtype="bfloat16")
    return {"config": json.loads(config.to_json_string(use_diff=True))}


def plain(architecture: str, name: str, **values: Any) -> dict[str, Any]:
    """In the older form, too."""
    made = newest(architecture, name, **values)
    return {**made, "older": config_v4(made["config"])}


GEMMA_4B = {
    **GEMMA, "vocab_size": 262_208, "hidden_size": 2560, "intermediate_size": 10_240,
    "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4,
    "sliding_window": 1024, "max_position_embeddings": 131_072, "rope_parameters": GEMMA_8X,
}  # fmt: skip
GEMMA_27B = {
    **GEMMA_4B, "hidden_size": 5376, "intermediate_size": 21_504, "num_hidden_layers": 62,
    "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
    "query_pre_attn_scalar": 168,
}  # fmt: skip
GEMMA_4_31B = {
    "attention_k_eq_v": True, "final_logit_softcapping": 30.0, "global_head_dim": 512,
    "head_dim": 256, "hidden_size": 5376, "hidden_size_per_layer_input": 0,
    "intermediate_size": 21_504, "num_attention_heads": 32, "num_global_key_value_heads": 4,
    "num_hidden_layers": 60, "num_key_value_heads": 16, "sliding_window": 1024,
    "use_bidirectional_attention": "vision",
}  # fmt: skip
GEMMA_SEES = "Gemma3ForConditionalGeneration"


def published() -> dict[str, dict[str, Any]]:
    """Every model by its name."""
    return {
        "llama-3.1-8b": plain(
            "LlamaForCausalLM", "LlamaConfig", **LLAMA,
            hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
        ),
        "llama-3.2-1b": plain(
            "LlamaForCausalLM", "LlamaConfig",
            **{**LLAMA, "rope_parameters": {**LLAMA3, "factor": 32.0}}, head_dim=64,
            hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
            tie_word_embeddings=True,
        ),
        "llama-3.3-70b": plain(
            "LlamaForCausalLM", "LlamaConfig", **{**LLAMA, "num_attention_heads": 64},
            hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80,
        ),
        "gemma-3-270m": plain(
            "Gemma3ForCausalLM", "Gemma3TextConfig", **GEMMA,
            hidden_size=640, intermediate_size=2048, num_hidden_layers=18,
        ),
        "gemma-3-1b": plain(
            "Gemma3ForCausalLM", "Gemma3TextConfig", **GEMMA,
            hidden_size=1152, intermediate_size=6912, num_hidden_layers=26,
        ),
        "gemma-3-4b": newest(GEMMA_SEES, "Gemma3Config", text_config=GEMMA_4B),
        "gemma-3-27b": newest(GEMMA_SEES, "Gemma3Config", text_config=GEMMA_27B),
        "qwen3-30b-a3b": plain(
            "Qwen3MoeForCausalLM", "Qwen3MoeConfig", vocab_size=151_936, hidden_size=2048,
            intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
            num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
            num_experts_per_tok=8, norm_topk_prob=True, max_position_embeddings=40_960,
            rope_parameters=rope(1e6), bos_token_id=151_643, eos_token_id=151_645,
        ),
        "gpt-oss-20b": plain(
            "GptOssForCausalLM", "GptOssConfig", **GPT_OSS,
            num_hidden_layers=24, num_local_experts=32,
        ),
        "gpt-oss-120b": plain(
            "GptOssForCausalLM", "GptOssConfig", **GPT_OSS,
            num_hidden_layers=36, num_local_experts=128,
        ),
        "smollm3-3b": plain(
            "SmolLM3ForCausalLM", "SmolLM3Config", max_position_embeddings=65_536,
            rope_parameters=rope(5e6), eos_token_id=128_012, sliding_window=None,
        ),
        "olmo-2-7b": plain(
            "Olmo2ForCausalLM", "Olmo2Config", **OLMO, vocab_size=100_352,
            max_position_embeddings=4096, rope_parameters=THETA_5,
        ),
        "olmo-3-7b": plain(
            "Olmo3ForCausalLM", "Olmo3Config", **OLMO, vocab_size=100_278, sliding_window=4096,
            max_position_embeddings=65_536,
            rope_parameters={
                "sliding_attention": THETA_5,
                "full_attention": {
                    "rope_type": "yarn", "rope_theta": 500_000.0, "factor": 8.0,
                    "attention_factor": 0.1 * math.log(8) + 1, "beta_fast": 32.0, "beta_slow": 1.0,
                    "original_max_position_embeddings": 8192,
                },
            },
        ),
        "granite-3.3-8b": plain(
            "GraniteForCausalLM", "GraniteConfig", **GRANITE, vocab_size=49_159, hidden_size=4096,
            intermediate_size=12_800, num_attention_heads=32, attention_multiplier=0.0078125,
            logits_scaling=16.0, bos_token_id=0, eos_token_id=0,
        ),
        "granite-4.0-micro": newest(
            "GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig", **GRANITE,
            vocab_size=100_352, hidden_size=2560, intermediate_size=8192,
            shared_intermediate_size=8192, num_attention_heads=40, attention_multiplier=0.015625,
            logits_scaling=10.0, num_local_experts=0, num_experts_per_tok=0,
            position_embedding_type="rope", layer_types=["attention"] * 40,
            bos_token_id=100_257, eos_token_id=100_257,
        ),
        "granite-4.0-h-micro": newest(
            "GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig",
            **{**GRANITE, "rope_parameters": rope(1e4)},
            vocab_size=100_352, hidden_size=2048, intermediate_size=8192,
            shared_intermediate_size=8192, num_attention_heads=32, attention_multiplier=0.015625,
            logits_scaling=8.0, num_local_experts=0, num_experts_per_tok=0, mamba_n_heads=64,
            position_embedding_type="nope",
            layer_types=["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
        ),
        "mixtral-8x7b": plain(
            "MixtralForCausalLM", "MixtralConfig", vocab_size=32_000,
            max_position_embeddings=32_768, rope_parameters=rope(1e6), sliding_window=None,
        ),
        "mistral-small-3-24b": plain(
            "MistralForCausalLM", "MistralConfig", **MISTRAL_SMALL,
            max_position_embeddings=32_768, rope_parameters=rope(1e8),
        ),
        "mistral-small-3.2-24b": newest(
            "Mistral3ForConditionalGeneration", "Mistral3Config",
            text_config={
                **MISTRAL_SMALL, "model_type": "mistral", "max_position_embeddings": 131_072,
                "rope_parameters": rope(1e9),
            },
        ),
        "ministral-3-8b": newest(
            "Mistral3ForConditionalGeneration", "Mistral3Config",
            text_config={"model_type": "ministral3"},
        ),
        "llama-4-scout": newest("Llama4ForConditionalGeneration", "Llama4Config"),
        "qwen3-next-80b-a3b": newest("Qwen3NextForCausalLM", "Qwen3NextConfig"),
        "qwen3.5-9b": newest("Qwen3_5ForConditionalGeneration", "Qwen3_5Config"),
        "qwen3.5-35b-a3b": newest("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeConfig"),
        "gemma-4-e2b": newest("Gemma4ForConditionalGeneration", "Gemma4Config"),
        "gemma-2-9b": plain(
            "Gemma2ForCausalLM", "Gemma2Config", vocab_size=256_000, hidden_size=3584,
            intermediate_size=14_336, num_hidden_layers=42, num_attention_heads=16,
            num_key_value_heads=8, head_dim=256, query_pre_attn_scalar=256,
        ),
        "gemma-4-31b": newest(
            "Gemma4ForConditionalGeneration", "Gemma4Config", text_config=GEMMA_4_31B,
        ),
        "deepseek-v3": newest("DeepseekV3ForCausalLM", "DeepseekV3Config"),
    }  # fmt: skip


if __name__ == "__main__":
    lines = (f"{json.dumps(name)}: {json.dumps(it)}" for name, it in published().items())
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    Path("tests/goldens/published.json").write_text(text, encoding="utf-8")

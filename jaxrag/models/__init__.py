"""The model core: parameters, the forward pass, and the families it can load.

A new family is one file with a ``Family`` and one line here.
"""

from jaxrag.models import (
    gemma,
    gemma2,
    gemma4,
    glm,
    gpt_oss,
    granite,
    llama,
    mistral,
    mixtral,
    olmo,
    qwen2,
    qwen3,
    qwen3_moe,
    qwen3_next,
    smollm3,
)
from jaxrag.models.family import Family

FAMILIES: dict[str, Family] = {
    "llama": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "gemma2": gemma2.FAMILY,
    "gemma3": gemma.FAMILY,
    "gemma4": gemma4.FAMILY,
    "mixtral": mixtral.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "qwen3_next": qwen3_next.NEXT,
    "qwen3_5": qwen3_next.DENSE,
    "qwen3_5_moe": qwen3_next.MOE,
    "gpt_oss": gpt_oss.FAMILY,
    "glm": glm.GLM,
    "glm4": glm.GLM4,
    "granite": granite.GRANITE,
    "granite4": granite.GRANITE_4,
    "olmo2": olmo.OLMO2,
    "olmo3": olmo.OLMO3,
    "smollm3": smollm3.FAMILY,
}

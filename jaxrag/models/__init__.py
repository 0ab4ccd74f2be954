"""The model core: parameters, the forward pass, and the families it can load.

A new family is one file with a ``Family`` and one line here.
"""

from jaxrag.models import gemma, glm, granite, llama, mistral, olmo, qwen2, qwen3, smollm3
from jaxrag.models.family import Family

FAMILIES: dict[str, Family] = {
    "llama": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "gemma3": gemma.FAMILY,
    "glm": glm.GLM,
    "glm4": glm.GLM4,
    "granite": granite.FAMILY,
    "olmo2": olmo.OLMO2,
    "olmo3": olmo.OLMO3,
    "smollm3": smollm3.FAMILY,
}

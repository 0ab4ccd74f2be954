"""What every test shares: eight CPU devices, full matmul precision, a small odd-sized config."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # inherited by the subprocesses of the tests

import jax
import numpy as np
import pytest

from jaxrag.config import ModelConfig, RopeConfig

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "highest")

# No two sizes are equal, N * H != D and no constant is a common default, so that a swapped axis or
# a forgotten field changes the numbers.
TINY = ModelConfig(
    family="llama",
    vocab_size=101,
    num_layers=3,
    model_dim=24,
    mlp_dim=40,
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,
    norm_eps=3e-5,
    rope=RopeConfig(theta=5_300.0, rotary_dim=10, interleaved=False, scaling=None),
    max_positions=512,
    sliding_window=None,
    window_layers=None,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    post_norms=False,
    tie_embeddings=False,
    dtype="float32",
    bos_id=1,
    eos_ids=(2,),
)
GLM_ROPE = RopeConfig(theta=5_300.0, rotary_dim=6, interleaved=True, scaling=None)
FAMILY_CHANGES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 7},
    "qwen2": {"qkv_bias": True, "tie_embeddings": True},
    "qwen3": {"qk_norm": True},
    "glm": {"qkv_bias": True, "rope": GLM_ROPE},
    "glm4": {"qkv_bias": True, "post_norms": True, "rope": GLM_ROPE},
}


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., ModelConfig]:
    """``tiny_config(family="llama", **changes)``: a ModelConfig small enough for any test."""

    def make(family: str = "llama", **changes: Any) -> ModelConfig:
        return dataclasses.replace(TINY, family=family, **{**FAMILY_CHANGES[family], **changes})

    return make


@pytest.fixture
def rng() -> np.random.Generator:
    """The same numbers in every run, whatever ran before."""
    return np.random.default_rng(20)

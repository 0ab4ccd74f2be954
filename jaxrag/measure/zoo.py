"""Small Llamas with random weights: what is timed and tested.

Each is ``LLAMA_100M`` with other numbers, so that a new field of ``ModelConfig`` is filled in once.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax

from jaxrag.base.config import DType, ModelConfig, RopeConfig
from jaxrag.models.export import export_hf
from jaxrag.models.spec import init_params, num_params

# The shape of a small Llama: 100M parameters.
LLAMA_100M = ModelConfig(
    family="llama",
    vocab_size=32_000,
    num_layers=12,
    model_dim=768,
    mlp_dim=2048,
    num_heads=12,
    num_kv_heads=4,
    head_dim=64,
    norm_eps=1e-5,
    rope=RopeConfig(theta=10_000.0, rotary_dim=64, interleaved=False, scaling=None),
    max_positions=65_536,
    sliding_window=None,
    window_layers=None,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    post_norms=False,
    tie_embeddings=True,
    dtype="float32",
    bos_id=1,
    eos_ids=(2,),
)


def llama(**changes: Any) -> ModelConfig:
    """``LLAMA_100M`` with other numbers; all of a head is rotated, unless ``rope`` is among them.

    ``theta`` is RoPE's.
    """
    rope = LLAMA_100M.rope
    changed = RopeConfig(
        theta=changes.pop("theta", rope.theta),
        rotary_dim=changes.get("head_dim", rope.rotary_dim),
        interleaved=False,
        scaling=None,
    )
    return dataclasses.replace(LLAMA_100M, **{"rope": changed, **changes})


# One that a small machine serves at some requests a second.
SMALL_LLAMA = llama(
    num_layers=6, model_dim=256, mlp_dim=688, num_heads=8, num_kv_heads=4, head_dim=32,
    vocab_size=2000, eos_ids=(),
)  # fmt: skip


def random_named(config: ModelConfig, *, shape: bool = False) -> str:
    """What a result says of a random model: its parameters; with ``shape`` layers and heads too."""
    name = f"random Llama, {num_params(config) / 1e6:.1f}M"
    if not shape:
        return name
    return (
        f"{name}, {config.num_layers} layers, {config.num_heads} heads on {config.num_kv_heads} "
        f"KV heads of {config.head_dim}"
    )


def write_random(directory: Path, config: ModelConfig, dtype: DType, seed: int) -> Path:
    """A Hugging Face directory of random weights of that dtype; returns it."""
    config = dataclasses.replace(config, dtype=dtype)
    params = jax.jit(init_params, static_argnums=0)(config, jax.random.key(seed))
    export_hf(directory, params, config)
    return directory

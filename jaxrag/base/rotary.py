"""Angles of rotary position embedding, of every supported scaling, in NumPy alone.

Programs that hold no model read them too: whoever gives stored keys their places in another engine.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxrag.base.config import (
    InParts,
    LinearScaling,
    Llama3Scaling,
    NoRotation,
    RopeConfig,
    YarnScaling,
)


def frequencies(rope: RopeConfig) -> NDArray[Any]:
    """Radians per position of each rotated pair: [R/2] float64."""
    dim = rope.rotary_dim
    plain = rope.theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    match rope.scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return plain / factor
        case NoRotation():
            return np.zeros_like(plain)
        case InParts(parts, turning):
            each = plain[: dim // 2 // parts] ** parts
            return np.tile(np.where(np.arange(len(each)) < turning, each, 0.0), parts)
        case Llama3Scaling():
            return _llama3(plain, rope.scaling)
        case YarnScaling():
            return _yarn(plain, rope, rope.scaling)


def attention_factor(rope: RopeConfig) -> float:
    """What multiplies the rotary dims of q and k once each; 1 for everything but YaRN."""
    return rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0


def _llama3(plain: NDArray[Any], scaling: Llama3Scaling) -> NDArray[Any]:
    """Long wavelengths divided by the factor, short ones kept, a linear blend between."""
    turns = scaling.original_max_positions * plain / (2 * math.pi)  # over the original context
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return np.asarray(blend * plain + (1 - blend) * plain / scaling.factor)


def _yarn(plain: NDArray[Any], rope: RopeConfig, scaling: YarnScaling) -> NDArray[Any]:
    """NTK by parts: a ramp over the pair index between beta_fast and beta_slow turns."""

    def pair_of(turns: float) -> float:
        wavelength = scaling.original_max_positions / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = high - low if high != low else 0.001
    ramp = np.clip((np.arange(rope.rotary_dim // 2) - low) / width, 0.0, 1.0)
    return np.asarray(plain / scaling.factor * ramp + plain * (1 - ramp))

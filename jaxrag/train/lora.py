"""Low-rank adapters: a parameter tree of its own beside frozen weights (LoRA, section 4.1).

W + (alpha / rank) A B, with A [in, r] drawn at random and B [r, out] zero, so that training starts
from the model as it is. Weights are merged layer by layer inside the layer scan, so that merged
copies and the gradients of whole matrices exist for one layer at a time.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import ConfigError
from jaxrag.base.sharding import Rules, sharding
from jaxrag.base.types import Array
from jaxrag.models.spec import MLP, LayerParams, Params, ParamSpec, param_specs
from jaxrag.train.config import LoraPart

_NUM_INPUT_AXES = {"o": 2}  # [N, H] -> D; every other target reads one axis


class Adapter(struct.PyTreeNode):
    """A and B of one target; leading axis L in the tree of all layers."""

    a: Any  # [L, in..., r]
    b: Any  # [L, r, out...]


Adapters = dict[str, Adapter]


def adapter_specs(config: ModelConfig, lora: LoraPart) -> dict[str, Adapter]:
    """ParamSpec of every A and B, by target. ConfigError for those of experts, and recurrence."""
    layers = param_specs(config).layers
    if config.experts is not None and (of_experts := sorted(set(MLP).intersection(lora.targets))):
        raise ConfigError(
            f"[lora]: targets has {of_experts[0]!r}: experts take no adapters; name q, k, v and o"
        )
    if config.recurrent is not None:
        raise ConfigError(
            f"[lora]: targets={lora.targets!r:.80}: layers that keep a state take no adapters; "
            "leave [lora] out"
        )
    specs: dict[str, Adapter] = {}
    for target in sorted(set(lora.targets)):
        weight: ParamSpec = getattr(layers, target)
        cut = 1 + _NUM_INPUT_AXES.get(target, 1)
        inputs, outputs = weight.shape[1:cut], weight.shape[cut:]
        specs[target] = Adapter(
            a=ParamSpec(
                (weight.shape[0], *inputs, lora.rank),
                (*weight.axes[:cut], None),
                "normal",
                math.prod(inputs),
            ),
            b=ParamSpec(
                (weight.shape[0], lora.rank, *outputs),
                (weight.axes[0], None, *weight.axes[cut:]),
                "zeros",
            ),
        )
    return specs


def init_adapters(config: ModelConfig, lora: LoraPart, key: jax.Array) -> Adapters:
    """Adapters that change nothing yet, float32."""

    def make(spec: Adapter, key: jax.Array) -> Adapter:
        a = jax.random.normal(key, spec.a.shape, jnp.float32) * spec.a.fan_in**-0.5
        return Adapter(a=a, b=jnp.zeros(spec.b.shape, jnp.float32))

    specs = adapter_specs(config, lora)
    keys = jax.random.split(key, len(specs))
    return {name: make(spec, k) for (name, spec), k in zip(specs.items(), keys, strict=True)}


def adapter_shardings(config: ModelConfig, lora: LoraPart, mesh: Mesh) -> dict[str, Adapter]:
    """NamedSharding of every A and B."""

    def of(spec: ParamSpec, name: str) -> Any:
        return sharding(mesh, spec.shape, spec.axes, Rules(), f"lora {name}")

    return {
        name: Adapter(a=of(spec.a, f"{name}.a"), b=of(spec.b, f"{name}.b"))
        for name, spec in adapter_specs(config, lora).items()
    }


def merge_layer(p: LayerParams, adapters: Adapters, scale: float) -> LayerParams:
    """One layer's weights (no leading L) with its adapters added, in the weights' dtype."""
    merged = {}
    for name, adapter in adapters.items():
        weight: Array = getattr(p, name)
        rank = adapter.b.shape[0]
        delta = adapter.a.reshape(-1, rank) @ adapter.b.reshape(rank, -1)
        merged[name] = weight + (delta.reshape(weight.shape) * scale).astype(weight.dtype)
    return p.replace(**merged)


def merge_all(params: Params, adapters: Adapters, scale: float) -> Params:
    """The whole model with its adapters added, for export."""
    layers = jax.vmap(lambda p, a: merge_layer(p, a, scale))(params.layers, adapters)
    return params.replace(layers=layers)

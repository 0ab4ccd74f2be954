"""What a run costs before it is started: parameters, tokens, arithmetic, memory, accelerator hours.

An estimate, and an upper one: rows are taken to be full and causal from end to end, which is what
full mode on one sample a row costs; block mode and short samples cost less.
"""

import dataclasses
import math

import jax

from jaxrag.base.config import ModelConfig
from jaxrag.models.delta_rule import TILE
from jaxrag.models.flops import forward_flops
from jaxrag.models.spec import ParamSpec, is_spec, num_params
from jaxrag.train.config import LoraPart, TrainConfig
from jaxrag.train.lora import adapter_specs

H100_PEAK = 989e12  # dense bfloat16 FLOP/s of one H100 SXM, from its data sheet
# Of a step in forward passes: gradients of activations and of weights cost one each. Adapters are
# merged into the weights, so theirs come from the weights' and cost no less.
PASSES = 3
UTILISATION = 0.4  # model FLOPs over peak that a well-tuned run of this size reaches


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of a whole run; bytes are of one device."""

    params: int
    trained_params: int
    tokens_per_step: int
    tokens: int
    flops_per_step: int
    flops: int
    weight_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    activation_bytes: int

    @property
    def device_bytes(self) -> int:
        """Memory of one device at the peak of a step."""
        return (
            self.weight_bytes + self.optimizer_bytes + self.gradient_bytes + self.activation_bytes
        )

    @property
    def h100_hours(self) -> float:
        """Hours on one H100 at 40 % utilisation; on n of them, an n-th of it."""
        return self.flops / (H100_PEAK * UTILISATION) / 3600


def estimate(config: TrainConfig, model: ModelConfig) -> Cost:
    """The cost of a run.

    What remat computes again is not counted, by the convention of model FLOP utilisation.
    """
    c, data = config.compute, config.data
    width = 4 if c.dtype == "float32" else 2
    params = num_params(model)
    trained = params if config.lora is None else _adapter_params(model, config.lora)
    weight_ways = c.fsdp * c.tensor
    tokens = data.rows * data.row_tokens
    per_row = forward_flops(model, [(data.row_tokens, 0)], data.row_tokens)
    per_step = passes(config) * per_row * data.rows
    frozen = 0 if config.lora is None else params
    part_tokens = tokens // (c.accumulate * c.data * c.fsdp)
    logits = min(config.loss.logits_tokens, tokens // c.accumulate)
    logits_bytes = 3 * 4 * model.vocab_size * logits // (c.data * c.fsdp * c.tensor)
    return Cost(
        params=params,
        trained_params=trained,
        tokens_per_step=tokens,
        tokens=tokens * config.optimizer.steps,
        flops_per_step=per_step,
        flops=per_step * config.optimizer.steps,
        weight_bytes=(4 * trained + width * frozen) // weight_ways,
        optimizer_bytes=8 * trained // weight_ways,
        gradient_bytes=(8 if c.accumulate > 1 else 4) * trained // weight_ways,
        activation_bytes=part_tokens * _token_bytes(model, c.remat, width, c.tensor) + logits_bytes,
    )


def passes(config: TrainConfig) -> int:
    """Of a step, in forward passes; the teacher's is one more."""
    return PASSES + (config.loss.objective == "distill")


def _adapter_params(model: ModelConfig, lora: LoraPart) -> int:
    specs: list[ParamSpec] = jax.tree.leaves(adapter_specs(model, lora), is_leaf=is_spec)
    return sum(math.prod(spec.shape) for spec in specs)


def _token_bytes(model: ModelConfig, remat: str, width: int, tensor: int) -> int:
    """Bytes that one token keeps for the backward pass, over all layers and in the one at work.

    What the delta rule of a layer with states has beside its products is what XLA plans for on a
    CPU, float32 in any dtype.
    """
    c = model
    heads = c.num_heads * c.head_dim // tensor
    kv_heads = max(c.num_kv_heads * c.head_dim // tensor, 1)
    mlp = c.mlp_dim
    if c.experts is not None:
        beside = c.experts.beside
        mlp = c.experts.active * (beside or mlp) + (mlp if beside else 0)
    mlp //= tensor
    around = 4 * c.model_dim + 3 * mlp
    products = 2 * heads + 2 * kv_heads + 2 * mlp + 2 * c.model_dim
    everything = width * (products + around + heads)
    kept = _kept(remat, width * c.model_dim, width * products, width * heads, everything)
    if (r := c.recurrent) is None:
        return c.num_layers * kept + everything
    values, channels = r.value_heads * r.value_dim // tensor, r.channels // tensor
    products = channels + values + 2 * r.value_heads // tensor + 2 * mlp + 2 * c.model_dim
    rule = r.value_heads * (50 * r.key_dim + 20 * r.value_dim + 14 * TILE) // tensor
    whole = width * (products + around + values) + 4 * (rule + 10 * channels)
    kept_of_state = _kept(remat, width * c.model_dim, width * products, 0, whole)
    states = sum(r.layers)
    at_work = max(everything, whole)
    return (c.num_layers - states) * kept + states * kept_of_state + at_work


def _kept(remat: str, given: int, products: int, attended: int, everything: int) -> int:
    """Of one layer's values those that the backward pass finds."""
    return {
        "none": everything,
        "dots": given + products,
        "attention": given + attended,
        "full": given,
    }[remat]

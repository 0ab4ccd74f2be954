"""AdamW with warm-up and decay, and a clip of the global gradient norm, from optax."""

from typing import Any

import jax
import optax

from jaxrag.base.types import Array
from jaxrag.train.config import OptimizerPart


def learning_rate(part: OptimizerPart) -> optax.Schedule:
    """Rate of step 0, 1, ...: a linear warm-up, then the decay to ``final_share`` at the end."""
    peak, end = part.learning_rate, part.learning_rate * part.final_share
    left = max(part.steps - part.warmup_steps, 1)
    if part.decay == "cosine":
        after = optax.cosine_decay_schedule(peak, left, part.final_share)
    else:
        after = optax.linear_schedule(peak, peak if part.decay == "constant" else end, left)
    if not part.warmup_steps:
        return after
    # The first step already learns: rate (i + 1) / warmup_steps of the peak.
    warm_up = optax.linear_schedule(peak / part.warmup_steps, peak, max(part.warmup_steps - 1, 1))
    return optax.join_schedules([warm_up, after], [part.warmup_steps])


def make_optimizer(part: OptimizerPart) -> optax.GradientTransformation:
    """The update rule. Its state has two float32 copies of the trained parameters."""
    adamw = optax.adamw(
        learning_rate(part),
        b1=part.beta1,
        b2=part.beta2,
        eps=part.epsilon,
        weight_decay=part.weight_decay,
        mask=decays,
    )
    rules = [adamw]
    if part.clip_norm:
        rules.insert(0, optax.clip_by_global_norm(part.clip_norm))
    if part.residual_rate != 1.0:
        rules.append(optax.masked(optax.scale(part.residual_rate), writes_residual))
    return optax.chain(*rules) if len(rules) > 1 else adamw


def decays(params: Any) -> Any:
    """Which leaves weight decay applies to: matrices, by name; norms and biases do not decay."""

    def of(path: tuple[Any, ...], _: Array) -> bool:
        name = jax.tree_util.keystr(path[-1:])
        return "norm" not in name and "bias" not in name

    return jax.tree_util.tree_map_with_path(of, params)


def writes_residual(params: Any) -> Any:
    """Which leaves write into the residual stream, by name: ``o`` and ``down``."""

    def of(path: tuple[Any, ...], _: Array) -> bool:
        return jax.tree_util.keystr(path[-1:], simple=True) in ("o", "down")

    return jax.tree_util.tree_map_with_path(of, params)

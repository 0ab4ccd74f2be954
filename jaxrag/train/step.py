"""One training step: loss, gradient, update, compiled once for every batch of a run."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrag.base.config import ModelConfig
from jaxrag.base.sharding import Rules, replicated
from jaxrag.base.types import Array, Tokens
from jaxrag.models.attention import PACKED_OUT, PackedAttend
from jaxrag.models.decoder import Layer, forward, scaled
from jaxrag.models.linear import PRODUCT
from jaxrag.models.recurrent import packed
from jaxrag.models.rope import RopeTable
from jaxrag.models.spec import WRITES_RESIDUAL, LayerParams, Params, param_shardings
from jaxrag.train.config import LossPart, OptimizerPart, TrainConfig
from jaxrag.train.lora import Adapters, adapter_shardings, merge_layer
from jaxrag.train.loss import TokenLoss, token_loss, weighted_loss
from jaxrag.train.packing import CONTEXT, RESPONSE, TrainBatch

_BATCH = PartitionSpec(Rules().batch)


class TrainState(struct.PyTreeNode):
    """What a step changes; float32 but for the counter.

    There is no random state: the step draws nothing, and the data's order follows from its seed
    and ``stream.Position``, which is saved beside this.
    """

    step: Array  # int32 [], steps done
    trained: Params | Adapters  # all weights, or the adapters
    optimizer: optax.OptState


class StepMetrics(struct.PyTreeNode):
    """Of one step, on the device; nothing waits for it."""

    loss: Array  # what was minimised, per reduction
    response_loss: Array  # mean over response tokens
    context_loss: Array  # mean over the other predicted tokens
    accuracy: Array  # share of response tokens that are the most likely ones
    grad_norm: Array  # before clipping
    learning_rate: Array


class _Sums(NamedTuple):
    """Over one part of a batch."""

    response_loss: Array
    context_loss: Array
    correct: Array


StepProgram = Callable[
    [TrainState, Params | None, RopeTable, TrainBatch], tuple[TrainState, StepMetrics]
]


@dataclasses.dataclass(frozen=True)
class Program:
    """How the model of a run is computed; shared by training and evaluation.

    ``frozen`` weights are passed beside the adapters when ``lora_scale`` is set, else they are None
    and ``trained`` holds all weights.
    """

    config: ModelConfig
    dtype: str
    remat: str
    logits_tokens: int
    lora_scale: float | None
    mesh: Mesh
    distills: bool = False

    def wanted(self, frozen: Params | None, rope: RopeTable, batch: TrainBatch) -> Array | None:
        """Hidden [B, T, D] of the frozen weights under full attention, where they teach."""
        if not self.distills:
            return None
        plain = dataclasses.replace(self, lora_scale=None)
        return lax.stop_gradient(plain.hidden(frozen, None, rope, batch.in_full_mode())[0])

    def hidden(
        self, trained: Any, frozen: Params | None, rope: RopeTable, tokens: Tokens
    ) -> tuple[Array, Array]:
        """hidden [B, T, D] of which the output matrix makes logits, and that; in ``dtype``."""
        outer: Params = trained if frozen is None else frozen
        layers: Any = outer.layers if frozen is None else (outer.layers, trained)
        params = outer.replace(
            embed=self._cast(outer.embed),
            layers=layers,
            final_norm=self._cast(outer.final_norm),
            lm_head=None if outer.lm_head is None else self._cast(outer.lm_head),
        )
        attend = PackedAttend(self.config, rope, prefix_visible=False)
        memory = packed(self.config, tokens, attend.prefix_visible)
        hidden, _, _ = forward(params, self.config, tokens, None, attend, self._wrap, memory)
        hidden = scaled(hidden, self.config.logit_scale)
        return hidden, params.embed if params.lm_head is None else params.lm_head

    @property
    def unembedding(self) -> tuple[bool, int, float | None]:
        """Is the output matrix [V, D]? Tokens that have their logits at once, and their cap."""
        return self.config.tie_embeddings, self.logits_tokens, self.config.logit_cap

    def _wrap(self, layer: Layer) -> Layer:
        """Cast and merge one layer's weights inside the scan, then what remat says."""

        def wrapped(carry: tuple[Array, Any], scanned: Any) -> tuple[tuple[Array, Any], Any]:
            x, cache = carry
            weights, *rest = scanned
            if self.lora_scale is None:
                p: LayerParams = self._cast(weights)
            else:
                base, adapters = weights
                p = merge_layer(self._cast(base), adapters, self.lora_scale)
            x = lax.with_sharding_constraint(x, NamedSharding(self.mesh, _BATCH))
            return layer((x, cache), (p, *rest))

        policy = _policy(self.remat)
        if policy is None:
            return wrapped
        return jax.checkpoint(wrapped, policy=policy, prevent_cse=False)

    def _cast(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(self.dtype), tree)


def _policy(remat: str) -> Callable[..., Any] | None:
    """What the backward pass finds kept; None for everything.

    The CPU computes what is elementwise sooner again than it writes and reads it: measured, 15M
    parameters step 6 % faster in half the memory. So "none" keeps there what "dots" does.
    """
    policies = jax.checkpoint_policies
    products = policies.save_only_these_names(PACKED_OUT, PRODUCT)
    return {
        "full": policies.nothing_saveable,
        "attention": policies.save_only_these_names(PACKED_OUT),
        "dots": products,
        "none": products if jax.default_backend() == "cpu" else None,
    }[remat]


def program_of(config: TrainConfig, model: ModelConfig, mesh: Mesh) -> Program:
    """The program of a run."""
    if model.experts is not None and mesh.size > 1:
        model = dataclasses.replace(model, kernel_mesh=mesh)
    return Program(
        config=model,
        dtype=config.compute.dtype,
        remat=config.compute.remat,
        logits_tokens=config.loss.logits_tokens,
        lora_scale=None if config.lora is None else config.lora.alpha / config.lora.rank,
        mesh=mesh,
        distills=config.loss.objective == "distill",
    )


def new_state(config: TrainConfig, trained: Params | Adapters) -> TrainState:
    """The state before the first step; jit it to place the optimizer's part."""
    optimizer = make_optimizer(config.optimizer).init(trained)
    return TrainState(step=jnp.zeros((), jnp.int32), trained=trained, optimizer=optimizer)


def state_shardings(config: TrainConfig, model: ModelConfig, mesh: Mesh) -> TrainState:
    """NamedSharding of the whole state: the optimizer's copies lie as the weights do."""
    trained: Any
    if config.lora is None:
        trained = param_shardings(model, mesh)
    else:
        trained = adapter_shardings(model, config.lora, mesh)
    shapes = jax.tree.map(lambda _: jax.ShapeDtypeStruct((), jnp.float32), trained)
    transform = make_optimizer(config.optimizer)
    optimizer = optax.tree.map_params(
        transform,
        lambda _, place: place,
        jax.eval_shape(transform.init, shapes),
        trained,
        transform_non_params=lambda _: replicated(mesh),
    )
    step: Any = replicated(mesh)
    return TrainState(step=step, trained=trained, optimizer=optimizer)


def make_step(config: TrainConfig, program: Program, shardings: TrainState) -> StepProgram:
    """The compiled step. It takes the state (donated), frozen weights, rope and a batch [A, B, T].

    The A parts are computed one after the other and their gradients added in float32; what the
    loss is divided by is counted over the whole batch first, so A changes nothing but memory.
    """
    optimizer, rate = make_optimizer(config.optimizer), learning_rate(config.optimizer)

    def step(
        state: TrainState, frozen: Params | None, rope: RopeTable, batch: TrainBatch
    ) -> tuple[TrainState, StepMetrics]:
        num_response, num_context = (
            jnp.maximum((batch.kinds == kind).sum(), 1).astype(jnp.float32)
            for kind in (RESPONSE, CONTEXT)
        )
        weights = _weights(config.loss, batch.kinds, num_response, num_context)

        def loss_of(trained: Any, part: TrainBatch, weights: Array) -> tuple[Array, _Sums]:
            hidden, head = program.hidden(trained, frozen, rope, part.tokens)
            wanted = program.wanted(frozen, rope, part)
            loss, found = weighted_loss(
                hidden, head, part.targets, weights, wanted, *program.unembedding
            )
            return loss, _sums(found, part.kinds)

        gradient_of = jax.value_and_grad(loss_of, has_aux=True)
        parts = batch.kinds.shape[0]
        if parts == 1:
            part, its_weights = jax.tree.map(lambda x: x[0], (batch, weights))
            (loss, sums), gradient = gradient_of(state.trained, part, its_weights)
        else:

            def add(total: Any, part: tuple[TrainBatch, Array]) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, total, gradient_of(state.trained, *part)), None

            one = jax.tree.map(lambda x: x[0], (batch, weights))
            shapes = jax.eval_shape(gradient_of, state.trained, *one)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            ((loss, sums), gradient), _ = lax.scan(add, zeros, (batch, weights))
        updates, opt_state = optimizer.update(gradient, state.optimizer, state.trained)
        metrics = StepMetrics(
            loss=loss,
            response_loss=sums.response_loss / num_response,
            context_loss=sums.context_loss / num_context,
            accuracy=sums.correct / num_response,
            grad_norm=optax.tree.norm(gradient),
            learning_rate=jnp.asarray(rate(state.step), jnp.float32),
        )
        trained = optax.apply_updates(state.trained, updates)
        return TrainState(step=state.step + 1, trained=trained, optimizer=opt_state), metrics

    placed = (shardings, replicated(program.mesh))
    return jax.jit(step, donate_argnums=0, out_shardings=placed)


def make_evaluation(
    program: Program,
) -> Callable[[Any, Params | None, RopeTable, TrainBatch], TokenLoss]:
    """The compiled forward pass of a batch [B, T], to the loss of each of its tokens."""

    def evaluate(
        trained: Any, frozen: Params | None, rope: RopeTable, batch: TrainBatch
    ) -> TokenLoss:
        hidden, head = program.hidden(trained, frozen, rope, batch.tokens)
        wanted = program.wanted(frozen, rope, batch)
        tied, tokens, cap = program.unembedding
        return token_loss(hidden, head, batch.targets, tied, tokens, wanted, cap)

    return jax.jit(evaluate, out_shardings=replicated(program.mesh))


def _weights(part: LossPart, kinds: Array, num_response: Array, num_context: Array) -> Array:
    """What each token's loss counts: float32, the shape of ``kinds``."""
    response = (kinds == RESPONSE).astype(jnp.float32)
    context = (kinds == CONTEXT).astype(jnp.float32) * part.lm_weight
    if part.reduction == "sum":
        return response + context
    return response / num_response + context / num_context


def _sums(found: TokenLoss, kinds: Array) -> _Sums:
    def over(x: Array, kind: int) -> Array:
        return jnp.where(kinds == kind, x.astype(jnp.float32), 0.0).sum()

    return _Sums(
        response_loss=over(found.loss, RESPONSE),
        context_loss=over(found.loss, CONTEXT),
        correct=over(found.correct, RESPONSE),
    )


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
    """Which leaves weight decay applies to: matrices; norms, biases and sink logits do not."""

    def of(path: tuple[Any, ...], _: Array) -> bool:
        name = jax.tree_util.keystr(path[-1:])
        return not any(kind in name for kind in ("norm", "bias", "sink_logits", "decay_log"))

    return jax.tree_util.tree_map_with_path(of, params)


def writes_residual(params: Any) -> Any:
    """Which leaves write into the residual stream, by name."""

    def of(path: tuple[Any, ...], _: Array) -> bool:
        return jax.tree_util.keystr(path[-1:], simple=True) in WRITES_RESIDUAL

    return jax.tree_util.tree_map_with_path(of, params)

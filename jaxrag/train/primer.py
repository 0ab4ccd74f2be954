"""Trains the vectors of a primer, so that chunks are read behind them as full attention reads them.

The weights stay as they are, and no labels are needed: what is to be reached is the model's own
distribution under full attention, along its own answer (KL divergence). The vectors stand in front
of each chunk while it is encoded, and nowhere else.

  encoded:  prefix | vectors | c1          sees prefix, vectors, itself
            prefix | vectors | c2          the same
  answered: prefix | c1 | c2 | question, answer      the KV of the chunks, at the prompt's positions

Vectors of packets (arXiv:2604.13226) stand around each chunk instead, and belong to it throughout.
"""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxrag.base import struct
from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import ConfigError, TrainError
from jaxrag.base.shapes import row_length
from jaxrag.base.types import (
    EMPTY,
    FINAL,
    FIRST_CHUNK,
    HIDDEN,
    PREFIX,
    Array,
    HostArray,
    Partial,
    Tokens,
)
from jaxrag.models.attention import PackedAttend, scale_of, scored
from jaxrag.models.decoder import embedded, forward, layer_windows, rms_norm, run_layer, unembed
from jaxrag.models.model import Model
from jaxrag.models.rope import RopeTable, place
from jaxrag.models.spec import Params, require_trainable
from jaxrag.models.taps import Tap

_STATE = ".state.npz"  # beside the result, until the run is done


@dataclasses.dataclass(frozen=True)
class PrimerPrompt:
    """One prompt, and how the model goes on under full attention; int32 [T] each.

    Attributes:
      chunks: in the order of the prompt.
      answer: tokens of which the distribution is compared, the first included.
      packets: the chunks with the ids of the vectors around them, by which the vectors stay in the
        prompt (``encode.wrapped``); None: all vectors are in front of each chunk, and in no prompt.
    """

    prefix: HostArray
    chunks: tuple[HostArray, ...]
    final: HostArray
    answer: HostArray
    packets: tuple[HostArray, ...] | None = None

    @property
    def tokens(self) -> int:
        """Of the prompt and the answer."""
        parts = (self.prefix, *self.chunks, self.final, self.answer)
        return sum(map(len, parts))


@dataclasses.dataclass(frozen=True)
class PrimerSettings:
    """How the vectors are trained.

    Attributes:
      steps: of Adam, over ``batch`` prompts each.
      learning_rate: of the first step; it falls to 0 along half a cosine.
      seed: of the order of the prompts.
      every: steps between two looks at the prompts that are held out.
    """

    steps: int = 180
    learning_rate: float = 0.01
    batch: int = 1
    seed: int = 0
    every: int = 30

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "every"):
            if getattr(self, name) < 1:
                raise TrainError(f"{name}={getattr(self, name)}: expected 1 or more")
        if not 0 < self.learning_rate < 1:
            raise TrainError(f"learning_rate={self.learning_rate}: expected between 0 and 1")


@dataclasses.dataclass(frozen=True)
class PrimerProgress:
    """After a step; ``held_out`` is the mean KL of the held-out prompts, where it was measured."""

    step: int
    loss: float
    held_out: float | None


class _Batch(struct.PyTreeNode):
    """Prompts as rows, padded.

    Attributes:
      full: tokens [B, T] of prompt and answer in order.
      wanted: [B, A] columns of ``full`` behind which a token of the answer stands; -1: none.
      block: tokens [B, U] of prefix, vectors and chunks, each chunk behind the first two alone.
      context: [B, S] columns of ``block`` that the prompt holds, in its order.
      order: [B, S] int32 their places in the prompt; HIDDEN behind the last.
      final: tokens [B, F] of the final block and the answer.
      asked: [B, A] columns of ``final`` as ``wanted``.
    """

    full: Tokens
    wanted: Array
    block: Tokens
    context: Array
    order: Array
    final: Tokens
    asked: Array


def train_primer(
    model: Model,
    start: HostArray,
    prompts: Sequence[PrimerPrompt],
    held_out: Sequence[PrimerPrompt],
    settings: PrimerSettings,
    out: Path,
    *,
    resume: bool = False,
    told: Callable[[PrimerProgress], object] = lambda progress: None,
) -> HostArray:
    """Train vectors that begin as ``start`` [R, D]; returns them, float32.

    Or K before rotation and V of every layer in their place, [R, L, 2, K, H].

    The state of the run is kept beside ``out``, so that one that was ended goes on to the same
    vectors, to the bit on one machine.

    Raises ConfigError for a model that is not trained, and TrainError for no prompt, for a state
    that is of another run, and for a loss that is no number.
    """
    require_trainable(model.config)
    if model.config.recurrent is not None:
        raise ConfigError("vectors are not trained for layers that keep a state; use full_reuse")
    if not prompts:
        raise TrainError("no prompt to train with; give more questions")
    rows = _rows_of(model, settings.batch)
    lay = functools.partial(_lay_out, model, num_vectors=len(start))
    shapes = _Shapes.of([*prompts, *held_out], len(start))
    vectors = jnp.asarray(start, jnp.float32)
    schedule = optax.cosine_decay_schedule(settings.learning_rate, settings.steps)
    optimizer = optax.adam(schedule)
    state, step = optimizer.init(vectors), 0
    kept = out.with_name(out.name + _STATE)
    run = _run_id(model, start, prompts, settings)
    if resume and kept.exists():
        (vectors, state), step = _read_state(kept, (vectors, state), run)
    ropes = model.rope(max(shapes.full, shapes.block + shapes.final))
    plain = jax.jit(functools.partial(_divergence, config=model.config))
    grads = jax.jit(jax.value_and_grad(functools.partial(_divergence, config=model.config)))

    def looked() -> float | None:
        found = [
            float(plain(vectors, model.params, ropes, lay(some, rows, shapes)))
            for some in _batches(held_out, rows)
        ]
        return float(np.mean(found)) if found else None

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(vectors: Array, state: Any, grad: Array) -> tuple[Array, Any]:
        change, state = optimizer.update(grad, state, vectors)
        return optax.apply_updates(vectors, change), state

    if step == 0:
        told(PrimerProgress(0, float("nan"), looked()))
    while step < settings.steps:
        chosen = [prompts[i] for i in _chosen(len(prompts), rows, step, settings.seed)]
        loss, grad = grads(vectors, model.params, ropes, lay(chosen, rows, shapes))
        if not np.isfinite(value := float(loss)):
            raise TrainError(
                f"step {step + 1}: the loss is {value}; load the model in float32, or lower "
                f"learning_rate={settings.learning_rate}"
            )
        vectors, state = update(vectors, state, grad)
        step += 1
        look = step % settings.every == 0 or step == settings.steps
        if look:
            _write_state(kept, (vectors, state), step, run)
        told(PrimerProgress(step, value, looked() if look else None))
    found = np.asarray(vectors)
    kept.unlink(missing_ok=True)
    return found


def _rows_of(model: Model, batch: int) -> int:
    """Rows of a step: the devices of a mesh share them."""
    return -(-batch // model.batch_ways) * model.batch_ways


def _chosen(count: int, rows: int, step: int, seed: int) -> list[int]:
    """Prompts of a step: all of them before any comes again, in an order of its own each time."""
    found = []
    for at in range(step * rows, (step + 1) * rows):
        order = np.random.default_rng((seed, at // count)).permutation(count)
        found.append(int(order[at % count]))
    return found


def _batches(prompts: Sequence[PrimerPrompt], rows: int) -> Iterator[list[PrimerPrompt]]:
    """Whole batches; the last one is filled up with its first prompts."""
    for at in range(0, len(prompts), rows):
        some = list(prompts[at : at + rows])
        yield [some[i % len(some)] for i in range(rows)]


@dataclasses.dataclass(frozen=True)
class _Shapes:
    """Tokens of the rows of a batch: one program serves all prompts of a run."""

    full: int
    block: int
    context: int
    final: int
    answer: int

    @classmethod
    def of(cls, prompts: Sequence[PrimerPrompt], num_vectors: int) -> "_Shapes":
        before = [len(it.prefix) + sum(map(len, it.packets or it.chunks)) for it in prompts]
        final = max(len(prompt.final) + len(prompt.answer) for prompt in prompts)
        return cls(
            row_length(max(prompt.tokens for prompt in prompts)),
            row_length(max(before) + num_vectors),
            row_length(max(before)),
            -(-final // 16) * 16,
            max(len(prompt.answer) for prompt in prompts),
        )


def _lay_out(
    model: Model,
    prompts: Sequence[PrimerPrompt],
    rows: int,
    shapes: _Shapes,
    num_vectors: int,
) -> _Batch:
    """Rows of a batch, on the device."""
    vocab = model.config.vocab_size
    full, block, final = (
        {name: np.zeros((rows, width), np.int32) for name in ("ids", "positions", "segments")}
        for width in (shapes.full, shapes.block, shapes.final)
    )
    context = np.zeros((rows, shapes.context), np.int32)
    order = np.full((rows, shapes.context), HIDDEN, np.int32)
    wanted, asked = (np.full((rows, shapes.answer), -1, np.int32) for _ in range(2))

    def write(into: dict[str, HostArray], row: int, at: int, ids: HostArray, position: int,
              segment: int) -> int:  # fmt: skip
        here = slice(at, at + len(ids))
        into["ids"][row, here] = ids
        into["positions"][row, here] = position + np.arange(len(ids))
        into["segments"][row, here] = segment
        return at + len(ids)

    for row, prompt in enumerate(prompts):
        plain = np.concatenate((prompt.prefix, *prompt.chunks, prompt.final, prompt.answer))
        write(full, row, 0, plain, 0, FINAL)
        before = len(plain) - len(prompt.final) - len(prompt.answer)
        count = np.arange(len(prompt.answer))
        wanted[row, : len(count)] = before + len(prompt.final) - 1 + count
        asked[row, : len(count)] = len(prompt.final) - 1 + count
        at = write(block, row, 0, prompt.prefix, 0, PREFIX)
        columns = [np.arange(at)]
        vectors = np.arange(vocab, vocab + (0 if prompt.packets else num_vectors), dtype=np.int32)
        at = front = write(block, row, at, vectors, at, PREFIX)
        for segment, chunk in enumerate(prompt.packets or prompt.chunks, FIRST_CHUNK):
            columns.append(np.arange(at, at + len(chunk)))
            at = write(block, row, at, chunk, front, segment)
        here = np.concatenate(columns)
        write(final, row, 0, plain[before:], len(here), FINAL)
        context[row, : len(here)] = here
        order[row, : len(here)] = np.arange(len(here))
    put = functools.partial(model.put_batch, batch=rows)
    tokens = (
        Tokens(**{name: put(array) for name, array in rows_.items()})
        for rows_ in (full, block, final)
    )
    of_full, of_block, of_final = tokens
    return _Batch(
        full=of_full,
        wanted=put(wanted),
        block=of_block,
        context=put(context),
        order=put(order),
        final=of_final,
        asked=put(asked),
    )


def _divergence(
    vectors: Array, params: Params, rope: RopeTable, batch: _Batch, config: ModelConfig
) -> Array:
    """Mean KL divergence of the block-wise answers from those of full attention."""
    plain = PackedAttend(config, rope, prefix_visible=False)
    hidden, _, _ = forward(params, config, batch.full, None, plain)
    teacher = lax.stop_gradient(_log_probs(params, config, hidden, batch.wanted))
    answered = _answered(vectors, params, rope, batch, config)
    student = _log_probs(params, config, answered, batch.asked)
    each = (jnp.exp(teacher) * (teacher - student)).sum(-1)
    counts = batch.wanted >= 0
    return jnp.where(counts, each, 0).sum() / counts.sum()


def _log_probs(params: Params, config: ModelConfig, hidden: Array, columns: Array) -> Array:
    """[B, A, V] float32 behind the columns [B, A] of hidden [B, T, D]."""
    here = jnp.take_along_axis(hidden, jnp.maximum(columns, 0)[..., None], axis=1, mode="clip")
    return jax.nn.log_softmax(unembed(params, config, here), axis=-1)


def _answered(
    vectors: Array, params: Params, rope: RopeTable, batch: _Batch, config: ModelConfig
) -> Array:
    """Hidden [B, F, D] of the final block over chunks that were encoded behind the vectors."""
    soft = params.with_soft(vectors.astype(params.embed.dtype))
    packed = PackedAttend(config, rope, prefix_visible=True)
    kept = Tap(packed, lambda q, k, v: (k, v))
    _, _, (k, v) = forward(soft, config, batch.block, None, kept, jax.checkpoint)
    columns = batch.context[None, :, :, None, None]
    k, v = (jnp.take_along_axis(x, columns, axis=2, mode="clip") for x in (k, v))  # [L, B, S, K, H]
    attend = _ContextAttend(config, rope, batch.order)

    @jax.checkpoint
    def layer(x: Array, at: Any) -> tuple[Array, None]:
        *here, k, v = at
        x, _, _ = run_layer(config, tuple(here), x, batch.final, (k, v), attend)
        return x, None

    x = embedded(params, config, batch.final.ids)
    layers = jnp.arange(config.num_layers, dtype=jnp.int32)
    x, _ = lax.scan(layer, x, (params.layers, layers, layer_windows(config), k, v))
    return rms_norm(x, params.final_norm, config)


@dataclasses.dataclass(frozen=True)
class _ContextAttend:
    """A row attends to KV of a context, and to itself.

    The cache is K before rotation and V, [B, S, K, H] each.

    Attributes:
      order: [B, S] int32 places of the context's tokens in the prompt; HIDDEN where there is none.
    """

    config: ModelConfig
    rope: RopeTable
    order: Array

    def __call__(
        self,
        layer: Array,
        window: Array | int | None,
        q: Array,
        k: Array,
        v: Array,
        tokens: Tokens,
        cache: tuple[Array, Array],
    ) -> tuple[Partial, tuple[Array, Array], None]:
        """Shapes as Attend."""
        config, at, rope = self.config, tokens.positions, self.rope.of_layer(layer)
        own = jnp.where(tokens.segments == EMPTY, HIDDEN, at)
        keys_at = jnp.concatenate((self.order, own), 1)
        placed_at = jnp.where(keys_at == HIDDEN, 0, keys_at)
        keys = place(jnp.concatenate((cache[0], k), 1), placed_at, rope, config.rope)
        values = jnp.concatenate((cache[1], v), 1)
        batch, length, _, dim = q.shape
        asked = place(q, at, rope, config.rope)
        asked = asked.reshape(batch, length, config.num_kv_heads, -1, dim)
        scores = jnp.einsum("bfkgh,bskh->bkgfs", asked, keys, preferred_element_type=jnp.float32)
        visible = keys_at[:, None] <= at[..., None]
        if window is not None:
            visible &= at[..., None] - keys_at[:, None] < window
        scores = scored(scores, scale_of(config))
        scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
        out = jnp.einsum("bkgfs,bskh->bfkgh", weights, values)
        lse = jax.nn.logsumexp(scores, axis=-1).transpose(0, 3, 1, 2).reshape(q.shape[:-1])
        return Partial(out.reshape(q.shape).astype(q.dtype), lse), cache, None


def _run_id(
    model: Model, start: HostArray, prompts: Sequence[PrimerPrompt], settings: PrimerSettings
) -> str:
    """Identity of a run: what its vectors follow from."""
    found = hashlib.sha256(json.dumps(dataclasses.asdict(settings), sort_keys=True).encode())
    found.update(model.fingerprint.encode())
    found.update(np.ascontiguousarray(start, "<f4").tobytes())
    for it in prompts:
        for part in (it.prefix, *it.chunks, it.final, it.answer, *(it.packets or ())):
            found.update(len(part).to_bytes(8, "little") + part.astype("<i4").tobytes())
    return found.hexdigest()


def _write_state(path: Path, state: Any, step: int, run: str) -> None:
    leaves: dict[str, Any] = {
        f"leaf{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))
    }
    new = path.with_name(f"{path.name}.{os.getpid()}")
    with open(new, "wb") as file:
        np.savez(file, step=step, run=run, **leaves)
    new.replace(path)


def _read_state[State](path: Path, like: State, run: str) -> tuple[State, int]:
    """State and step of a run that was ended. Raises TrainError for another run's."""
    leaves, tree = jax.tree.flatten(like)
    try:
        with np.load(path) as held:
            values: Mapping[str, HostArray] = dict(held)
        found = [jnp.asarray(values[f"leaf{i}"], leaf.dtype) for i, leaf in enumerate(leaves)]
        step, own = int(values["step"]), str(values["run"])
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise TrainError(f"{path}: no state of a run ({error}); delete it") from None
    if own != run:
        raise TrainError(
            f"{path} is the state of another run (other prompts, weights or settings); leave "
            "--resume out to begin anew"
        )
    return jax.tree.unflatten(tree, found), step

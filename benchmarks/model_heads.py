"""Queries and keys of a model's own heads over a text, for the index benchmarks."""

import dataclasses
import functools
import random
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from attention_heads import Heads
from decode_rules import generate
from index_measure import Options

from jaxrag.base.config import ModelConfig, RopeConfig
from jaxrag.base.errors import RequestError
from jaxrag.base.types import FINAL, Array, HostArray, Tokens
from jaxrag.engine.direct import map_request, unmap
from jaxrag.engine.engine import engine_of
from jaxrag.engine.request import Prompt, Request
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.sampling_params import SamplingParams
from jaxrag.measure.subject import format_of
from jaxrag.models.attention import PackedAttend
from jaxrag.models.decoder import forward
from jaxrag.models.model import Model, as_token_ids
from jaxrag.models.rope import RopeTable
from jaxrag.models.spec import Params
from jaxrag.models.taps import Tap
from jaxrag.reuse.attention_index import QueryBank
from jaxrag.reuse.methods import METHODS
from jaxrag.tasks.long.case import Frame
from jaxrag.tasks.long.tasks import SUITES, Draw


def model_heads(
    model: Model, ids: Sequence[int], options: Options, layers: Sequence[int] | None = None
) -> Iterator[tuple[str, Heads]]:
    """Every KV head of some layers, for every context of the options, named "layer.head".

    The tokens behind a context are those that follow it in ``ids``: they are run with it, so what
    they ask is what decoding them would ask.

    Raises:
        RequestError: too few ids, a layer that the model does not have, or a model with sliding
            windows, which never ask for what an index holds.
    """
    config = model.config
    chosen = range(config.num_layers) if layers is None else layers
    if odd := [layer for layer in chosen if not 0 <= layer < config.num_layers]:
        raise RequestError(f"layer {odd[0]}: expected 0 to {config.num_layers - 1}")
    if config.sliding_window is not None:
        raise RequestError(
            f"a model with a sliding window of {config.sliding_window} tokens: expected one whose "
            "layers see the whole context"
        )
    needed = max(options.contexts) + options.ask
    if len(ids) < needed:
        raise RequestError(f"{len(ids)} tokens: expected {needed}, the longest context and --ask")
    return _heads(model, as_token_ids(ids[:needed], config, "text"), options, chosen)


def _heads(
    model: Model, ids: HostArray, options: Options, layers: Sequence[int]
) -> Iterator[tuple[str, Heads]]:
    config = model.config
    for context in options.contexts:
        queries, keys = queries_and_keys(model, ids[: context + options.ask])
        strided = np.unique(np.linspace(options.sink, context - 1, options.train).astype(np.int64))
        inside = slice(options.sink, context - options.recent)
        for layer in layers:
            shape = (queries.shape[1], config.num_kv_heads, -1, config.head_dim)
            groups = queries[layer].reshape(shape)
            for head in range(config.num_kv_heads):
                group = groups[:, head].swapaxes(0, 1)  # [G, T, H]
                yield (
                    f"{layer}.{head}",
                    Heads(
                        config.rope,
                        keys[layer, inside, head],
                        options.sink,
                        QueryBank(group[:, strided], strided.astype(np.int32)),
                        group[:, context:],
                        context,
                    ),
                )


@dataclasses.dataclass(frozen=True, eq=False)
class AnswerHeads:
    """One layer over a prompt and its answer.

    Attributes:
      name: of the question.
      ids: [T] int32 of prompt and answer; none where they are generated.
      queries: [T, N, H] float32 before rotation.
      keys: [T, K, H] float32 before rotation.
      values: [T, K, H] float32.
      prompt: tokens of the prompt; the answer is behind it.
    """

    name: str
    ids: HostArray
    rope: RopeConfig
    queries: HostArray
    keys: HostArray
    values: HostArray
    prompt: int

    @property
    def total(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.keys)


def answer_heads(
    model: Model,
    tasks: Sequence[str],
    length: int,
    seed: int,
    layers: Sequence[int] | None = None,
    *,
    sampled: int | None = None,
) -> list[AnswerHeads]:
    """Some or all layers of a model over questions of RULER (village) and the right answers.

    The answer is forced on the model, so its queries are those of decoding exactly that. With
    ``sampled`` it is as many tokens that the model draws at temperature 1.
    """
    tokenizer, template = model.text_tokenizer(), format_of(model, None)
    frame, made = Frame(tokenizer, template), list[AnswerHeads]()
    for name in tasks:
        case = SUITES["ruler", "village"][name].make(Draw(random.Random(f"{seed} {name}"), 0.5))
        fitted = frame.fit(case, length)
        chunks = [template.chunk_ids(tokenizer, chunk) for chunk in fitted.chunks]
        final = template.final_ids(tokenizer, case.question), fitted.lead
        ids = np.concatenate([template.prefix_ids(tokenizer), *chunks, *final]).astype(np.int32)
        answer = (
            tokenizer.encode(" " + case.between.join(case.expected))
            if sampled is None
            else _sampled(model, ids, sampled, seed)
        )
        ids = np.concatenate([ids, np.asarray(answer, np.int32)])
        each = list(_answered(model, name, ids, length))
        made += each if layers is None else [each[layer] for layer in layers]
    return made


def _sampled(model: Model, ids: HostArray, tokens: int, seed: int) -> list[int]:
    """Tokens that the model draws behind ``ids``, by dense attention; none of them ends it."""
    sampling = SamplingParams(temperature=1.0, seed=seed)
    prompt, method = Prompt(ids[:0], (), ids), METHODS["full_attention"]
    request = Request(prompt, engine_of(model).memory, method, tokens, sampling)

    def draw(runner: ModelRunner) -> list[int]:
        mapped = map_request(runner, request, request.room)
        try:
            return generate(runner, mapped, request, tokens - 1)[2]
        finally:
            unmap(runner, mapped)

    return engine_of(model).call(draw)


def _answered(model: Model, name: str, ids: HostArray, prompt: int) -> Iterator[AnswerHeads]:
    padded = np.pad(ids, (0, -len(ids) % 128))  # one program for answers of any length
    for q, k, v in zip(*queries_keys_values(model, padded), strict=True):
        there = slice(len(ids))
        yield AnswerHeads(name, ids, model.config.rope, q[there], k[there], v[there], prompt)


def queries_and_keys(model: Model, ids: HostArray) -> tuple[HostArray, HostArray]:
    """Q [L, T, N, H] and K [L, T, K, H] float32 before rotation, of tokens [T] run together."""
    queries, keys, _ = queries_keys_values(model, ids)
    return queries, keys


def queries_keys_values(model: Model, ids: HostArray) -> tuple[HostArray, HostArray, HostArray]:
    """As ``queries_and_keys``, and V [L, T, K, H]."""
    tokens = Tokens(
        ids=jnp.asarray(ids)[None],
        positions=jnp.arange(len(ids), dtype=jnp.int32)[None],
        segments=jnp.full((1, len(ids)), FINAL, jnp.int32),
    )
    made = _run(model.params, model.config, tokens, model.rope(len(ids)))
    queries, keys, values = (np.asarray(each, np.float32) for each in made)
    return queries, keys, values


@functools.partial(jax.jit, static_argnames="config")
def _run(
    params: Params, config: ModelConfig, tokens: Tokens, table: RopeTable
) -> tuple[Array, Array, Array]:
    packed = PackedAttend(config, table, prefix_visible=False)
    attend = Tap(packed, lambda q, k, v: (q[0], k[0], v[0]))
    collected: tuple[Array, Array, Array] = forward(params, config, tokens, None, attend)[2]
    return collected

"""Queries and keys of a model's own heads over an answer, and what an index finds for them."""

import dataclasses
import functools
import random
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrag.base.config import ModelConfig, RopeConfig
from jaxrag.base.types import FINAL, Array, HostArray, Tokens
from jaxrag.engine.engine import engine_of
from jaxrag.engine.request import Prompt, Request
from jaxrag.engine.sampling_params import SamplingParams
from jaxrag.measure.subject import format_of
from jaxrag.models.attention import PackedAttend
from jaxrag.models.decoder import forward
from jaxrag.models.model import Model
from jaxrag.models.rope import RopeTable
from jaxrag.models.spec import Params
from jaxrag.models.taps import Tap
from jaxrag.reuse.attention_index import Exact, QueryBank, nearest, open_index, rotated
from jaxrag.reuse.decode import Retrieval
from jaxrag.reuse.decode.checks import RecallChecks
from jaxrag.reuse.methods import METHODS
from jaxrag.tasks.long.case import Frame
from jaxrag.tasks.long.tasks import SUITES, Draw


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

    return [token for it in engine_of(model).iterate([request]) for token in it.new]


def _answered(model: Model, name: str, ids: HostArray, prompt: int) -> Iterator[AnswerHeads]:
    padded = np.pad(ids, (0, -len(ids) % 128))  # one program for answers of any length
    for q, k, v in zip(*queries_keys_values(model, padded), strict=True):
        there = slice(len(ids))
        yield AnswerHeads(name, ids, model.config.rope, q[there], k[there], v[there], prompt)


def queries_keys_values(model: Model, ids: HostArray) -> tuple[HostArray, HostArray, HostArray]:
    """Q [L, T, N, H], K and V [L, T, K, H] float32 before rotation, of tokens run together."""
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


def searched(
    heads: AnswerHeads, rule: Retrieval, placed: HostArray
) -> tuple[HostArray, dict[str, HostArray]]:
    """Positions that indexes find [steps, K, G, k], checked as decoding checks them; and stats."""
    assert rule.observe is not None
    count, total, dim = placed.shape
    chosen, room = rule.observe.chosen(heads.prompt), total - heads.prompt
    end = max(heads.prompt + 1 - rule.recent, rule.sink)
    grouped = heads.queries.reshape(total, count, -1, dim).transpose(1, 2, 0, 3)  # [K, G, T, H]
    shape = (room, count, grouped.shape[1])
    found = np.full((*shape, rule.k), -1, np.int32)
    recall, scanned = np.ones(shape), np.ones(shape)
    exact = np.zeros(shape[1:], bool)
    checks = RecallChecks.of(rule.index, heads.prompt, shape[1:])
    for kv_head, queries in enumerate(grouped):
        keys = placed[kv_head, rule.sink : end]
        bank = QueryBank(queries[:, chosen], chosen.astype(np.int32))
        index = rule.index_head(keys, bank, heads.rope, heads.prompt, room)
        searcher = open_index(index)
        exact[kv_head] = isinstance(index.spec, Exact)
        for head in range(shape[2]):
            behind = np.arange(heads.prompt, total)
            asked = rotated(queries[head, heads.prompt :], behind, heads.rope)
            best = nearest(asked, keys, min(rule.k, len(keys))).ids
            for step in range(room):
                wanted, at = best[step], (step, kv_head, head)
                ids = wanted
                times = int(checks.times[at[1:]]) if checks else 1
                if not exact[kv_head, head] and times:
                    effort = searcher.chosen_effort(head) * times
                    query = asked[step : step + 1]
                    one = searcher.search_head(head, query, rule.k, effort=effort, count=True)
                    ids, scanned[at] = one.ids[0], one.scanned[0] / len(keys)
                    if checks is not None and checks.due(at[1:], heads.prompt + step):
                        checks.judge(at[1:], heads.prompt + step, ids, wanted)
                        ids, scanned[at] = wanted, scanned[at] + 1
                recall[at] = np.isin(wanted, ids).mean()
                found[at][: len(ids)] = np.where(ids >= 0, ids + rule.sink, -1)
    failed = np.zeros(shape[1:], bool) if checks is None else checks.times == 0
    more = np.zeros(shape[1:], bool) if checks is None else checks.times > 1
    return found, {
        "searched": recall.reshape(room, -1),
        "scanned": scanned.reshape(room, -1),
        "exact": exact.reshape(-1),
        "failed": failed.reshape(-1),
        "more": more.reshape(-1),
    }

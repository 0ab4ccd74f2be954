"""What decode rules read at the positions of an answer: recall, softmax mass, error of the output.

One layer at a time, as a rule runs in decoding: its own ``prepare`` and ``attend`` over a pool that
holds the keys of prompt and answer. The answer is forced on it, so all rules are asked by the same
queries. In the place of V there is more than V: columns from which the mass that was read, and how
many of the best keys, can be read off the output.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attention_heads import HeadSpec, draw
from model_heads import AnswerHeads
from tqdm import tqdm

from jaxrag.base.config import ModelConfig
from jaxrag.base.types import HIDDEN, Array, HostArray
from jaxrag.kv.cache import PAGE, PagePool
from jaxrag.measure.machine import describe
from jaxrag.measure.zoo import llama
from jaxrag.models.rope import RopeTable, rope_table
from jaxrag.reuse.attention_index import (
    Exact,
    Ivf,
    ProjectedGraph,
    QueryBank,
    QueryLists,
    nearest,
    open_index,
    rotated,
)
from jaxrag.reuse.attention_index.faiss_objects import one_thread
from jaxrag.reuse.decode import (
    DecodeRule,
    Flat,
    InfLLM,
    IvfRetrieval,
    Quest,
    Retrieval,
    SnapKV,
    StaticWindow,
    TopN,
)
from jaxrag.reuse.decode.checks import RecallChecks
from jaxrag.reuse.decode.retrieval import Indexed
from jaxrag.reuse.decode.view import View

BEST = (20, 100)  # keys whose recall is counted
BLOCK = 32  # tokens of an answer whose recall is averaged
_SHORT: dict[str, Any] = {"k": 20, "sink": 4, "recent": 32}
SEARCHES: dict[str, Retrieval] = {
    "lists": Retrieval(index=QueryLists(exact_below=0), **_SHORT),
    "graph": Retrieval(index=ProjectedGraph(exact_below=0), **_SHORT),
    "ivf": IvfRetrieval(index=Ivf(exact_below=0), **_SHORT),
}
_LAYER = 8  # behind the layers in which some rules attend to everything


@dataclasses.dataclass(frozen=True, eq=False)
class _Found:
    """In the place of the host: what indexes found [K, G, k]."""

    positions: Array

    def find(self, *_: Any) -> Array:
        """What was found, of one row."""
        return self.positions[None]


class _Layer(View):
    """A view whose V is wider than its keys: dense attention is not part of what is measured."""

    def dense(self) -> Any:
        """Attention to every key, of rules that may ask for it in other layers."""
        slots = jnp.arange(self.slot_position.shape[1])[None, None, None]
        return self.mix(self.scores(), slots)


def read(heads: AnswerHeads, rule: DecodeRule) -> dict[str, HostArray]:
    """What a rule reads in every step of an answer: arrays [steps, N].

    ``mass`` of the softmax over all keys; ``recall_K`` of the best K of all keys; ``error``, the
    squared distance from dense attention as a share of its square; ``mse`` a value; ``searched``:
    the recall of an index among the keys that it is for, ``scanned`` their share that is scanned.
    """
    config = llama(
        num_heads=heads.queries.shape[1], num_kv_heads=heads.keys.shape[1],
        head_dim=heads.keys.shape[2], rope=heads.rope, num_layers=1,
        max_positions=heads.total, dtype="float32",
    )  # fmt: skip
    table = rope_table(heads.rope, -(-heads.total // 1024) * 1024)
    slots = -(-heads.total // PAGE) * PAGE
    keys = np.zeros((slots, *heads.keys.shape[1:]), np.float32)
    placed = rotated(heads.keys.swapaxes(0, 1), np.arange(heads.total), heads.rope)
    keys[: heads.total] = placed.swapaxes(0, 1)
    pooled = jnp.asarray(keys.reshape(-1, PAGE, *keys.shape[1:]))
    shown = np.where(np.arange(slots) < heads.total, np.arange(slots), HIDDEN).astype(np.int32)
    at = (config, table, pooled, jnp.asarray(shown)[None])
    room = heads.total - heads.prompt
    found, stats = None, dict[str, HostArray]()
    if isinstance(rule, Retrieval):
        found, stats = searched(heads, rule, placed)
        end = max(heads.prompt + 1 - rule.recent, rule.sink)
        tail = jnp.arange(end, end + room, dtype=jnp.int32)[None, None, None]
        state: Any = Indexed(jnp.zeros(1, jnp.int32), tail)
    else:
        observed = rule.observe
        chosen = np.zeros(0, np.int64) if observed is None else observed.chosen(heads.prompt)
        bank = (jnp.asarray(heads.queries[chosen])[None], jnp.asarray(chosen, jnp.int32)[None])
        state = _prepared(*at, *bank, heads.prompt - 1, rule, room)
    rows: list[dict[str, HostArray]] = []
    for step in range(room):
        row, state = _step(heads, placed, rule, at, state, step, found)
        rows.append(row)
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]} | stats


def _step(
    heads: AnswerHeads,
    placed: HostArray,
    rule: DecodeRule,
    at: tuple[Any, ...],
    state: Any,
    step: int,
    found: HostArray | None,
) -> tuple[dict[str, HostArray], Any]:
    """One token of the answer; ``placed`` [K, T, H] are the keys where they stand."""
    position = heads.prompt + step
    count, dim = placed.shape[0], placed.shape[2]
    q = heads.queries[position].reshape(count, -1, dim)
    asked = rotated(q, np.full(q.shape[1], position), heads.rope)
    scores = np.einsum("kgh,kth->kgt", asked, placed[:, : position + 1]) * dim**-0.5
    top = scores.max(-1, keepdims=True)
    lse = np.log(np.exp(scores - top).sum(-1)) + top[..., 0]
    weights = np.exp(scores - lse[..., None])  # [K, G, t]
    order = np.argsort(-weights, axis=-1)
    group = q.shape[1]
    wide = np.zeros((at[2].shape[0] * PAGE, count, dim + 1 + group * len(BEST)), np.float32)
    wide[: position + 1, :, :dim] = heads.values[: position + 1]
    wide[: position + 1, :, dim] = 1
    for kv_head, head, which in np.ndindex(count, group, len(BEST)):
        best = order[kv_head, head, : BEST[which]]
        share = np.maximum(weights[kv_head, head, best], 1e-30)
        wide[best, kv_head, dim + 1 + head * len(BEST) + which] = 1 / share
    pool = jnp.asarray(wide.reshape(-1, PAGE, *wide.shape[1:]))
    given = None if found is None else jnp.asarray(found[step])
    part, state = _attended(*at, pool, heads.queries[position][None], position, state, rule, given)
    out, kept = (np.asarray(each, np.float64) for each in (part.out, part.lse))
    out = out.reshape(count, group, -1)
    # Of what is kept; 1 where a rule leaves its weights as they are in the softmax over all keys.
    kept = np.exp(np.minimum(kept.reshape(count, group) - lse, 0))
    dense = np.einsum("kgt,tkh->kgh", weights, heads.values[: position + 1])
    off = ((out[..., :dim] - dense) ** 2).sum(-1)
    row = {
        "mass": kept * out[..., dim],
        "error": off / (dense**2).sum(-1),
        "mse": off / dim,
    }
    for which, k in enumerate(BEST):
        columns = dim + 1 + np.arange(group) * len(BEST) + which
        mine = np.take_along_axis(out, np.broadcast_to(columns[None, :, None], (*kept.shape, 1)), 2)
        row[f"recall_{k}"] = kept * mine[..., 0] / min(k, position + 1)
    return {name: each.reshape(-1) for name, each in row.items()}, state


def _view(
    config: ModelConfig,
    rope: RopeTable,
    keys: Array,
    shown: Array,
    values: Array,
    position: Array,
    **more: Any,
) -> _Layer:
    pages = jnp.arange(keys.shape[0], dtype=jnp.int32)[None]
    order = jnp.arange(shown.shape[1], dtype=jnp.int32)[None]
    pool = PagePool(keys, values)
    where = (pages, jnp.zeros_like(pages), shown, order, jnp.asarray(position)[None])
    return _Layer(config, rope, pool, *where, **more)


@functools.partial(jax.jit, static_argnums=(0, 7, 8))
def _prepared(
    config: ModelConfig,
    rope: RopeTable,
    keys: Array,
    shown: Array,
    queries: Array,
    positions: Array,
    position: Array,
    rule: DecodeRule,
    room: int,
) -> Any:
    view = _view(config, rope, keys, shown, keys, position)
    return rule.prepare(view, queries, positions, room)


@functools.partial(jax.jit, static_argnums=(0, 8))
def _attended(
    config: ModelConfig,
    rope: RopeTable,
    keys: Array,
    shown: Array,
    values: Array,
    q: Array,
    position: Array,
    state: Any,
    rule: DecodeRule,
    found: Array | None,
) -> Any:
    host: Any = None if found is None else _Found(found)
    view = _view(config, rope, keys, shown, values, position, q=q, host=host)
    return rule.attend(view, jnp.int32(_LAYER), state)


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


def rows_of(
    regime: str, heads: Sequence[AnswerHeads], rules: Sequence[tuple[str, DecodeRule]]
) -> Iterator[dict[str, Any]]:
    """One row a rule: means over all heads and steps, the worst answer's and the worst head's."""
    for text, rule in rules:
        every = [(each.name, read(each, rule)) for each in heads]
        row: dict[str, Any] = {"heads": regime, "rule": text}
        for name in every[0][1]:
            if name in ("exact", "failed", "more"):
                row[name] = float(np.mean(np.concatenate([each[name] for _, each in every])))
                continue
            of_heads = np.concatenate([each[name].mean(0) for _, each in every])
            of_answers: dict[str, list[HostArray]] = {}
            for case, each in every:
                of_answers.setdefault(case, []).append(each[name])
            means = [float(np.concatenate(some, 1).mean()) for some in of_answers.values()]
            worst = max if name in ("error", "mse", "scanned") else min
            row[name] = {
                "mean": float(np.mean(means)),
                "worst_answer": worst(means),
                "worst_head": float(worst(of_heads)),
            }
        yield row


def searches(heads: Sequence[AnswerHeads], kinds: Sequence[str]) -> Iterator[dict[str, Any]]:
    """One row a task and kind of index: recall, and the share of keys scanned, k = 20."""
    for kind in kinds:
        rule = SEARCHES[kind]
        for name in dict.fromkeys(each.name for each in heads):
            told = []
            for layer in (each for each in heads if each.name == name):
                placed = rotated(layer.keys.swapaxes(0, 1), np.arange(layer.total), layer.rope)
                told.append(searched(layer, rule, placed)[1])
            every = {of: np.concatenate([each[of] for each in told], -1) for of in told[0]}
            blocks = [
                float(every["searched"][at : at + BLOCK].mean())
                for at in range(0, len(every["searched"]), BLOCK)
            ]
            yield {
                "task": name,
                "index": kind,
                "tokens": len(every["searched"]),
                "heads": every["searched"].shape[1],
                "recall": float(every["searched"].mean()),
                "worst_block": min(blocks),
                "worst_head": float(every["searched"].mean(0).min()),
                "scanned": float(every["scanned"].mean()),
                "exact": int(every["exact"].sum()),
                "more": int(every["more"].sum()),
                "failed": int(every["failed"].sum()),
            }


def run_searches(heads: Sequence[AnswerHeads], kinds: Sequence[str]) -> dict[str, Any]:
    """Measure ``searches``; JSON-able."""
    with one_thread():
        rows = list(searches(heads, tqdm(kinds, desc="searches", disable=None)))
    return {"benchmark": "index searches", "rows": rows, "machine": describe()}


def report_searches(result: dict[str, Any]) -> Iterator[str]:
    """The result of ``searches`` as lines of a Markdown table."""
    yield (
        "| task (tokens) | index | recall | worst block | worst head | keys | exact, more, "
        "scanned |"
    )
    yield "|---|---|---|---|---|---|---|"
    for row in result["rows"]:
        shares = " | ".join(f"{row[of]:.3f}" for of in ("recall", "worst_block", "worst_head"))
        yield (
            f"| {row['task']} ({row['tokens']}) | {row['index']} | {shares} | "
            f"{100 * row['scanned']:.0f} % | {row['exact']}, {row['more']}, {row['failed']} |"
        )


def sparse_heads(
    spec: HeadSpec, prompt: int, steps: int, *, kept: int = 36, most: float = 1e-6
) -> tuple[list[AnswerHeads], float]:
    """A generated head as sparse as RetrievalAttention reports, and its logits' scale.

    Queries are made longer until the ``kept`` best keys alone give an output whose mean squared
    error is below ``most``, values being normal.
    """
    drawn = draw(spec, prompt + steps, train=prompt + steps, ask=1, sink=0, recent=0)
    rng = np.random.default_rng([spec.seed, 3])
    values = rng.standard_normal((prompt + steps, 1, spec.head_dim)).astype(np.float32)
    queries = drawn.bank.queries.swapaxes(0, 1)  # [T, G, H]
    scale = 1.0
    while True:
        heads = AnswerHeads(
            "generated",
            np.zeros(0, np.int32),
            spec.rope,
            queries * np.float32(scale),
            drawn.keys[:, None],
            values,
            prompt,
        )
        if read(heads, TopN(n=kept, device_layers=0, renormalise=True))["mse"].mean() < most:
            return [heads], scale
        scale *= 1.5


def generated_heads(spec: HeadSpec, prompt: int, steps: int) -> list[AnswerHeads]:
    """The same head as other benchmarks draw it, which is not sparse."""
    return [sparse_heads(spec, prompt, steps, most=np.inf)[0][0]]


def rules(lengths: str) -> list[tuple[str, DecodeRule]]:
    """What is measured: every rule by k, with the window of short contexts or by default."""
    small = lengths == "short"
    sink, recent = (4, 32) if small else (128, 512)
    ks = (20, 100) if small else (100,)
    some: list[tuple[str, DecodeRule]] = [("static_window", StaticWindow(sink=sink, recent=recent))]
    for k in ks:
        some += [
            (f"flat k={k}", Flat(k=k, sink=sink, recent=recent)),
            (
                f"retrieval lists k={k}",
                Retrieval(k=k, index=QueryLists(exact_below=0), sink=sink, recent=recent),
            ),
            (
                f"retrieval graph k={k}",
                Retrieval(k=k, index=ProjectedGraph(exact_below=0), sink=sink, recent=recent),
            ),
            (f"ivf k={k}", IvfRetrieval(k=k, index=Ivf(exact_below=0), sink=sink, recent=recent)),
            (f"topn n={k}", TopN(n=k, device_layers=0)),
            (f"topn n={k} renormalised", TopN(n=k, device_layers=0, renormalise=True)),
        ]
    for budget in (128, 512) if small else (1024,):
        some += [
            (f"quest budget={budget}", Quest(budget=budget)),
            (
                f"infllm blocks={budget // 64} of 64",
                InfLLM(block=64, blocks=budget // 64, sink=sink, recent=recent),
            ),
            (f"snapkv capacity={budget}", SnapKV(capacity=budget)),
        ]
    return some


def run(heads: Sequence[AnswerHeads], lengths: str) -> dict[str, Any]:
    """Measure heads of a model at answers, and a generated head in both regimes; JSON-able.

    The generated ones have as many tokens as the first of ``heads`` in front of their answer.
    """
    spec, steps, length = HeadSpec(seed=3), 32, heads[0].prompt
    sparse, scale = sparse_heads(spec, length, steps)
    given = {
        "model": heads,
        "generated": generated_heads(spec, length, steps),
        "generated, sparse": sparse,
    }
    rows: list[dict[str, Any]] = []
    with one_thread():
        for regime, some in given.items():
            rows += rows_of(regime, some, tqdm(rules(lengths), desc=regime, disable=None))
    return {
        "benchmark": "index answers",
        "window": lengths,
        "sparse_scale": scale,
        "rows": rows,
        "machine": describe(),
    }


def report(result: dict[str, Any]) -> Iterator[str]:
    """The result as lines of a Markdown table."""
    best = [f"recall_{k}" for k in BEST]
    yield (
        "| heads | rule | mass | "
        + " | ".join(best)
        + " | error | mse | index: worst answer, head | scanned |"
    )
    yield "|---|---|---|" + "---|" * len(best) + "---|---|---|---|"
    for row in result["rows"]:
        cells = [f"{row['mass']['mean']:.3f}", *(f"{row[name]['mean']:.3f}" for name in best)]
        cells += [f"{row['error']['mean']:.3f}", f"{row['mse']['mean']:.1e}"]
        cells += (
            [
                f"{row['searched']['worst_answer']:.3f}, {row['searched']['worst_head']:.3f}",
                f"{100 * row['scanned']['mean']:.0f} %",
            ]
            if "searched" in row
            else ["", ""]
        )
        yield f"| {row['heads']} | {row['rule']} | " + " | ".join(cells) + " |"

"""InfLLM (section 3.2, arXiv:2402.04617): blocks that a few representative keys stand for.

InfLLM: Training-Free Long-Context Extrapolation for LLMs with an Efficient Context HostMemory.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, override

import jax
import jax.numpy as jnp
import numpy as np

from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import RequestError
from jaxrag.base.types import HIDDEN, Array, HostArray, Partial
from jaxrag.kv.placement import KVPlacement
from jaxrag.models.attention import merge
from jaxrag.reuse.attention_index import rotated_unscaled
from jaxrag.reuse.decode.far import FarAnswer, FarLayer, HostPrompt, HostTask
from jaxrag.reuse.decode.far.layer import gathered
from jaxrag.reuse.decode.far.memory import HostMemory, Stretch, first_highest
from jaxrag.reuse.decode.footprint import Account, Bytes
from jaxrag.reuse.decode.rule import (
    DecodeRule,
    Observe,
    Positions,
    check_positions,
    highest,
    require,
    require_zero_or_more,
)
from jaxrag.reuse.decode.view import View


@dataclasses.dataclass(frozen=True)
class InfLLM(DecodeRule):
    """The static pattern, and the best ``blocks`` of ``block`` tokens outside it, for all heads.

    A block stands for itself with ``representatives`` of its keys per KV head, those that score
    highest on average with the queries of the ``recent`` tokens behind each; its relevance is their
    mean score with the newest query, summed over the heads, and all heads read the same blocks. Of
    the tokens that are run for the prompt, ``observed`` evenly spread ones
    give these queries. Where a key has none of them within ``recent``, as in chunks that are reused
    and far from the question, all that stand behind it rank it. In a block of generated tokens the
    first ones represent it. The block that the edge of the window cuts is always read.

    Attributes:
      block: tokens of a block.
      representatives: keys of a block that stand for it, per KV head.
      sink: tokens of the window from the start of the prompt.
      recent: newest tokens of the window, the newest one included.
      observed: tokens of the prompt whose queries choose representatives.
      positions: "original": keys where they stand; "cache": as published, all keys outside the
        local window stand ``recent`` tokens away.
    """

    block: int = 128
    blocks: int = 16
    representatives: int = 4
    sink: int = 128
    recent: int = 4096
    observed: int = 512
    positions: Positions = "original"
    name: str = dataclasses.field(default="infllm", init=False)
    by_kv_head: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_zero_or_more(self.name, sink=self.sink)
        require(
            self.name,
            block=self.block,
            blocks=self.blocks,
            representatives=self.representatives,
            recent=self.recent,
            observed=self.observed,
        )
        if self.representatives > self.block:
            raise RequestError(
                f"decode rule 'infllm': representatives={self.representatives} of a block of "
                f"{self.block} tokens; choose at most that many"
            )
        check_positions(self.name, self.positions)

    @property
    @override
    def observe(self) -> Observe:
        return Observe("strided", self.observed)

    @property
    @override
    def static_pattern(self) -> tuple[int, int] | None:
        return (self.sink, self.recent) if self.positions == "original" else None

    @override
    def far(self, prompt: HostPrompt) -> FarLayer:
        """The best blocks."""
        return BestBlocks(prompt, self)

    @override
    def tokens(self) -> dict[str, int]:
        return {
            "sink + recent": self.sink + self.recent,
            "blocks x block": self.blocks * self.block,
        }

    @override
    def beside(self, config: ModelConfig, tokens: int, placement: KVPlacement) -> Bytes:
        shown = -(-max(tokens - self.sink, 0) // self.block) * self.representatives
        shown *= 4 * config.num_layers * config.num_kv_heads
        if not placement.away:
            return Bytes(device=shown)
        return Bytes(host=shown * (1 + config.head_dim))

    @override
    def prepare(self, view: View, queries: Array, positions: Array, room: int) -> Array:
        """Positions of the representatives of every block: [B, K, C * R] int32."""
        mean = _mean_behind(view, queries, positions, self.recent)
        scores = jnp.einsum("bskh,bskh->bks", mean, view.keys(at=jnp.int32(0)))
        scores = jnp.where(view.visible[:, None], scores, -jnp.inf)
        scores = jnp.take_along_axis(scores, view.order[:, None], axis=-1)  # by position
        scores = jnp.where(_known(view)[:, None], scores, -jnp.inf)[..., self.sink :]
        short = -scores.shape[-1] % self.block
        scores = jnp.pad(scores, ((0, 0), (0, 0), (0, short)), constant_values=-jnp.inf)
        scores = scores.reshape(*scores.shape[:2], -1, self.block)
        _, best = highest(scores, self.representatives)  # ties go to the first
        first = self.sink + jnp.arange(scores.shape[2]) * self.block
        return (best + first[:, None]).reshape(*scores.shape[:2], -1).astype(jnp.int32)

    @override
    def attend(self, view: View, layer: Array, state: Array) -> tuple[Partial, Any]:
        """The window, and the tokens of the best blocks."""
        local = view.position[:, None, None, None] - self.recent  # the last one outside the window
        far = jnp.maximum(local, 0) if self.positions == "cache" else None
        representatives = state[:, :, None]
        scores = view.scores_at(representatives, representatives <= local, far)
        scores = scores.reshape(*scores.shape[:3], -1, self.representatives)
        relevance = scores.mean(-1).sum((1, 2))  # [B, C]
        first = self.sink + jnp.arange(relevance.shape[-1]) * self.block
        edge = local[:, 0, 0]
        relevance = jnp.where(first + self.block - 1 <= edge, relevance, -jnp.inf)
        relevance = jnp.where((first <= edge) & (edge < first + self.block - 1), jnp.inf, relevance)
        best_score, best = highest(relevance, self.blocks)
        where = self.sink + best[..., None] * self.block + jnp.arange(self.block)
        where = where.reshape(where.shape[0], 1, 1, -1).astype(jnp.int32)
        chosen = jnp.repeat(best_score > -jnp.inf, self.block, axis=-1)[:, None, None]
        rest = view.attend_at(where, chosen & (where <= local), far)
        positions, counts_window = view.window(self.sink, self.recent)
        if far is None:
            return merge([view.attend_at(positions, counts_window), rest]), state
        is_sink = jnp.arange(positions.shape[-1]) < self.sink
        at = jnp.where(is_sink & (positions <= local), far, positions)
        return merge([view.attend_at(positions, counts_window, jnp.maximum(at, 0)), rest]), state


def _mean_behind(view: View, queries: Array, positions: Array, recent: int) -> Array:
    """For the key of every slot the mean query of observed tokens behind it: [B, S, K, H] float32.

    Query heads of a group are summed. Of the tokens up to ``recent`` behind it, or of all where
    there are none; 0 where nothing is behind it. ``positions`` [B, W] ascend, -1 come last.
    """
    there = positions >= 0
    asked = jnp.where(there[:, :, None, None], queries.astype(jnp.float32), 0.0)
    shape = (*positions.shape, view.config.num_kv_heads, -1, view.config.head_dim)
    sums = jnp.cumsum(asked.reshape(shape).sum(3), axis=1)
    sums = jnp.pad(sums, ((0, 0), (1, 0), (0, 0), (0, 0)))  # [B, W + 1, K, H]
    places = jnp.where(there, positions, HIDDEN)
    key = jnp.where(view.visible, view.slot_position, 0)
    count = jax.vmap(lambda some, at: jnp.searchsorted(some, at, side="right"))
    first, end = count(places, key), count(places, key + recent)
    end = jnp.where(end > first, end, there.sum(1, keepdims=True))
    rows = jnp.arange(key.shape[0])[:, None]
    total = sums[rows, end] - sums[rows, first]
    return total / jnp.maximum(end - first, 1)[:, :, None, None]


def _known(view: View) -> Array:
    """[B, S] which positions hold a token of the prompt."""
    return jnp.arange(view.order.shape[1]) <= view.position[:, None]


class BestBlocks(FarLayer):
    """On the host: the best blocks behind the sink, the same for all heads.

    Representatives are held as copies, rotated to their positions.
    """

    def __init__(self, prompt: HostPrompt, rule: InfLLM) -> None:
        """Choose the representatives, as ``prepare`` does."""
        self.memory = memory = HostMemory(prompt.config, prompt.layer)
        block, sink, recent = rule.block, rule.sink, rule.recent
        self.block, self.blocks, self.sink, self.recent = block, rule.blocks, sink, recent
        count = max(0, -(-(len(prompt.layer.rows) - sink) // block))
        known = np.full((memory.kv_heads, count * block), -np.inf, np.float32)
        end = prompt.position + 1
        if end > sink:
            known[:, : end - sink] = _shown(memory, prompt, recent, np.arange(sink, end))
        known = known.reshape(memory.kv_heads, count, block)
        best = np.argsort(-known, axis=-1, kind="stable")[..., : rule.representatives]
        first = sink + np.arange(count) * block
        self.shown = (best + first[:, None]).astype(np.int32)
        self.keys = np.zeros((*self.shown.shape, memory.dim), np.float32)
        self.ready = 0  # blocks whose keys are copied
        self._copy(end - 1)
        held = int(self.shown.nbytes + self.keys.nbytes)
        self.account = Account(keys=self.shown.size, index_bytes=held + memory.nbytes)

    def _copy(self, edge: int) -> None:
        """Copy the representatives of blocks that end at ``edge`` or before."""
        whole = max(self.ready, (edge + 1 - self.sink) // self.block)
        for head, shown in enumerate(self.shown[:, self.ready : whole]):
            keys = self.memory.placed_keys(head, shown.ravel())
            self.keys[head, self.ready : whole] = keys.reshape(*shown.shape, self.memory.dim)
        self.ready = whole

    @override
    def work(self, position: int) -> int:
        if position - self.recent < self.sink:
            return 0
        read = min(self.blocks * self.block, position - self.recent + 1 - self.sink)
        return self.shown.size + self.memory.kv_heads * read

    @override
    def tasks(self, q: HostArray, position: int, answer: FarAnswer, pieces: int) -> list[HostTask]:
        """Relevance of the blocks by KV head, then attention by KV head."""
        edge = position - self.recent
        if edge < self.sink:
            return []
        self._copy(edge)
        asked = self.memory.ask(q, position, [0])
        heads = range(self.memory.kv_heads)
        whole = (edge + 1 - self.sink) // self.block
        parts = [
            functools.partial(self._relevance, head, asked[-1, head], whole, answer)
            for head in heads
        ]
        return gathered(parts, functools.partial(self._choose, asked[:-1], edge, answer))

    def _relevance(self, head: int, asked: HostArray, whole: int, answer: FarAnswer) -> HostArray:
        """Of the first ``whole`` blocks: [C] float32."""
        with answer.searching():
            keys = self.keys[head, :whole]
            # The sum over heads of the scores is the score of their sum.
            scores = np.einsum("nh,h->n", keys.reshape(-1, keys.shape[-1]), asked.sum(0))
            means: HostArray = scores.reshape(keys.shape[:2]).mean(1)
        return means

    def _choose(
        self, asked: HostArray, edge: int, answer: FarAnswer, parts: Sequence[HostArray]
    ) -> Sequence[HostTask]:
        with answer.searching():
            relevance = np.sum(parts, axis=0)
            cut = (edge + 1 - self.sink) % self.block  # tokens of the block that the edge cuts
            best = first_highest(relevance, self.blocks - (cut > 0))
            best = np.append(best, len(relevance)) if cut else best
            where = (self.sink + best[:, None] * self.block + np.arange(self.block)).ravel()
            stretches = self.memory.gathered(where[where <= edge].astype(np.int32))
        return [
            functools.partial(self._attend, head, asked[:, head], stretches, answer)
            for head in range(self.memory.kv_heads)
        ]

    def _attend(
        self, head: int, asked: HostArray, stretches: Sequence[Stretch], answer: FarAnswer
    ) -> None:
        with answer.attending():
            answer.out[head], answer.lse[head] = self.memory.attend(head, asked, stretches)


def _shown(memory: HostMemory, prompt: HostPrompt, recent: int, positions: HostArray) -> HostArray:
    """How well keys at positions [n] stand for others: [K, n] float32.

    Their product, before rotation, with the mean of the observed queries up to ``recent`` behind
    them, or of all behind them where there are none.
    """
    there = prompt.positions >= 0
    asked = prompt.queries[there].reshape(there.sum(), memory.kv_heads, -1, memory.dim).sum(2)
    sums = np.concatenate([np.zeros_like(asked[:1]), np.cumsum(asked, axis=0)])  # [W + 1, K, H]
    places = prompt.positions[there]
    first = np.searchsorted(places, positions, side="right")
    end = np.searchsorted(places, positions + recent, side="right")
    end = np.where(end > first, end, len(places))
    count = np.maximum(end - first, 1)[:, None]
    scores = np.empty((memory.kv_heads, len(positions)), np.float32)
    for head in range(memory.kv_heads):
        mean = (sums[end, head] - sums[first, head]) / count
        keys = memory.keys(head, memory.layer.rows[positions])
        back = memory.layer.offsets[positions] - positions
        scores[head] = np.einsum("nh,nh->n", mean, rotated_unscaled(keys, back, memory.config.rope))
    return scores

"""SnapKV (sections 4.1 and 4.3, arXiv:2404.14469): keep what the end of the prompt looks at.

SnapKV: LLM Knows What You are Looking for Before Generation.
"""

import dataclasses
import functools
import operator
from typing import Any, override

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrag.base import struct
from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import RequestError
from jaxrag.base.types import Array, HostArray, Partial
from jaxrag.kv.placement import KVPlacement
from jaxrag.models.attention import merge, scale_of, scored, with_sink_logits
from jaxrag.models.rope import place
from jaxrag.reuse.attention_index import rotated, rotated_unscaled
from jaxrag.reuse.decode.far import FarAnswer, FarLayer, HostPrompt
from jaxrag.reuse.decode.far.memory import HostMemory, first_highest, merged, softmax
from jaxrag.reuse.decode.far.scan import ByHead
from jaxrag.reuse.decode.footprint import Account, Bytes
from jaxrag.reuse.decode.rule import DecodeRule, Observe, highest, require
from jaxrag.reuse.decode.view import View


class Kept(struct.PyTreeNode):
    """What one layer attends to.

    Attributes:
      chosen: [B, K, G, n] int32 positions; -1 where there is none.
      tail: [B, 1, 1, window + room] int32 positions of the window and of what follows it.
    """

    chosen: Array
    tail: Array


@dataclasses.dataclass(frozen=True)
class SnapKV(DecodeRule):
    """``capacity`` tokens of the prompt per layer and query head, chosen once, and all that follow.

    The last ``window`` tokens are kept. Their softmax over the prompt, of which the model's sink
    logits take, summed over them and averaged over ``kernel`` neighbours, ranks the tokens before
    them. Query heads that share a KV
    head choose for themselves, as in the published code, which repeats the keys. Of a prompt with
    reused chunks only the queries of the final block are there to look.

    Attributes:
      capacity: tokens of the prompt that are kept, the window included.
      window: tokens at the end of the prompt whose queries choose.
      kernel: neighbours that a vote is averaged over, odd.
    """

    capacity: int = 2048
    window: int = 32
    kernel: int = 5
    name: str = dataclasses.field(default="snapkv", init=False)

    def __post_init__(self) -> None:
        require(self.name, capacity=self.capacity, window=self.window, kernel=self.kernel)
        if self.window >= self.capacity:
            raise RequestError(
                f"decode rule 'snapkv': window={self.window} leaves nothing to choose of capacity="
                f"{self.capacity}; use a smaller window"
            )
        if self.kernel % 2 == 0:
            raise RequestError(
                f"decode rule 'snapkv': kernel={self.kernel}: expected an odd number, so that the "
                f"average has a middle"
            )

    @property
    @override
    def observe(self) -> Observe:
        return Observe("last", self.window)

    @property
    @override
    def static_pattern(self) -> tuple[int, int]:
        return 0, self.window

    @override
    def far(self, prompt: HostPrompt) -> FarLayer:
        """What was chosen, and what left the window."""
        return KeptKeys(prompt, self)

    @override
    def tokens(self) -> dict[str, int]:
        return {"capacity": self.capacity}

    @override
    def beside(self, config: ModelConfig, tokens: int, placement: KVPlacement) -> Bytes:
        chosen = min(max(tokens - self.window, 0), self.capacity - self.window)
        positions = 4 * config.num_layers * config.num_heads * chosen
        return Bytes(host=positions) if placement.away else Bytes(device=positions)

    @override
    def prepare(self, view: View, queries: Array, positions: Array, room: int) -> Kept:
        """Choose from the attention of the prompt's last queries."""
        start = view.position - self.window + 1  # of the window
        votes = _votes(view, queries, jnp.where(positions >= start[:, None], positions, -1))
        by_position = jnp.take_along_axis(votes, view.order[:, None, None], axis=-1)
        earlier = jnp.arange(by_position.shape[-1]) < start[:, None, None, None]
        ranked = _average(jnp.where(earlier, by_position, 0.0), self.kernel)
        ranked = jnp.where(earlier, ranked, -1.0)
        best, chosen = highest(ranked, self.capacity - self.window)
        tail = start[:, None] + jnp.arange(self.window + room)
        return Kept(
            chosen=jnp.where(best >= 0, chosen, -1).astype(jnp.int32),
            tail=jnp.where(view.position[:, None] >= 0, tail, -1)[:, None, None].astype(jnp.int32),
        )

    @override
    def attend(self, view: View, layer: Array, state: Kept) -> tuple[Partial, Any]:
        """Attention to what was kept, the window and the generated tokens."""
        parts = [view.attend_at(state.chosen, state.chosen >= 0)]
        return merge([*parts, view.attend_at(state.tail, state.tail >= 0)]), state


def _votes(view: View, queries: Array, positions: Array) -> Array:
    """Softmax weights of every slot, summed over the queries: [B, K, G, S]."""
    config = view.config
    keys = view.keys()  # [B, S, K, H]
    placed = place(queries.astype(jnp.float32), jnp.maximum(positions, 0), view.rope, config.rope)
    placed = placed.reshape(*queries.shape[:2], config.num_kv_heads, -1, config.head_dim)
    sinks = view.sink_logits
    sinks = None if sinks is None else sinks.reshape(config.num_kv_heads, -1)

    def add(total: Array, one: tuple[Array, Array]) -> tuple[Array, None]:
        q, at = one  # [B, K, G, H], [B]
        scores = scored(jnp.einsum("bkgh,bskh->bkgs", q, keys), scale_of(config))
        see = (view.slot_position <= at[:, None])[:, None, None]
        scores = jnp.where(see, scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1)
        weights = with_sink_logits(Partial(weights, jax.nn.logsumexp(scores, axis=-1)), sinks)
        return total + jnp.where(see, weights, 0.0), None

    batch, slots = keys.shape[:2]
    zero = jnp.zeros((batch, config.num_kv_heads, config.group_size, slots))
    total, _ = lax.scan(add, zero, (jnp.moveaxis(placed, 1, 0), positions.T))
    return total


def _average[T: (Array, HostArray)](x: T, kernel: int) -> T:
    """Mean of every ``kernel`` neighbours on the last axis, zeros beyond the ends."""
    side, size = kernel // 2, x.shape[-1]
    pad = np.pad if isinstance(x, np.ndarray) else jnp.pad
    wide = pad(x, ((0, 0),) * (x.ndim - 1) + ((side, side),))
    shifted = (wide[..., first : first + size] for first in range(kernel))
    return functools.reduce(operator.add, shifted) / np.float32(kernel)


class KeptKeys(ByHead):
    """On the host: the chosen tokens of the prompt, and those that left the window."""

    def __init__(self, prompt: HostPrompt, rule: SnapKV) -> None:
        """Choose by the attention of the prompt's last queries, as ``prepare`` does."""
        self.memory, self.window = HostMemory(prompt.config, prompt.layer), rule.window
        self.start = prompt.position - rule.window + 1  # of the window when the prompt ends
        chosen = []
        for head in range(self.memory.kv_heads):
            votes = _host_votes(self.memory, prompt, head, self.start)[:, : max(self.start, 0)]
            ranked = _average(votes, rule.kernel)
            chosen.append([first_highest(one, rule.capacity - rule.window) for one in ranked])
        self.chosen = np.asarray(chosen, np.int32)  # [K, G, n]
        self.account = Account(index_bytes=int(self.chosen.nbytes) + self.memory.nbytes)

    @override
    def work(self, position: int) -> int:
        return self.chosen.size + max(0, position - self.window + 1 - self.start)

    @override
    def attend_head(self, head: int, asked: HostArray, position: int, answer: FarAnswer) -> None:
        memory, chosen = self.memory, self.chosen[head]
        with answer.attending():
            scores = [memory.scores(head, asked[:, at], some) for at, some in enumerate(chosen)]
            parts = [memory.mix(head, np.stack(scores), chosen)]
            left = memory.stretches(max(self.start, 0), position - self.window + 1)
            if left:
                parts.append(memory.attend(head, asked, left))
            answer.out[head], answer.lse[head] = merged(parts)


def _host_votes(memory: HostMemory, prompt: HostPrompt, head: int, start: int) -> HostArray:
    """Softmax weights of every position, summed over queries from ``start`` on: [G, S] float32."""
    end, group = prompt.position + 1, memory.group
    stretches = memory.stretches(0, end)
    places = np.concatenate(
        [
            np.arange(each.positions.start, each.positions.stop)
            if isinstance(each.positions, slice)
            else each.positions
            for each in stretches
        ]
    )
    queries = prompt.queries[:, head * group : (head + 1) * group].swapaxes(0, 1)  # [G, W, H]
    placed = rotated(queries, np.maximum(prompt.positions, 0), memory.config.rope)
    total = np.zeros((group, end), np.float32)
    for number, position in enumerate(prompt.positions.tolist()):
        if position < max(start, 0):
            continue
        one = np.repeat(placed[:, number, None], len(memory.offsets), axis=1)
        asked = rotated_unscaled(one, -memory.offsets, memory.config.rope).swapaxes(0, 1)
        scores = memory.scan(head, asked * np.float32(memory.config.score_scale), stretches)
        weights, lse = softmax(np.where(places <= position, scores, np.float32(-np.inf)))
        if prompt.sink_logits is not None:
            sinks = prompt.sink_logits[head * group : (head + 1) * group]
            weights /= (1 + np.exp(sinks - lse))[:, None]
        total[:, places] += weights
    return total

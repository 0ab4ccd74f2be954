"""Quest (section 3.4, arXiv:2406.10774): pages whose keys could score highest.

Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference.
"""

import dataclasses
from typing import Any, ClassVar, override

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrag.base import struct
from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import RequestError
from jaxrag.base.types import Array, HostArray, Partial
from jaxrag.kv.cache import PAGE
from jaxrag.kv.placement import KVPlacement
from jaxrag.models.rope import rotate, scale_rotary
from jaxrag.reuse.decode.dense import EveryKey
from jaxrag.reuse.decode.far import FarAnswer, FarLayer, HostPrompt
from jaxrag.reuse.decode.far.memory import HostMemory, first_highest
from jaxrag.reuse.decode.far.scan import ByHead
from jaxrag.reuse.decode.footprint import Account, Bytes
from jaxrag.reuse.decode.rule import DecodeRule, highest, require, require_zero_or_more
from jaxrag.reuse.decode.view import View


class Boxes(struct.PyTreeNode):
    """The box around the visible keys of every page, as they lie.

    Attributes:
      low: [B, M, K, H] least value of every channel.
      high: [B, M, K, H] greatest value of every channel.
    """

    low: Array
    high: Array


@dataclasses.dataclass(frozen=True)
class Quest(DecodeRule):
    """The ``budget`` tokens in the pages with the highest bound on their scores, per query head.

    The bound of a page is the sum over channels of max(q * low, q * high), at the corners of the
    box around its keys; a page is a page of the pool, of 16 slots, the boxes lie in its own frame
    and the query is turned into it. The newest token's page is always read. Query heads choose for
    themselves, also where they share a KV head.

    Attributes:
      budget: tokens of the pages that a query head reads, at least a page.
      dense_layers: the first layers, which attend to every key.
    """

    budget: int = 1024
    dense_layers: int = 2
    name: str = dataclasses.field(default="quest", init=False)
    by_position: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(self.name, budget=self.budget)
        if self.budget < PAGE:
            raise RequestError(
                f"decode rule 'quest': budget={self.budget}: expected at least a page of {PAGE} "
                f"tokens"
            )
        require_zero_or_more(self.name, dense_layers=self.dense_layers)

    @override
    def check(self, config: ModelConfig) -> None:
        """Refuse a model in which no layer is left to choose in."""
        super().check(config)
        if self.dense_layers >= config.num_layers:
            raise RequestError(
                f"decode rule 'quest': dense_layers={self.dense_layers}, the model has "
                f"{config.num_layers} layers: none would choose pages; use fewer dense layers"
            )

    @property
    @override
    def static_pattern(self) -> tuple[int, int]:
        return 0, 1  # of every other token its page decides

    @override
    def far(self, prompt: HostPrompt) -> FarLayer:
        """The best pages; everything in the first layers."""
        if prompt.index < self.dense_layers:
            return EveryKey(prompt, *self.static_pattern)
        return BestPages(prompt, self.budget // PAGE)

    @override
    def tokens(self) -> dict[str, int]:
        return {"budget": self.budget}

    @override
    def beside(self, config: ModelConfig, tokens: int, placement: KVPlacement) -> Bytes:
        pages, away = -(-tokens // PAGE), placement.away
        width = 4 if away else config.kv_row_bytes // (config.num_kv_heads * config.head_dim)
        boxes = 2 * pages * config.num_kv_heads * config.head_dim * width
        if not away:
            return Bytes(device=config.num_layers * boxes)
        layers = config.num_layers - self.dense_layers
        return Bytes(host=layers * (boxes + 4 * PAGE * pages + 4 * tokens))

    @override
    def prepare(self, view: View, queries: Array, positions: Array, room: int) -> Boxes:
        """The boxes of the prompt's pages."""
        return _boxes(view, view.pages, view.visible.reshape(*view.pages.shape, -1))

    @override
    def attend(self, view: View, layer: Array, state: Boxes) -> tuple[Partial, Any]:
        """Put the newest key into its box, then attend to the best pages."""
        page = view.pool.k.shape[1]
        own = view.slots_of(view.position[:, None])[:, :1] // page  # [B, 1] place in the table
        rows = jnp.arange(own.shape[0])[:, None]
        visible = view.visible.reshape(*view.pages.shape, page)[rows, own]
        new = _boxes(view, jnp.take_along_axis(view.pages, own, 1), visible)
        state = Boxes(
            low=state.low.at[rows, own].set(new.low), high=state.high.at[rows, own].set(new.high)
        )
        return lax.cond(
            layer < self.dense_layers, view.dense, lambda: self._best_pages(view, state, own)
        ), state

    def _best_pages(self, view: View, boxes: Boxes, own: Array) -> Partial:
        batch, num_pages = view.pages.shape
        page = view.pool.k.shape[1]
        bound = _bounds(view, boxes)  # [B, K, G, M]
        bound = jnp.where(jnp.arange(num_pages) == own[:, None, None], jnp.inf, bound)
        visible = view.visible.reshape(batch, 1, 1, num_pages, page)
        bound = jnp.where(visible.any(-1), bound, -jnp.inf)
        _, best = highest(bound, self.budget // page)
        slots = best[..., None] * page + jnp.arange(page)
        slots = slots.reshape(*best.shape[:-1], -1)
        return view.mix(view.scores_of_slots(slots), slots)


def _boxes(view: View, pages: Array, visible: Array) -> Boxes:
    """Boxes of pages [B, m] of the pool, over the slots seen [B, m, page]; empty ones are 0."""
    keys = view.pool.k[pages]  # [B, m, page, K, H]
    visible = visible[..., None, None]
    largest = jnp.finfo(keys.dtype).max
    some = visible.any(2)
    low = jnp.where(visible, keys, largest).min(2)
    high = jnp.where(visible, keys, -largest).max(2)
    return Boxes(low=jnp.where(some, low, 0), high=jnp.where(some, high, 0))


def _bounds(view: View, boxes: Boxes) -> Array:
    """No key of a page scores higher than this: [B, K, G, M] float32, before scaling."""
    assert view.q is not None
    rotation = jnp.maximum(view.position[:, None] - view.offsets, 0)
    q = scale_rotary(view.q, view.rope, view.config.rope).astype(jnp.float32)[:, None]
    cos, sin = view.rope.cos[rotation][:, :, None], view.rope.sin[rotation][:, :, None]
    q = rotate(q, cos, sin, interleaved=view.config.rope.interleaved)
    q = q.reshape(*rotation.shape, view.config.num_kv_heads, -1, view.config.head_dim)
    above = jnp.einsum("bmkgh,bmkh->bkgm", jnp.maximum(q, 0), boxes.high.astype(jnp.float32))
    return above + jnp.einsum("bmkgh,bmkh->bkgm", jnp.minimum(q, 0), boxes.low.astype(jnp.float32))


class BestPages(ByHead):
    """On the host: the pages with the highest bounds of every query head, without the newest token.

    A page is ``PAGE`` rows of the memory, of which the request has some; the box around their keys
    lies in their own frame. The newest token's page is always read.
    """

    def __init__(self, prompt: HostPrompt, pages: int) -> None:
        """The boxes of the prompt's pages."""
        self.memory = memory = HostMemory(prompt.config, prompt.layer)
        self.pages = pages
        offsets = np.searchsorted(memory.offsets, prompt.layer.offsets)
        # Pages in the order of their offsets, those of one beside each other.
        name = offsets.astype(np.int64) << 32 | prompt.layer.rows // PAGE
        names, self._page_of = np.unique(name, return_inverse=True)
        self._ends = np.searchsorted(names >> 32, np.arange(len(memory.offsets) + 1))
        order = np.argsort(self._page_of, kind="stable")
        page = self._page_of[order]
        place = np.arange(len(order)) - np.searchsorted(page, page)
        self._members = np.full((len(names), PAGE), -1, np.int32)
        self._members[page, place] = order
        self._page_of = self._page_of.astype(np.int32)
        shape = (memory.kv_heads, len(names), memory.dim)
        self.low = np.full(shape, np.inf, np.float32)
        self.high = np.full(shape, -np.inf, np.float32)
        self._last_boxed = -1  # the last position in a box
        self.extend(prompt.position)
        held = (self.low, self.high, self._members, self._page_of)
        nbytes = sum(int(each.nbytes) for each in held)
        self.account = Account(index_bytes=nbytes + memory.nbytes)

    @override
    def extend(self, position: int) -> None:
        """Put the keys up to ``position`` into their boxes."""
        for at in range(self._last_boxed + 1, position + 1, 1 << 14):
            positions = np.arange(at, min(at + (1 << 14), position + 1))
            positions = positions[np.argsort(self._page_of[positions], kind="stable")]
            pages, first = np.unique(self._page_of[positions], return_index=True)
            for head in range(self.memory.kv_heads):
                keys = self.memory.keys(head, self.memory.layer.rows[positions])
                low, high = self.low[head], self.high[head]
                low[pages] = np.minimum(low[pages], np.minimum.reduceat(keys, first))
                high[pages] = np.maximum(high[pages], np.maximum.reduceat(keys, first))
        self._last_boxed = max(self._last_boxed, position)

    @override
    def work(self, position: int) -> int:
        return self.low.shape[0] * (2 * self.low.shape[1] + self.memory.group * self.pages * PAGE)

    @override
    def attend_head(self, head: int, asked: HostArray, position: int, answer: FarAnswer) -> None:
        with answer.searching():
            bounds = self._bounds(head, asked)
            bounds[:, self._page_of[position]] = np.inf
            width = min(self.pages, bounds.shape[1]) * PAGE
            scores = np.full((len(bounds), width), -np.inf, np.float32)
            where = np.zeros((len(bounds), width), np.int32)
            for at, bound in enumerate(bounds):
                some = self._members[first_highest(bound, self.pages)].ravel()
                some = some[(some >= 0) & (some < position)]
                where[at, : len(some)] = some
                scores[at, : len(some)] = self.memory.scores(head, asked[:, at], some)
        with answer.attending():
            answer.out[head], answer.lse[head] = self.memory.mix(head, scores, where)

    def _bounds(self, head: int, asked: HostArray) -> HostArray:
        """No key of a page scores higher: [g, M] float32; -inf for pages that hold no key yet."""
        bounds = np.empty((asked.shape[1], self.low.shape[1]), np.float32)
        empty = np.isinf(self.low[head, :, 0])
        for number, q in enumerate(asked):
            above, below, end = np.maximum(q, 0), np.minimum(q, 0), int(self._ends[number + 1])
            for at in range(int(self._ends[number]), end, self.memory.block):
                block = slice(at, min(at + self.memory.block, end))
                low = np.where(empty[block, None], 0, self.low[head, block])
                high = np.where(empty[block, None], 0, self.high[head, block])
                bounds[:, block] = above @ high.T + below @ low.T
        bounds[:, empty] = -np.inf
        return bounds

"""Quest (section 3.4, arXiv:2406.10774): pages whose keys could score highest.

Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference.
"""

import dataclasses
from typing import Any, override

import jax.numpy as jnp
from jax import lax

from jaxrag.base import struct
from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import RequestError
from jaxrag.base.types import Array, Partial
from jaxrag.kv.cache import PAGE
from jaxrag.models.rope import rotate, scale_rotary
from jaxrag.reuse.decode.far import Everything, FarLayer, HostPrompt, Pages
from jaxrag.reuse.decode.footprint import Bytes, Placement, row_bytes
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

    def __post_init__(self) -> None:
        """Refuse less than a page, and a negative number of layers."""
        require(self.name, budget=self.budget)
        if self.budget < PAGE:
            raise RequestError(
                f"decode rule 'quest': budget={self.budget}: expected at least a page of {PAGE} "
                f"tokens"
            )
        require_zero_or_more(self.name, dense_layers=self.dense_layers)

    @property
    @override
    def by_position(self) -> bool:
        return False

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
            return Everything(prompt, *self.static_pattern)
        return Pages(prompt, self.budget // PAGE)

    @override
    def tokens(self) -> dict[str, int]:
        return {"budget": self.budget}

    @override
    def beside(self, config: ModelConfig, tokens: int, placement: Placement) -> Bytes:
        pages, away = -(-tokens // PAGE), placement == "host"
        width = 4 if away else row_bytes(config) // (config.num_kv_heads * config.head_dim)
        boxes = 2 * pages * config.num_kv_heads * config.head_dim * width
        if not away:
            return Bytes(device=config.num_layers * boxes)
        layers = config.num_layers - self.dense_layers
        return Bytes(host=layers * (boxes + 4 * PAGE * pages + 4 * tokens))

    @override
    def prepare(self, view: View, queries: Array, positions: Array, room: int) -> Boxes:
        """The boxes of the prompt's pages."""
        return _boxes(view, view.pages, view.seen.reshape(*view.pages.shape, -1))

    @override
    def attend(self, view: View, layer: Array, state: Boxes) -> tuple[Partial, Any]:
        """Put the newest key into its box, then attend to the best pages."""
        page = view.pool.k.shape[1]
        own = view.slots_of(view.position[:, None])[:, :1] // page  # [B, 1] place in the table
        rows = jnp.arange(own.shape[0])[:, None]
        seen = view.seen.reshape(*view.pages.shape, page)[rows, own]
        new = _boxes(view, jnp.take_along_axis(view.pages, own, 1), seen)
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
        seen = view.seen.reshape(batch, 1, 1, num_pages, page)
        bound = jnp.where(seen.any(-1), bound, -jnp.inf)
        _, best = highest(bound, self.budget // page)
        slots = best[..., None] * page + jnp.arange(page)
        slots = slots.reshape(*best.shape[:-1], -1)
        return view.mix(view.scores_of_slots(slots), slots)


def _boxes(view: View, pages: Array, seen: Array) -> Boxes:
    """Boxes of pages [B, m] of the pool, over the slots seen [B, m, page]; empty ones are 0."""
    keys = view.pool.k[pages]  # [B, m, page, K, H]
    seen = seen[..., None, None]
    largest = jnp.finfo(keys.dtype).max
    some = seen.any(2)
    low = jnp.where(seen, keys, largest).min(2)
    high = jnp.where(seen, keys, -largest).max(2)
    return Boxes(low=jnp.where(some, low, 0), high=jnp.where(some, high, 0))


def _bounds(view: View, boxes: Boxes) -> Array:
    """No key of a page scores higher than this: [B, K, G, M] float32, before scaling."""
    assert view.q is not None
    turn = jnp.maximum(view.position[:, None] - view.offsets, 0)
    q = scale_rotary(view.q, view.config.rope).astype(jnp.float32)[:, None]
    cos, sin = view.rope.cos[turn][:, :, None], view.rope.sin[turn][:, :, None]
    q = rotate(q, cos, sin, interleaved=view.config.rope.interleaved)
    q = q.reshape(*turn.shape, view.config.num_kv_heads, -1, view.config.head_dim)
    above = jnp.einsum("bmkgh,bmkh->bkgm", jnp.maximum(q, 0), boxes.high.astype(jnp.float32))
    return above + jnp.einsum("bmkgh,bmkh->bkgm", jnp.minimum(q, 0), boxes.low.astype(jnp.float32))

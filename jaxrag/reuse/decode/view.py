"""What a decode rule is given: one layer of the pool as one new token sees it."""

import dataclasses
import functools
from collections.abc import Callable

import jax.numpy as jnp

from jaxrag.base import struct
from jaxrag.base.config import ModelConfig
from jaxrag.base.types import HIDDEN, Array, HostArray, Partial
from jaxrag.kv.cache import PagePool, PageTable
from jaxrag.kv.cache.host import HostValues
from jaxrag.models.attention import (
    Pages,
    attend_pool,
    kept_mixture,
    paged_decode_attention,
    paged_scores,
    rotary_of,
    scale_of,
    slot_scores,
    slot_values,
    topn_attention,
)
from jaxrag.models.rope import RopeTable, rotate, scale_rotary
from jaxrag.reuse.decode.host_search import HostSearch


@dataclasses.dataclass(frozen=True)
class Far:
    """Values of a layer in host memory, and what its newest tokens add to them.

    Attributes:
      layer: scalar int32.
      pages: [B, M] of the requests' tables.
      slots: [B, 1] of the newest tokens.
      v: [B, 1, K, H] of these.
    """

    values: HostValues
    layer: Array
    pages: Array
    slots: Array
    v: Array

    def mix(self, scores: Array, slots: Array) -> tuple[Array, Array]:
        """Mix the values at slots [B, K, G, n], once the newest are there: out and lse."""
        return kept_mixture(self.values, self.layer, self.pages, self.slots, self.v, scores, slots)


@dataclasses.dataclass(frozen=True)
class View:
    """One layer of the pool as the newest token of every row sees it.

    Rules choose by position, the pool is read by slot.

    Attributes:
      rope: of this layer, at least as long as the request's slots.
      pool: K and V of all layers.
      pages: [B, M] rows of the pool, of this layer.
      offsets: [B, M] by how much the keys of each page are still to be rotated.
      slot_position: [B, S] the position in every slot; HIDDEN where nothing is.
      order: [B, S] the slot of every position.
      position: [B] of the newest token, while a rule prepares that of the prompt's last one; -1 is
        a padding row.
      q: [B, N, H] before rotation; None while a rule prepares.
      far: where V of some layers, perhaps not this one, lies in host memory.
      sink_logits: [N] of this layer while a rule prepares; None where the model has none.
    """

    config: ModelConfig
    rope: RopeTable
    pool: PagePool
    pages: Array
    offsets: Array
    slot_position: Array
    order: Array
    position: Array
    q: Array | None = None
    host: HostSearch | None = None
    far: Far | None = None
    sink_logits: Array | None = None

    @property
    def table(self) -> Pages:
        """Where the keys of this layer stand."""
        return Pages(self.pages, self.offsets, self.slot_position)

    def dense(self) -> Partial:
        """Attention to every key."""
        return self._attend(paged_decode_attention)

    def top(self, n: int, renormalise: bool) -> Partial:
        """Attention to the ``n`` keys with the largest weights of every query head."""
        return self._attend(functools.partial(topn_attention, n=n, renormalise=renormalise))

    def _attend(self, op: Callable[..., tuple[Array, Array]]) -> Partial:
        assert self.q is not None
        out, lse = attend_pool(
            op, self.config, self.rope, self.pool, self.q, self.table, self.position
        )
        return Partial(out=out[:, None], lse=lse[:, None])

    def scores(self) -> Array:
        """Scores of all keys, by slot: [B, K, G, S] float32, -inf where a slot is not seen."""
        assert self.q is not None
        return paged_scores(
            scale_rotary(self.q, self.rope, self.config.rope),
            self.pool.k,
            self.table,
            self.position,
            rotary_of(self.config, self.rope),
            scale=scale_of(self.config),
        )

    def slots_of(self, positions: Array) -> Array:
        """The slots [B, ...] of positions [B, ...]; any valid one where there is none."""
        flat = jnp.clip(positions.reshape(positions.shape[0], -1), 0, self.order.shape[1] - 1)
        return jnp.take_along_axis(self.order, flat, axis=1).reshape(positions.shape)

    def scores_at(
        self,
        positions: Array,
        see: Array,
        at: Array | None = None,
        query_at: Array | None = None,
    ) -> Array:
        """Scores with the keys at some positions.

        Args:
            positions: [B, K', G', n]; K' is K or 1, G' is G or 1.
            see: which of them count; those behind the newest token never do.
            at: where the keys are placed; None: where they stand.
            query_at: [B] where the query is placed; None: at its own position.

        Returns:
            [B, K, G, n] float32, -inf where a key is not seen.
        """
        slots = self.slots_of(positions)
        rotation = self.rotations(slots)  # keys lie in the pool as they stand inside their chunk
        rotation = rotation if at is None else rotation + at - positions
        query_at = self.position if query_at is None else query_at
        see = see & (positions >= 0) & (positions <= self.position[:, None, None, None])
        return self._slot_scores(slots, see, query_at, rotation)

    def attend_at(
        self,
        positions: Array,
        see: Array,
        at: Array | None = None,
        query_at: Array | None = None,
    ) -> Partial:
        """Attention to the keys at positions; arguments as ``scores_at``."""
        scores = self.scores_at(positions, see, at, query_at)
        return self.mix(scores, self.slots_of(positions))

    def scores_of_slots(self, slots: Array) -> Array:
        """Scores with the keys at slots [B, K', G', n], -inf where one is not seen."""
        assert self.q is not None
        flat = slots.reshape(slots.shape[0], -1)
        see = jnp.take_along_axis(self.visible, flat, axis=1).reshape(slots.shape)
        return self._slot_scores(slots, see, self.position, self.rotations(slots))

    def _slot_scores(self, slots: Array, see: Array, query_at: Array, rotation: Array) -> Array:
        assert self.q is not None
        return slot_scores(
            scale_rotary(self.q, self.rope, self.config.rope),
            self.pool.k,
            self.pages,
            slots,
            see,
            jnp.maximum(query_at, 0),
            rotation,
            rotary_of(self.config, self.rope),
            scale=scale_of(self.config),
        )

    def mix(self, scores: Array, slots: Array) -> Partial:
        """Softmax over scores [B, K, G, n] and the mixture of the values at their slots."""
        out, lse = slot_values(scores, self.pool.v, self.pages, slots)
        return Partial(out=out[:, None], lse=lse[:, None])

    def mix_far(self, scores: Array, slots: Array) -> Partial:
        """As ``mix``, with values from host memory: those rows are all that is brought in."""
        assert self.far is not None
        out, lse = self.far.mix(scores, jnp.broadcast_to(slots, scores.shape))
        return Partial(out=out[:, None], lse=lse[:, None])

    def rotations(self, slots: Array) -> Array:
        """By how much the keys at slots [B, ...] still have to be rotated: their page's offset."""
        flat = slots.reshape(slots.shape[0], -1) // self.pool.k.shape[1]
        return jnp.take_along_axis(self.offsets, flat, axis=1).reshape(slots.shape)

    def keys(self, at: Array | None = None) -> Array:
        """All keys of the requests by slot, [B, S, K, H] float32: reads and copies the whole layer.

        At their own positions, or all at the position ``at``. Slots that are not seen hold zeros.
        """
        batch, num_pages = self.pages.shape
        page = self.pool.k.shape[1]
        keys = self.pool.k[self.pages].astype(jnp.float32)  # [B, M, page, K, H]
        visible = self.visible.reshape(batch, num_pages, page, 1, 1)
        rotation = jnp.broadcast_to(self.offsets[:, :, None], (batch, num_pages, page))
        if at is not None:
            local = jnp.where(
                visible[..., 0, 0], self.slot_position.reshape(rotation.shape) - rotation, 0
            )
            rotation = at - local
        rotation = rotation[..., None, None]
        angle = jnp.abs(rotation[..., 0])
        keys = rotate(
            jnp.where(visible, keys, 0),
            self.rope.cos[angle],
            jnp.sign(rotation) * self.rope.sin[angle],
            interleaved=self.config.rope.interleaved,
        )
        return keys.reshape(batch, num_pages * page, *keys.shape[3:])

    def keys_at(self, positions: Array) -> Array:
        """The keys at positions [B, n], where they stand: [B, n, K, H] float32."""
        slots = self.slots_of(positions)
        page = self.pool.k.shape[1]
        rows = jnp.take_along_axis(self.pages, slots // page, axis=1)
        keys = self.pool.k[rows, slots % page].astype(jnp.float32)
        rotation = self.rotations(slots)
        cos, sin = self.rope.cos[rotation][:, :, None], self.rope.sin[rotation][:, :, None]
        return rotate(keys, cos, sin, interleaved=self.config.rope.interleaved)

    @property
    def visible(self) -> Array:
        """[B, S] which slots the newest token sees."""
        return self.slot_position <= self.position[:, None]

    def window(self, sink: int, recent: int) -> tuple[Array, Array]:
        """Positions [B, 1, 1, sink + recent] of the static pattern, and which of them count.

        The first ``sink`` tokens and the ``recent`` newest ones, the newest token included; a token
        that is both counts once.
        """
        first = jnp.broadcast_to(jnp.arange(sink), (self.position.shape[0], sink))
        last = self.position[:, None] - recent + 1 + jnp.arange(recent)
        positions = jnp.concatenate((first, last), axis=1).astype(jnp.int32)
        counts = jnp.concatenate((jnp.ones_like(first, bool), last >= sink), axis=1)
        return positions[:, None, None], counts[:, None, None]

    def outside_window(self, sink: int, recent: int) -> Array:
        """[B, S] which slots the newest token sees and the static pattern leaves out."""
        inside = self.slot_position <= self.position[:, None] - recent
        return inside & (self.slot_position >= sink) & (self.slot_position != HIDDEN)


class PromptSlots(struct.PyTreeNode):
    """Which slots of the pool the tokens of prompts are in; order and position start on the host.

    Attributes:
      order: [B, S] int32 slot of every position.
      position: [B] int32 of each prompt's last token; -1 is a padding row.
    """

    table: PageTable
    order: Array | HostArray
    position: Array | HostArray

    def view(self, config: ModelConfig, rope: RopeTable, pool: PagePool, layer: Array) -> View:
        """One layer [] int32, as a rule that prepares is given it."""
        table = self.table
        pages = pool.rows(layer, table.pages, config.num_kv_layers)
        where = (jnp.asarray(self.order), jnp.asarray(self.position))
        rope = rope.of_layer(layer)
        return View(config, rope, pool, pages, table.offsets, table.slot_position, *where)

"""What a decode rule is given and returns: one layer of the pool as one new token sees it."""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxrag.attention_index import Spec
from jaxrag.cache import PagePool
from jaxrag.cache.host import HostValues
from jaxrag.config import ModelConfig
from jaxrag.decode.host_search import HostSearch
from jaxrag.errors import RequestError
from jaxrag.models.attention import (
    Pages,
    attend_pool,
    paged_decode_attention,
    paged_scores,
    rotary_of,
    slot_mixture,
    slot_scores,
    slot_values,
    topn_attention,
)
from jaxrag.models.rope import RopeTable, rotate, scale_rotary
from jaxrag.types import HIDDEN, Array, Partial


@dataclasses.dataclass(frozen=True)
class Observe:
    """Which queries of the prompt a rule wants kept from prefill: of the tokens that were run."""

    which: Literal["last", "strided"]
    count: int


class PromptQueries(struct.PyTreeNode):
    """Queries of some prompt tokens, of every layer, before rotation."""

    queries: Array  # [L, B, W, N, H]
    positions: Array  # [B, W] int32; -1 where there is no query


@dataclasses.dataclass(frozen=True)
class Far:
    """Values of a layer in host memory, and what its newest tokens add to them.

    Attributes:
      values: where they lie. layer: scalar int32. pages: [B, M] of the requests' tables.
      slots: [B, 1] of the newest tokens. v: [B, 1, K, H] of these.
    """

    values: HostValues
    layer: Array
    pages: Array
    slots: Array
    v: Array

    def rows(self, slots: Array) -> Array:
        """The values at slots [B, K, G, n], once the newest are there: [B, K, G, n, H]."""
        return self.values.rows(self.layer, self.pages, self.slots, self.v, slots)


@dataclasses.dataclass(frozen=True)
class View:
    """One layer of the pool as the newest token of every row sees it.

    ``order`` holds the slot of every position: rules choose by position, the pool is read by slot.
    ``q`` is None while a rule prepares, before any token is generated; ``position`` then is that of
    the prompt's last token.
    """

    config: ModelConfig
    rope: RopeTable
    pool: PagePool
    pages: Array  # [B, M] rows of the pool, of this layer
    offsets: Array  # [B, M]
    slot_position: Array  # [B, S]
    order: Array  # [B, S]
    position: Array  # [B]; -1 is a padding row
    q: Array | None = None  # [B, N, H] before rotation
    host: HostSearch | None = None  # for rules that search
    far: Far | None = None  # where V of some layers, perhaps not this one, lies in host memory

    @property
    def scale(self) -> float:
        """What scores are multiplied with."""
        return self.config.head_dim**-0.5

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
            scale_rotary(self.q, self.config.rope),
            self.pool.k,
            self.table,
            self.position,
            rotary_of(self.config, self.rope),
            scale=self.scale,
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
        """Scores with the keys at positions [B, K', G', n] (K' is K or 1, G' is G or 1).

        ``see`` says which of them count; those behind the newest token never do. ``at`` places the
        keys elsewhere than they stand, and ``query_at`` [B] the query. Returns [B, K, G, n] in
        float32.
        """
        slots = self.slots_of(positions)
        turn = self.turns(slots)  # keys lie in the pool as they stand inside their chunk
        turn = turn if at is None else turn + at - positions
        query_at = self.position if query_at is None else query_at
        see = see & (positions >= 0) & (positions <= self.position[:, None, None, None])
        return self._slot_scores(slots, see, query_at, turn)

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
        see = jnp.take_along_axis(self.seen, flat, axis=1).reshape(slots.shape)
        return self._slot_scores(slots, see, self.position, self.turns(slots))

    def _slot_scores(self, slots: Array, see: Array, query_at: Array, turn: Array) -> Array:
        assert self.q is not None
        return slot_scores(
            scale_rotary(self.q, self.config.rope),
            self.pool.k,
            self.pages,
            slots,
            see,
            jnp.maximum(query_at, 0),
            turn,
            rotary_of(self.config, self.rope),
            scale=self.scale,
        )

    def mix(self, scores: Array, slots: Array) -> Partial:
        """Softmax over scores [B, K, G, n] and the mixture of the values at their slots."""
        out, lse = slot_values(scores, self.pool.v, self.pages, slots)
        return Partial(out=out[:, None], lse=lse[:, None])

    def mix_far(self, scores: Array, slots: Array) -> Partial:
        """As ``mix``, with values from host memory: those rows are all that is brought in."""
        assert self.far is not None
        out, lse = slot_mixture(scores, self.far.rows(jnp.broadcast_to(slots, scores.shape)))
        return Partial(out=out[:, None], lse=lse[:, None])

    def turns(self, slots: Array) -> Array:
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
        seen = self.seen.reshape(batch, num_pages, page, 1, 1)
        turn = jnp.broadcast_to(self.offsets[:, :, None], (batch, num_pages, page))
        if at is not None:
            local = jnp.where(seen[..., 0, 0], self.slot_position.reshape(turn.shape) - turn, 0)
            turn = at - local
        turn = turn[..., None, None]
        angle = jnp.abs(turn[..., 0])
        keys = rotate(
            jnp.where(seen, keys, 0),
            self.rope.cos[angle],
            jnp.sign(turn) * self.rope.sin[angle],
            interleaved=self.config.rope.interleaved,
        )
        return keys.reshape(batch, num_pages * page, *keys.shape[3:])

    def keys_at(self, positions: Array) -> Array:
        """The keys at positions [B, n], where they stand: [B, n, K, H] float32."""
        slots = self.slots_of(positions)
        page = self.pool.k.shape[1]
        rows = jnp.take_along_axis(self.pages, slots // page, axis=1)
        keys = self.pool.k[rows, slots % page].astype(jnp.float32)
        turn = self.turns(slots)
        cos, sin = self.rope.cos[turn][:, :, None], self.rope.sin[turn][:, :, None]
        return rotate(keys, cos, sin, interleaved=self.config.rope.interleaved)

    @property
    def seen(self) -> Array:
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


@dataclasses.dataclass(frozen=True)
class DecodeRule(abc.ABC):
    """How a generated token attends. A rule is its settings: frozen, comparable, hashable.

    Attributes:
      name: the key of DECODE_RULES; a field, so that a record of the settings says whose they are.
    """

    name: str = dataclasses.field(init=False)

    @property
    def observe(self) -> Observe | None:
        """Which queries of the prompt the rule needs; None: it needs none."""
        return None

    @property
    def searches(self) -> Spec | None:
        """The kind of index that the rule searches on the host; None: it needs none."""
        return None

    @property
    def by_position(self) -> bool:
        """Does the rule choose by position? Then it is refused where positions overlap."""
        return True

    def check(self, config: ModelConfig) -> None:
        """Refuse a model that this rule cannot serve (RequestError)."""
        if config.sliding_window is not None:
            raise RequestError(
                f"decode rule {self.name!r}: layers of this model see {config.sliding_window} "
                f"tokens only (sliding window), there is nothing to leave out; use decode='dense'"
            )
        for field, tokens in self.tokens().items():
            if tokens > config.max_positions:
                raise RequestError(
                    f"decode rule {self.name!r}: {field}={tokens} is larger than the model's "
                    f"context of {config.max_positions} tokens; choose less, or decode='dense'"
                )

    def check_values(self, value_layers: int | None) -> None:
        """Refuse a cache with V of that many layers only on the device (RequestError)."""
        if value_layers is not None:
            raise RequestError(
                f"decode rule {self.name!r} reads V of every layer on the device, and only the "
                f"first {value_layers} of this model have it there; use decode='topn:device_layers="
                f"{value_layers}', or load the model without value_layers"
            )

    @abc.abstractmethod
    def tokens(self) -> dict[str, int]:
        """Settings that count tokens of the context, by name."""

    def prepare(self, view: View, queries: Array, positions: Array, room: int) -> Any:
        """State of one layer once the prompt is in the pool; None, or a tree of arrays [B, ...].

        ``queries`` [B, W, N, H] and their ``positions`` [B, W] are what ``observe`` asked for (W is
        0 where it asked for nothing). At most ``room`` tokens are generated.
        """
        return None

    @abc.abstractmethod
    def attend(self, view: View, layer: Array, state: Any) -> tuple[Partial, Any]:
        """Attention of the newest token in one layer, float32, and the layer's state after it."""


def highest(scores: Array, count: int) -> tuple[Array, Array]:
    """The ``count`` highest scores [..., S], best first, and where they are; all where S is less.

    Ties go to the earlier one.
    """
    best, at = lax.top_k(scores, min(count, scores.shape[-1]))
    return best, at


def require(rule: str, **counts: int) -> None:
    """RequestError unless every count is an integer of at least 1."""
    for field, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise RequestError(
                f"decode rule {rule!r}: {field}={value}: expected a positive integer"
            )


def require_zero_or_more(rule: str, **counts: int) -> None:
    """RequestError unless every count is an integer of at least 0."""
    for field, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise RequestError(f"decode rule {rule!r}: {field}={value}: expected 0 or more tokens")

"""A decode rule in the place of attention: what it needs before the first token, and each step."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxrag.cache import PagePool, PageTable
from jaxrag.config import ModelConfig
from jaxrag.decode.base import DecodeRule, Far, PromptQueries, View
from jaxrag.decode.host_search import HostSearch
from jaxrag.decode.retrieval import Indexed
from jaxrag.models.attention import PagedAttend
from jaxrag.models.rope import RopeTable
from jaxrag.types import HIDDEN, Array, HostArray, Tokens


class Decoding(struct.PyTreeNode):
    """What a rule carries from step to step."""

    order: Array  # [B, S] int32 slot of every position, of prompt and generated tokens
    state: Any  # the rule's own, a tree of arrays [L, B, ...]; None where it has none


def order_of(slot_position: HostArray, position: HostArray, slot: HostArray) -> HostArray:
    """The slot of every position: [B, S] int32 from ``slot_position`` [B, S] after prefill.

    The tokens to be generated stand from ``position`` [B] on in slots from ``slot`` [B] on. Where
    positions overlap (composite), one of the slots. 0 where nothing is or will be.
    """
    rows, num_slots = slot_position.shape
    order = np.zeros((rows, num_slots), np.int32)
    for row in range(rows):
        slots = np.flatnonzero(slot_position[row] != HIDDEN)
        order[row, slot_position[row, slots]] = slots
        if position[row] >= 0:
            room = min(num_slots - slot[row], num_slots - position[row])
            order[row, position[row] : position[row] + room] = slot[row] + np.arange(room)
    return order


@functools.partial(jax.jit, static_argnames=("config", "rule", "room"))
def prepare(
    config: ModelConfig,
    rope: RopeTable,
    pool: PagePool,
    table: PageTable,
    order: Array,
    position: Array,
    bank: PromptQueries,
    rule: DecodeRule,
    room: int,
) -> Any:
    """The rule's state before the first generated token, a tree of arrays [L, B, ...].

    ``position`` [B] is that of each prompt's last token, -1 for padding rows; at most ``room``
    tokens are generated.
    """

    def layer(index: Array, queries: Array) -> Any:
        pages = pool.rows(index, table.pages, config.num_layers)
        view = View(config, rope, pool, pages, table.offsets, table.slot_position, order, position)
        return rule.prepare(view, queries, bank.positions, room)

    layers = jnp.arange(config.num_layers, dtype=jnp.int32)
    return jax.lax.map(lambda x: layer(*x), (layers, bank.queries))


def numbers_of(decoding: Decoding | None) -> list[int]:
    """The numbers under which the host knows the requests; none where no index is searched."""
    if decoding is None or not isinstance(decoding.state, Indexed):
        return []
    return [int(number) for number in np.asarray(decoding.state.numbers[0])]


@dataclasses.dataclass(frozen=True)
class DecodeAttend:
    """One new token a row: writes its K and V as PagedAttend does, then attends by the rule.

    The cache is (pool, the rule's state [L, ...]).
    """

    paged: PagedAttend
    rule: DecodeRule
    order: Array
    host: HostSearch | None = None

    def __call__(
        self,
        layer: Array,
        window: Array | int | None,
        q: Array,
        k: Array,
        v: Array,
        tokens: Tokens,
        cache: tuple[PagePool, Any],
    ) -> tuple[Array, tuple[PagePool, Any], None]:
        """Write, then attend; shapes as Attend, T = 1."""
        pool, state = cache
        pages, pool = self.paged.write(layer, k, v, tokens, pool)
        table, far = self.paged.table, None
        if self.paged.values is not None:
            new = v.astype(pool.v.dtype)
            far = Far(self.paged.values, layer, table.pages, self.paged.slots, new)
        view = View(
            config=self.paged.config,
            rope=self.paged.rope,
            pool=pool,
            pages=pages,
            offsets=table.offsets,
            slot_position=table.slot_position,
            order=self.order,
            position=tokens.positions[:, 0],
            q=q[:, 0],
            host=self.host,
            far=far,
        )
        here = jax.tree.map(lambda x: x[layer], state)
        part, new = self.rule.attend(view, layer, here)
        if new is not here:  # most rules only read their state
            state = jax.tree.map(lambda x, y: x.at[layer].set(y), state, new)
        return part.out.astype(q.dtype), (pool, state), None

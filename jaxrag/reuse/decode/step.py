"""A decode rule in the place of attention: what it carries from step to step, and each step."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxrag.base import struct
from jaxrag.base.types import HIDDEN, Array, HostArray, Partial, Tokens
from jaxrag.kv.cache import PagePool
from jaxrag.kv.cache.host import HostValues
from jaxrag.models.attention import PagedAttend
from jaxrag.reuse.decode.host_search import HostSearch
from jaxrag.reuse.decode.rule import DecodeRule
from jaxrag.reuse.decode.view import Far, View


class Decoding(struct.PyTreeNode):
    """What a rule carries from step to step.

    Attributes:
      order: [B, S] int32 slot of every position, of prompt and generated tokens; None where K and
        V lie in host memory.
      state: the rule's own, a tree of arrays [L, B, ...]; None where it has none.
    """

    order: Array | None
    state: Any


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


@dataclasses.dataclass(frozen=True)
class DecodeAttend:
    """One new token a row: writes its K and V as PagedAttend does, then attends by the rule.

    The cache is (pool, the rule's state [L, ...]).

    Attributes:
      paged: writes, and says where things lie.
      order: [B, S] int32 slot of every position.
      host: where indexes are searched; None where the rule searches nothing.
      values: where V of some layers lies in host memory; None: nowhere.
    """

    paged: PagedAttend
    rule: DecodeRule
    order: Array
    host: HostSearch | None = None
    values: HostValues | None = None

    def __call__(
        self,
        layer: Array,
        window: Array | int | None,
        q: Array,
        k: Array,
        v: Array,
        tokens: Tokens,
        cache: tuple[PagePool, Any],
    ) -> tuple[Partial, tuple[PagePool, Any], None]:
        """Write, then attend; shapes as Attend, T = 1."""
        pool, state = cache
        pages, pool = self.paged.write(layer, k, v, tokens, pool)
        table, far = self.paged.table, None
        if self.values is not None:
            new = v.astype(pool.v.dtype)
            far = Far(self.values, layer, table.pages, self.paged.slots, new)
        view = View(
            config=self.paged.config,
            rope=self.paged.rope.of_layer(layer),
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
        own_state = jax.tree.map(lambda x: x[layer], state)
        part, new = self.rule.attend(view, layer, own_state)
        if new is not own_state:  # most rules only read their state
            state = jax.tree.map(lambda x, y: x.at[layer].set(y), state, new)
        return part.replace(out=part.out.astype(q.dtype)), (pool, state), None

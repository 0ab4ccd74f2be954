"""CacheBlend: the tokens whose cached KV differs most from what the whole prompt would give.

CacheBlend: Fast Large Language Model Serving for RAG with Cached Knowledge Fusion, section 4,
arXiv:2405.16444.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrag.base import struct
from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import RequestError
from jaxrag.base.shapes import bucket
from jaxrag.base.sharding import to_host
from jaxrag.base.types import Array, HostArray, Step
from jaxrag.kv.cache import PAGE, PagedCache, PagePool, PageTable, TableBuilder, batch_table
from jaxrag.models.attention import Attend, PackedAttend, PagedAttend
from jaxrag.models.decoder import Decoder, keys_and_values
from jaxrag.models.flops import turborag_flops
from jaxrag.models.model import Model
from jaxrag.models.rope import place
from jaxrag.models.taps import Tap
from jaxrag.reuse.select.base import (
    SelectionInput,
    Selector,
    best,
    budget_of,
    in_order,
    put_row,
)

ComparedPart = Literal["v", "k", "kv"]

_NOWHERE = np.iinfo(np.int32).max // 2  # a slot that no table has: what is written there is dropped


@dataclasses.dataclass(frozen=True)
class KvDeviation(Selector):
    """CacheBlend: highest squared deviation of the KV of one early layer (FusionRAG eq. 7 and 8).

    All prompt tokens run through the layers before ``layers[0]`` with full attention; that layer's
    fresh V (``part`` "v", as published; "k" or "kv" as options) is compared with the cached,
    squared differences summed over KV heads and dimensions. Layer 0 never deviates: its K and V do
    not depend on the context.

    ``keep_fresh``: the KV that was computed to get there stays. The request then reads, in copies
    of the chunks' pages, fresh K and V of every token up to the check layer, as CacheBlend's own
    code does, and stored K and V only behind it; else what was computed is dropped, as FusionRAG
    describes the method.

    Gradual filtering (CacheBlend section 4.3): with more than one layer, layer i keeps
    ``widths[i]`` times the budget, and only what it kept runs on to the next check, everything else
    as cached; the last layer keeps the budget itself. ``widths`` has one entry, at least 1 and
    falling, for each layer but the last.
    """

    layers: tuple[int, ...] = (1,)
    widths: tuple[float, ...] = ()
    part: ComparedPart = "v"
    keep_fresh: bool = True
    name: str = dataclasses.field(default="kv_deviation", init=False)

    def __post_init__(self) -> None:
        if self.part not in get_args(ComparedPart):
            raise RequestError(f"kv_deviation: part={self.part!r}: expected one of v, k, kv")
        if not self.layers or min(self.layers) < 1 or list(self.layers) != sorted(set(self.layers)):
            raise RequestError(
                f"kv_deviation: layers={self.layers}: expected rising layer indices from 1 on "
                f"(layer 0 never deviates)"
            )
        falling = list(self.widths) == sorted(self.widths, reverse=True)
        if (
            len(self.widths) != len(self.layers) - 1
            or not falling
            or min(self.widths, default=1) < 1
        ):
            raise RequestError(
                f"kv_deviation: widths={self.widths}: expected {len(self.layers) - 1} falling "
                f"numbers of at least 1, one for each check layer but the last"
            )

    def check(self, config: ModelConfig) -> None:
        """The model must have the layers that are compared."""
        if self.layers[-1] >= config.num_kv_layers:
            raise RequestError(
                f"kv_deviation: layer {self.layers[-1]} is compared and the model has layers "
                f"0..{config.num_kv_layers - 1}; choose smaller layers"
            )

    def room(self, lengths: Sequence[int], ratio: float | None) -> int:
        """What the widest check runs again."""
        assert ratio is not None
        total = sum(lengths)
        return _kept(max(self.widths, default=1.0), budget_of(ratio, total), total)

    @property
    def reads_values(self) -> bool:
        """It runs tokens through the layers over the cache."""
        return True

    @property
    def rewrites(self) -> bool:
        """Fresh KV of tokens that are not chosen goes to the request's copies."""
        return self.keep_fresh

    def observe(
        self, model: Model, cache: PagedCache, scene: SelectionInput
    ) -> tuple[HostArray, int]:
        """Deviations in the last layer that is compared, and what the checks spent.

        [C] float32, -inf where an earlier check dropped a token.
        """
        self.check(model.config)
        found, running = self._first_check(model, cache, scene), scene.num_prompt_tokens
        flops = self._flops(model.config, scene, running, self.layers[0])
        for check, width in enumerate(self.widths, 1):
            available = int(scene.candidates.sum())
            kept = best(found, scene.candidates, _kept(width, scene.budget, available))
            found = self._next_check(model, cache, scene, kept, self.layers[check - 1 : check + 1])
            flops += self._flops(model.config, scene, _running(scene, kept), self.layers[check])
        return found, flops

    def score(self, scene: SelectionInput) -> HostArray:
        """How far the cached KV is from the fresh."""
        deviations: HostArray = scene.observed[0]
        return deviations

    def flops(self, model: Model, scene: SelectionInput) -> int:
        """Of all checks."""
        return int(scene.observed[1])

    @staticmethod
    def _flops(config: ModelConfig, scene: SelectionInput, computed: int, layers: int) -> int:
        """Of one check: the layers before it, in the convention of ``turborag_flops``."""
        context = len(scene.prefix) + scene.num_chunk_tokens
        return turborag_flops(config, computed, context) * layers // config.num_layers

    def _first_check(self, model: Model, cache: PagedCache, scene: SelectionInput) -> HostArray:
        """Deviations in ``layers[0]``; the copies get the fresh KV up to there if it is kept."""
        ids, segments, *where = put_row(
            model, *scene.causal, scene.spread(scene.chunk_slots), scene.spread(scene.local)
        )
        prompt = _Prompts(ids, segments, _Where(*where))
        copies = None
        if self.keep_fresh:
            own = np.where(_has_copy(scene), scene.chunk_slots, _NOWHERE)
            [slots] = put_row(model, scene.spread(own, _NOWHERE))
            copies = _Copies(batch_table([_copied(scene)], 1, model.put_batch).pages, slots)
        table = batch_table([scene.table], 1, model.put_batch)
        decoder = model.decoder(ids.shape[1])
        out = cache.update(_whole_check, decoder, table, prompt, copies, self.layers[0], self.part)
        return scene.gather(to_host(out))

    def _next_check(
        self,
        model: Model,
        cache: PagedCache,
        scene: SelectionInput,
        kept: HostArray,
        layers: tuple[int, ...],
    ) -> HostArray:
        """Deviation of the kept tokens with everything else as it is: [C], -inf elsewhere."""
        # Chunks that are computed in place hold nothing yet: they run along, in their own slots.
        both = np.concatenate((kept, np.flatnonzero(np.repeat(scene.in_place, scene.lengths))))
        width, count = bucket(len(both)), len(kept)
        ids, local, stale = np.zeros((3, 1, width), np.int32)
        positions = np.full((1, width), -1, np.int32)
        slots, own = np.full((2, 1, width), _NOWHERE, np.int32)
        span = slice(len(both))
        ids[0, span] = np.concatenate(scene.chunks)[both]
        local[0, span] = scene.local[both]
        positions[0, span] = len(scene.prefix) + both
        stale[0, span] = slots[0, span] = scene.chunk_slots[both]
        own[0, :count] = np.where(_has_copy(scene), scene.chunk_slots, _NOWHERE)[kept]
        slots[0, :count] = scene.scratch + np.arange(count)
        builder = _copied(scene) if self.keep_fresh else scene.table.copy()
        builder.hide(scene.chunk_slots[kept])
        table = batch_table([builder], 1, model.put_batch)
        step = Step(*put_row(model, ids, positions, slots))
        where = _Where(*put_row(model, stale, local))
        copies = _Copies(table.pages, *put_row(model, own)) if self.keep_fresh else None
        decoder = model.decoder(table.slot_position.shape[1])
        out = cache.update(_sparse_check, decoder, table, step, where, copies, layers, self.part)
        found = np.full(scene.num_chunk_tokens, -np.inf, np.float32)
        found[kept] = to_host(out)[0, :count]
        return found


def _kept(width: float, budget: int, available: int) -> int:
    """Tokens that a check keeps of those available."""
    return min(math.ceil(width * budget), available)


class _Where(struct.PyTreeNode):
    """Where the cached KV of tokens lies; int32 [B, T]."""

    slots: Array  # in the table
    local: Array  # place in their chunk, to which the cached keys are rotated


class _Copies(struct.PyTreeNode):
    """Where fresh KV of tokens goes; int32."""

    pages: Array  # [B, M] of the table that reads it
    slots: Array  # [B, T] of the tokens in it, _NOWHERE of those that have no copy


class _Prompts(struct.PyTreeNode):
    """Prefix and chunks of prompts, each in a row; int32 [B, T]."""

    ids: Array
    segments: Array
    where: _Where


def _running(scene: SelectionInput, kept: HostArray) -> int:
    """Tokens of a check behind the first: those that are kept, and chunks computed in place."""
    gaps = zip(scene.lengths, scene.in_place, strict=True)
    return len(kept) + sum(length for length, in_place in gaps if in_place)


def _copied(scene: SelectionInput) -> TableBuilder:
    """The scene's table with the copies of its chunks in their places."""
    table = scene.table.copy()
    for first, pages in scene.copied_pages.items():
        table.replace(first, pages)
    return table


def _has_copy(scene: SelectionInput) -> HostArray:
    """[C] bool: does the token's chunk lie in pages that the request may write to?"""
    return np.repeat([bool(pages) for pages in scene.copies], scene.lengths)


@functools.partial(jax.jit, static_argnames=("layer", "part"), donate_argnames=("pool",))
def _whole_check(
    pool: PagePool,
    decoder: Decoder,
    table: PageTable,
    prompts: _Prompts,
    copies: _Copies | None,
    layer: int,
    part: ComparedPart,
) -> tuple[PagePool, Array]:
    """The pool, and the deviation [B, T] of prompts' KV in ``layer`` from that in their slots.

    With ``copies``, the pages that differ from the table's take its content, and the fresh KV of
    all layers from 1 to ``layer``: that of layer 0 depends on no context.
    """
    params, config = decoder.params, decoder.config
    attend: Attend = PackedAttend(config, decoder.rope, prefix_visible=True)
    if copies is not None:
        attend = Tap(attend, lambda q, k, v: (k, v))
    k, v, _, before = keys_and_values(
        params, config, in_order(prompts.ids, prompts.segments), None, attend, layer
    )
    out = _deviation(decoder, pool, table.pages, prompts.where, {"k": k, "v": v}, layer, part)
    if copies is not None:
        pool = _copy(pool, table.pages, copies.pages, config.num_kv_layers)
        fresh = _from_layer(1, before, (k, v))
        pool = _write(pool, decoder, copies, prompts.where.local, fresh, 1)
    return pool, out


def _from_layer(
    first: int, before: tuple[Array, Array], last: tuple[Array, Array]
) -> tuple[Array, Array]:
    """K and V [n, B, T, K, H] of layers ``first`` to the last, of [layer, ...] and the last's."""
    k, v = (
        jnp.concatenate((old[first:], new[None])) for old, new in zip(before, last, strict=True)
    )
    return k, v


def _copy(pool: PagePool, source: Array, target: Array, num_layers: int) -> PagePool:
    """Copy pages [B, M] of all layers to those that differ from them."""
    layers = jnp.arange(num_layers)[:, None, None]
    old, new = (pool.rows(layers, pages[None], num_layers) for pages in (source, target))
    new = jnp.where(old == new, pool.k.shape[0], new)
    return pool.replace(
        k=pool.k.at[new].set(pool.k[old], mode="drop"),
        v=pool.v.at[new].set(pool.v[old], mode="drop"),
    )


def _write(
    pool: PagePool,
    decoder: Decoder,
    copies: _Copies,
    local: Array,
    fresh: tuple[Array, Array],
    first: int,
) -> PagePool:
    """Write K before rotation and V [n, B, T, K, H] of the layers from ``first`` on."""
    config = decoder.config

    def layer(pool: PagePool, scanned: tuple[Array, Array, Array]) -> tuple[PagePool, None]:
        index, k, v = scanned
        pages = pool.rows(index, copies.pages, config.num_kv_layers)
        placed = place(k, local, decoder.rope.of_layer(index), config.rope)
        return pool.write(pages, copies.slots, placed, v), None

    layers = first + jnp.arange(len(fresh[0]), dtype=jnp.int32)
    return lax.scan(layer, pool, (layers, *fresh))[0]


@functools.partial(jax.jit, static_argnames=("layers", "part"), donate_argnames=("pool",))
def _sparse_check(
    pool: PagePool,
    decoder: Decoder,
    table: PageTable,
    step: Step,
    stale: _Where,
    copies: _Copies | None,
    layers: tuple[int, int],
    part: ComparedPart,
) -> tuple[PagePool, Array]:
    """The pool, and the deviation [B, T] of tokens that see the cache and each other.

    ``layers`` are the check before and this one. With ``copies``, the tokens' fresh KV of the
    layers behind the one, to the other, is written there.
    """
    params, config = decoder.params, decoder.config
    before, layer = layers
    table = table.reveal(step.slots, step.positions)
    attend: Attend = PagedAttend(config, decoder.rope, table, step.slots)
    if copies is not None:
        attend = Tap(attend, lambda q, k, v: (k, v))
    k, v, pool, run = keys_and_values(params, config, step.tokens, pool, attend, layer)
    out = _deviation(decoder, pool, table.pages, stale, {"k": k, "v": v}, layer, part)
    if copies is not None:
        fresh = _from_layer(before + 1, run, (k, v))
        pool = _write(pool, decoder, copies, stale.local, fresh, before + 1)
    return pool, out


def _deviation(
    decoder: Decoder,
    pool: PagePool,
    pages: Array,
    where: _Where,
    fresh: dict[str, Array],
    layer: Array | int,
    part: ComparedPart,
) -> Array:
    """Squared difference of fresh k, v [B, T, K, H] from the cached, over heads and dims: [B, T].

    Keys are compared where the pool holds them, at their place in the chunk: a rotation changes no
    distance.
    """
    config, slots = decoder.config, where.slots
    at = jnp.take_along_axis(pages, slots // PAGE, axis=1)
    at = pool.rows(layer, at, config.num_kv_layers)
    total = jnp.zeros(slots.shape, jnp.float32)
    rope = decoder.rope.of_layer(layer)
    fresh = fresh | {"k": place(fresh["k"], where.local, rope, config.rope)}
    for name in part:
        cached = getattr(pool, name)[at, slots % PAGE].astype(jnp.float32)
        total += jnp.square(fresh[name].astype(jnp.float32) - cached).sum((2, 3))
    return total

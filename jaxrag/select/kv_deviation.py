"""CacheBlend: the tokens whose cached KV differs most from what the whole prompt would give.

CacheBlend: Fast Large Language Model Serving for RAG with Cached Knowledge Fusion, section 4,
arXiv:2405.16444.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jaxrag.cache import PAGE, PagedCache, PagePool, PageTable, batch_table
from jaxrag.config import ModelConfig
from jaxrag.errors import RequestError
from jaxrag.models.attention import PackedAttend, PagedAttend
from jaxrag.models.decoder import Decoder, forward, keys_and_values
from jaxrag.models.flops import turborag_flops
from jaxrag.models.model import Model
from jaxrag.models.rope import place
from jaxrag.models.taps import Tap
from jaxrag.select.base import Choice, SelectionInput, Selector, best, budget_of
from jaxrag.shapes import bucket, row_length
from jaxrag.sharding import to_host
from jaxrag.types import EMPTY, FINAL, Array, HostArray, Step, Tokens

Part = Literal["v", "k", "kv"]


@dataclasses.dataclass(frozen=True)
class KvDeviation(Selector):
    """CacheBlend: highest squared deviation of the KV of one early layer (FusionRAG eq. 7 and 8).

    All prompt tokens run through the layers before ``layers[0]`` with full attention; that layer's
    fresh V (``part`` "v", as published; "k" or "kv" as options) is compared with the cached,
    squared differences summed over KV heads and dimensions. Layer 0 never deviates: its K and V do
    not depend on the context.

    Gradual filtering (CacheBlend section 4.3): with more than one layer, layer i keeps
    ``widths[i]`` times the budget, and only what it kept runs on to the next check, everything else
    as cached; the last layer keeps the budget itself. ``widths`` has one entry, at least 1 and
    falling, for each layer but the last.
    """

    layers: tuple[int, ...] = (1,)
    widths: tuple[float, ...] = ()
    part: Part = "v"
    name: str = dataclasses.field(default="kv_deviation", init=False)

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other."""
        if self.part not in get_args(Part):
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
        if self.layers[-1] >= config.num_layers:
            raise RequestError(
                f"kv_deviation: layer {self.layers[-1]} is compared and the model has layers "
                f"0..{config.num_layers - 1}; choose smaller layers"
            )

    def room(self, lengths: Sequence[int], ratio: float | None) -> int:
        """What the widest check runs again."""
        assert ratio is not None
        total = sum(lengths)
        return max(self._kept(i, budget_of(ratio, total), total) for i in range(len(self.layers)))

    def _kept(self, check: int, budget: int, available: int) -> int:
        """Tokens that the check at this index keeps."""
        if check == len(self.layers) - 1:
            return budget
        return min(int(np.ceil(self.widths[check] * budget)), available)

    @property
    def reads_values(self) -> bool:
        """It runs tokens through the layers over the cache."""
        return True

    def select(
        self, model: Model, cache: PagedCache, scenes: Sequence[SelectionInput]
    ) -> list[Choice]:
        """Choose the tokens that deviate most, over all chunks."""
        self.check(model.config)
        deviations = [self.deviations(model, cache, scenes)]
        kept = [scene.candidates for scene in scenes]
        flops = [self._flops(model.config, scene, scene.num_chunk_tokens, 0) for scene in scenes]
        chosen: list[HostArray] = []
        for check in range(len(self.layers)):
            if check:
                layer = self.layers[check]
                deviations.append(self._next_check(model, cache, scenes, chosen, layer))
                flops = [
                    spent + self._flops(model.config, scene, len(tokens), check)
                    for spent, scene, tokens in zip(flops, scenes, chosen, strict=True)
                ]
            chosen = [
                best(scores, among, self._kept(check, scene.budget, int(among.sum())))
                for scores, among, scene in zip(deviations[check], kept, scenes, strict=True)
            ]
            kept = [_flags(tokens, scene) for tokens, scene in zip(chosen, scenes, strict=True)]
        return [Choice(*pair) for pair in zip(chosen, flops, strict=True)]

    def _flops(
        self, config: ModelConfig, scene: SelectionInput, num_tokens: int, check: int
    ) -> int:
        """Of one check: the layers before it, in the convention of ``turborag_flops``."""
        context = len(scene.prefix) + scene.num_chunk_tokens
        computed = context if check == 0 else num_tokens
        all_layers = turborag_flops(config, computed, context)
        return all_layers * self.layers[check] // config.num_layers

    def deviations(
        self, model: Model, cache: PagedCache, scenes: Sequence[SelectionInput]
    ) -> list[HostArray]:
        """Deviation of every chunk token in ``layers[0]``: [C] float32 each."""
        table, rows = _whole_rows(model, scenes)
        decoder = model.decoder(rows.ids.shape[1])
        out = _whole_deviation(cache.pool, decoder, table, rows, self.layers[0], self.part)
        host = to_host(out)
        return [_of_chunks(host[row], scene) for row, scene in enumerate(scenes)]

    def _next_check(
        self,
        model: Model,
        cache: PagedCache,
        scenes: Sequence[SelectionInput],
        kept: Sequence[HostArray],
        layer: int,
    ) -> list[HostArray]:
        """Deviation of the kept tokens with everything else as cached: [C] each, 0 elsewhere."""
        rows = bucket(len(scenes), 1)
        tables = [scene.table.copy() for scene in scenes]
        shape = (rows, bucket(max(map(len, kept))))
        ids, local, stale = (np.zeros(shape, np.int32) for _ in range(3))
        positions = np.full(shape, -1, np.int32)
        slots = np.full(shape, np.iinfo(np.int32).max // 2, np.int32)
        for row, (scene, tokens) in enumerate(zip(scenes, kept, strict=True)):
            at = np.arange(len(tokens))
            ids[row, at] = np.concatenate((scene.prefix[:0], *scene.chunks))[tokens]
            local[row, at] = scene.local[tokens]
            stale[row, at] = scene.chunk_slots[tokens]
            positions[row, at] = len(scene.prefix) + tokens
            slots[row, at] = scene.scratch + at
            tables[row].hide(scene.chunk_slots[tokens])
        table = batch_table(tables, rows, model.put_batch)
        step = Step(*(model.put_batch(x, rows) for x in (ids, positions, slots)))
        where = _Where(*(model.put_batch(x, rows) for x in (stale, local)))
        decoder = model.decoder(table.slot_position.shape[1])
        out = cache.run(_sparse_deviation, decoder, table, step, where, layer, self.part)
        host = to_host(out)
        deviations = [np.zeros(scene.num_chunk_tokens, np.float32) for scene in scenes]
        for row, tokens in enumerate(kept):
            deviations[row][tokens] = host[row, : len(tokens)]
        return deviations


def layer_deviations(
    model: Model, cache: PagedCache, scene: SelectionInput
) -> tuple[HostArray, HostArray]:
    """Deviation of every chunk token in every layer, of K and of V: [L, C] float32 each.

    The stored KV against one pass of full attention over all of the prompt before the final block
    (FusionRAG equation 7); squared differences, summed over KV heads and dimensions.
    """
    table, rows = _whole_rows(model, [scene])
    both = _layer_deviations(cache.pool, model.decoder(rows.ids.shape[1]), table, rows)
    k, v = (_of_chunks(to_host(out)[:, 0], scene) for out in both)
    return k, v


class _Where(struct.PyTreeNode):
    """Where the cached KV of tokens lies; int32 [B, T]."""

    slots: Array  # in the table
    local: Array  # place in their chunk, to which the cached keys are rotated


class _Rows(struct.PyTreeNode):
    """Prefix and chunks of prompts, each in a row; int32 [B, T]."""

    ids: Array
    segments: Array
    where: _Where

    @property
    def tokens(self) -> Tokens:
        """At positions that are their order."""
        order = jnp.arange(self.ids.shape[1], dtype=jnp.int32)
        positions = jnp.broadcast_to(order, self.ids.shape)
        return Tokens(ids=self.ids, positions=positions, segments=self.segments)


def _of_chunks(rows: HostArray, scene: SelectionInput) -> HostArray:
    """The chunk tokens of what was laid out by ``_whole_rows``: [..., T] -> [..., C]."""
    first = len(scene.prefix)
    return rows[..., first : first + scene.num_chunk_tokens]


def _whole_rows(model: Model, scenes: Sequence[SelectionInput]) -> tuple[PageTable, _Rows]:
    """Prefix and chunks of every scene in a row, and the table of their pages."""
    rows = bucket(len(scenes), 1)
    used = [len(scene.prefix) + scene.num_chunk_tokens for scene in scenes]
    shape = (rows, row_length(max(used)))
    ids, segments = np.zeros(shape, np.int32), np.full(shape, EMPTY, np.int32)
    slots, local = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for row, scene in enumerate(scenes):
        ids[row, : used[row]] = np.concatenate((scene.prefix, *scene.chunks))
        segments[row, : used[row]] = FINAL  # one causal block
        slots[row, len(scene.prefix) : used[row]] = scene.chunk_slots
        local[row, len(scene.prefix) : used[row]] = scene.local
    table = batch_table([scene.table for scene in scenes], rows, model.put_batch)
    placed = [model.put_batch(x, rows) for x in (ids, segments, slots, local)]
    return table, _Rows(placed[0], placed[1], _Where(placed[2], placed[3]))


def _flags(tokens: HostArray, scene: SelectionInput) -> HostArray:
    flags = np.zeros(scene.num_chunk_tokens, bool)
    flags[tokens] = True
    return flags


@functools.partial(jax.jit, static_argnames=("layer", "part"))
def _whole_deviation(
    pool: PagePool, decoder: Decoder, table: PageTable, rows: _Rows, layer: int, part: Part
) -> Array:
    """Deviation [B, T] of prompts' KV in ``layer`` from that in their slots."""
    params, config = decoder.params, decoder.config
    attend = PackedAttend(config, decoder.rope, prefix_visible=True)
    k, v, _ = keys_and_values(params, config, rows.tokens, None, attend, layer)
    return _deviation(decoder, pool, table.pages, rows.where, {"k": k, "v": v}, layer, part)


@jax.jit
def _layer_deviations(
    pool: PagePool, decoder: Decoder, table: PageTable, rows: _Rows
) -> tuple[Array, Array]:
    """Deviation of K and of V [L, B, T] of prompts in their slots."""
    params, config = decoder.params, decoder.config
    packed = PackedAttend(config, decoder.rope, prefix_visible=True)
    attend = Tap(packed, lambda q, k, v: (k, v))
    _, _, fresh = forward(params, config, rows.tokens, None, attend)

    def of_layer(scanned: tuple[Array, tuple[Array, Array]]) -> tuple[Array, Array]:
        layer, (k, v) = scanned
        at = (decoder, pool, table.pages, rows.where, {"k": k, "v": v}, layer)
        return _deviation(*at, "k"), _deviation(*at, "v")

    return lax.map(of_layer, (jnp.arange(config.num_layers), fresh))


@functools.partial(jax.jit, static_argnames=("layer", "part"), donate_argnames=("pool",))
def _sparse_deviation(
    pool: PagePool,
    decoder: Decoder,
    table: PageTable,
    step: Step,
    stale: _Where,
    layer: int,
    part: Part,
) -> tuple[PagePool, Array]:
    """The pool, and the deviation [B, T] of tokens that see the cache and each other."""
    params, config = decoder.params, decoder.config
    table = table.reveal(step.slots, step.positions)
    attend = PagedAttend(config, decoder.rope, table, step.slots)
    k, v, pool = keys_and_values(params, config, step.tokens, pool, attend, layer)
    return pool, _deviation(decoder, pool, table.pages, stale, {"k": k, "v": v}, layer, part)


def _deviation(
    decoder: Decoder,
    pool: PagePool,
    pages: Array,
    where: _Where,
    fresh: dict[str, Array],
    layer: Array | int,
    part: Part,
) -> Array:
    """Squared difference of fresh k, v [B, T, K, H] from the cached, over heads and dims: [B, T].

    Keys are compared where the pool holds them, at their place in the chunk: a rotation changes no
    distance.
    """
    config, slots = decoder.config, where.slots
    at = jnp.take_along_axis(pages, slots // PAGE, axis=1)
    at = pool.rows(layer, at, config.num_layers)
    total = jnp.zeros(slots.shape, jnp.float32)
    fresh = fresh | {"k": place(fresh["k"], where.local, decoder.rope, config.rope)}
    for name in part:
        cached = getattr(pool, name)[at, slots % PAGE].astype(jnp.float32)
        total += jnp.square(fresh[name].astype(jnp.float32) - cached).sum((2, 3))
    return total

"""CacheBlend: the tokens whose cached KV differs most from what the whole prompt would give."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrag.cache import PAGE, PagePool, PageTable, batch_table
from jaxrag.config import ModelConfig
from jaxrag.errors import RequestError
from jaxrag.models.attention import PackedAttend, PagedAttend
from jaxrag.models.decoder import forward, keys_and_values
from jaxrag.models.flops import turborag_flops
from jaxrag.models.model import Model
from jaxrag.models.rope import RopeTable, place
from jaxrag.models.spec import Params
from jaxrag.models.taps import Tap
from jaxrag.select.base import Choice, Scene, Selector, best, budget_of
from jaxrag.shapes import bucket, row_length
from jaxrag.types import EMPTY, FINAL, Array, HostArray, Tokens

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

    def select(self, model: Model, scenes: Sequence[Scene]) -> list[Choice]:
        """Choose the tokens that deviate most, over all chunks."""
        self.check(model.config)
        deviations = [self.deviations(model, scenes)]
        kept = [scene.candidates for scene in scenes]
        flops = [self._flops(model.config, scene, scene.num_chunk_tokens, 0) for scene in scenes]
        chosen: list[HostArray] = []
        for check in range(len(self.layers)):
            if check:
                deviations.append(self._next_check(model, scenes, chosen, self.layers[check]))
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

    def _flops(self, config: ModelConfig, scene: Scene, num_tokens: int, check: int) -> int:
        """Of one check: the layers before it, in the convention of ``turborag_flops``."""
        context = len(scene.prefix) + scene.num_chunk_tokens
        computed = context if check == 0 else num_tokens
        all_layers = turborag_flops(config, computed, context)
        return all_layers * self.layers[check] // config.num_layers

    def deviations(self, model: Model, scenes: Sequence[Scene]) -> list[HostArray]:
        """Deviation of every chunk token in ``layers[0]``: [C] float32 each."""
        table, batch = _whole_rows(model, scenes)
        out = _whole_deviation(
            model.params,
            model.config,
            model.rope(batch[0].shape[1]),
            model.cache.pool,
            table,
            *batch,
            self.layers[0],
            self.part,
        )
        return [_of_chunks(np.asarray(out[row]), scene) for row, scene in enumerate(scenes)]

    def _next_check(
        self, model: Model, scenes: Sequence[Scene], kept: Sequence[HostArray], layer: int
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
        model.cache.pool, out = _sparse_deviation(
            model.params,
            model.config,
            model.rope(table.slot_position.shape[1]),
            model.cache.pool,
            table,
            *(model.put_batch(x, rows) for x in (ids, positions, slots, stale, local)),
            layer,
            self.part,
        )
        host = np.asarray(out)
        deviations = [np.zeros(scene.num_chunk_tokens, np.float32) for scene in scenes]
        for row, tokens in enumerate(kept):
            deviations[row][tokens] = host[row, : len(tokens)]
        return deviations


def layer_deviations(model: Model, scene: Scene) -> tuple[HostArray, HostArray]:
    """Deviation of every chunk token in every layer, of K and of V: [L, C] float32 each.

    The stored KV against one pass of full attention over all of the prompt before the final block
    (FusionRAG equation 7); squared differences, summed over KV heads and dimensions.
    """
    table, batch = _whole_rows(model, [scene])
    rope = model.rope(batch[0].shape[1])
    both = _layer_deviations(model.params, model.config, rope, model.cache.pool, table, *batch)
    k, v = (_of_chunks(np.asarray(out[:, 0]), scene) for out in both)
    return k, v


def _of_chunks(rows: HostArray, scene: Scene) -> HostArray:
    """The chunk tokens of what was laid out by ``_whole_rows``: [..., T] -> [..., C]."""
    first = len(scene.prefix)
    return rows[..., first : first + scene.num_chunk_tokens]


def _whole_rows(model: Model, scenes: Sequence[Scene]) -> tuple[PageTable, list[Array]]:
    """Prefix and chunks of every scene in a row: the table; ids, segments, slots, local [B, T]."""
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
    return table, [model.put_batch(x, rows) for x in (ids, segments, slots, local)]


def _flags(tokens: HostArray, scene: Scene) -> HostArray:
    flags = np.zeros(scene.num_chunk_tokens, bool)
    flags[tokens] = True
    return flags


@functools.partial(jax.jit, static_argnames=("config", "layer", "part"))
def _whole_deviation(
    params: Params,
    config: ModelConfig,
    rope: RopeTable,
    pool: PagePool,
    table: PageTable,
    ids: Array,
    segments: Array,
    slots: Array,
    local: Array,
    layer: int,
    part: Part,
) -> Array:
    """Deviation [B, T] of prompts' KV in ``layer`` from that in their slots [B, T]."""
    attend = PackedAttend(config, rope, prefix_visible=True)
    k, v, _ = keys_and_values(params, config, _in_order(ids, segments), None, attend, layer)
    return _deviation(config, rope, pool, table.pages, slots, local, k, v, layer, part)


@functools.partial(jax.jit, static_argnames=("config",))
def _layer_deviations(
    params: Params,
    config: ModelConfig,
    rope: RopeTable,
    pool: PagePool,
    table: PageTable,
    ids: Array,
    segments: Array,
    slots: Array,
    local: Array,
) -> tuple[Array, Array]:
    """Deviation of K and of V [L, B, T] of prompts in their slots [B, T]."""
    attend = Tap(PackedAttend(config, rope, prefix_visible=True), lambda q, k, v: (k, v))
    _, _, fresh = forward(params, config, _in_order(ids, segments), None, attend)

    def of_layer(scanned: tuple[Array, tuple[Array, Array]]) -> tuple[Array, Array]:
        layer, (k, v) = scanned
        at = (config, rope, pool, table.pages, slots, local, k, v, layer)
        return _deviation(*at, "k"), _deviation(*at, "v")

    return lax.map(of_layer, (jnp.arange(config.num_layers), fresh))


def _in_order(ids: Array, segments: Array) -> Tokens:
    """Tokens [B, T] whose positions are their order."""
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    return Tokens(ids=ids, positions=positions, segments=segments)


@functools.partial(jax.jit, static_argnames=("config", "layer", "part"), donate_argnames=("pool",))
def _sparse_deviation(
    params: Params,
    config: ModelConfig,
    rope: RopeTable,
    pool: PagePool,
    table: PageTable,
    ids: Array,
    positions: Array,
    slots: Array,
    stale: Array,
    local: Array,
    layer: int,
    part: Part,
) -> tuple[PagePool, Array]:
    """The pool, and the deviation [B, T] of tokens that see the cache and each other."""
    table = table.reveal(slots, positions)
    tokens = Tokens(ids=ids, positions=positions, segments=jnp.full_like(ids, FINAL))
    attend = PagedAttend(config, rope, table, slots)
    k, v, pool = keys_and_values(params, config, tokens, pool, attend, layer)
    return pool, _deviation(config, rope, pool, table.pages, stale, local, k, v, layer, part)


def _deviation(
    config: ModelConfig,
    rope: RopeTable,
    pool: PagePool,
    pages: Array,
    slots: Array,
    local: Array,
    k: Array,
    v: Array,
    layer: Array | int,
    part: Part,
) -> Array:
    """Squared difference of fresh k, v [B, T, K, H] from the cached, over heads and dims: [B, T].

    Keys are compared where the pool holds them, at their place in the chunk: a rotation changes no
    distance.
    """
    at = jnp.take_along_axis(pages, slots // PAGE, axis=1)
    at = pool.rows(layer, at, config.num_layers)
    total = jnp.zeros(slots.shape, jnp.float32)
    fresh = {"k": place(k, local, rope, config.rope), "v": v}
    for name in part:
        cached = getattr(pool, name)[at, slots % PAGE].astype(jnp.float32)
        total += jnp.square(fresh[name].astype(jnp.float32) - cached).sum((2, 3))
    return total

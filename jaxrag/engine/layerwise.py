"""Prefill layer by layer, for models whose K and V, or V, lie in host memory.

All tokens of a prompt go through one layer before the next one begins, so that K and V of a single
layer are all that the device has to hold of it. What a layer computed is copied to the host while
it attends (KCache section 3.2; RetrievalAttention appendix C), and does not come back; KV of chunks
that is in host memory already comes in once, in blocks.
"""

import functools
from collections import abc
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrag.base import struct
from jaxrag.base.config import ModelConfig
from jaxrag.base.shapes import bucket, pieces
from jaxrag.base.types import HIDDEN, Array, HostArray, Partial, on_host
from jaxrag.engine.mapping import batch_tables
from jaxrag.engine.prefill import PREFILL_TOKENS, Prefilled, observed_tokens
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.sequence import Sequence
from jaxrag.kv.cache import PAGE, PagePool, PageTable
from jaxrag.kv.cache.host_pool import rows_of
from jaxrag.models.attention import Pages, attend_placed, merge
from jaxrag.models.decoder import (
    embedded,
    finish_layer,
    heads_of,
    layer_of,
    layer_windows,
    rms_norm,
    unembed,
)
from jaxrag.models.rope import RopeFactors, place, rotate_by
from jaxrag.models.spec import Params
from jaxrag.reuse.decode import Observe, PromptQueries

BLOCK_PAGES = 512  # of KV in host memory that are on the device at once
_STEP = 32  # pages that the sizes of blocks differ by


class _Prompt(struct.PyTreeNode):
    """The tokens of one prompt that are run, padded to S, a power of two.

    Attributes:
      ids: [S] int32.
      positions: [S] int32; -1 behind the last.
      slots: [S] int32 of the request's table; beyond it behind the last.
      observed: [W] int32 indices of tokens whose queries are kept; -1: none.
    """

    ids: Array
    positions: Array
    slots: Array
    observed: Array


class _Layer(struct.PyTreeNode):
    """One layer of the model, and the prompt that goes through it.

    Attributes:
      rope: of the layer.
      prompt: the tokens that are run.
      index: [] int32 of the layer.
    """

    params: Params
    rope: RopeFactors
    prompt: _Prompt
    index: Array


class _Block(NamedTuple):
    """Pages of chunks that are in host memory, padded.

    Attributes:
      pages: [M] of the pool.
      offsets: [M] by how much their keys are still to be turned.
      slot_position: [M * PAGE]; HIDDEN where no token may attend.
    """

    pages: HostArray
    offsets: HostArray
    slot_position: HostArray


class LayerPrefill:
    """A request on its way through the model, layer by layer.

    Attributes:
      left: (tokens, width) of what has not been run: every piece of every layer.
      prefilled: what there is so far, a batch of one. Kept queries are on
        the host, those of the KV heads that this process has.
    """

    def __init__(self, runner: ModelRunner, request: Sequence, observe: Observe | None) -> None:
        """Runs nothing yet."""
        self._runner, config = runner, runner.model.config
        self._observed, positions = observed_tokens([request], observe, 1)
        heads = config.num_heads // runner.model.head_share.ways
        shape = (config.num_layers, 1, positions.shape[1], heads, config.head_dim)
        self._queries = np.zeros(shape, jnp.dtype(config.dtype))
        bank = on_host(PromptQueries, self._queries, positions)
        logits = runner.model.zeros((1, config.vocab_size), "float32")
        table = batch_tables([request], 1, bucket(len(request.table.pages)))
        self.prefilled = Prefilled(logits, table, bank)
        widths = pieces(len(request.run.ids), PREFILL_TOKENS)
        self.left = widths * config.num_layers
        self._work = self._run(request, widths)

    def next_piece(self) -> int:
        """Run the next piece of the next layer; returns what it costs, in tokens of all layers."""
        width = next(self._work)
        del self.left[0]
        if not self.left:
            for _ in self._work:  # what is behind the last piece
                raise AssertionError("a piece that was not counted")
        return -(-width // self._runner.model.config.num_layers)

    def _run(self, request: Sequence, widths: abc.Sequence[tuple[int, int]]) -> Iterator[int]:
        """The width of every piece of every layer, once it is dispatched."""
        model = self._runner.model
        starts = list(np.cumsum([0, *(length for length, _ in widths)])[:-1])
        size = bucket(max(int(s) + width for s, (_, width) in zip(starts, widths, strict=True)))
        prompt = self._prompt(request, size)
        pages, offsets, slot_position = request.table.rows(len(request.table.pages))
        blocks = list(_blocks(pages, offsets, slot_position))
        rows = rows_of(pages)[request.run.slots]
        x = _embed(model.params, model.config, prompt.ids)
        for layer in range(model.config.num_layers):
            at, rope = np.asarray(layer, np.int32), model.rope_factors.of_layer(layer)
            on_layer = on_host(_Layer, model.params, rope, prompt, at)
            k, v, queries = _keys_values(on_layer, x, model.config)
            self._write_on_device(at, k, v, prompt, pages)
            part = None
            for block in blocks:
                block_kv = self._bring_in(layer, block)
                part = part or _nothing(x, model.config)
                for start, (_, width) in zip(starts, widths, strict=True):
                    start_ = np.int32(start)
                    part = _attend_block(on_layer, x, part, block_kv, start_, width, model.config)
            for start, (_, width) in zip(starts, widths, strict=True):
                x = _finish(on_layer, x, part, (k, v), np.int32(start), width, model.config)
                if start == starts[-1]:
                    self._push(layer, rows, k, v)
                    self._queries[layer, 0] = model.own_heads(queries, 1)
                    if layer == model.config.num_layers - 1:
                        last = np.int32(len(request.run.ids) - 1)
                        logits = _logits(model.params, model.config, x, last)
                        self.prefilled = self.prefilled._replace(logits=logits[None])
                yield width

    def _prompt(self, request: Sequence, size: int) -> _Prompt:
        pad = size - len(request.run.ids)
        nowhere = len(request.table.pages) * PAGE
        return on_host(
            _Prompt,
            np.pad(request.run.ids, (0, pad)).astype(np.int32),
            np.pad(request.run.positions, (0, pad), constant_values=-1).astype(np.int32),
            np.pad(request.run.slots, (0, pad), constant_values=nowhere).astype(np.int32),
            self._observed[0].astype(np.int32),
        )

    def _write_on_device(
        self, layer: HostArray, k: Array, v: Array, prompt: _Prompt, pages: HostArray
    ) -> None:
        """What the device's pool keeps of a layer."""
        cache = self._runner.cache
        if not self._runner.model.placement.away:
            table = np.pad(pages, (0, bucket(len(pages)) - len(pages)))
            slots = np.where(prompt.positions >= 0, prompt.slots, len(table) * PAGE)
            cache.update(_write, self._runner.model.config, layer, k, v, slots[None], table[None])

    def _push(self, layer: int, rows: HostArray, k: Array, v: Array) -> None:
        """Copy what a layer computed to the host, while the device attends."""
        host = self._runner.cache.host
        assert host is not None
        kept = [x if keep else None for x, keep in ((k, host.k is not None), (v, True))]
        kept[1] = v if layer >= host.first_layer else None
        for x in kept:
            if x is not None:
                x.copy_to_host_async()
        n = len(rows)
        own = self._runner.model.own_heads
        k_, v_ = (None if x is None else own(x, 1)[:n] for x in kept)
        host.write(layer, rows, k_, v_)

    def _bring_in(self, layer: int, block: _Block) -> tuple[Array, Array, PageTable]:
        """K and V of one layer of a block [M, PAGE, K, H], and where its slots stand."""
        cache, config = self._runner.cache, self._runner.model.config
        host = cache.host
        assert host is not None
        rows = rows_of(block.pages)
        values = host.values(layer)
        memory = (None if host.k is None else host.k[layer], values)
        put = self._runner.model.put_heads
        brought = [None if x is None else put(np.take(x, rows, axis=1), 0) for x in memory]
        host.count(brought=sum(x.nbytes for x in brought if x is not None))
        k, v = _as_pages(cache.pool, config, np.int32(layer), block.pages, *brought)
        where = (block.pages[None], block.offsets[None], block.slot_position[None])
        return k, v, on_host(PageTable, *where)


def _blocks(pages: HostArray, offsets: HostArray, slot_position: HostArray) -> Iterator[_Block]:
    """The pages in which something is to be seen, in blocks of some distinct sizes."""
    held_pages = np.flatnonzero((slot_position.reshape(-1, PAGE) != HIDDEN).any(-1))
    for start in range(0, len(held_pages), BLOCK_PAGES):
        some = held_pages[start : start + BLOCK_PAGES]
        pad = -len(some) % _STEP
        where = slot_position.reshape(-1, PAGE)[some].reshape(-1)
        yield _Block(
            np.pad(pages[some], (0, pad)),
            np.pad(offsets[some], (0, pad)),
            np.pad(where, (0, pad * PAGE), constant_values=HIDDEN),
        )


@functools.partial(jax.jit, static_argnames=("config",))
def _embed(params: Params, config: ModelConfig, ids: Array) -> Array:
    """The residual stream before the first layer: [1, S, D]."""
    return embedded(params, config, ids)[None]


@functools.partial(jax.jit, static_argnames=("config",))
def _keys_values(layer: _Layer, x: Array, config: ModelConfig) -> tuple[Array, Array, Array]:
    """K at its positions and V [S, K, H] of one layer, and queries before rotation [W, N, H]."""
    p, prompt = layer_of(layer.params, layer.index), layer.prompt
    size = min(x.shape[1], PREFILL_TOKENS)

    def piece(some: tuple[Array, Array]) -> tuple[Array, Array]:
        x, positions = some
        _, k, v = heads_of(x[None], p, config, layer.index)
        k = place(k, jnp.maximum(positions, 0)[None], layer.rope, config.rope)
        return k[0].astype(config.dtype), v[0].astype(config.dtype)

    cut = (x[0].reshape(-1, size, x.shape[-1]), prompt.positions.reshape(-1, size))
    k, v = lax.map(piece, cut)
    columns = x[:, jnp.maximum(prompt.observed, 0)]
    queries, _, _ = heads_of(columns, p, config, layer.index)
    queries = jnp.where((prompt.observed >= 0)[:, None, None], queries[0], 0)
    whole = (x.shape[1], config.num_kv_heads, config.head_dim)
    return k.reshape(whole), v.reshape(whole), queries.astype(config.dtype)


@functools.partial(jax.jit, static_argnames=("config",))
def _nothing(x: Array, config: ModelConfig) -> Partial:
    """Attention of the tokens of x [1, S, D] to no key."""
    shape = (*x.shape[:2], config.num_heads)
    return Partial(
        out=jnp.zeros((*shape, config.head_dim), jnp.float32),
        lse=jnp.full(shape, -jnp.inf, jnp.float32),
    )


@functools.partial(jax.jit, static_argnames=("width", "config"), donate_argnames=("part",))
def _attend_block(
    layer: _Layer,
    x: Array,
    part: Partial,
    block: tuple[Array, Array, PageTable],
    start: Array,
    width: int,
    config: ModelConfig,
) -> Partial:
    """Merge what the tokens from ``start`` on see in a block of chunks into their part."""
    k, v, table = block
    # Keys lie as they stand inside their chunk.
    offsets = jnp.broadcast_to(table.offsets[..., None], (1, *k.shape[:2]))
    k = rotate_by(k[None], offsets, layer.rope, config.rope)
    new = _attend(layer, x, PagePool(k=k[0], v=v), table.slot_position, start, width, config)
    old = Partial(*_cut((part.out, part.lse), start, width))
    both = merge([old, new])
    return Partial(*_put((part.out, part.lse), (both.out, both.lse), start))


@functools.partial(jax.jit, static_argnames=("width", "config"), donate_argnames=("x",))
def _finish(
    layer: _Layer,
    x: Array,
    part: Partial | None,
    run: tuple[Array, Array],
    start: Array,
    width: int,
    config: ModelConfig,
) -> Array:
    """Take the tokens from ``start`` on through a layer: x [1, S, D] with theirs replaced.

    ``run`` are K and V [S, K, H] of all tokens, ``part`` is what these saw of other chunks.
    """
    k, v = (y.reshape(-1, PAGE, *y.shape[1:]) for y in run)
    where = jnp.where(layer.prompt.positions < 0, HIDDEN, layer.prompt.positions)[None]
    new = _attend(layer, x, PagePool(k=k, v=v), where, start, width, config)
    if part is not None:
        new = merge([new, Partial(*_cut((part.out, part.lse), start, width))])
    [old] = _cut((x,), start, width)
    new = new.replace(out=new.out.astype(old.dtype))
    done = finish_layer(old, new, layer_of(layer.params, layer.index), config)
    [x] = _put((x,), (done,), start)
    return x


def _attend(
    layer: _Layer,
    x: Array,
    pool: PagePool,
    slot_position: Array,
    start: Array,
    width: int,
    config: ModelConfig,
) -> Partial:
    """Attention of the tokens of x [1, S, D] from ``start`` on to keys that lie at their positions.

    The pages of ``pool`` are all mapped, in order; ``slot_position`` is [1, M * PAGE].
    """
    pages = jnp.arange(len(pool.k), dtype=jnp.int32)[None]
    table = Pages(pages, jnp.zeros_like(pages), slot_position)
    x, positions = _cut((x, layer.prompt.positions[None]), start, width)
    q, _, _ = heads_of(x, layer_of(layer.params, layer.index), config, layer.index)
    q = place(q, jnp.maximum(positions, 0), layer.rope, config.rope)
    windows = layer_windows(config)
    window = None if windows is None else windows[layer.index]
    return attend_placed(config, q, pool, table, positions, window)


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("pool",))
def _write(
    pool: PagePool,
    config: ModelConfig,
    layer: Array,
    k: Array,
    v: Array,
    slots: Array,
    pages: Array,
) -> tuple[PagePool, None]:
    """Put K, and V where the pool has it, of one layer [S, K, H] into the slots [1, S]."""
    return pool.write(pool.rows(layer, pages, config.num_kv_layers), slots, k[None], v[None]), None


@functools.partial(jax.jit, static_argnames=("config",))
def _as_pages(
    pool: PagePool,
    config: ModelConfig,
    layer: Array,
    pages: Array,
    k: Array | None,
    v: Array | None,
) -> tuple[Array, Array]:
    """K and V of pages [M] as [M, PAGE, K, H]: from the host's [K, M * PAGE, H], or the pool."""
    rows = pool.rows(layer, pages, config.num_kv_layers)

    def of(array: Array | None, there: Array) -> Array:
        if array is None:
            return there[rows]
        return array.swapaxes(0, 1).reshape(-1, PAGE, *there.shape[2:])

    return of(k, pool.k), of(v, pool.v)


@functools.partial(jax.jit, static_argnames=("config",))
def _logits(params: Params, config: ModelConfig, x: Array, last: Array) -> Array:
    """[V] float32 after token ``last`` of x [1, S, D]."""
    return unembed(params, config, rms_norm(x[0, last], params.final_norm, config))


def _cut(arrays: abc.Sequence[Array], start: Array, width: int) -> list[Array]:
    """``width`` tokens from ``start`` on, along the second axis."""
    return [lax.dynamic_slice_in_dim(x, start, width, 1) for x in arrays]


def _put(arrays: abc.Sequence[Array], news: abc.Sequence[Any], start: Array) -> list[Array]:
    """Arrays with these tokens replaced from ``start`` on."""
    pairs = zip(arrays, news, strict=True)
    return [lax.dynamic_update_slice_in_dim(x, new, start, 1) for x, new in pairs]

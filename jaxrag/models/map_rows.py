"""Rows of a model with recurrent layers: chunks are KV and maps, put one behind the other.

A row has pages of KV for the layers that attend, rotated to where its tokens stand, and for the
others a state of each value head and the last inputs of their convolution. A chunk with its own
keys, values and decays is one map of each state, S -> A S + B, whatever stood before it; so chunks
are composed in the order of the prompt.
"""

import dataclasses
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import ConfigError, EngineError
from jaxrag.base.shapes import bucket, pieces
from jaxrag.base.sharding import Rules, processes_of, put, replicated, sharding
from jaxrag.base.types import EMPTY, FINAL, HIDDEN, Array, HostArray, TokenRun, Tokens
from jaxrag.kv.cache import PAGE, PagePool, PageTable, pages_for
from jaxrag.kv.cache.pool import empty_pool
from jaxrag.kv.store.layout import KVLayout
from jaxrag.models.attention import PagedAttend
from jaxrag.models.backend import ROWS, check_length
from jaxrag.models.decoder import Decoder, forward, unembed
from jaxrag.models.delta_rule import compose
from jaxrag.models.maps import (
    MAP_FORMS,
    MapForm,
    StoredMaps,
    map_layout,
    maps_behind,
    stored_maps,
    with_maps,
)
from jaxrag.models.recurrent import Recurrent, StateMap, no_memory
from jaxrag.models.rope import place as rotated
from jaxrag.models.rope import rope_tables
from jaxrag.models.spec import Params

_MOST_CELLS = 65_536  # tokens of KV by default, of all rows together
_PIECE = 512  # tokens of a prompt that are run at once
_TABLE = 64  # pages of the smallest table

_Held = tuple[PagePool, Recurrent]


@dataclasses.dataclass(eq=False, repr=False)
class MapRows:
    """The rows of one model, on one device or split over several. A ``RowBackend``.

    Attributes:
      params: the weights, layers apart where that is faster.
      form: how maps are stored.
      cells: tokens of KV of all rows together.
      mesh: KV and states are split over its devices by heads; each device has all rows.
    """

    config: ModelConfig
    params: Params
    form: MapForm
    cells: int
    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        self._life, self._reading = 1, threading.Lock()
        self._held: _Held | None = None
        self._free: list[int] = []
        self._pages: dict[int, list[int]] = {}
        self._front: tuple[Any, ...] | None = None

    called = "a model with recurrent layers"

    @property
    def engine(self) -> str:
        """As ``load_model`` has it."""
        return next(name for name, form in MAP_FORMS.items() if form == self.form)

    @property
    def identity(self) -> dict[str, str]:
        """What shapes its chunks beside weights and tokens."""
        return {"maps": self.form}

    @functools.cached_property
    def layout(self) -> KVLayout:
        """Of its chunks: KV of layers that attend, K before rotation, and maps of the others."""
        return map_layout(self.config, self.form)

    @property
    def most_read(self) -> int:
        """Tokens of a chunk, with what it is read behind."""
        return min(self.config.max_positions, self.cells)

    @functools.cached_property
    def _decoder(self) -> Decoder:
        rope = rope_tables(self.config, bucket(self.cells, 1024))
        if (mesh := self.mesh) is not None:
            rope = jax.tree.map(lambda x: put(np.asarray(x), replicated(mesh)), rope)
        return Decoder(self.params, rope, self.config)

    def before(self, prefix: HostArray, ids: HostArray) -> HostArray:
        """What a chunk is read behind: prefix and primer."""
        return prefix

    def encode(
        self, prefix: HostArray, chunks: Sequence[HostArray]
    ) -> Iterator[tuple[int, HostArray]]:
        """As ``encode_chunks``: yields (index, chunk of ``layout``), each apart from the others.

        Raises RequestError for a chunk that is too long, StoreError for maps that are no numbers.
        """
        for index, ids in enumerate(chunks):
            check_length(self, len(prefix), len(ids))
            with self._reading:
                made = self._encoded(np.asarray(prefix, np.int32), ids)
            yield index, made

    def _encoded(self, prefix: HostArray, ids: HostArray) -> HostArray:
        pages = bucket(pages_for(len(prefix) + len(ids)), _TABLE)
        held = self._behind(prefix, pages)
        kv, whole = list[HostArray](), None
        for at, some, width in _cut(ids):
            table = np.arange(pages, dtype=np.int32)[None]
            step = _laid([(len(prefix) + at, some)], 1, width)
            held, (k, v), maps = _read(self._decoder, self.mesh, *step, table, *held)
            kv.append(np.stack([np.asarray(x)[:, 0, : len(some)] for x in (k, v)], axis=1))
            whole = maps if whole is None else _composed(whole, maps)
        assert whole is not None
        found = jax.tree.map(lambda x: np.asarray(x)[:, 0], whole)
        tail = np.asarray(held[1].tail)[:, 0].astype(np.float32)
        stored = stored_maps(found, tail, self.form)
        return with_maps(np.concatenate(kv, axis=2), stored, self.layout)

    def _behind(self, prefix: HostArray, pages: int) -> _Held:
        """A pool and the memory of one row behind a prefix; that of the last one is kept."""
        name = prefix.tobytes(), pages
        if self._front is None or self._front[0] != name:
            held = _empty(self.config, self.mesh, pages, 1)
            table = np.arange(pages, dtype=np.int32)[None]
            for at, some, width in _cut(prefix):
                step = _laid([(at, some)], 1, width)
                held, _, _ = _read(self._decoder, self.mesh, *step, table, *held)
            self._front = name, held
        kept: _Held = self._front[1]
        return kept

    def live(self) -> int:
        """It lives until a device fails; then its rows are empty."""
        if self._held is None:
            count = pages_for(self.cells)
            self._held = _empty(self.config, self.mesh, count, ROWS)
            self._free, self._pages = list(range(count)), {}
        return self._life

    def restore(self, row: int, kv: HostArray, first: int, place: int, life: int) -> None:
        """Put a chunk to ``place`` of a row, its end; what it was read behind does not matter."""
        tokens = kv.shape[2] - self.layout.rows
        maps = maps_behind(kv, self.config, self.form, self.layout)
        width = bucket(tokens, 64)
        padded = np.zeros((*kv.shape[:2], width, *kv.shape[3:]), kv.dtype)
        padded[:, :, :tokens] = kv[:, :, :tokens]
        table = self._table([(row, place + tokens)], 1)
        at = np.array([row, place, tokens], np.int32)
        ready = functools.partial(_restored, self._decoder, self.mesh, padded, maps, at, table)
        self._go(life, lambda held: (ready(*held), None))

    def step(self, runs: Sequence[TokenRun], life: int) -> HostArray:
        """Run tokens at the ends of rows; logits [n, V] float32 where they are wanted, in order."""
        found = dict[int, HostArray]()
        for row, place, ids, _ in (run for run in runs if len(run[2]) > 1):
            for at, some, width in _cut(ids):
                table = self._table([(row, place + at + len(some))], 1)
                laid = _laid([(place + at, some)], 1, width)
                found[row] = self._run(life, laid, table, np.array([row], np.int32))[0]
        if short := [run for run in runs if len(run[2]) == 1]:
            given: dict[int, tuple[int, HostArray]] = {row: (at, ids) for row, at, ids, _ in short}
            nothing = 0, np.zeros(0, np.int32)
            laid = _laid([given.get(row, nothing) for row in range(ROWS)], ROWS, 1)
            table = self._table([(row, at + 1) for row, (at, _) in given.items()], ROWS)
            logits = self._run(life, laid, table, None)
            found |= {row: logits[row] for row in given}
        wanted = [found[row] for row, _, _, ends in runs if ends]
        return np.stack(wanted) if wanted else np.zeros((0, self.config.vocab_size), np.float32)

    def leave(self, row: int) -> None:
        """Nobody has the row any more; it begins with nothing at place 0."""
        self._free += self._pages.pop(row, [])

    def _run(self, life: int, laid: Any, table: HostArray, row: HostArray | None) -> HostArray:
        def run(held: _Held) -> tuple[_Held, HostArray]:
            held, logits = _step(self._decoder, self.mesh, *laid, table, row, *held)
            return held, np.asarray(logits)

        found: HostArray = self._go(life, run)
        return found

    def _go(self, life: int, run: Any) -> Any:
        """Run what takes the pool and gives it back; EngineError, and no rows, where it fails."""
        if life != self._life or self._held is None:
            raise EngineError("the rows of this request are gone; ask again")
        held, self._held = self._held, None
        try:
            self._held, found = run(held)
        except BaseException as error:  # the pool went with it
            self._life += 1
            if isinstance(error, jax.errors.JaxRuntimeError):
                raise EngineError(f"the device failed ({error}); ask again") from error
            raise
        return found

    def _table(self, ends: Sequence[tuple[int, int]], rows: int) -> HostArray:
        """Pages [rows, M] of rows that have tokens up to an end; one row stands first."""
        for row, end in ends:
            mine = self._pages.setdefault(row, [])
            while len(mine) * PAGE < end:
                mine.append(self._free.pop())
        width = bucket(max(len(self._pages[row]) for row, _ in ends), _TABLE)
        table = np.zeros((rows, width), np.int32)
        for row, _ in ends:
            mine = self._pages[row]
            table[row if rows > 1 else 0, : len(mine)] = mine
        return table


def open_map_rows(
    config: ModelConfig, params: Params, form: MapForm, cells: int | None, mesh: Mesh | None = None
) -> MapRows:
    """The rows of a model.

    Args:
      params: on the mesh, with layers apart where that is faster.
      cells: tokens of KV; None: of ``ROWS`` prompts of full length, at most 65,536.
      mesh: None: the default device.

    Raises ConfigError for a mesh of several processes.
    """
    if (processes := len(processes_of(mesh))) > 1:
        raise ConfigError(
            f"a mesh over {processes} processes: a model with recurrent layers is served by one; "
            "choose a mesh of the devices of one machine"
        )
    most = cells or min(ROWS * config.max_positions, _MOST_CELLS)
    return MapRows(config, params, form, most, mesh)


def _cut(ids: HostArray) -> Iterator[tuple[int, HostArray, int]]:
    """Pieces of token ids: where each begins, it, and the width it is run in."""
    at = 0
    for count, width in pieces(len(ids), _PIECE):
        yield at, ids[at : at + count], width
        at += count


def _laid(
    parts: Sequence[tuple[int, HostArray]], rows: int, width: int
) -> tuple[HostArray, HostArray]:
    """Ids and positions [rows, width] of tokens that begin at places; position -1 is padding."""
    ids, positions = np.zeros((rows, width), np.int32), np.full((rows, width), -1, np.int32)
    for row, (place, some) in enumerate(parts):
        ids[row, : len(some)] = some
        positions[row, : len(some)] = place + np.arange(len(some))
    return ids, positions


@dataclasses.dataclass(frozen=True)
class _Kept:
    """An ``Attend`` that collects K before rotation and V."""

    attend: PagedAttend

    def __call__(
        self, layer: Array, window: Any, q: Array, k: Array, v: Array, tokens: Tokens, cache: Any
    ) -> Any:
        part, cache, _ = self.attend(layer, window, q, k, v, tokens, cache)
        return part, cache, (k, v)


def _ran(
    decoder: Decoder, ids: Array, positions: Array, table: Array, pool: PagePool, memory: Recurrent
) -> tuple[Array, PagePool, Recurrent, Any]:
    """Hidden [B, T, D] of tokens, the pool and the memory behind them, and their K and V."""
    config, used = decoder.config, positions >= 0
    beyond = table.shape[1] * PAGE
    ends = positions.max(1, keepdims=True)
    slots = jnp.arange(beyond, dtype=jnp.int32)
    seen = jnp.where(slots <= ends, slots, HIDDEN)
    pages = PageTable(table, jnp.zeros_like(table), seen)
    attend = PagedAttend(config, decoder.rope, pages, jnp.where(used, positions, beyond))
    tokens = Tokens(ids, positions, jnp.where(used, FINAL, EMPTY))
    hidden, pool, (kv, memory) = forward(
        decoder.params, config, tokens, pool, _Kept(attend), recurrent=memory
    )
    return hidden, pool, memory, kv


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _empty(config: ModelConfig, mesh: Mesh | None, pages: int, rows: int) -> _Held:
    """So many pages of KV, and the memory of so many rows before their first token."""
    return _at_home((empty_pool(config, pages), no_memory(config, rows)), mesh)


def _at_home(held: _Held, mesh: Mesh | None) -> _Held:
    """Pool and states split over a mesh by heads, as every program takes and leaves them."""
    if mesh is None:
        return held

    def put_by(x: Array, axes: tuple[str | None, ...], name: str) -> Array:
        return lax.with_sharding_constraint(x, sharding(mesh, x.shape, axes, Rules(), name))

    pool, memory = held
    k, v = (put_by(x, (None, None, "kv_heads", None), "KV pool") for x in (pool.k, pool.v))
    state = put_by(memory.state, (None, None, "heads", None, None), "states")
    tail = put_by(memory.tail, (None,) * 4, "tails")
    return pool.replace(k=k, v=v), memory.replace(state=state, tail=tail)


@functools.partial(jax.jit, static_argnames="mesh")
def _read(
    decoder: Decoder,
    mesh: Mesh | None,
    ids: Array,
    positions: Array,
    table: Array,
    pool: PagePool,
    memory: Recurrent,
) -> tuple[_Held, tuple[Array, Array], StateMap | None]:
    """Tokens of one row with what is stored of them: K before rotation, V, and maps."""
    asked = memory.replace(wants_map=True)
    _, pool, behind, kv = _ran(decoder, ids, positions, table, pool, asked)
    held = pool, behind.replace(map=None, wants_map=False)
    return _at_home(held, mesh), kv, behind.map


@functools.partial(jax.jit, static_argnames="mesh", donate_argnames=("pool", "memory"))
def _step(
    decoder: Decoder,
    mesh: Mesh | None,
    ids: Array,
    positions: Array,
    table: Array,
    row: Array | None,
    pool: PagePool,
    memory: Recurrent,
) -> tuple[_Held, Array]:
    """Tokens of all rows, or of one [1], and the logits [B, V] behind the last of each."""
    mine = memory if row is None else jax.tree.map(lambda x: x[:, row], memory)
    begins = positions[:, 0] == 0
    mine = jax.tree.map(lambda x: _emptied(x, begins), mine)
    hidden, pool, behind, _ = _ran(decoder, ids, positions, table, pool, mine)
    last = jnp.maximum((positions >= 0).sum(1) - 1, 0)
    hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    if row is not None:
        behind = jax.tree.map(lambda x, new: x.at[:, row].set(new), memory, behind)
    logits = unembed(decoder.params, decoder.config, hidden)
    return _at_home((pool, behind), mesh), logits


def _emptied(x: Array, begins: Array) -> Array:
    """x [Lr, B, ...] with zeros in rows that begin."""
    return jnp.where(begins.reshape(-1, *[1] * (x.ndim - 2)), 0, x)


@functools.partial(jax.jit, static_argnames="mesh", donate_argnames=("pool", "memory"))
def _restored(
    decoder: Decoder,
    mesh: Mesh | None,
    kv: Array,
    maps: StoredMaps,
    at: Array,
    table: Array,
    pool: PagePool,
    memory: Recurrent,
) -> _Held:
    """A chunk's KV [L, 2, T, K, H] in a row's pages [1, M], and its maps composed with the state.

    ``at``: the row, its place, and how many of the T are tokens.
    """
    row, place, tokens = at
    config = decoder.config
    local = jnp.arange(kv.shape[2], dtype=jnp.int32)
    slots = jnp.where(local < tokens, place + local, table.shape[1] * PAGE)[None]
    stands = jnp.minimum(place + local, len(decoder.rope.cos) - 1)
    k = rotated(kv[:, 0], stands, decoder.rope, config.rope)
    for layer in range(config.num_kv_layers):
        pages = pool.rows(layer, table, config.num_kv_layers)
        pool = pool.write(pages, slots, k[layer][None], kv[layer, 1][None])
    state = jnp.where(place == 0, 0, memory.state[:, row])
    behind = Recurrent(maps.wide()(state), jnp.asarray(maps.tail).astype(memory.tail.dtype))
    memory = jax.tree.map(lambda x, new: x.at[:, row].set(new), memory, behind)
    return _at_home((pool, memory), mesh)


_composed = jax.jit(compose)

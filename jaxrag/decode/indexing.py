"""The indexes of a batch before its first token: those stored with its chunks, and new ones."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrag.attention_index import Exact, Spec
from jaxrag.cache import PagePool, PageTable
from jaxrag.config import ModelConfig
from jaxrag.decode.base import PromptQueries, View
from jaxrag.decode.footprint import index_bytes
from jaxrag.decode.host_search import NOBODY, HostSearch, training_queries
from jaxrag.decode.retrieval import Indexed, Retrieval
from jaxrag.decode.stored import DAMAGED, Carried, Known, Layers
from jaxrag.errors import RequestError
from jaxrag.models.rope import RopeTable
from jaxrag.shapes import bucket
from jaxrag.types import Array, HostArray

_FEWEST = 1024  # positions whose keys are read at once; more in powers of two


@dataclasses.dataclass(frozen=True, eq=False)
class _Stored:
    """A chunk that was stored with indexes, in one request."""

    chunk: Carried
    known: Known
    positions: HostArray  # [T] int32 where its keys are to be found; -1 where they are not


@dataclasses.dataclass(frozen=True, eq=False)
class _Span:
    """What is to be indexed of one request."""

    stored: list[_Stored]
    rest: HostArray  # [n] int32 positions of the keys that are in no stored index

    def spec(self, rule: Retrieval) -> Spec:
        """Of the index over the rest: exact where stored indexes leave only a few keys over."""
        few = len(self.rest) < getattr(rule.index, "exact_below", 0)
        return Exact(rule.index.storage) if self.stored and few else rule.index


def index_keys(
    host: HostSearch,
    config: ModelConfig,
    rope: RopeTable,
    pool: PagePool,
    table: PageTable,
    order: HostArray,
    position: HostArray,
    bank: PromptQueries,
    rule: Retrieval,
    room: int,
    carried: Sequence[Sequence[Carried]] | None = None,
) -> Indexed:
    """Index the keys of a batch on the host, layer by layer; the rule's state [L, B, ...].

    Of every request the keys between the sink and the window of its first generated token. Those of
    its ``carried`` chunks are searched in the indexes that the chunks were stored with; over the
    others an index is built.

    Raises RequestError where that takes more than the rule's ceiling of host memory.
    """
    rows = len(position)
    end = np.maximum(position + 2 - rule.recent, rule.sink)  # the first that is not indexed
    spans = [
        _span(host, config, order[row], rule, int(end[row]), carried[row] if carried else ())
        for row in range(rows)
    ]
    _check_bytes(config, rule, spans)
    opened, spans = _open(host, config, spans)
    numbers = [host.admit() if at >= 0 else NOBODY for at in position]
    try:
        for layer, keys, queries in _read(config, rope, pool, table, order, position, bank, spans):
            for row in np.flatnonzero(position >= 0):
                span = spans[row]
                parts = [
                    host.adopt(opened[it.chunk.key][layer], it.positions, it.chunk.position)
                    for it in span.stored
                ]
                if len(span.rest):
                    here = keys[row, : len(span.rest)].transpose(1, 0, 2)
                    at = int(position[row]) + 1 if rule.rerotate else None
                    own = np.asarray(bank.positions)[row]
                    trained = training_queries(queries[row], own, config, at)
                    spec = span.spec(rule)
                    here = np.ascontiguousarray(here)
                    parts.append(host.build(here, trained, spec, span.rest))
                host.add_layer(numbers[row], parts)
    except BaseException:
        host.release(numbers)
        raise
    tail = np.where(position[:, None] >= 0, end[:, None] + np.arange(room), -1).astype(np.int32)
    number = jnp.asarray(np.array(numbers, np.int32))
    return Indexed(
        numbers=jnp.broadcast_to(number, (config.num_layers, rows)),
        tail=jnp.broadcast_to(tail[:, None, None], (config.num_layers, rows, 1, 1, room)),
    )


def _span(
    host: HostSearch,
    config: ModelConfig,
    order: HostArray,
    rule: Retrieval,
    end: int,
    carried: Sequence[Carried],
) -> _Span:
    """Which positions from the sink to ``end`` are in which stored index, and the rest.

    A key that was computed again for this request stands at another slot than its chunk's, and is
    part of the rest.
    """
    left = np.zeros(len(order), bool)
    left[rule.sink : end] = True
    stored = []
    for chunk in carried if rule.stored else ():
        try:
            known = host.documents.known(chunk, config)
        except DAMAGED as error:
            host.note(f"a stored index is not used: {error}")
            continue
        if known is None:
            continue
        places = chunk.position + np.arange(len(chunk.slots))
        there = left[places] & (order[places] == chunk.slots)
        if there.any():
            left[places[there]] = False
            stored.append(_Stored(chunk, known, np.where(there, places, -1).astype(np.int32)))
    return _Span(stored, np.flatnonzero(left).astype(np.int32))


def _check_bytes(config: ModelConfig, rule: Retrieval, spans: Sequence[_Span]) -> None:
    """Refuse indexes that may take more host memory than the rule allows."""
    if rule.max_host_bytes is None:
        return
    held = {it.chunk.key: it.known.nbytes for span in spans for it in span.stored}
    need = sum(held.values())
    need += sum(index_bytes(span.spec(rule), config, len(span.rest)) for span in spans)
    if need > rule.max_host_bytes:
        raise RequestError(
            f"decode rule {rule.name!r}: the indexes of {len(spans)} request(s) may take {need} "
            f"bytes of host memory, max_host_bytes={rule.max_host_bytes}; raise it, or ask fewer "
            "at once"
        )


def _open(
    host: HostSearch, config: ModelConfig, spans: Sequence[_Span]
) -> tuple[dict[str, Layers], list[_Span]]:
    """The stored indexes by chunk; the keys of those that cannot be read are part of the rest."""
    opened: dict[str, Layers] = {}
    for it in (it for span in spans for it in span.stored):
        if it.chunk.key in opened:
            continue
        try:
            opened[it.chunk.key] = host.documents.open(it.chunk, it.known, config)
        except DAMAGED as error:
            host.note(f"a stored index is not used: {error}")
    whole = []
    for span in spans:
        lost = [it.positions for it in span.stored if it.chunk.key not in opened]
        rest = np.concatenate([span.rest, *(where[where >= 0] for where in lost)])
        kept = [it for it in span.stored if it.chunk.key in opened]
        whole.append(_Span(kept, np.sort(rest)))
    return opened, whole


def _read(
    config: ModelConfig,
    rope: RopeTable,
    pool: PagePool,
    table: PageTable,
    order: HostArray,
    position: HostArray,
    bank: PromptQueries,
    spans: Sequence[_Span],
) -> Iterator[tuple[int, HostArray, HostArray]]:
    """Every layer with the keys at the rest of each row [B, n, K, H], and the bank's queries."""
    longest = max(len(span.rest) for span in spans)
    if not longest:
        nothing = np.zeros(0, np.float32)
        yield from ((layer, nothing, nothing) for layer in range(config.num_layers))
        return
    rest = np.zeros((len(spans), bucket(longest, _FEWEST)), np.int32)
    for row, span in enumerate(spans):
        rest[row, : len(span.rest)] = span.rest
    arrays = [jnp.asarray(x) for x in (order, position, rest)]
    for layer in range(config.num_layers):
        keys = _keys(config, rope, pool, table, *arrays, jnp.int32(layer))
        yield layer, np.asarray(keys), np.asarray(bank.queries[layer].astype(jnp.float32))


@functools.partial(jax.jit, static_argnames=("config",))
def _keys(
    config: ModelConfig,
    rope: RopeTable,
    pool: PagePool,
    table: PageTable,
    order: Array,
    position: Array,
    wanted: Array,
    layer: Array,
) -> Array:
    """The keys of one layer at positions ``wanted`` [B, n], as they stand: [B, n, K, H] float32."""
    pages = pool.rows(layer, table.pages, config.num_layers)
    slots = (table.slot_position, order, position)
    return View(config, rope, pool, pages, table.offsets, *slots).keys_at(wanted)

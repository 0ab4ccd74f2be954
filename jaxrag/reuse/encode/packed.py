"""Packs chunks into rows behind a shared prefix and runs them through the model at once.

Chunks that see nothing but themselves, and perhaps the prefix: TurboRAG section 3.4
(arXiv:2410.07590), Block-Attention section 2.1 (arXiv:2409.15355). The packing is ours; whoever
shares a row is hidden from each other.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np

from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import RequestError
from jaxrag.base.shapes import row_length
from jaxrag.base.sharding import host_part
from jaxrag.base.types import EMPTY, FIRST_CHUNK, PREFIX, Array, HostArray, Tokens
from jaxrag.models.attention import PackedAttend
from jaxrag.models.decoder import run_layers
from jaxrag.models.model import Model
from jaxrag.models.rope import RopeTable
from jaxrag.models.segments import pack
from jaxrag.models.spec import Params
from jaxrag.models.taps import Tap, at_columns

Places = list[tuple[int, int, slice]]  # (chunk, row, columns)

# A batch that runs on the device: where its chunks are, and K and V of its rows [L, B, T, K, H],
# of which every process holds its heads.
Started = tuple[Places, Array, Array]

# A batch that is laid out: its tokens, rotation tables for them, and where its chunks are.
RowBatch = tuple[Tokens, RopeTable, Places]

ROW_TOKENS = 2048  # tokens of one packed row; a longer chunk makes its own row longer


@functools.partial(jax.jit, static_argnames=("config",))
def run_packed(
    params: Params,
    config: ModelConfig,
    tokens: Tokens,
    rope: RopeTable,
    columns: Array | None = None,
    asked: Array | None = None,
) -> tuple[Array, ...]:
    """K before RoPE and V of packed rows: [L, B, T, K, H] each, then queries [L, B, C', N, H].

    Of ``columns`` [B, C], where they are given; the queries of ``asked`` [B, C'], where they are.
    """

    def kept(q: Array, k: Array, v: Array) -> tuple[Array, ...]:
        kv = (k, v) if columns is None else (at_columns(k, columns), at_columns(v, columns))
        return kv if asked is None else (*kv, at_columns(q, asked))

    attend = Tap(PackedAttend(config, rope, prefix_visible=True), kept)
    found: tuple[Array, ...]
    found = run_layers(params, config, tokens, None, attend, config.num_kv_layers)[2]
    return found


def encode_rows(
    model: Model, prefix: HostArray, chunks: Sequence[HostArray]
) -> Iterator[tuple[int, HostArray]]:
    """Encode every chunk as if it stood directly behind ``prefix`` (which may be empty).

    Rows hold the prefix once and many chunks, each seeing the prefix and itself; every chunk's
    positions start right after the prefix. Yields (index, kv [L, 2, T, K, H]), of the heads that
    this process holds (``Model.kv_layout``).

    Raises RequestError for an empty chunk or one that is longer than the model's context.
    """
    check_context(model, prefix, chunks, [()] * len(chunks))
    yield from encode_batches(model, packed_batches(model, prefix, chunks))


def encode_batches(model: Model, batches: Iterable[RowBatch]) -> Iterator[tuple[int, HostArray]]:
    """As ``encode_rows``, of chunks that are laid out."""
    yield from take_behind(
        start_taking(model, places, *run_packed(model.params, model.config, tokens, rope))
        for tokens, rope, places in batches
    )


def packed_batches(
    model: Model, prefix: HostArray, chunks: Sequence[HostArray]
) -> Iterator[RowBatch]:
    """Every chunk once, in batches of full rows."""
    lengths = [len(chunk) for chunk in chunks]
    rows = pack(lengths, ROW_TOKENS - len(prefix))
    rows.sort(key=lambda row: -sum(lengths[i] for i in row))
    for members in itertools.batched(rows, model.batch_ways):
        used = len(prefix) + sum(lengths[i] for i in members[0])
        shape = (model.batch_ways, row_length(used))
        yield lay_rows(model, prefix, chunks, members, shape)


def lay_rows(
    model: Model,
    prefix: HostArray,
    chunks: Sequence[HostArray],
    rows: Sequence[Sequence[int]],
    shape: tuple[int, int],
) -> RowBatch:
    """Lay chunks out in rows, each behind the prefix; ``shape`` may hold more than these rows."""
    ids = np.zeros(shape, np.int32)
    positions = np.zeros(shape, np.int32)
    segments = np.full(shape, EMPTY, np.int32)
    places: Places = []
    for row, members in enumerate(rows):
        ids[row, : len(prefix)] = prefix
        positions[row, : len(prefix)] = np.arange(len(prefix))
        segments[row, : len(prefix)] = PREFIX
        at = len(prefix)
        for segment, index in enumerate(members, FIRST_CHUNK):
            span = slice(at, at + len(chunks[index]))
            ids[row, span] = chunks[index]
            positions[row, span] = len(prefix) + np.arange(len(chunks[index]))
            segments[row, span] = segment
            places.append((index, row, span))
            at = span.stop
    put = functools.partial(model.put_batch, batch=shape[0])
    tokens = Tokens(ids=put(ids), positions=put(positions), segments=put(segments))
    rope = model.rope(len(prefix) + max(len(chunks[i]) for row in rows for i in row))
    return tokens, rope, places


def check_context(
    model: Model,
    prefix: HostArray,
    chunks: Sequence[HostArray],
    neighbours: Sequence[Sequence[HostArray]],
) -> None:
    """Refuse chunks that are empty, or do not fit the model's context with what precedes them."""
    limit = model.config.max_positions
    most = max((int(ids.max()) for ids in (prefix, *chunks) if len(ids)), default=0)
    if most >= model.num_ids:
        raise RequestError(f"token id {most}: the model embeds 0..{model.num_ids - 1}")
    for index, (chunk, others) in enumerate(zip(chunks, neighbours, strict=True)):
        before = len(prefix) + sum(map(len, others))
        if not len(chunk) or before + len(chunk) > limit:
            raise RequestError(
                f"chunk {index} has {len(chunk)} tokens behind {before}: expected at least 1, and "
                f"{limit} in all; use fewer neighbours or smaller chunks"
            )


def take_behind(started: Iterable[Started]) -> Iterator[tuple[int, HostArray]]:
    """``take_places`` of batches that start as they are drawn, each when the next has started.

    So the device works on one batch while the host takes the one before.
    """
    before: Started | None = None
    for batch in started:
        if before is not None:
            yield from take_places(*before)
        before = batch
    if before is not None:
        yield from take_places(*before)


def start_taking(model: Model, places: Places, k: Array, v: Array) -> Started:
    """A batch whose program was started; its K and V move to the processes that take them."""
    k, v = model.by_heads(k, v)
    return places, k, v


def take_places(places: Places, k: Array, v: Array) -> Iterator[tuple[int, HostArray]]:
    """Wait for a batch; (index, kv [L, 2, T, K, H]) of every chunk in it, copies of their own."""
    host_k, host_v = host_part(k), host_part(v)
    for index, row, span in places:
        yield index, np.stack((host_k[:, row, span], host_v[:, row, span]), axis=1)

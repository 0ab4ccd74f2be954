"""Packs chunks into rows behind a shared prefix and runs them through the model at once."""

import functools
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from jaxrag.attention import PackedAttend
from jaxrag.config import ModelConfig
from jaxrag.errors import RequestError
from jaxrag.models.decoder import forward
from jaxrag.models.model import Model
from jaxrag.models.spec import Params
from jaxrag.rope import RopeTable
from jaxrag.segments import bucket, pack
from jaxrag.types import EMPTY, FIRST_CHUNK, PREFIX, Array, HostArray, Tokens

ROW_TOKENS = 2048  # tokens of one packed row; a longer chunk makes its own row longer


@functools.partial(jax.jit, static_argnames=("config",))
def _encode(
    params: Params, config: ModelConfig, tokens: Tokens, rope: RopeTable
) -> tuple[Array, Array]:
    """K before RoPE and V of packed rows: [L, B, T, K, H] each."""
    attend = PackedAttend(config, rope, prefix_visible=True, collect=True)
    _, _, (k, v) = forward(params, config, tokens, None, attend)
    return k, v


def encode_rows(
    model: Model, prefix: HostArray, chunks: Sequence[HostArray]
) -> Iterator[tuple[int, HostArray]]:
    """Encode every chunk as if it stood directly behind ``prefix`` (which may be empty).

    Rows hold the prefix once and many chunks, each seeing the prefix and itself; every chunk's
    positions start right after the prefix. Yields (index, kv [L, 2, T, K, H]).

    Raises RequestError for an empty chunk or one that is longer than the model's context.
    """
    lengths = [len(chunk) for chunk in chunks]
    for index, length in enumerate(lengths):
        if not 0 < length <= model.config.max_positions - len(prefix):
            raise RequestError(
                f"chunk {index} has {length} tokens: expected 1.."
                f"{model.config.max_positions - len(prefix)}; choose a smaller chunk size"
            )
    rows = pack(lengths, ROW_TOKENS - len(prefix))
    rows.sort(key=lambda row: -sum(lengths[i] for i in row))
    ways = model.batch_ways
    for start in range(0, len(rows), ways):
        yield from _encode_batch(model, prefix, chunks, rows[start : start + ways])


def _encode_batch(
    model: Model, prefix: HostArray, chunks: Sequence[HostArray], rows: Sequence[Sequence[int]]
) -> Iterator[tuple[int, HostArray]]:
    used = max(len(prefix) + sum(len(chunks[i]) for i in row) for row in rows)
    shape = (model.batch_ways, bucket(used, 128))
    ids = np.zeros(shape, np.int32)
    positions = np.zeros(shape, np.int32)
    segments = np.full(shape, EMPTY, np.int32)
    starts: list[tuple[int, int, int]] = []  # (chunk, row, first column)
    for row, members in enumerate(rows):
        ids[row, : len(prefix)] = prefix
        positions[row, : len(prefix)] = np.arange(len(prefix))
        segments[row, : len(prefix)] = PREFIX
        at = len(prefix)
        for segment, index in enumerate(members, FIRST_CHUNK):
            here = slice(at, at + len(chunks[index]))
            ids[row, here] = chunks[index]
            positions[row, here] = len(prefix) + np.arange(len(chunks[index]))
            segments[row, here] = segment
            starts.append((index, row, at))
            at = here.stop
    put = functools.partial(model.put_batch, batch=shape[0])
    tokens = Tokens(ids=put(ids), positions=put(positions), segments=put(segments))
    rope = model.rope(int(positions.max()) + 1)
    k, v = (np.asarray(x) for x in _encode(model.params, model.config, tokens, rope))
    for index, row, at in starts:
        here = slice(at, at + len(chunks[index]))
        yield index, np.stack((k[:, row, here], v[:, row, here]), axis=1)

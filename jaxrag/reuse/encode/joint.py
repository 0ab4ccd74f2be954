"""Encodes chunks together with what precedes them: prefix, neighbours, and the chunk last.

An ablation of FusionRAG section 3.1 (arXiv:2601.12904): the same chunks in front, but computed anew
for every chunk, where equation 10 takes the KV that each of them has by itself.

Short prompts share rows, and rows have few distinct lengths. Of what the layers compute only the KV
of the chunk itself leaves the device.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from jaxrag.base.shapes import bucket, row_length
from jaxrag.base.types import EMPTY, FINAL, Array, HostArray, Tokens
from jaxrag.models.model import Model
from jaxrag.models.rope import RopeTable
from jaxrag.models.segments import pack
from jaxrag.reuse.encode.packed import (
    ROW_TOKENS,
    Places,
    check_context,
    run_packed,
    start_taking,
    take_behind,
)


@dataclasses.dataclass(frozen=True)
class _Example:
    """What one chunk is encoded in."""

    prefix: HostArray
    neighbours: Sequence[HostArray]
    chunk: HostArray

    @property
    def num_before(self) -> int:
        """Tokens in front of the chunk."""
        return len(self.prefix) + sum(map(len, self.neighbours))

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole example."""
        return self.num_before + len(self.chunk)


def encode_jointly(
    model: Model,
    prefix: HostArray,
    chunks: Sequence[HostArray],
    neighbours: Sequence[Sequence[HostArray]],
) -> Iterator[tuple[int, HostArray]]:
    """Encode every chunk behind the prefix and its neighbours, everything seeing all before it.

    Positions are those of the prompt, 0, 1, ...; K is handed over before RoPE, so that it stands at
    any place afterwards.

    Args:
      prefix: [P] int32, may be empty.
      chunks: [T] int32 each.
      neighbours: for every chunk those in front of it, in order, [T'] int32 each.

    Yields (index, kv [L, 2, T, K, H]). Raises RequestError for an empty chunk, or one that does
    not fit the model's context with its neighbours.
    """
    check_context(model, prefix, chunks, neighbours)
    examples = [
        _Example(prefix, others, chunk) for others, chunk in zip(neighbours, chunks, strict=True)
    ]
    yield from take_behind(
        start_taking(model, places, *run_packed(model.params, model.config, tokens, rope, columns))
        for tokens, rope, columns, places in _batches(model, examples)
    )


def _batches(
    model: Model, examples: Sequence[_Example]
) -> Iterator[tuple[Tokens, RopeTable, Array, Places]]:
    """Every example once, in batches of rows of similar length, the longest first.

    Yields tokens, rotation tables, the columns [B, C] int32 to keep (padded with 0), and where
    every chunk is among these.
    """
    lengths = [example.num_tokens for example in examples]
    rows = pack(lengths, ROW_TOKENS)
    rows.sort(key=lambda row: (-sum(lengths[i] for i in row), row))
    for members in itertools.batched(rows, model.batch_ways):
        tokens, columns, places = _lay_rows(model, examples, members)
        rope = model.rope(max(lengths[i] for row in members for i in row))
        yield tokens, rope, columns, places


def _lay_rows(
    model: Model, examples: Sequence[_Example], rows: Sequence[Sequence[int]]
) -> tuple[Tokens, Array, Places]:
    """Lay examples out in at most ``model.batch_ways`` rows."""
    used = max(sum(examples[i].num_tokens for i in row) for row in rows)
    kept = max(sum(len(examples[i].chunk) for i in row) for row in rows)
    shape = (model.batch_ways, row_length(used))
    ids = np.zeros(shape, np.int32)
    positions = np.zeros(shape, np.int32)
    segments = np.full(shape, EMPTY, np.int32)
    numbers = np.zeros(shape, np.int32)
    columns = np.zeros((shape[0], bucket(kept, 128)), np.int32)
    places: Places = []
    for row, members in enumerate(rows):
        at = taken = 0
        for number, index in enumerate(members):
            example = examples[index]
            span = slice(at, at + example.num_tokens)
            ids[row, span] = np.concatenate([example.prefix, *example.neighbours, example.chunk])
            positions[row, span] = np.arange(example.num_tokens)
            segments[row, span] = FINAL
            numbers[row, span] = number
            place = slice(taken, taken + len(example.chunk))
            columns[row, place] = np.arange(at + example.num_before, span.stop)
            places.append((index, row, place))
            at, taken = span.stop, place.stop
    put = functools.partial(model.put_batch, batch=shape[0])
    tokens = Tokens(
        ids=put(ids), positions=put(positions), segments=put(segments), examples=put(numbers)
    )
    return tokens, put(columns), places

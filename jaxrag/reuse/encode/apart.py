"""Encodes chunks apart: one to a row, rows of equal width together, by one program for each width.

A program has the same shape whether one chunk or many wait for it. So a chunk's KV does not depend
on what else is encoded, to the bit on a CPU, and short chunks share a reading of the weights.
"""

import itertools
from collections.abc import Iterator, Sequence

from jaxrag.base.shapes import row_length
from jaxrag.base.types import HostArray
from jaxrag.models.model import Model
from jaxrag.reuse.encode.packed import RowBatch, check_context, encode_batches, lay_rows

_WIDTHS = (
    32, 48, 64, 80, 96, 128, 160, 192, 224, 256, 288, 320, 384, 448, 512, 768, 1024,
)  # fmt: skip
_TOKENS = 128  # of a program, unless one row is longer: what reading the weights costs is paid off


def shape_apart(model: Model, tokens: int) -> tuple[int, int]:
    """Rows and width of the program that encodes a chunk of ``tokens``, with what it sees."""
    width = next((it for it in _WIDTHS if tokens <= it), row_length(tokens))
    return model.batch_ways * max(1, _TOKENS // width), width


def encode_apart(
    model: Model, prefix: HostArray, chunks: Sequence[HostArray]
) -> Iterator[tuple[int, HostArray]]:
    """As ``encode_rows``; a chunk's KV is the same whatever the others are."""
    check_context(model, prefix, chunks, [()] * len(chunks))
    shapes = [shape_apart(model, len(prefix) + len(chunk)) for chunk in chunks]
    yield from encode_batches(model, _batches(model, prefix, chunks, shapes))


def widths_apart(model: Model, before: int) -> list[int]:
    """Lengths of chunks behind ``before`` tokens, one for each program that is kept ready."""
    return [width - before for width in _WIDTHS if before < width <= model.config.max_positions]


def _batches(
    model: Model,
    prefix: HostArray,
    chunks: Sequence[HostArray],
    shapes: Sequence[tuple[int, int]],
) -> Iterator[RowBatch]:
    for shape in sorted(set(shapes)):
        members = [[index] for index, it in enumerate(shapes) if it == shape]
        for rows in itertools.batched(members, shape[0]):
            yield lay_rows(model, prefix, chunks, rows, shape)

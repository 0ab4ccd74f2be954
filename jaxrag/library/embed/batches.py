"""Texts of many lengths in batches of few shapes, so that few programs are compiled."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrag.base.shapes import bucket, bucket_below
from jaxrag.base.types import HostArray

_SMALLEST = 16


@dataclasses.dataclass(frozen=True)
class Batch:
    """Texts that are embedded at once, and the shape they are padded to."""

    members: tuple[int, ...]  # indices of the texts
    rows: int
    width: int  # tokens


def width_for(length: int, longest: int) -> int:
    """The padded length of a text: 16, 24, 32, 48, 64, 96, ..., at most ``longest``."""
    power = bucket(length, _SMALLEST)
    three_quarters = power // 4 * 3
    return min(three_quarters if length <= three_quarters and power > _SMALLEST else power, longest)


def plan(lengths: Sequence[int], batch_tokens: int, longest: int, ways: int = 1) -> list[Batch]:
    """Cut texts into batches, longest first.

    Args:
      lengths: tokens of each text, 1 to ``longest``.
      batch_tokens: rows x width of a batch stays within it, but a batch has at least ``ways`` rows.
      longest: the widest a batch may be.
      ways: rows are a multiple of it (the devices a batch is split over).

    Returns:
      Batches that hold every text once. Rows are ``ways`` times a power of two; rows that texts of
      a width leave empty are filled with shorter texts.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    widths = [width_for(lengths[i], longest) for i in order]
    ends = {width: index + 1 for index, width in enumerate(widths)}  # of each width's run
    batches = []
    start = 0
    while start < len(order):
        width = widths[start]
        most = bucket_below(batch_tokens // width // ways)
        needed = -(-(ends[width] - start) // ways)
        per_way = min(bucket(needed, 1), most)
        members = tuple(order[start : start + per_way * ways])
        batches.append(Batch(members, per_way * ways, width))
        start += len(members)
    return batches


def fill(batch: Batch, ids: Sequence[HostArray]) -> tuple[HostArray, HostArray]:
    """Token ids [rows, width] and lengths [rows] of a batch, int32; an empty row has length 1."""
    block = np.zeros((batch.rows, batch.width), np.int32)
    lengths = np.ones(batch.rows, np.int32)
    for row, member in enumerate(batch.members):
        lengths[row] = len(ids[member])
        block[row, : lengths[row]] = ids[member]
    return block, lengths

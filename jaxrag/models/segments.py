"""Where every token of a prompt is and which block it belongs to; how chunks share a row.

The papers' masks are data for one rule (pallas_kernels/visibility.py). Positions of a prompt with a
prefix `p`, two chunks and a final block `q` (TurboRAG section 3.2, Fig. 2 b and c):

    tokens      p p a a a b b q q
    segments    1 1 3 3 3 4 4 2 2
    reordered   0 1 2 3 4 5 6 7 8     positions equal order
    composite   0 1 0 1 2 0 1 7 8     positions restart at every chunk, the final block does not
    parallel    0 1 2 3 4 2 3 5 6     every chunk is right behind the prefix, the final block behind
                                      the longest (APE, arXiv:2502.05431)
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from jaxrag.base.errors import RequestError
from jaxrag.base.types import EMPTY, FINAL, FIRST_CHUNK, PREFIX, HostArray
from pallas_kernels.visibility import QUESTION_SHIFT

PositionScheme = Literal["reordered", "composite", "parallel"]
POSITION_SCHEMES: tuple[str, ...] = get_args(PositionScheme)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Positions and segments of one prompt, and where each chunk starts."""

    positions: HostArray  # [T] int32
    segments: HostArray  # [T] int32
    chunk_offsets: tuple[int, ...]  # position of each chunk's first token
    final_start: int  # position of the final block's first token


def lay_out(
    prefix: int, chunks: Sequence[int], final: int, scheme: PositionScheme = "reordered"
) -> Layout:
    """Lay out a prompt from the lengths of its parts, in tokens.

    Raises RequestError for an unknown position scheme.
    """
    if scheme not in POSITION_SCHEMES:
        raise RequestError(f"positions={scheme!r}: expected one of {', '.join(POSITION_SCHEMES)}")
    starts = prefix + np.concatenate(([0], np.cumsum(chunks, dtype=np.int64))).astype(int)
    offsets, final_start = tuple(int(s) for s in starts[:-1]), int(starts[-1])
    if scheme != "reordered":
        offsets = (0 if scheme == "composite" else prefix,) * len(chunks)
    if scheme == "parallel":
        final_start = prefix + max(chunks, default=0)
    positions = [np.arange(prefix)]
    positions += [np.arange(n) + at for n, at in zip(chunks, offsets, strict=True)]
    positions += [np.arange(final) + final_start]
    ids = [PREFIX, *range(FIRST_CHUNK, FIRST_CHUNK + len(chunks)), FINAL]
    return Layout(
        positions=np.concatenate(positions).astype(np.int32),
        segments=np.repeat(ids, [prefix, *chunks, final]).astype(np.int32),
        chunk_offsets=offsets,
        final_start=final_start,
    )


def example_ids(example: int, question: int = 0) -> int:
    """The `examples` value of a packed example's tokens.

    Question 0 is what all questions of the example share (prefix and chunks); questions 1, 2, ...
    see the shared tokens and themselves, never each other.
    """
    return example | question << QUESTION_SHIFT


def pack(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """First-fit-decreasing packing: indices of the pieces that share each row of `row_tokens`.

    A piece longer than a row gets a row of its own. Deterministic; rows keep ascending index order.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for row, free in enumerate(room):
            if lengths[index] <= free:
                rows[row].append(index)
                room[row] -= lengths[index]
                break
        else:
            rows.append([index])
            room.append(row_tokens - lengths[index])
    return [sorted(row) for row in rows]


def positions_follow_order(
    positions: HostArray, segments: HostArray, examples: HostArray | None
) -> bool:
    """Do positions differ as the order does, within what a token can see? Arrays [B, T].

    A sliding window is measured in tokens of the prompt, so it needs this.
    """
    for row in range(positions.shape[0]):
        used = segments[row] != EMPTY
        ids = np.zeros_like(positions[row]) if examples is None else examples[row]
        shared = ids >> QUESTION_SHIFT == 0
        for value in np.unique(ids[used]):
            example = ids & ((1 << QUESTION_SHIFT) - 1)
            mine = used & (example == example[ids == value][0]) & (shared | (ids == value))
            if (np.diff(positions[row][mine]) != 1).any():
                return False
    return True

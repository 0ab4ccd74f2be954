"""Samples into packed rows: who sees whom, what is predicted, and how full the rows are.

A sample of a prefix `p`, chunks `a` and `b` and two questions with responses, in both modes:

    tokens            p p a a b b q r r q r
    segments, block   1 1 3 3 4 4 2 2 2 2 2
    segments, full    2 2 2 2 2 2 2 2 2 2 2
    question          0 0 0 0 0 0 1 1 1 2 2
    positions         0 1 2 3 4 5 6 7 8 6 7
    in_order          0 1 2 3 4 5 6 7 8 6 7     positions in full mode, whatever the scheme
    kinds             0 0 2 0 2 0 1 1 0 1 0     1 predicts a response token, 2 one of its own part

In full mode every token is FINAL, so it sees all that comes before it in its sample.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxrag.base.types import EMPTY, FINAL, Array, HostArray, Tokens
from jaxrag.models.segments import PositionScheme, example_ids, lay_out
from jaxrag.train.samples import TrainSample

NOTHING, RESPONSE, CONTEXT = 0, 1, 2  # what a token's prediction counts as


class TrainBatch(struct.PyTreeNode):
    """Packed rows with what each token is to predict; leading axes [A, B, T] in a step."""

    tokens: Tokens
    targets: Array  # int32, the next token of the same prompt; 0 where kinds is NOTHING
    kinds: Array  # int8
    in_order: Array  # int32, positions in full mode

    def in_full_mode(self) -> Tokens:
        """The same tokens, read with full attention."""
        segments = self.tokens.segments
        return self.tokens.replace(
            positions=self.in_order, segments=jnp.where(segments == EMPTY, EMPTY, FINAL)
        )


@dataclasses.dataclass(frozen=True)
class SamplePiece:
    """A sample laid out in one mode; int32 arrays [n]."""

    ids: HostArray
    positions: HostArray
    segments: HostArray
    examples: HostArray  # question << QUESTION_SHIFT; the row adds the example
    in_order: HostArray
    targets: HostArray
    kinds: HostArray
    spans: tuple[tuple[int, int], ...]  # runs of (new tokens, tokens before them), for FLOPs
    questions: tuple[tuple[int, int], ...]  # (first, end) of the tokens that predict a response

    def __len__(self) -> int:
        return len(self.ids)


def lay_piece(sample: TrainSample, full: bool, positions: PositionScheme) -> SamplePiece:
    """Lay a sample out in full or in block mode; ``positions`` is read in block mode only."""
    lengths = [len(chunk) for chunk in sample.chunks]
    scheme: PositionScheme = "reordered" if full else positions
    shared = lay_out(len(sample.prefix), lengths, 0, scheme)
    parts = [sample.prefix, *sample.chunks]
    ids, place, segments, examples = list(parts), [shared.positions], [shared.segments], []
    examples.append(np.zeros(sample.num_shared, np.int32))
    kinds = [_inside(len(part)) for part in parts]
    kinds[0][:] = NOTHING
    questions = []
    at = sample.num_shared
    spans = [(len(sample.prefix), 0), *((n, 0) for n in lengths)]
    if full:
        spans = [(sample.num_shared, 0)]
    for number, final in enumerate(sample.finals, 1):
        asked, answered = len(final.question), len(final.response)
        ids += [final.question, final.response]
        place.append(sample.num_shared + np.arange(len(final)))
        segments.append(np.full(len(final), FINAL, np.int32))
        examples.append(np.full(len(final), example_ids(0, number), np.int32))
        kind = _inside(len(final))
        kind[max(asked - 1, 0) : -1] = RESPONSE
        kinds.append(kind)
        questions.append((at + max(asked - 1, 0), at + asked + answered - 1))
        spans.append((len(final), sample.num_shared))
        at += len(final)
    joined = np.concatenate(ids).astype(np.int32)
    kind = np.concatenate(kinds)
    in_order = [np.arange(sample.num_shared), *place[1:]]
    return SamplePiece(
        ids=joined,
        positions=np.concatenate(place).astype(np.int32),
        segments=np.full_like(joined, FINAL) if full else np.concatenate(segments).astype(np.int32),
        examples=np.concatenate(examples).astype(np.int32),
        in_order=np.concatenate(in_order).astype(np.int32),
        targets=np.where(kind != NOTHING, np.roll(joined, -1), 0).astype(np.int32),
        kinds=kind,
        spans=tuple((new, before) for new, before in spans if new),
        questions=tuple(questions),
    )


def _inside(length: int) -> HostArray:
    """Kinds of a part that predicts itself: every token but the last has a next one."""
    kinds = np.full(length, CONTEXT, np.int8)
    kinds[-1:] = NOTHING
    return kinds


@dataclasses.dataclass
class Packer:
    """Rows being filled, largest pieces first, each into the row it leaves least room in."""

    rows: int
    row_tokens: int

    def __post_init__(self) -> None:
        """Start with empty rows."""
        self.members: list[list[SamplePiece]] = [[] for _ in range(self.rows)]
        self.free = [self.row_tokens] * self.rows

    def add(self, pieces: Sequence[SamplePiece]) -> bool:
        """Place all of these, or none of them: whether there was room."""
        free, places = list(self.free), []
        for piece in pieces:
            room = [(space, row) for row, space in enumerate(free) if space >= len(piece)]
            if not room:
                return False
            row = min(room)[1]
            free[row] -= len(piece)
            places.append(row)
        for row, piece in zip(places, pieces, strict=True):
            self.members[row].append(piece)
        self.free = free
        return True

    def batch(self) -> TrainBatch:
        """The rows as arrays [B, T]."""
        return pack_batch(self.members, self.row_tokens)

    @property
    def efficiency(self) -> float:
        """Share of the rows' tokens that are not padding."""
        return 1 - sum(self.free) / (self.rows * self.row_tokens)


def pack_batch(rows: Sequence[Sequence[SamplePiece]], row_tokens: int) -> TrainBatch:
    """Rows of pieces, one behind the other and apart from each other, as arrays [B, T]."""
    shape = (len(rows), row_tokens)
    names = ("ids", "positions", "segments", "examples", "targets", "in_order")
    arrays: dict[str, Any] = {name: np.zeros(shape, np.int32) for name in names}
    kinds: Any = np.zeros(shape, np.int8)
    assert EMPTY == NOTHING == 0
    for row, members in enumerate(rows):
        at = 0
        for example, piece in enumerate(members):
            here = slice(at, at + len(piece))
            for name in names:
                arrays[name][row, here] = getattr(piece, name)
            arrays["examples"][row, here] |= example_ids(example)
            kinds[row, here] = piece.kinds
            at = here.stop
    apart = {name: arrays.pop(name) for name in ("targets", "in_order")}
    return TrainBatch(tokens=Tokens(**arrays), kinds=kinds, **apart)

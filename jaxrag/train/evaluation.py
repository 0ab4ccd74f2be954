"""Held-out questions, many packed into a row: loss and exact match, in full or in block mode.

A response counts when every one of its tokens, its end included, is the most likely one after the
right tokens before it; greedy decoding would then produce exactly this response. The curve of it
over the steps of a run is Block-Attention's Fig. 4.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxrag.base.errors import TrainError
from jaxrag.base.types import HostArray
from jaxrag.models.segments import pack
from jaxrag.models.text.prompts import template_named
from jaxrag.models.text.tokenizer import Tokenizer
from jaxrag.train.config import DataPart, EvalPart
from jaxrag.train.loss import TokenLoss
from jaxrag.train.packing import SamplePiece, TrainBatch, lay_piece, pack_batch
from jaxrag.train.samples import SampleWriter
from jaxrag.train.sources import SampleLimits, open_source

Losses = Callable[[TrainBatch], TokenLoss]  # the forward pass of a batch


@dataclasses.dataclass(frozen=True)
class Scores:
    """One entry per question, in the order of the pieces and of the questions in each."""

    loss: HostArray  # float64 [Q], summed over the tokens of the response
    tokens: HostArray  # int64 [Q], of the response, its end included
    right: HostArray  # bool [Q], exact match


@dataclasses.dataclass(frozen=True)
class PackedPieces:
    """Pieces packed into batches [B, T]: make one with ``pack_pieces``, score it many times."""

    pieces: tuple[SamplePiece, ...]
    batches: tuple[tuple[tuple[int, ...], ...], ...]  # numbers of the pieces in each row
    row_tokens: int

    def score(
        self, losses: Losses, progress: Callable[[int], None] = lambda pieces: None
    ) -> Scores:
        """Run every batch; ``progress`` hears how many pieces each one held."""
        columns: list[tuple[HostArray, ...]] = [()] * len(self.pieces)
        for rows in self.batches:
            batch = pack_batch([[self.pieces[i] for i in row] for row in rows], self.row_tokens)
            found = losses(batch)
            loss, correct = jax.device_get((found.loss, found.correct))
            for row, numbers in enumerate(rows):
                at = 0
                for number in numbers:
                    piece = self.pieces[number]
                    columns[number] = _of_piece(piece, loss[row, at:], correct[row, at:])
                    at += len(piece)
            progress(sum(map(len, rows)))
        return Scores(*(np.concatenate(column) for column in zip(*columns, strict=True)))


def pack_pieces(pieces: Sequence[SamplePiece], rows: int, row_tokens: int) -> PackedPieces:
    """Pack pieces of at most ``row_tokens`` tokens into batches of ``rows`` rows each."""
    packed = pack([len(piece) for piece in pieces], row_tokens)
    packed += [[] for _ in range(-len(packed) % rows)]  # every batch has the one compiled shape
    numbered = tuple(map(tuple, packed))
    batches = tuple(numbered[at : at + rows] for at in range(0, len(numbered), rows))
    return PackedPieces(tuple(pieces), batches, row_tokens)


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """The packed samples of one ``[[eval]]``, made once."""

    name: str
    packed: PackedPieces

    def measure(self, losses: Losses) -> dict[str, float]:
        """``NAME/loss`` (mean over response tokens) and ``NAME/accuracy`` (exact match)."""
        scores = self.packed.score(losses)
        return {
            f"{self.name}/loss": float(scores.loss.sum() / scores.tokens.sum()),
            f"{self.name}/accuracy": float(scores.right.mean()),
        }


def held_out(
    part: EvalPart, data: DataPart, rows: int, tokenizer: Tokenizer, end_id: int, positions: int
) -> HeldOut:
    """Pack the first ``part.samples`` samples of a source into batches of ``rows`` rows.

    ``positions`` is the length of the model's context. Raises TrainError for no usable sample.
    """
    template = template_named(data.template)
    writer = SampleWriter(tokenizer, template, end_id, data.response_start, data.refusal)
    limits = SampleLimits(data.row_tokens, positions, data.bad_rows, data.too_long)
    source = open_source(part.name, part.paths, part.synthetic, writer, limits, part.seed)
    count = min(part.samples, source.num_rows or part.samples)
    samples = (source.sample(k) for k in range(count))
    pieces = [
        lay_piece(sample, part.mode == "full", part.positions)
        for sample in samples
        if sample is not None
    ]
    if not pieces:
        raise TrainError(f"[[eval]] {part.name!r}: no usable sample")
    return HeldOut(part.name, pack_pieces(pieces, rows, data.row_tokens))


def _of_piece(
    piece: SamplePiece, loss: HostArray, correct: HostArray
) -> tuple[HostArray, HostArray, HostArray]:
    """Loss, tokens and exact match of the piece's questions, from those of its row's tokens."""
    spans = piece.questions
    return (
        np.array([loss[a:b].sum(dtype=np.float64) for a, b in spans], np.float64),
        np.array([b - a for a, b in spans], np.int64),
        np.array([correct[a:b].all() for a, b in spans], np.bool_),
    )

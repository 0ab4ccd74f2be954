"""Held-out questions during training: loss and exact match, in full or in block mode.

A response counts when every one of its tokens, its end included, is the most likely one after the
right tokens before it; greedy decoding would then produce exactly this response. The curve of it
over the steps is Block-Attention's Fig. 4.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxrag.errors import TrainError
from jaxrag.prompts import template_named
from jaxrag.tokenizer import Tokenizer
from jaxrag.train.config import DataPart, EvalPart
from jaxrag.train.loss import TokenLoss
from jaxrag.train.packing import RESPONSE, Packer, Piece, TrainBatch, lay_piece
from jaxrag.train.samples import Writer
from jaxrag.train.sources import Limits, open_source


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """The packed samples of one ``[[eval]]``, made once."""

    name: str
    batches: tuple[tuple[TrainBatch, tuple[tuple[Piece, ...], ...]], ...]  # and pieces of each row

    def measure(self, losses: Callable[[TrainBatch], TokenLoss]) -> dict[str, float]:
        """``NAME/loss`` (mean over response tokens) and ``NAME/accuracy`` (exact match)."""
        total = tokens = right = questions = 0.0
        for batch, rows in self.batches:
            found: TokenLoss = jax.device_get(losses(batch))
            response = np.asarray(batch.kinds) == RESPONSE
            total += float(found.loss[response].sum(dtype=np.float64))
            tokens += int(response.sum())
            for row, pieces in enumerate(rows):
                at = 0
                for piece in pieces:
                    for first, end in piece.questions:
                        right += bool(found.correct[row, at + first : at + end].all())
                        questions += 1
                    at += len(piece)
        return {f"{self.name}/loss": total / tokens, f"{self.name}/accuracy": right / questions}


def held_out(
    part: EvalPart, data: DataPart, rows: int, tokenizer: Tokenizer, end_id: int, positions: int
) -> HeldOut:
    """Pack the first ``part.samples`` samples of a source into batches of ``rows`` rows.

    ``positions`` is the length of the model's context. Raises TrainError for no usable sample.
    """
    template = template_named(data.template)
    writer = Writer(tokenizer, template, end_id, data.response_start, data.refusal)
    limits = Limits(data.row_tokens, positions, data.bad_rows, data.too_long)
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
    return HeldOut(part.name, tuple(_packed(pieces, rows, data.row_tokens)))


def _packed(
    pieces: list[Piece], rows: int, row_tokens: int
) -> Iterator[tuple[TrainBatch, tuple[tuple[Piece, ...], ...]]]:
    packer = Packer(rows, row_tokens)

    def full() -> Any:
        return packer.batch(), tuple(map(tuple, packer.members))

    for piece in pieces:
        if not packer.add([piece]):
            yield full()
            packer = Packer(rows, row_tokens)
            packer.add([piece])
    yield full()

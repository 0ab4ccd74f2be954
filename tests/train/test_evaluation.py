"""Packed scoring: every question gets the verdict of its own tokens, wherever it was packed."""

import numpy as np
import pytest

from jaxrag.train.evaluation import HeldOut, pack_pieces
from jaxrag.train.loss import TokenLoss
from jaxrag.train.packing import lay_piece
from jaxrag.train.samples import Final, TrainSample

WRONG = 90  # a target from here on is predicted wrong


def a_piece(rng, chunks, responses):
    """A sample with questions of such responses; ids of chunks and questions are below 10."""
    finals = [
        Final(rng.integers(1, 10, rng.integers(1, 5)), np.array(ids, np.int32)) for ids in responses
    ]
    parts = tuple(rng.integers(1, 10, n) for n in chunks)
    return lay_piece(TrainSample(rng.integers(1, 10, 2), parts, tuple(finals)), False, "reordered")


def by_target(calls):
    """A forward pass whose loss of a token is its target, and right below WRONG."""

    def losses(batch):
        calls.append(batch.kinds.shape)
        targets = np.asarray(batch.targets)
        return TokenLoss(targets.astype(np.float32), targets < WRONG)

    return losses


@pytest.fixture
def pieces(rng):
    responses = [
        [[11, 12], [13, 95, 14]],
        [[21]],
        [[91], [31, 32], [33, 34, 99]],
        [[41, 42, 43]],
        [[51], [52]],
    ]
    lengths = [(9, 3), (30,), (5, 5, 5), (2,), (11, 8)]
    return [a_piece(rng, *both) for both in zip(lengths, responses, strict=True)]


def test_scores_come_back_in_the_order_of_the_questions(pieces):
    calls, heard = [], []
    packed = pack_pieces(pieces, rows=2, row_tokens=40)
    scores = packed.score(by_target(calls), heard.append)
    assert scores.right.tolist() == [True, False, True, False, True, False, True, True, True]
    assert scores.loss.tolist() == [23, 122, 21, 91, 63, 166, 126, 51, 52]
    assert scores.tokens.tolist() == [2, 3, 1, 1, 2, 3, 3, 1, 1]
    assert set(calls) == {(2, 40)}  # one shape to compile
    assert sum(heard) == len(pieces)
    assert sorted(i for rows in packed.batches for row in rows for i in row) == list(range(5))


def test_held_out_metrics_are_means(pieces):
    part = HeldOut("held", pack_pieces(pieces, rows=3, row_tokens=64))
    assert part.measure(by_target([])) == pytest.approx(
        {"held/loss": (23 + 122 + 21 + 91 + 63 + 166 + 126 + 51 + 52) / 17, "held/accuracy": 6 / 9}
    )

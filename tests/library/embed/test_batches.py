"""Batches hold every text once, in few shapes, within the budget."""

import numpy as np
import pytest

from jaxrag.library.embed.text import Batch, fill, plan, width_for


def test_widths():
    assert [width_for(n, 512) for n in (1, 16, 17, 24, 25, 33, 48, 49, 385, 512)] == [
        16, 16, 24, 24, 32, 48, 48, 64, 512, 512,
    ]  # fmt: skip
    assert width_for(45, 47) == 47


@pytest.mark.parametrize("budget", [1, 256, 4096])
def test_every_text_once_within_the_budget(rng, budget):
    lengths = rng.integers(1, 201, 500).tolist()
    batches = plan(lengths, budget, 200)
    members = [i for batch in batches for i in batch.members]
    assert sorted(members) == list(range(500))
    for batch in batches:
        assert len(batch.members) <= batch.rows
        assert max(lengths[i] for i in batch.members) <= batch.width
        assert batch.rows.bit_count() == 1
        assert batch.rows * batch.width <= budget or batch.rows == 1


def test_few_shapes_and_little_padding(rng):
    lengths = np.clip(rng.normal(150, 60, 2000).astype(int), 3, 256).tolist()
    batches = plan(lengths, 4096, 256)
    assert len({(batch.rows, batch.width) for batch in batches}) <= 20
    padded = sum(batch.rows * batch.width for batch in batches)
    assert padded < 1.25 * sum(lengths)


def test_rows_that_a_width_leaves_empty_hold_shorter_texts():
    lengths = [100, 100, 100, 5, 5]
    assert plan(lengths, 4096, 128) == [
        Batch((0, 1, 2, 3), rows=4, width=128),
        Batch((4,), rows=1, width=16),
    ]


def test_nothing_to_embed():
    assert plan([], 4096, 128) == []


def test_fill():
    ids = [np.array([7, 8], np.int32), np.array([1, 2, 3], np.int32)]
    block, lengths = fill(Batch((1, 0), rows=3, width=4), ids)
    np.testing.assert_array_equal(block, [[1, 2, 3, 0], [7, 8, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(lengths, [3, 2, 1])

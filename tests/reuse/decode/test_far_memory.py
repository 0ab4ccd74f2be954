"""Reading K and V in host memory by position."""

import numpy as np
import pytest

from jaxrag.reuse.attention_index import rotated
from jaxrag.reuse.decode.far import HostLayer, memory
from jaxrag.reuse.decode.far.memory import HostMemory, first_highest, highest, positions_of


@pytest.fixture
def layer(rng):
    """A long run, a run elsewhere at another offset, and single rows of both."""
    rows = np.concatenate([np.arange(40, 140), np.arange(200, 290), 2 * np.arange(20)])
    offsets = np.concatenate([np.zeros(100), np.full(90, 30), np.tile([30, 7], 10)])
    shape = (2, 300, 10)
    k, v = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    return HostLayer(k, v, rows.astype(np.int32), offsets.astype(np.int32))


@pytest.mark.parametrize("block", [1, 16, 64, 1000])
@pytest.mark.parametrize(("low", "high"), [(0, 210), (3, 205), (99, 101), (150, 150), (207, 208)])
def test_stretches_are_all_positions_once(tiny_config, layer, block, low, high):
    mine = HostMemory(tiny_config(), layer)
    mine.block = block
    found = memory.Runs(np.arange(210, dtype=np.int32), layer.rows, mine._which, block).between(
        low, high
    )
    seen = []
    for each in found:
        assert 0 < each.count <= block
        positions = np.arange(210)[each.positions]
        np.testing.assert_array_equal(np.arange(300)[each.rows], layer.rows[positions])
        assert (layer.offsets[positions] == mine.offsets[each.offset]).all()
        # Runs are read without a copy.
        assert np.shares_memory(mine.keys(0, each.rows), layer.k) == (positions[0] < 190)
        seen += positions.tolist()
    assert sorted(seen) == list(range(low, high))


def test_a_run_ends_where_the_offset_changes():
    places = np.arange(200, dtype=np.int32)
    found = memory.Runs(places, places, np.repeat(np.uint16([0, 1]), 100), 1000).between(0, 200)
    assert [(it.positions, it.offset) for it in found] == [(slice(0, 100), 0), (slice(100, 200), 1)]


@pytest.mark.parametrize("cap", [None, 0.4])
def test_scores_are_those_of_placed_keys_with_a_placed_query(tiny_config, layer, rng, cap):
    config = tiny_config(attention_scale=0.21, score_cap=cap)
    mine, q = HostMemory(config, layer), rng.standard_normal((2, 3, 10)).astype(np.float32)
    at = np.arange(210)
    asked = mine.ask(q, 260)
    placed = rotated(q[..., None, :], np.array([260]), config.rope)[..., 0, :]
    for head in range(2):
        keys = np.stack(
            [
                rotated(layer.k[head, row][None], np.array([turn]), config.rope)[0]
                for row, turn in zip(layer.rows, layer.offsets, strict=True)
            ]
        )
        np.testing.assert_allclose(mine.placed_keys(head, at), keys, rtol=1e-5, atol=1e-5)
        expected = placed[head] @ keys.T * 0.21
        if cap:
            expected = cap * np.tanh(expected / cap)
        stretches = mine.stretches(0, 210)
        where = positions_of(stretches, np.arange(210))
        np.testing.assert_allclose(
            mine.scan(head, asked[:, head], stretches), expected[:, where], rtol=1e-4, atol=1e-5
        )
        weights = np.exp(expected)
        out, lse = mine.attend(head, asked[:, head], stretches)
        np.testing.assert_allclose(lse, np.log(weights.sum(1)), rtol=1e-5)
        mixed = weights @ layer.v[head, layer.rows] / weights.sum(1)[:, None]
        np.testing.assert_allclose(out, mixed, rtol=1e-4, atol=1e-5)
        some = rng.permutation(210)[:50]
        np.testing.assert_allclose(
            mine.scores(head, asked[:, head, 1], some), expected[1, some], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("count", [1, 9, 10, 11, 5000, 8192, 20_000])
@pytest.mark.parametrize("k", [1, 10, 200])
def test_the_highest_are_those_of_a_sort(rng, count, k):
    for scores in (
        rng.standard_normal(count),
        rng.integers(0, 4, count),
        np.where(rng.random(count) < 0.999, -np.inf, 1.0),
    ):
        found = highest(scores.astype(np.float32), k)
        assert len(set(found.tolist())) == min(k, count)
        np.testing.assert_array_equal(np.sort(scores[found]), np.sort(scores)[-k:])
        first = first_highest(scores, k)
        expected = np.sort(np.argsort(-scores, kind="stable")[:k])
        np.testing.assert_array_equal(first, expected)


def test_parts_are_merged_as_one(rng):
    scores, values = rng.standard_normal((3, 30)) * 40, rng.standard_normal((30, 5))
    scores[2, :] = -np.inf
    scores[1, 10:] = -np.inf

    def attend(some):
        weights, lse = memory.softmax(scores[:, some])
        return weights @ values[some], lse

    whole = attend(slice(None))
    for parts in ([slice(0, 10), slice(10, 30)], [slice(0, 1), slice(1, 20), slice(20, 30)]):
        for one, other in zip(memory.merged(list(map(attend, parts))), whole, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    assert (whole[0][2] == 0).all() and whole[1][2] == -np.inf

"""What selectors count: budgets, shares of chunks, and the choices that need no model."""

import dataclasses

import numpy as np
import pytest

from jaxrag.reuse.select import AllTokens, FirstK, NoTokens, RandomTokens, SelectionInput, budget_of
from jaxrag.reuse.select.base import best
from jaxrag.reuse.select.cache_craft import order_penalty, scaled_counts


def scene_of(rng, ratio):
    """A request of one to eight chunks, some of them settled; for selectors that ask no model."""
    count = int(rng.integers(1, 9))
    prompt = [rng.integers(3, 101, rng.integers(1, 9)).astype(np.int32) for _ in range(count + 2)]
    settled = rng.random((2, count)) < 0.2
    return SelectionInput(
        prefix=prompt[0], chunks=tuple(prompt[2:]), final=prompt[1], table=None, chunk_slots=None,
        question=(0, 1), scratch=0, copies=((),) * count,
        exact=tuple(settled[0]), in_place=tuple(settled[1]), seen=((),) * count, ratio=ratio,
    )  # fmt: skip


@pytest.mark.parametrize("ratio", [None, 0.01, 0.15, 0.5, 1.0])
def test_selectors_that_ask_no_model_by_counting(rng, ratio):
    """EPIC's first tokens of every chunk, all, none, and as many at random as the budget says."""
    for _ in range(60):
        scene = scene_of(rng, ratio)
        free, first, at = [], [], 0
        for chunk, exact, gap in zip(scene.chunks, scene.exact, scene.in_place, strict=True):
            count = 3 if ratio is None else int(np.ceil(ratio * len(chunk) - 1e-9))
            if not (exact or gap):
                free += range(at, at + len(chunk))
                first += range(at, at + min(count, len(chunk)))
            at += len(chunk)
        expected = {FirstK(k=3): first, AllTokens(): free, NoTokens(): []}
        for selector, tokens in expected.items():
            choice = selector.select(None, None, scene)
            assert choice.tokens.tolist() == tokens
            assert choice.flops == 0
        if ratio is not None:
            chosen = RandomTokens().select(None, None, scene).tokens.tolist()
            assert chosen == sorted(set(chosen) & set(free))
            assert len(chosen) == min(int(np.ceil(ratio * at - 1e-9)), len(free))


def test_random_is_a_function_of_seed_and_request(rng):
    one, other = scene_of(rng, 0.5), scene_of(rng, 0.5)
    first, again, seeded = (RandomTokens(seed).score(one) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != seeded).all()
    final = dataclasses.replace(one, final=other.final)  # every part of a request counts
    assert (first != RandomTokens().score(final)).all()


def test_random_draws_all_candidates_equally_often(rng):
    """Each of the candidates, and each pair of them, as often as chance says."""
    chunks = tuple(ids.astype(np.int32) for ids in np.split(rng.integers(3, 101, 12), [5, 8]))
    settled = {"exact": (False, True, False), "in_place": (False,) * 3}
    scene = dataclasses.replace(scene_of(rng, 0.25), chunks=chunks, **settled)
    draws, together = 3000, np.zeros((12, 12))
    for seed in range(draws):
        tokens = RandomTokens(seed).select(None, None, scene).tokens
        together[np.ix_(tokens, tokens)] += 1
    free = [0, 1, 2, 3, 4, 8, 9, 10, 11]
    once, twice = 3 / 9, 3 / 9 * 2 / 8
    assert together.sum() == together[np.ix_(free, free)].sum() == 9 * draws
    for i in free:
        spread = np.sqrt(draws * once * (1 - once))
        assert abs(together[i, i] - draws * once) < 5 * spread
        for j in free[: free.index(i)]:
            spread = np.sqrt(draws * twice * (1 - twice))
            assert abs(together[i, j] - draws * twice) < 5 * spread


def test_order_penalty_is_the_share_of_inverted_pairs():
    assert order_penalty([]) == order_penalty([4]) == order_penalty([1, 2, 3]) == 0
    assert order_penalty([3, 2, 1]) == 1
    assert order_penalty([2, 1, 3]) == pytest.approx(1 / 3)


def test_scaled_counts_are_whole_in_proportion_and_within_the_limits(rng, work):
    for _ in range(200):
        limits = rng.integers(0, 30, rng.integers(1, 8))
        chunk_weights = rng.random(len(limits)) * (rng.random(len(limits)) < 0.7)
        total = int(rng.integers(0, limits.sum() + 1))
        counts = scaled_counts(chunk_weights, limits, total)
        assert ((counts >= 0) & (counts <= limits)).all()
        work.assert_shared_out(counts, chunk_weights, limits, total)
    assert scaled_counts(np.array([0.0, 1.0]), np.array([4, 4]), 6).tolist() == [2, 4]


@pytest.mark.parametrize(
    ("ratio", "tokens", "expected"),
    [
        (0.07, 100, 7),
        (0.15, 20, 3),
        (0.15, 21, 4),
        (0.3, 10, 3),
        (0, 9, 0),
        (1.0, 9, 9),
        (1e-6, 9, 1),
    ],
)
def test_the_budget_is_the_ceiling_of_the_decimal_number(ratio, tokens, expected):
    assert budget_of(ratio, tokens) == expected


def test_best_takes_candidates_only_and_ties_go_to_the_earlier():
    scores = np.array([5, 1, 3, 3, 3, 9], np.float32)
    among = np.array([False, True, True, True, True, True])
    assert best(scores, among, 3).tolist() == [2, 3, 5]
    assert best(scores, among, 0).tolist() == []
    assert best(scores, among, 99).tolist() == [1, 2, 3, 4, 5]

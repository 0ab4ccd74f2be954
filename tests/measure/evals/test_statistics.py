"""Intervals of shares of clustered questions: against slow sums, a bootstrap, and coverage."""

import numpy as np
import pytest

from jaxrag.measure.evals.statistics import (
    bootstrapped,
    bootstrapped_difference,
    difference,
    median,
    recovery,
    share,
)

Z = 1.959963984540054


def clustered(rng, groups, size=6, p=0.7, spread=3.0):
    """Questions that are right with a probability of their sample's own: right, sample numbers."""
    chance = rng.beta(spread * p, spread * (1 - p), groups)
    sizes = rng.integers(1, size + 1, groups)
    samples = np.repeat(np.arange(groups), sizes)
    return rng.random(len(samples)) < chance[samples], samples


def resampled(rng, statistic, samples, times=3000):
    """Standard deviation of a statistic of rows over a bootstrap of whole samples."""
    rows = [np.flatnonzero(samples == group) for group in np.unique(samples)]
    values = [
        statistic(np.concatenate([rows[i] for i in rng.integers(0, len(rows), len(rows))]))
        for _ in range(times)
    ]
    return float(np.std(values))


def test_share_is_wilson_for_independent_questions():
    """k of n: the published form of Wilson's interval, where every sample has one question."""
    right = np.array([True] * 81 + [False] * 182)
    found = share(right, np.arange(263))
    p, n = 81 / 263, 263
    # The variance between samples is that of independent draws but for n / (n - 1).
    n_eff = n * (n - 1) / n
    middle = (p + Z**2 / (2 * n_eff)) / (1 + Z**2 / n_eff)
    half = Z / (1 + Z**2 / n_eff) * np.sqrt(p * (1 - p) / n_eff + Z**2 / (4 * n_eff**2))
    assert found.value == pytest.approx(p)
    assert (found.low, found.high) == pytest.approx((middle - half, middle + half))
    assert found.n == 263
    assert (found.low, found.high) == pytest.approx((0.2553, 0.3662), abs=3e-4)  # Newcombe 1998


@pytest.mark.parametrize("value", [0, 1])
def test_share_at_the_ends_is_not_certain(value):
    found = share(np.full(50, bool(value)), np.arange(50) // 5)
    assert found.value == value
    bounds = (0, Z**2 / (50 + Z**2)) if value == 0 else (50 / (50 + Z**2), 1)
    assert (found.low, found.high) == pytest.approx(bounds)


def test_asking_the_same_question_again_teaches_nothing(rng):
    right, samples = clustered(rng, 200)
    once = share(right, samples)
    thrice = share(np.repeat(right, 3), np.repeat(samples, 3))
    assert thrice[:3] == pytest.approx(once[:3])
    assert thrice.n == 3 * once.n
    apart = share(np.repeat(right, 3), np.arange(3 * len(right)))
    assert apart.high - apart.low < 0.7 * (once.high - once.low)


def test_standard_errors_are_those_of_a_bootstrap_of_samples(rng):
    best, samples = clustered(rng, 300, p=0.95)
    lost = best & (rng.random(len(best)) < 0.7)
    back = lost | (best & (rng.random(len(best)) < 0.8))
    found = difference(lost, best, samples)
    spread = resampled(rng, lambda r: lost[r].mean() - best[r].mean(), samples)
    assert (found.high - found.low) / 2 / Z == pytest.approx(spread, rel=0.06)
    found = recovery(lost, back, best, samples)
    ratio = lambda r: (back[r].mean() - lost[r].mean()) / (best[r].mean() - lost[r].mean())  # noqa: E731
    assert found.value == pytest.approx(ratio(np.arange(len(best))))
    spread = resampled(rng, ratio, samples)
    assert (found.high - found.low) / 2 / Z == pytest.approx(spread, rel=0.06)


@pytest.mark.parametrize("p", [0.7, 0.95])
def test_intervals_hold_the_truth_as_often_as_they_say(rng, p):
    """Clusters of unequal sizes whose questions are correlated."""
    times, kept, naive = 800, 0, 0
    for _ in range(times):
        right, samples = clustered(rng, 120, p=p)
        found = share(right, samples)
        kept += found.low <= p <= found.high
        alone = share(right, np.arange(len(right)))
        naive += alone.low <= p <= alone.high
    assert 0.92 <= kept / times <= 0.98
    assert naive / times < kept / times - 0.04


def test_agreement_on_few_questions_is_not_certain():
    same = np.ones(3, np.bool_)
    found = difference(same, same, np.arange(3))
    assert found.value == 0 and found.low < -0.3 and found.high > 0.3
    many = np.ones(4000, np.bool_)
    assert difference(many, many, np.arange(4000) // 8).high < 0.001


def test_nothing_to_recover_has_no_recovery(rng):
    best, samples = clustered(rng, 100)
    assert recovery(best, best, best, samples) is None
    assert recovery(best, best, ~best, samples) is None


def test_no_question_has_no_share():
    none = np.zeros(0, np.bool_)
    assert share(none, none) is None
    assert difference(none, none, none) is None


def test_the_interval_of_a_median_covers_it_as_often_as_it_says():
    """Of skewed values, whose mean is far from it; few values have no interval of 95 %."""
    rng = np.random.default_rng(3)
    for n, least in ((6, 0.95), (25, 0.95)):
        found = [median(rng.lognormal(size=n)) for _ in range(2000)]
        covered = np.mean([it.low <= 1.0 <= it.high for it in found])
        assert least - 0.01 <= covered <= 0.985
    assert median(np.array([3.0, 1.0, 2.0])) == (2.0, None, None, 3)
    assert median(np.arange(6.0)) == (2.5, 0.0, 5.0, 6)
    assert median(np.array([])) is None


def test_an_interval_of_resampled_samples_is_that_of_whole_ones(rng):
    """Three times the same question is one; with ratios, too."""
    values, over = rng.normal(2, 1, 100), rng.uniform(1, 2, 100)
    samples = np.repeat(np.arange(100), 3)
    for beside in (None, over):
        once = bootstrapped(values, 3, over=beside)
        more = None if beside is None else np.repeat(beside, 3)
        thrice = bootstrapped(np.repeat(values, 3), 3, over=more, samples=samples)
        assert thrice == pytest.approx(once)
    once, alone = bootstrapped(values, 3), bootstrapped(np.repeat(values, 3), 3)
    assert alone["high"] - alone["low"] < 0.7 * (once["high"] - once["low"])


def test_what_a_difference_takes_is_the_textbooks_number(rng):
    """(z of 95 % + z of 80 %)^2 variance / difference^2, of independent pairs."""
    a, b = rng.normal(0.3, 1, 4000), np.zeros(4000)
    wanted = ((Z + 0.8416212335729143) * a.std() / a.mean()) ** 2
    assert bootstrapped_difference(a, b, 3)["needed"] == pytest.approx(wanted, rel=0.1)
    right, wrong = rng.random(4000) < 0.7, rng.random(4000) < 0.6
    each = right.astype(float) - wrong
    wanted = ((Z + 0.8416212335729143) * each.std() / each.mean()) ** 2
    assert difference(right, wrong, np.arange(4000)).needed == pytest.approx(wanted, rel=0.02)
    assert difference(right, right, np.arange(4000)).needed is None


def test_as_many_questions_as_are_needed_show_the_difference_four_times_of_five(rng):
    chances, times = (0.75, 0.6), 300
    big = [rng.random(100_000) < p for p in chances]
    count = difference(*big, np.arange(100_000)).needed
    seen = 0
    for _ in range(times):
        found = difference(*(rng.random(count) < p for p in chances), np.arange(count))
        seen += found.low > 0
    assert 0.72 < seen / times < 0.88

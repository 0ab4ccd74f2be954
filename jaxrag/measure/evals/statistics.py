"""Intervals for shares of questions that are asked several to a sample.

Questions on the same documents are right or wrong together, so they count for less than as many
independent ones. Every variance here is the cluster-robust one (Taylor linearisation over samples,
as for ratios in survey statistics): what an estimate would change by if a question weighed a little
more is added up within each sample, and those sums are squared. Intervals are

- of a share: Wilson's score interval with the effective number of questions, n over the design
  effect (cluster-robust variance over that of independent questions, at least 1);
- of a difference and of a ratio of differences: estimate +- 1.96 standard errors; for a difference
  never less than those of independent pairs with half a question added to each cell of their
  2 x 2 table (Agresti and Min 2005), so that agreement on few questions is not taken for certain;

A question's verdict is a bool, or a score from 0 to 1 such as F1: scores vary less than verdicts of
the same mean, so the terms for independent questions bound theirs from above.

A value that is no share, such as a KL divergence, has the interval of resampled samples (a
bootstrap), paired where two methods are compared.

All of them are asymptotic in the number of samples; with less than some thirty they are too narrow.
Not so that of a median, which goes from one order statistic to another.
"""

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxrag.base.types import HostArray

LEVEL = 0.95
POWER = 0.8  # with which a difference of the size seen is to show, of ``needed`` questions
_Z = statistics.NormalDist().inv_cdf((1 + LEVEL) / 2)
_Z_POWER = statistics.NormalDist().inv_cdf(POWER)


class Estimate(NamedTuple):
    """A share or a difference of shares, as a fraction of 1, with its 95 % interval."""

    value: float
    low: float
    high: float
    n: int  # questions


class Difference(NamedTuple):
    """A difference of shares of the same questions, and how many would show one of this size."""

    value: float
    low: float
    high: float
    n: int  # questions
    needed: int | None  # None: there is no difference


class Median(NamedTuple):
    """The middle of some values with its 95 % interval; no interval for fewer than six."""

    value: float
    low: float | None
    high: float | None
    n: int


def plain(estimate: Estimate | Difference | Median | None) -> dict[str, Any] | None:
    """JSON-able; None for an estimate that does not exist."""
    return None if estimate is None else estimate._asdict()


def median(values: HostArray) -> Median | None:
    """Of independent values, float [N]; None for no value.

    The interval is from one order statistic to another, by the binomial distribution of how many
    values lie below the median: it supposes nothing of how values are distributed.
    """
    n = len(values)
    if not n:
        return None
    ordered = np.sort(values)
    below, left = 0.0, -1  # the chance that at most `left` values lie below the median
    while below + math.comb(n, left + 1) / 2**n <= (1 - LEVEL) / 2:
        left += 1
        below += math.comb(n, left) / 2**n
    middle = float(np.median(ordered))
    if left < 0:
        return Median(middle, None, None, n)
    return Median(middle, float(ordered[left]), float(ordered[n - 1 - left]), n)


def share(right: HostArray, samples: HostArray) -> Estimate | None:
    """How often ``right`` (bool or 0..1, [Q]) holds.

    ``samples`` [Q] numbers the sample of each question. None for no question.
    """
    n = len(right)
    if not n:
        return None
    p = float(right.mean())
    independent = p * (1 - p) / n
    effect = _variance((right - p) / n, samples) / independent if independent else 1.0
    effective = n / max(effect, 1.0)
    middle = p + _Z**2 / (2 * effective)
    half = _Z * math.sqrt(p * (1 - p) / effective + _Z**2 / (4 * effective**2))
    scale = 1 + _Z**2 / effective
    # At the ends of the scale rounding would put the bound beside the value.
    low = 0.0 if p == 0 else (middle - half) / scale
    high = 1.0 if p == 1 else (middle + half) / scale
    return Estimate(p, low, high, n)


def needed(value: float, half: float, n: int) -> int | None:
    """Questions like these that show a difference of this size, with a chance of ``POWER``.

    Args:
      value: the difference that n questions had.
      half: of its interval.

    None for no difference.
    """
    return math.ceil(n * ((1 + _Z_POWER / _Z) * half / value) ** 2) if value else None


def difference(a: HostArray, b: HostArray, samples: HostArray) -> Difference | None:
    """How much more often ``a`` holds than ``b``, of the same questions.

    Paired, bool or 0..1, [Q] each. None for no question.
    """
    n = len(a)
    if not n:
        return None
    each = a.astype(np.float64) - b
    value = float(each.mean())
    discordant = float(np.abs(each).sum()) + 1
    independent = (discordant - each.sum() ** 2 / (n + 2)) / (n + 2) ** 2
    half = _Z * math.sqrt(max(_variance((each - value) / n, samples), independent))
    low, high = max(value - half, -1.0), min(value + half, 1.0)
    return Difference(value, low, high, n, needed(value, half, n))


def recovery(
    lost: HostArray, back: HostArray, best: HostArray, samples: HostArray
) -> Estimate | None:
    """(back - lost) / (best - lost): how much of a loss was made good, of the same questions.

    None where the loss, ``best - lost``, is not above 0 with its whole interval: the ratio means
    nothing then.
    """
    loss = difference(best, lost, samples)
    if loss is None or loss.low <= 0:
        return None
    gain = back.astype(np.float64) - lost
    room = best.astype(np.float64) - lost
    value = float(gain.sum() / room.sum())
    half = _Z * math.sqrt(_variance((gain - value * room) / room.sum(), samples))
    return Estimate(value, value - half, value + half, len(lost))


def bootstrapped(
    values: HostArray,
    seed: int,
    *,
    over: HostArray | None = None,
    samples: HostArray | None = None,
    resamples: int = 10_000,
) -> dict[str, float]:
    """The mean of one value a question, float [Q], with the interval of means of resampled samples.

    With ``over`` [Q], of the same questions, the mean over theirs: the ratio of both means.
    ``samples`` [Q] numbers the sample of each, which is drawn whole; None: each is one.
    """
    n = len(values)
    _, of = np.unique(np.arange(n) if samples is None else samples, return_inverse=True)
    sums, below = (np.bincount(of, it) for it in (values, np.ones(n) if over is None else over))
    draws = np.random.default_rng(seed).integers(len(sums), size=(resamples, len(sums)))
    means = sums[draws].sum(1) / below[draws].sum(1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return {"value": float(sums.sum() / below.sum()), "low": float(low), "high": float(high)}


def bootstrapped_difference(
    a: HostArray, b: HostArray, seed: int, samples: HostArray | None = None
) -> dict[str, Any]:
    """How much larger the mean of ``a`` is than that of ``b``, paired; also what is ``needed``."""
    interval = bootstrapped(a - b, seed, samples=samples)
    half = (interval["high"] - interval["low"]) / 2
    return interval | {"needed": needed(interval["value"], half, len(a))}


def by_group(
    groups: Mapping[str, HostArray],
    samples: HostArray,
    estimate: Callable[..., Estimate | Difference | None],
    *values: HostArray,
) -> dict[str, Any]:
    """An estimate of each group of questions (bool [Q]) from values [Q]; JSON-able."""
    return {
        name: plain(estimate(*(column[rows] for column in values), samples[rows]))
        for name, rows in groups.items()
    }


def _variance(influence: HostArray, samples: HostArray) -> float:
    """Cluster-robust variance of an estimate from each question's influence on it, [Q]."""
    groups, index = np.unique(samples, return_inverse=True)
    sums = np.bincount(index, weights=influence, minlength=len(groups))
    return float((sums**2).sum() * len(groups) / max(len(groups) - 1, 1))

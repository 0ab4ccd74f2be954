"""What became of requests under load, and what that says of a server: percentiles and goodput."""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrag.measure.bench.options import Slo

PERCENTILES = (50, 95, 99)


@dataclasses.dataclass
class ServedRequest:
    """One request as its client saw it; times in seconds after the start.

    Attributes:
      due: when it was to be sent, which its times count from, also where it was sent later.
      wanted: tokens that it asked for.
      first: when its first token came; None before.
      last: when its last token came.
      ids: its answer, where the server tells ids.
      text: of its answer, over HTTP.
      done: whether the server said that the answer is complete.
      found: of its chunks, how many came from where.
      error: what the server said instead of an answer.
      status: of HTTP, where that was not 200.
      retry_after: seconds after which it is to be asked again, by a server that refused.
    """

    due: float
    wanted: int
    tenant: str = ""
    first: float | None = None
    last: float | None = None
    ids: list[int] = dataclasses.field(default_factory=list)
    tokens: int = 0
    text: str = ""
    done: bool = False
    found: Counter[str] = dataclasses.field(default_factory=Counter)
    error: str | None = None
    status: int | None = None
    retry_after: float | None = None

    def came(self, now: float, tokens: int, ids: Sequence[int] = ()) -> None:
        """Count tokens that came at this moment."""
        if tokens:
            self.first = now if self.first is None else self.first
            self.last = now
            self.tokens += tokens
            self.ids += ids

    @property
    def complete(self) -> bool:
        """Did all that it asked for come, and no more?"""
        return self.done and self.error is None and self.tokens == self.wanted

    @property
    def to_first(self) -> float:
        """Seconds to the first token; infinite where none came."""
        return math.inf if self.first is None else self.first - self.due

    @property
    def per_token(self) -> float:
        """Mean seconds of the tokens behind the first; 0 where there are none."""
        if self.first is None or self.last is None or self.tokens < 2:
            return 0.0
        return (self.last - self.first) / (self.tokens - 1)

    @property
    def to_last(self) -> float:
        """Seconds to the last token; infinite where none came."""
        return math.inf if self.last is None else self.last - self.due

    def good(self, slo: Slo) -> bool:
        """Was it served in full and in time?"""
        return self.complete and self.to_first < slo.first and self.per_token < slo.per_token


def summary(served: Sequence[ServedRequest], slo: Slo) -> dict[str, Any]:
    """What the requests of one run say of a server, JSON-able.

    Times are those of the requests that were served in full; ``lost`` counts the others. ``good``
    is a share of all. ``tokens_per_second`` and ``good_per_second`` are over the time from the
    first arrival to the last token. ``fairness`` is Jain's index of the tenants, each with its
    tokens over the seconds that it waited for them: 1 where all tenants are served alike,
    1 / tenants where one alone is served.
    """
    whole = [it for it in served if it.complete]
    start = min(it.due for it in served)
    span = max((it.last for it in served if it.last is not None), default=start) - start
    good = sum(it.good(slo) for it in served)
    return {
        "requests": len(served),
        "lost": len(served) - len(whole),
        "errors": sorted({it.error for it in served if it.error is not None}),
        "first_token": percentiles([it.to_first for it in whole]),
        "per_token": percentiles([it.per_token for it in whole if it.tokens > 1]),
        "end_to_end": percentiles([it.to_last for it in whole]),
        "good": good / len(served),
        "good_per_second": good / span if span else 0.0,
        "tokens_per_second": sum(it.tokens for it in served) / span if span else 0.0,
        "seconds": span,
        "found": dict(sum((it.found for it in served), Counter[str]())),
        "fairness": jain(_by_tenant(served)),
        "first_tokens": [round(it.to_first, 5) for it in served if it.first is not None],
    }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, p50, p95 and p99, by linear interpolation; None of nothing."""
    if not values:
        return None
    found = np.percentile(values, PERCENTILES)
    named = {f"p{p}": float(x) for p, x in zip(PERCENTILES, found, strict=True)}
    return {"mean": float(np.mean(values)), **named}


def jain(shares: Sequence[float]) -> float:
    """Jain's fairness index: (sum x) ** 2 / (n sum x ** 2); 1 of nothing and of zeros."""
    squares = sum(x * x for x in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def highest_rate(
    good: Callable[[float], float], start: float, share: float, *, doublings: int, halvings: int
) -> tuple[float, list[tuple[float, float]]]:
    """The highest rate at which at least a share of the requests is good, by bisection.

    From ``start`` the rate is doubled while it is sustained, or halved until it is, ``doublings``
    times at most; then the interval that was found is halved.

    Args:
      good: the share that is good at a rate.
      doublings: steps to find the interval.

    Returns:
      The highest rate that was seen to be sustained, 0 where none was, and what was tried, with
      its share.
    """
    tried: list[tuple[float, float]] = []

    def sustained(rate: float) -> bool:
        tried.append((rate, good(rate)))
        return tried[-1][1] >= share

    low, high, rate = 0.0, math.inf, start
    for _ in range(doublings + 1):
        if sustained(rate):
            low, rate = rate, 2 * rate
        else:
            high, rate = rate, rate / 2
        if low and not math.isinf(high):
            break
    if low and not math.isinf(high):
        for _ in range(halvings):
            middle = (low + high) / 2
            low, high = (middle, high) if sustained(middle) else (low, middle)
    return low, tried


def ratios(rows: Sequence[Mapping[str, Any]], of: str) -> list[dict[str, Any]]:
    """The times of the arm ``of``, and of it under other settings, over those of the other rows.

    At the same rate; one under other settings is not compared with its like. JSON-able.
    """
    like = {row["arm"] for row in rows if row["arm"].partition(":")[0] == of}
    found = []
    for one, row in itertools.product(rows, rows):
        if one["arm"] not in like or row is one or row["rate"] != one["rate"]:
            continue
        if one["arm"] != of and row["arm"] in like:
            continue
        entry: dict[str, Any] = {"arm": one["arm"], "over": row["arm"], "rate": row["rate"]}
        for name in ("first_token", "per_token", "end_to_end"):
            a, b = one[name], row[name]
            if a and b and all(b.values()):
                entry[name] = {key: a[key] / b[key] for key in a}
        found.append(entry)
    return found


def _by_tenant(served: Sequence[ServedRequest]) -> list[float]:
    """Of every tenant the tokens of its complete answers over the seconds that it waited."""
    tokens: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for it in served:
        mine = it.tokens if it.complete else 0
        tokens[it.tenant] = tokens.get(it.tenant, 0) + mine
        waited = 0.0 if it.last is None else it.to_last
        seconds[it.tenant] = seconds.get(it.tenant, 0.0) + waited
    return [tokens[it] / seconds[it] if seconds[it] else 0.0 for it in tokens]

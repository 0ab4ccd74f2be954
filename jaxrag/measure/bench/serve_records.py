"""What became of requests under load, and what that says of a server: percentiles and goodput."""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
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
      done: whether the server said that the answer is complete.
      found: of its chunks, how many came from where.
      error: what the server said instead of an answer.
    """

    due: float
    wanted: int
    first: float | None = None
    last: float | None = None
    ids: list[int] = dataclasses.field(default_factory=list)
    tokens: int = 0
    done: bool = False
    found: Counter[str] = dataclasses.field(default_factory=Counter)
    error: str | None = None

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
    first arrival to the last token.
    """
    whole = [reply for reply in served if reply.complete]
    start = min(reply.due for reply in served)
    span = max((reply.last for reply in served if reply.last is not None), default=start) - start
    good = sum(reply.good(slo) for reply in served)
    return {
        "requests": len(served),
        "lost": len(served) - len(whole),
        "errors": sorted({reply.error for reply in served if reply.error is not None}),
        "first_token": percentiles([reply.to_first for reply in whole]),
        "per_token": percentiles([reply.per_token for reply in whole if reply.tokens > 1]),
        "end_to_end": percentiles([reply.to_last for reply in whole]),
        "good": good / len(served),
        "good_per_second": good / span if span else 0.0,
        "tokens_per_second": sum(reply.tokens for reply in served) / span if span else 0.0,
        "seconds": span,
        "found": dict(sum((reply.found for reply in served), Counter[str]())),
        "first_tokens": [round(reply.to_first, 5) for reply in served if reply.first is not None],
    }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, p50, p95 and p99, by linear interpolation; None of nothing."""
    if not values:
        return None
    found = np.percentile(values, PERCENTILES)
    named = {f"p{p}": float(x) for p, x in zip(PERCENTILES, found, strict=True)}
    return {"mean": float(np.mean(values)), **named}

"""Arms that are measured in turn, so that a slow moment of the machine falls on all of them."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from jaxrag.measure.machine import settle


def in_turn[Answer](
    arms: Mapping[str, Callable[[], Answer]],
    repeats: int,
    *,
    before: Callable[[], None] = settle,
    rounds: Callable[[range], Iterable[int]] = iter,
) -> dict[str, list[Answer]]:
    """What every arm answers in every round but the first, which compiles and warms up.

    Args:
      arms: by name.
      repeats: rounds that count.
      before: called before every measurement.
      rounds: goes through the rounds, with a bar.
    """
    answers: dict[str, list[Answer]] = {name: [] for name in arms}
    for number in rounds(range(repeats + 1)):
        for name, measure in arms.items():
            before()
            answer = measure()
            if number:
                answers[name].append(answer)
    return answers


def seconds_of(way: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """How long a call takes."""
    start = clock()
    way()
    return clock() - start


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def ratios(theirs: Sequence[float], ours: Sequence[float]) -> dict[str, float]:
    """Spread of theirs over ours, round by round."""
    return spread([one / other for one, other in zip(theirs, ours, strict=True)])


def between(it: Mapping[str, float], form: str) -> str:
    """A spread as text: median (low-high)."""
    return f"{it['median']:{form}} ({it['low']:{form}}-{it['high']:{form}})"

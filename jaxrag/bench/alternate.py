"""Arms that are measured in turn, so that a slow moment of the machine falls on all of them."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from jaxrag.bench import ttft
from jaxrag.config import ModelConfig, RopeConfig

OURS = "jaxrag"

# Random weights, the shape of a small Llama: 298M parameters.
LLAMA_300M: ModelConfig = dataclasses.replace(
    ttft.LLAMA_100M,
    vocab_size=8192,
    num_layers=24,
    model_dim=1024,
    mlp_dim=3072,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    rope=RopeConfig(theta=10_000.0, rotary_dim=64, interleaved=False, scaling=None),
)


def in_turn[Answer](
    arms: Mapping[str, Callable[[], Answer]], repeats: int
) -> dict[str, list[Answer]]:
    """What every arm answers in every round but the first, which compiles and warms up."""
    answers: dict[str, list[Answer]] = {name: [] for name in arms}
    for round_ in range(repeats + 1):
        for name, measure in arms.items():
            time.sleep(ttft.SETTLE_SECONDS)
            answer = measure()
            if round_:
                answers[name].append(answer)
    return answers


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def ratios(theirs: Sequence[float], ours: Sequence[float]) -> dict[str, float]:
    """Spread of theirs over ours, round by round."""
    return spread([one / other for one, other in zip(theirs, ours, strict=True)])


def between(it: Mapping[str, float], form: str) -> str:
    """A spread as text: median (low-high)."""
    return f"{it['median']:{form}} ({it['low']:{form}}-{it['high']:{form}})"

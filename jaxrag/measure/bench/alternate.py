"""Arms that are measured in turn, so that a slow moment of the machine falls on all of them.

And the rows that come of it, kept in a file one by one: a run that ends early loses none of them.
"""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrag.base.config import DTYPES, ModelConfig, RopeConfig
from jaxrag.base.errors import RequestError
from jaxrag.base.types import HostArray
from jaxrag.measure.bench import ttft
from jaxrag.measure.bench.machine import describe
from jaxrag.models.spec import num_params

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


def named(model: str | None) -> str:
    """What a result says of its model: a directory, or None."""
    return model or f"random Llama, {num_params(LLAMA_300M) / 1e6:.1f}M"


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


@dataclasses.dataclass
class Rows:
    """The rows of a result, in its file as soon as they are measured.

    Attributes:
      setting: what they share; a file with another setting is not gone on with.
      names: the fields that tell a row from others.
      rows: measured so far.
      out: the file; None: no file.
    """

    setting: dict[str, Any]
    names: tuple[str, ...]
    rows: list[dict[str, Any]]
    out: Path | None

    @classmethod
    def open(
        cls, setting: dict[str, Any], names: tuple[str, ...], out: str | None, resume: bool
    ) -> "Rows":
        """No rows, or with ``resume`` those of the file, where there is one.

        Raises RequestError for a file that is no result of this setting.
        """
        if resume and out is None:
            raise RequestError("--resume without --out; name the file of the rows")
        path = None if out is None else Path(out)
        if path is None or not resume or not path.exists():
            return cls(setting, names, [], path)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            rows = [row for row in found["rows"] if all(name in row for name in names)]
        except (OSError, ValueError, LookupError, TypeError):
            raise RequestError(f"--out {out}: no result to go on with; remove it") from None
        for name, value in setting.items():
            if found.get(name) != value:
                raise RequestError(
                    f"--out {out}: {name} is {found.get(name)!r}, now {value!r}; write to another"
                )
        return cls(setting, names, rows, path)

    def has(self, **fields: Any) -> bool:
        """Is the row of these fields measured?"""
        return any(all(row[name] == fields[name] for name in self.names) for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row, with when and at which commit it was measured."""
        machine = describe()
        self.rows.append({**row, "time": machine["time"], "commit": machine["commit"]})
        if self.out is not None:
            text = json.dumps(self.result(), indent=1) + "\n"
            self.out.write_text(text, encoding="utf-8")

    def result(self) -> dict[str, Any]:
        """Setting, rows and machine, JSON-able."""
        return {**self.setting, "rows": self.rows, "machine": describe()}


def check_lists(options: Any, *names: str) -> None:
    """RequestError for a list that is empty or names anything twice, or for an unknown dtype."""
    for name in names:
        values = getattr(options, name)
        if not values or len(set(values)) != len(values):
            raise RequestError(f"{name} {values}: expected one or more, each once")
    for dtype in options.dtypes:
        if dtype not in DTYPES:
            raise RequestError(f"dtype {dtype!r}: expected some of {', '.join(DTYPES)}")


def draw(config: ModelConfig, seed: int, count: int) -> HostArray:
    """[count] int32 random token ids, none of the first three."""
    rng = np.random.default_rng((seed, count))
    return rng.integers(3, config.vocab_size, count).astype(np.int32)

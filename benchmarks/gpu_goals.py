"""What the GPU benchmark is to reach, row by row, beside what it measured."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpu_scenes import Shape
from gpu_serve import ARMS, NEIGHBOURS, RATES, RULES, rules_context

Stages = Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Goal:
    """One number that is wanted, and where a result has it.

    Attributes:
      what: is measured.
      places: (stage, row) that may have it; the best one counts. A row "" is the stage itself.
      field: of the row.
      wanted: the bound; None: any number, it is only reported.
      most: the bound is the most, not the least.
      unit: "x" (times), "%" (of 1), "ms" (of seconds), or words that follow the number.
    """

    what: str
    places: tuple[tuple[str, str], ...]
    field: str
    wanted: float | None = None
    most: bool = False
    unit: str = "x"

    def measured(self, stages: Stages) -> float | None:
        """The best number in these places; None where there is none."""
        found = []
        for stage, row in self.places:
            rows = stages.get(stage, {})
            held = rows.get(row) if row else rows
            if isinstance(held, dict) and isinstance(held.get(self.field), int | float):
                found.append(float(held[self.field]))
        return (min if self.most else max)(found, default=None)

    def met(self, value: float) -> bool:
        """Whether it is reached; only of a goal that wants something."""
        assert self.wanted is not None
        return value <= self.wanted if self.most else value >= self.wanted

    def said(self, value: float) -> str:
        """The number in its unit."""
        if self.unit == "%":
            return f"{value:.0%}"
        if self.unit == "ms":
            return f"{value * 1e3:.3g} ms"
        return f"{value:.3g} times" if self.unit == "x" else f"{value:,.3g} {self.unit}"


def goals_of(shape: Shape) -> Iterator[Goal]:
    """All rows of the table, at the sizes of a result."""
    longest, rate = shape.contexts[-1], "tokens/s"
    recomputed = (("sparse", "recomputed"), ("mosaic", f"recomputed {longest}"))
    share = f"{shape.share:.0%}"
    yield Goal(
        f"sparse attention, {longest} at {share}, over the best dense causal attention",
        (("sparse", ""),), "times_faster_than_best_dense", 5.5,
    )  # fmt: skip
    yield Goal(
        f"sparse attention, {longest} at {share}, of the matrix product's rate", recomputed,
        "of_roofline", 0.65, unit="%",
    )  # fmt: skip
    for batch in shape.batches:
        yield Goal(
            f"decode kernel, {batch} x {longest}, of the copy's rate", (("decode", f"b={batch}"),),
            "of_roofline", 0.75, unit="%",
        )  # fmt: skip
    most = f"{max(shape.ttft_contexts)} + {shape.question}"
    yield Goal(
        f"Llama-3-8B, first token, {most}, 0 %", (("llama", f"0 %, {most}"),), "seconds", 7e-3,
        most=True, unit="ms",
    )  # fmt: skip
    yield Goal(
        f"Llama-3-8B, first token, {most}, {share}, over full prefill",
        (("llama", f"{share} again, {most}"),), "times_faster_than_full", 5.0,
    )  # fmt: skip
    yield from _batches(shape, rate)
    yield Goal(
        "engine, all requests at once", (("engine", "asynchronous"),), "tokens_per_second",
        unit=rate,
    )  # fmt: skip
    yield Goal(
        f"engine, {RATES[-1]:g} requests a second",
        (("serve", f"{ARMS[0]} at {RATES[-1]:g}/s"),), "tokens_per_second", unit=rate,
    )  # fmt: skip
    yield Goal(
        f"ingest behind {NEIGHBOURS} neighbours",
        (("ingest", f"behind {NEIGHBOURS} neighbours, measured"),), "chunks_per_minute",
        unit="chunks/min",
    )  # fmt: skip
    for name, rule in (("kcache", RULES[2]), ("retrieval", RULES[-1])):
        yield Goal(
            f"decode rule {name}, K and V where its paper has them",
            (("rules", f"{rule} behind {rules_context(shape)}"),), "seconds", most=True, unit="ms",
        )  # fmt: skip


def _batches(shape: Shape, rate: str) -> Iterator[Goal]:
    """First tokens and tokens a second of requests that come together."""
    for batch in sorted(shape.batches_ttft):
        where = f"{batch} x ({shape.batch_context} + {shape.answer})"
        for kv, wanted, places in (
            ("resident", 40.0, (("llama", f"0 %, {where}"),)),
            ("in host memory", 6.0, (("llama", f"0 %, {where}, KV from host memory"),)),
            ("on the disk", 6.0, (("serve", f"0 %, {where}, KV from files"),)),
        ):
            yield Goal(
                f"Llama-3-8B, first tokens, {where}, KV {kv}, over full prefill", places,
                "times_faster_than_full", wanted,
            )  # fmt: skip
        yield Goal(
            f"Llama-3-8B, decode, {where}", (("llama", f"decode, {where}"),), "tokens_per_second",
            unit=rate,
        )  # fmt: skip


def goal_lines(shape: Shape, stages: Stages) -> Iterator[str]:
    """The table, in Markdown."""
    yield "| goal | wanted | measured | |"
    yield "|---|---:|---:|---|"
    for goal in goals_of(shape):
        value = goal.measured(stages)
        wanted, verdict = "", ""
        if goal.wanted is not None:
            wanted = f"{'at most' if goal.most else 'at least'} {goal.said(goal.wanted)}"
            verdict = "" if value is None else ("met" if goal.met(value) else "missed")
        measured = "not measured" if value is None else goal.said(value)
        yield f"| {goal.what} | {wanted} | {measured} | {verdict} |"


def merged(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several results of one device and shape as one: later stages replace those of one name.

    Raises ValueError where devices or shapes differ.
    """
    first = results[0]
    for other in results[1:]:
        for what in ("shape", "impl"):
            if other[what] != first[what]:
                raise ValueError(f"{what} {other[what]!r} beside {first[what]!r}: not one result")
        if other["machine"]["device"] != first["machine"]["device"]:
            raise ValueError(
                f"device {other['machine']['device']!r} beside {first['machine']['device']!r}: "
                "not one result"
            )
    return {**first, "stages": {k: v for it in results for k, v in it["stages"].items()}}

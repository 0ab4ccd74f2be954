"""The result of ``run.run`` as tables, and what is to be known of its numbers."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxrag.measure.table import Table, percent, points

_FEW = 30  # questions, below which intervals are too narrow


def heading(result: Mapping[str, Any]) -> str:
    """What was asked, and what was left out."""
    skipped = sum(result["skipped"].values())
    return (
        f"{result['title']} ({result['checked']}): {result['questions']} questions, "
        f"{skipped} skipped, {result['questions_cut']} of them cut: {result['left_out']} of "
        f"{result['documents']} documents left out"
    )


def tables(result: Mapping[str, Any]) -> Iterator[Table]:
    """Scores by group, paired differences from the first method; time and reuse, also by group."""
    groups, rows = list(result["groups"]), result["methods"]
    asked = heading(result)
    for metric in result["metrics"]:
        yield Table(
            f"{asked}; {metric} in %, with 95 % intervals",
            [
                ["method", *(f"{name}, {result['groups'][name]}" for name in groups)],
                *(
                    [row["method"], *(percent(row["scores"][metric][it]) for it in groups)]
                    for row in rows
                ),
            ],
        )
        if len(rows) > 1:
            yield Table(
                f"{metric} minus that of {rows[0]['method']} on the same questions, in points",
                [
                    ["method", *groups],
                    *(
                        [row["method"], *(points(row["minus_first"][metric][it]) for it in groups)]
                        for row in rows[1:]
                    ),
                ],
            )
    yield Table(
        f"{asked}; median ms from the text to the first token with chunks that are kept, and when "
        "first asked (with encoding and compiling); that of the first method over it; chunk tokens "
        "of a question",
        [
            [
                "method",
                "prompt tokens",
                "ms",
                f"{rows[0]['method']} / own",
                "first asked, ms",
                "reused",
                "again",
                "reused, %",
                "GFLOP",
            ],
            *(
                _cost(name, costs)
                for row in rows
                for name, costs in (
                    (row["method"], row),
                    *((f"{row['method']}, {of}", it) for of, it in row["by_group"].items()),
                )
            ),
        ],
    )


def notes(result: Mapping[str, Any]) -> Iterator[str]:
    """What would make a reader take the tables for more than they are."""
    if result["questions"] < _FEW:
        yield f"{result['questions']} questions are few: intervals are too narrow below some {_FEW}"
    if result["note"]:
        yield result["note"]
    for reason, count in result["skipped"].items():
        yield f"{count} questions were skipped: {reason}"
    for row in result["methods"]:
        if row["without_time"]:
            yield (
                f"{row['method']}: {row['without_time']} answers have no time of their own, for "
                "something was compiled or encoded each time that they were asked for"
            )
        yield from (f"{row['method']}: {note}" for note in row["notes"])


def _cost(name: str, row: Mapping[str, Any]) -> list[str]:
    tokens = row["tokens"]
    return [
        name,
        _median(row["prompt_tokens"], 1, ".0f"),
        _median(row["ttft"], 1000, ".3g"),
        _median(row["first_over_own"], 1, ".3g"),
        _median(row["first_ttft"], 1000, ".3g"),
        f"{tokens['reused']:.0f}",
        f"{tokens['recomputed']:.0f}",
        f"{100 * row['reuse']:.1f}",
        f"{row['flops'] / 1e9:.3g}",
    ]


def _median(found: Mapping[str, Any] | None, factor: float, form: str) -> str:
    if found is None:
        return ""
    value, low, high = (found[name] for name in ("value", "low", "high"))
    if low is None:
        return f"{factor * value:{form}}"
    return f"{factor * value:{form}} [{factor * low:{form}}, {factor * high:{form}}]"

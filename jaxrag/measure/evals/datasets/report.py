"""The result of ``run.run`` as tables, and what is to be known of its numbers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxrag.measure.evals.datasets.nearness import FULL, control_table, near_cells, needs, shown
from jaxrag.measure.evals.statistics import POWER
from jaxrag.measure.table import Table, percent, points

_FEW = 30  # questions, below which intervals are too narrow


def tables(result: Mapping[str, Any]) -> Iterator[Table]:
    """Scores by group, paired differences from the first method; time and reuse, also by group."""
    rows, asked = result["methods"], result["asked"]
    first = rows[0]["method"]
    yield from _scores(result, rows, "scores", percent, "{} in %, with 95 % intervals", asked)
    if len(rows) > 1:
        title = f"{{}} minus that of {first} on the same questions, in points"
        yield from _scores(result, rows[1:], "minus_first", points, title)
        yield from _sizes(result, rows[1:])
    near = [it for it in _parts([row for row in rows if row["method"] != FULL]) if "kl" in it[1]]
    if near:
        yield Table(
            f"beside {FULL}: the same whole answer, in %; along its answer's first "
            f"{result['answer_tokens']} tokens KL to it and the same next token, in %; "
            "log-probability of the right answer minus its own",
            [
                ["method", "same answer", "KL", "same token", "gold"],
                *([name, percent(row["same_answer"]), *near_cells(row)] for name, row in near),
            ],
        )
    yield from control_table(near)
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
                "again, %",
                "GFLOP",
            ],
            *(_cost(name, costs) for name, costs in _parts(rows)),
        ],
    )


def _parts(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Of every method the whole, and its groups, by name."""
    for row in rows:
        yield method_of(row), row
        yield from ((f"{row['method']}, {of}", it) for of, it in row["by_group"].items())


def _sizes(result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    """How many questions the differences of scores take, of all groups; nothing for none."""
    metrics = result["metrics"]
    cells = [
        [method_of(row), *(needs(row["minus_first"][it]["all"]) for it in metrics)] for row in rows
    ]
    if any(text for _, *its in cells for text in its):
        yield Table(
            "questions that a difference of the size seen takes to be told from none, at 95 % and "
            f"with a power of {100 * POWER:.0f} %; there were {result['questions']}",
            [["method", *(metric.replace("_", " ") for metric in metrics)], *cells],
        )


def _scores(
    result: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    part: str,
    percents: Callable[[Any], str],
    title: str,
    asked: str = "",
) -> Iterator[Table]:
    """A table a metric, of all groups; of one group one table, of all metrics."""
    groups, metrics = result["groups"], result["metrics"]
    columns = [[(metric, group) for group in groups] for metric in metrics]
    if len(groups) == 1:
        columns = [[(metric, group) for metric in metrics for group in groups]] if metrics else []
    for cells in columns:
        of_one = len(groups) > 1
        named = [
            f"{group}, {groups[group]}" if of_one else metric.replace("_", " ")
            for metric, group in cells
        ]
        what = title.format(cells[0][0] if of_one else "right answers")
        yield Table(
            f"{asked}; {what}" if asked else what,
            [
                ["method", *named],
                *([method_of(row), *(percents(row[part][m][g]) for m, g in cells)] for row in rows),
            ],
        )


def method_of(row: Mapping[str, Any]) -> str:
    """The method, with the ratio that a gate has chosen for it."""
    name, ratio = str(row["method"]), row.get("ratio")
    return name if ratio is None or f" {ratio:g}" in name else f"{name} {ratio:g}"


def notes(result: Mapping[str, Any]) -> Iterator[str]:
    """What would make a reader take the tables for more than they are."""
    if result["questions"] < _FEW:
        yield f"{result['questions']} questions are few: intervals are too narrow below some {_FEW}"
    if result.get("note"):
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
    yield from result.get("notes", ())


def _cost(name: str, row: Mapping[str, Any]) -> list[str]:
    tokens = row["tokens"]
    return [
        name,
        shown(row["prompt_tokens"], ".0f"),
        shown(row["ttft"], ".3g", 1000),
        shown(row["first_over_own"], ".3g"),
        shown(row["first_ttft"], ".3g", 1000),
        f"{tokens['reused']:.0f}",
        f"{tokens['recomputed']:.0f}",
        f"{100 * row['reuse']:.1f}",
        f"{100 * row['recomputed']:.1f}",
        f"{row['flops'] / 1e9:.3g}",
    ]

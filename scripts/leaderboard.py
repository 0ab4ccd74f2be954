"""The claims of the papers beside what pretrained models showed, as tables of docs/results.md.

benchmarks/claims.toml says what each claim comes to in numbers of the committed results; the
verdicts are computed here. A claim is *held* where all its checks are, *held in part* where some
are, else *not held* where one is not; a check whose interval holds its limit is *inconclusive*.

    python scripts/leaderboard.py [--check]
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrag.base.tables import build, read_toml
from jaxrag.measure.evals.datasets.nearness import FULL
from jaxrag.measure.table import markdown_rows, percent

ROOT = Path(__file__).resolve().parents[1]
CLAIMS = ROOT / "benchmarks" / "claims.toml"
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"
BEGIN, END = "<!-- scripts/leaderboard.py -->", "<!-- end -->"
HELD, NOT_HELD, INCONCLUSIVE, IN_PART = "held", "not held", "inconclusive", "held in part"
LEGEND = """\
*held*: every check has its whole 95 % interval on the claimed side; *held in part*: some have;
*not held*: none has, and one at least is on the other side; *inconclusive*: every interval holds
its limit. The number of questions is in brackets: with fewer than thirty intervals are too narrow,
and nothing is corrected for the number of checks.
*Gold* is the log-probability of the right answer minus full attention's, in nats. A difference of
two results is judged as if their questions differed, which is cautious. Limits are ours: a gold of
-.5 is a right answer 39 % less likely.
"""
PLACES = {"gold_minus_full": 2, "first_over_own": 1}  # of decimals that a table shows
LISTS = ("rows", "methods", "cells")  # of a result: those whose entries name their method


@dataclasses.dataclass(frozen=True)
class Check:
    """That a number of a result, or a difference of two, is below or above a limit.

    Attributes:
      on: model and prompts, for the reader.
      file: of benchmarks/results, without its ending.
      row: the method whose number it is.
      measure: its name; of parts, joined by dots; of a suite of long prompts "difference", from the
        first method.
      of: what else the number is of, such as a task and a length.
      below: the limit; 0 where another method's number is subtracted and there is no ``above``.
      above: the limit, in place of it.
      than: a method whose number is subtracted; with ``than_file``, of that file.
    """

    on: str
    file: str
    row: str
    measure: str = "kl"
    of: Mapping[str, str] = dataclasses.field(default_factory=dict)
    below: float | None = None
    above: float | None = None
    than: str = ""
    than_file: str = ""


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a paper says, and what has to be seen for it."""

    paper: str
    text: str
    checks: tuple[Check, ...]


@dataclasses.dataclass(frozen=True)
class Prompts:
    """A column of the table of methods."""

    on: str
    files: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class DataSet:
    """A column of a table of quality.

    Attributes:
      on: the prompts, for the reader.
      file: of benchmarks/results, without its ending.
      group: of the questions of a data set; "": all.
      of: as of ``Check``.
      but: methods that are left out.
    """

    on: str
    file: str
    group: str = ""
    of: Mapping[str, str] = dataclasses.field(default_factory=dict)
    but: tuple[str, ...] = ()

    def entries(self) -> dict[str, Mapping[str, Any]]:
        """Those of the result by method."""
        own = by_method(self.file, self.of)
        return {method: own[method] for method in own if method not in self.but}

    def count(self) -> int:
        """How many questions it is of."""
        if self.of:
            return int(next(iter(self.entries().values()))["score"]["n"])
        return int(result(self.file)["groups"][self.group or "all"])


@dataclasses.dataclass(frozen=True)
class QualityTable:
    """Methods by data set, a table for each measure of ``measures``, which has its heading."""

    title: str
    text: str
    measures: Mapping[str, str]
    columns: tuple[DataSet, ...]


@dataclasses.dataclass(frozen=True)
class Leaderboard:
    """What the page shows; the method of ``rows`` by the name that the page calls it."""

    columns: tuple[Prompts, ...]
    rows: Mapping[str, str]
    claim: tuple[Claim, ...]
    quality: tuple[QualityTable, ...] = ()


def leaderboard(path: Path = CLAIMS) -> Leaderboard:
    """What a file says; ConfigError for an unknown key."""
    return build(Leaderboard, read_toml(path), str(path))


@functools.cache
def result(name: str) -> Mapping[str, Any]:
    """A committed result."""
    found: Mapping[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def is_of(entry: Mapping[str, Any], of: Mapping[str, str]) -> bool:
    """Whether these are what it says of itself."""
    return all(str(entry[name]) == text for name, text in of.items())


def by_method(
    file: str, of: Mapping[str, str] | None = None, measure: str = ""
) -> dict[str, Mapping[str, Any]]:
    """Entries of a result that are of these, and have the measure."""
    lists = ("differences",) if measure == "difference" else LISTS
    found = next(found for name in lists if isinstance(found := result(file).get(name), list))
    return {it["method"]: it for it in found if is_of(it, of or {})}


def number(
    file: str, row: str, measure: str, of: Mapping[str, str] | None = None
) -> tuple[float, float, float]:
    """Value, low and high; KeyError where the result lacks the method or the measure."""
    entry: Any = by_method(file, of, measure)[row]
    found = functools.reduce(lambda at, part: at[part], measure.split("."), entry)
    return found["value"], found["low"], found["high"]


def asked(it: Check | Prompts) -> int:
    """How many questions its number is of."""
    if isinstance(it, Check) and it.of:
        return DataSet(it.on, it.file, of=it.of).count()
    found = result(it.file if isinstance(it, Check) else it.files[0])
    return int(found.get("prompts") or found["questions"])


def shown(value: float, low: float, high: float, places: int = 3) -> str:
    """A number with its interval."""
    return f"{value:.{places}f} [{low:.{places}f}, {high:.{places}f}]"


def judged(check: Check) -> tuple[str, str]:
    """The verdict of a check, and its figures.

    Of two methods the difference is judged, by its own interval where the result has it (the other
    method is the first of its file), else as one of independent numbers, which is too wide.
    """
    value, low, high = number(check.file, check.row, check.measure, check.of)
    figures = shown(value, low, high)
    if check.than and not check.than_file and check.than == next(iter(by_method(check.file))):
        value, low, high = number(check.file, check.row, f"{check.measure}_minus_first")
        figures += f", less that of `{check.than}` {shown(value, low, high)}"
    elif check.than:
        file = check.than_file or check.file
        other, least, most = number(file, check.than, check.measure)
        figures += f" against {shown(other, least, most)}"
        down, up = math.hypot(value - low, most - other), math.hypot(high - value, other - least)
        low, high = value - other - down, value - other + up
    limit = check.below or 0.0 if check.above is None else check.above
    sides = (high < limit, low > limit)  # the whole interval below, and above
    right, wrong = sides if check.above is None else sides[::-1]
    return HELD if right else NOT_HELD if wrong else INCONCLUSIVE, figures


def verdict(each: Sequence[str]) -> str:
    """Of a claim, from those of its checks."""
    if len(set(each)) == 1:
        return each[0]
    return IN_PART if HELD in each else NOT_HELD


def methods_table(board: Leaderboard) -> str:
    """KL of every method on all prompts."""
    head = [f"{it.on} ({asked(it)})" for it in board.columns]
    rows = [["method", *head, "KiB a token"]]
    for name, method in board.rows.items():
        cells = [
            next((shown(*number(file, method, "kl")) for file in column.files
                  if method in by_method(file)), "")
            for column in board.columns
        ]  # fmt: skip
        first = next(file for file in board.columns[0].files if method in by_method(file))
        row = by_method(first)[method]
        rows.append([name, *cells, f"{row['bytes_per_token'] / 1024:.0f}"])
    names = dict.fromkeys(file for column in board.columns for file in column.files)
    return f"{markdown_rows(rows)}\n\nFrom {links(names)}.\n"


def cell(column: DataSet, entry: Mapping[str, Any], measure: str) -> str:
    """A method's number on a column's prompts."""
    group = column.group
    if measure == "score":
        return percent(entry[measure])
    if measure in entry["scores"]:
        return percent(entry["scores"][measure][group or "all"])
    found = (entry["by_group"][group] if group else entry)[measure]
    return shown(found["value"], found["low"], found["high"], PLACES.get(measure, 3))


def quality_table(first: str, columns: Sequence[tuple[str, DataSet, str]]) -> str:
    """Methods in the order of the column that has them first; nearness to itself is left out.

    A column is its heading, the prompts and the measure; ``first`` heads the methods.
    """
    every = [column.entries() for _, column, _ in columns]
    rows = [[first, *(name for name, _, _ in columns)]]
    for name in dict.fromkeys(itertools.chain(*every)):
        cells = [
            cell(column, methods[name], measure) if name in methods else ""
            for (_, column, measure), methods in zip(columns, every, strict=True)
        ]
        if name != FULL or columns[0][2] in every[0][FULL]["scores"]:
            rows.append([f"`{name.split(', ')[-1]}`", *cells])
    return f"{markdown_rows(rows)}\n"


def quality(tables: Iterable[QualityTable]) -> Iterator[str]:
    """Of each a table a measure, of a single column one table of all measures."""
    for table in tables:
        files = links(dict.fromkeys(column.file for column in table.columns))
        heads = [f"{it.on} ({it.count()})" for it in table.columns]
        yield f"#### {table.title}\n\n{table.text}"
        if len(heads) == 1:
            each = [(head, table.columns[0], it) for it, head in table.measures.items()]
            yield quality_table(heads[0], each)
        else:
            for it, head in table.measures.items():
                yield quality_table(
                    head, [(*pair, it) for pair in zip(heads, table.columns, strict=True)]
                )
        yield f"From {files}.\n"


def links(files: Iterable[str]) -> str:
    """Of results, as the page has them."""
    return ", ".join(f"[{name}](../benchmarks/results/{name}.json)" for name in files)


def tables(claims: Sequence[Claim]) -> Iterator[str]:
    """A heading and a table for every paper."""
    for paper, of in itertools.groupby(claims, lambda claim: claim.paper):
        rows = [["claim", "", "here", "results"]]
        for claim in of:
            each = [judged(check) for check in claim.checks]
            here = [
                f"{check.on} ({asked(check)}): {figures}"
                + (f", *{own}*" if len({name for name, _ in each}) > 1 else "")
                for check, (own, figures) in zip(claim.checks, each, strict=True)
            ]
            files = dict.fromkeys(
                name for check in claim.checks for name in (check.file, check.than_file) if name
            )
            total = verdict([own for own, _ in each])
            rows.append([claim.text, f"*{total}*", "; ".join(here), links(files)])
        yield f"#### {paper}\n\n{markdown_rows(rows, 4)}\n"


def main() -> int:
    """Write the tables into the page; with --check only compare, 1 where they differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(f"{BEGIN}\n", 1)
    _, after = rest.split(END, 1)
    board = leaderboard()
    parts = [methods_table(board), *quality(board.quality)]
    parts += ["### Claims about answers\n", LEGEND, *tables(board.claim)]
    new = f"{before}{BEGIN}\n\n" + "\n".join(parts) + f"\n{END}{after}"
    if args.check:
        return int(new != text)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The result of ``run`` as tables."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxrag.measure.table import Table, shown

TITLES = {
    "needle": "needle in a haystack",
    "ruler": "RULER's tasks in words of our own",
    "infinitebench": "InfiniteBench's retrieval tasks in words of our own",
}

_COSTS = (
    "cost of a generated token by length, {rows} at a time: ms a step, tokens that a query reads "
    "in a layer, and bytes by the rules' formulas in thousands, device / host"
)


def tables(result: Mapping[str, Any]) -> Iterator[Table]:
    """Scores by length and depth; differences from the first method, agreement with it."""
    lengths = [str(length) for length in result["lengths"]]
    depths = result["depths"]
    each = result["questions"] * (len(depths) if depths else 1)
    flavour = "" if result["flavour"] == "plain" else f", {result['flavour']} flavour"
    chunks = result["chunk_tokens"]
    shape = f"cut into chunks of up to {chunks} tokens" if chunks else "as one chunk"
    yield Table(
        f"{TITLES[result['suite']]}{flavour}: score in % by tokens of the prompt, {each} questions "
        f"each, the haystack {shape}, seed {result['seed']}, with 95 % intervals",
        [["task", "method", *lengths], *_rows(result, "cells", "score", ".1f")],
        names=2,
    )
    if result["grid"]:
        yield Table(
            "score in % by depth of the needle, 0 at the start",
            [
                ["method", "tokens", *(f"{100 * depth:g} %" for depth in depths)],
                *_by_depth(result),
            ],
            names=2,
        )
    if result["differences"]:
        yield Table(
            f"paired difference from {result['differences'][0]['minus']}, in points",
            [["task", "method", *lengths], *_rows(result, "differences", "difference", "+.1f")],
            names=2,
        )
    if result["costs"]:
        yield Table(_COSTS.format(rows=result["costs"][0]["rows"]), list(_costs(result)), names=1)
    named = {name: rule for name, rule in result["decode"].items() if name != rule}
    if named:
        rows = [["called", "decode rule"], *([name, rule] for name, rule in named.items())]
        yield Table("decode rules", rows, names=2)
    if result["agreement"]:
        yield Table(
            f"answers that are those of {result['agreement'][0]['with']}, token by token, in %",
            [["task", "method", *lengths, "all"], *_rows(result, "agreement", "share", ".1f")],
            names=2,
        )


def _costs(result: Mapping[str, Any]) -> Iterator[list[str]]:
    lengths = result["lengths"]
    yield ["method", "reads", *(f"{n}, ms" for n in lengths), *(f"{n}, kB" for n in lengths)]
    for name in result["methods"]:
        rows = [cost for cost in result["costs"] if cost["method"] == name]
        read = rows[0]["read"]
        times = ["" if row["seconds"] is None else f"{1000 * row['seconds']:.2f}" for row in rows]
        placed = [row["bytes"] for row in rows]
        sizes = [f"{one['device'] / 1e3:,.0f} / {one['host'] / 1e3:,.0f}" for one in placed]
        yield [name, "all" if read is None else str(read), *times, *sizes]


def _rows(result: Mapping[str, Any], part: str, value: str, form: str) -> list[list[str]]:
    """Tasks and methods by lengths."""
    cells: dict[tuple[str, str], list[str]] = {}
    for cell in result[part]:
        cells.setdefault((cell["task"], cell["method"]), []).append(shown(cell[value], form))
    return [[*key, *cells[key]] for key in _by_task(result, cells)]


def _by_depth(result: Mapping[str, Any]) -> list[list[str]]:
    """Means of every method and length by depth, whole per cents; intervals are in the JSON."""
    cells: dict[tuple[str, str, str], list[str]] = {}
    for cell in result["grid"]:
        key = (cell["task"], cell["method"], str(cell["length"]))
        cells.setdefault(key, []).append(f"{100 * cell['score']['value']:.0f}")
    return [[*key[1:], *cells[key]] for key in _by_task(result, cells)]


def _by_task[Key: tuple[str, ...]](result: Mapping[str, Any], keys: Iterable[Key]) -> list[Key]:
    """By task and method in the order of the result; the rest keeps its order."""
    tasks, methods = result["tasks"], list(result["methods"])
    return sorted(keys, key=lambda key: (tasks.index(key[0]), methods.index(key[1])))

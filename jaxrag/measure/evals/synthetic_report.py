"""The result of ``synthetic.run`` as tables."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxrag.measure.evals.synthetic import ALL
from jaxrag.measure.table import Table, percent, points

READ_TITLES = {
    "full": "full attention",
    "block": "block, reordered",
    "composite": "block, composite",
}


def tables(result: Mapping[str, Any]) -> Iterator[Table]:
    """Scores, the same by kind of question, differences, recoveries; what there is."""
    cells, counts = result["cells"], result["questions"]
    reads = list(dict.fromkeys(cell["read"] for cell in cells))
    of_models: dict[str, dict[str, str]] = {}
    for cell in cells:
        row = of_models.setdefault(cell["model"], {})
        row[cell["read"]] = percent(cell["accuracy"][ALL])
    yield Table(
        f"exact match in %, {_setting(result)}, with 95 % intervals",
        [
            ["model", *(READ_TITLES[read] for read in reads)],
            *([model, *(row[read] for read in reads)] for model, row in of_models.items()),
        ],
    )
    yield Table(
        "by kind of question; the shortcut answers with any value of the relation asked for",
        [
            ["model", "read", *counts],
            ["questions", "", *map(str, counts.values())],
            ["shortcut", "", *(f"{100 * value:.1f}" for value in result["shortcut"].values())],
            *([*_names(cell), *map(percent, cell["accuracy"].values())] for cell in cells),
        ],
        names=2,
    )
    if result["differences"]:
        rows = ([it["a"], it["b"], points(it["difference"][ALL])] for it in result["differences"])
        yield Table(
            "paired differences in points, first minus second",
            [["first", "second", "difference"], *rows],
            names=2,
        )
    if result["recovery"]:
        yield Table(
            f"share of what {result['baseline']} loses without fine-tuning that comes back, in %",
            [
                ["model", "read", "recovered"],
                *([*_names(row), percent(row["recovery"])] for row in result["recovery"]),
            ],
            names=2,
        )


def _names(cell: Mapping[str, Any]) -> list[str]:
    return [cell["model"], READ_TITLES[cell["read"]]]


def _setting(result: Mapping[str, Any]) -> str:
    """How much of the synthetic task was asked."""
    task, (low, high) = result["task"], result["task"]["chunks"]
    chunks = f"{low}" if low == high else f"{low} to {high}"
    return (
        f"{result['questions'][ALL]} questions on {result['samples']} sets of {chunks} chunks "
        f"({task['split']} split, seed {result['seed']})"
    )

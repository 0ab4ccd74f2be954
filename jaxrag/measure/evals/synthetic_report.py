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


def tables(result: dict[str, Any]) -> Iterator[Table]:
    """Accuracy by model and read, the same by kind of question, differences, recoveries."""
    cells, counts = result["cells"], result["questions"]
    names = list(result["models"])
    reads = list(dict.fromkeys(cell["read"] for cell in cells))
    found = {(cell["model"], cell["read"]): cell["accuracy"] for cell in cells}
    yield Table(
        f"exact match in %, {setting(result)}, with 95 % intervals",
        [
            ["model", *(READ_TITLES[read] for read in reads)],
            *([name, *(percent(found[name, read][ALL]) for read in reads)] for name in names),
        ],
        names=1,
    )
    shortcut = [f"{100 * value:.1f}" for value in result["shortcut"].values()]
    yield Table(
        "by kind of question; the shortcut answers with any value of the relation asked for",
        [
            ["model", "read", *counts],
            ["questions", "", *map(str, counts.values())],
            ["shortcut", "", *shortcut],
            *(
                [name, READ_TITLES[read], *map(percent, found[name, read].values())]
                for name in names
                for read in reads
            ),
        ],
        names=2,
    )
    if result["differences"]:
        yield Table(
            "paired differences in points, first minus second",
            [
                ["first", "second", "difference"],
                *(
                    [row["a"], row["b"], points(row["difference"][ALL])]
                    for row in result["differences"]
                ),
            ],
            names=2,
        )
    if result["recovery"]:
        yield Table(
            f"share of what {result['baseline']} loses without fine-tuning that comes back, in %",
            [
                ["model", "read", "recovered"],
                *(
                    [row["model"], READ_TITLES[row["read"]], percent(row["recovery"])]
                    for row in result["recovery"]
                ),
            ],
            names=2,
        )


def setting(result: Mapping[str, Any]) -> str:
    """How much of the synthetic task was asked."""
    task, (low, high) = result["task"], result["task"]["chunks"]
    chunks = f"{low}" if low == high else f"{low} to {high}"
    return (
        f"{result['questions'][ALL]} questions on {result['samples']} sets of {chunks} chunks "
        f"({task['split']} split, seed {result['seed']})"
    )

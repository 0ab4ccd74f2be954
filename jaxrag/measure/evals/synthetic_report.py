"""The result of ``synthetic.run`` and of ``methods.run`` as tables."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxrag.measure.evals.synthetic import ALL
from jaxrag.measure.table import Table, percent, points

LABELS = ("model", "read", "method", "encoder", "ratio")  # of cells; the last has the columns
READ_TITLES = {
    "full": "full attention",
    "block": "block, reordered",
    "composite": "block, composite",
}
TITLES = {  # of what every cell has, by what it is called in the result
    "accuracy": "exact match in %, {}, with 95 % intervals",
    "exact_match": "exact match in %, {}, by recompute ratio, with 95 % intervals",
    "f1": "F1 of words in %, by recompute ratio",
    "normalised_f1": "normalised F1 (FusionRAG equation 11): 0 is full reuse, 100 full attention; "
    "undefined where the gap between them may be none",
    "as_full_attention": "answers that are full attention's, token by token, in %",
}
_BY_KIND = {
    "accuracy": "by kind of question; the shortcut answers with any value of the relation asked "
    "for",
    "exact_match": "exact match in % by hops and kind of question",
    "f1": "F1 in % by hops and kind of question",
}
Shown = Callable[[Mapping[str, Any]], list[str]]  # cells of a row


def tables(result: Mapping[str, Any]) -> Iterator[Table]:
    """Scores, the same by kind of question, differences, recoveries, costs; what there is."""
    cells, counts = result["cells"], result["questions"]
    labels = [name for name in LABELS if name in cells[0]]
    for metric, title in TITLES.items():
        if metric in cells[0]:
            yield _across(cells, labels, metric, title.format(setting(result)))
    empty = [""] * (len(labels) - 1)
    above = [["questions", *empty, *map(str, counts.values())]]
    if "shortcut" in result:
        shortcut = (f"{100 * value:.1f}" for value in result["shortcut"].values())
        above.append(["shortcut", *empty, *shortcut])
    for metric, title in _BY_KIND.items():
        if metric in cells[0]:
            of_kinds = [{**cell, "of": cell[metric].values()} for cell in cells]
            head = [*labels, *counts]
            yield _listed(
                title, head, of_kinds, labels, lambda it: [*map(percent, it["of"])], above
            )
    yield from _compared(result)
    if "flops" in cells[0]:
        yield _listed(
            "what a question costs: recomputed chunk tokens, and FLOPs to the first token; without "
            "a ratio it is the method's own budget",
            [*labels, "recomputed", "tokens", "MFLOPs"],
            cells,
            labels,
            lambda cell: [
                f"{100 * cell['recomputed']:.1f} %",
                f"{cell['recomputed_tokens']:.1f}",
                f"{cell['flops'] / 1e6:.3g}",
            ],
        )


def _compared(result: Mapping[str, Any]) -> Iterator[Table]:
    if result["differences"]:
        yield _listed(
            "paired differences in points, first minus second", ["first", "second", "difference"],
            result["differences"], ("a", "b"), lambda row: [points(row["difference"][ALL])],
        )  # fmt: skip
    if result.get("recovery"):
        yield _listed(
            f"share of what {result['baseline']} loses without fine-tuning that comes back, in %",
            ["model", "read", "recovered"], result["recovery"], ("model", "read"),
            lambda row: [percent(row["recovery"])],
        )  # fmt: skip


def _listed(
    title: str, head: list[str], rows: Sequence[Mapping[str, Any]], labels: Sequence[str],
    shown: Shown, above: Sequence[list[str]] = (),
) -> Table:  # fmt: skip
    """A row each, with its labels in front."""
    named = ([*(label(name, row[name]) for name in labels), *shown(row)] for row in rows)
    return Table(title, [head, *above, *named], names=len(labels))


def _across(
    cells: Sequence[Mapping[str, Any]], labels: Sequence[str], metric: str, title: str
) -> Table:
    """Of all questions: the last label has a column for each of its values."""
    *names, last = labels
    found: dict[tuple[str, ...], dict[Any, str]] = {}
    for cell in cells:
        value = cell[metric].get(ALL, cell[metric])
        row = found.setdefault(tuple(label(name, cell[name]) for name in names), {})
        row[cell[last]] = percent(value)
    columns = list(dict.fromkeys(cell[last] for cell in cells))
    head = [*names, *("own" if column is None else label(last, column) for column in columns)]
    rows = ([*key, *(row.get(column, "") for column in columns)] for key, row in found.items())
    return Table(title, [head, *rows], names=len(names))


def label(name: str, value: Any) -> str:
    """What stands in a table for the label of that name; nothing for none."""
    if name == "read":
        return READ_TITLES[value]
    return f"{value:g}" if isinstance(value, float) else value or ""


def setting(result: Mapping[str, Any]) -> str:
    """How much of the synthetic task was asked."""
    task, (low, high) = result["task"], result["task"]["chunks"]
    chunks = f"{low}" if low == high else f"{low} to {high}"
    return (
        f"{result['questions'][ALL]} questions on {result['samples']} sets of {chunks} chunks "
        f"({task['split']} split, seed {result['seed']})"
    )

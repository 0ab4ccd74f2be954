"""The result of ``methods.run`` as tables."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrag.measure.evals.synthetic import ALL
from jaxrag.measure.evals.synthetic_report import setting
from jaxrag.measure.table import Table, percent, points

GroupKey = tuple[str, str | None]  # method and encoder: a row of the tables
TITLES = {"exact_match": "exact match", "f1": "F1", "normalised_f1": "normalised F1"}
NO_RATIO = "own"  # the column of what a method does by itself, without a ratio


def tables(result: Mapping[str, Any]) -> Iterator[Table]:
    """Scores by ratio, by kind of question, differences, costs."""
    cells = result["cells"]
    yield _scores(result, "exact_match", percent)
    yield _scores(result, "f1", percent)
    yield _scores(result, "normalised_f1", percent)
    yield _scores(result, "as_full_attention", percent)
    for metric in ("exact_match", "f1"):
        groups = list(result["questions"])
        yield Table(
            f"{TITLES[metric]} in % by hops and kind of question",
            [
                ["method", "encoder", "ratio", *groups],
                ["questions", "", "", *map(str, result["questions"].values())],
                *([*_names(cell), *(percent(cell[metric][g]) for g in groups)] for cell in cells),
            ],
            names=3,
        )
    if result["differences"]:
        groups = [ALL, *(name for name in result["questions"] if name.endswith(("hop", "hops")))]
        yield Table(
            "F1, the first method minus the second at the same ratio, in points, paired; better "
            "or worse where the whole interval of all questions is on one side of 0",
            [
                ["first", "second", "ratio", "first is", *groups],
                *(
                    [
                        row["first"],
                        row["second"],
                        f"{row['ratio']:g}",
                        verdict(row["f1"][ALL]),
                        *(points(row["f1"][group]) for group in groups),
                    ]
                    for row in result["differences"]
                ),
            ],
            names=4,
        )
    yield Table(
        "what a question costs: recomputed chunk tokens, and FLOPs to the first token; without a "
        "ratio it is the method's own budget",
        [
            ["method", "encoder", "ratio", "recomputed", "tokens", "MFLOPs", "exact match"],
            *(
                [
                    *_names(cell),
                    f"{100 * cell['recomputed']:.1f} %",
                    f"{cell['recomputed_tokens']:.1f}",
                    f"{cell['flops'] / 1e6:.3g}",
                    percent(cell["exact_match"][ALL]),
                ]
                for cell in cells
            ),
        ],
        names=3,
    )


def verdict(estimate: Mapping[str, float] | None) -> str:
    """Whether a difference is one: better, worse, or no difference that the data can show."""
    if estimate is None or estimate["low"] <= 0 <= estimate["high"]:
        return "not different"
    return "better" if estimate["low"] > 0 else "worse"


def _scores(result: Mapping[str, Any], metric: str, show: Any) -> Table:
    """Methods by ratios, of all questions."""
    found: dict[GroupKey, dict[float | None, str]] = {}
    for cell in result["cells"]:
        value = cell[metric] if metric == "as_full_attention" else cell[metric][ALL]
        found.setdefault((cell["method"], cell["encoder"]), {})[cell["ratio"]] = show(value)
    ratios: list[float | None] = [None, *result["ratios"]]
    title = {
        "exact_match": f"exact match in %, {setting(result)}, by recompute ratio, with 95 % "
        "intervals",
        "f1": "F1 of words in %, by recompute ratio",
        "normalised_f1": "normalised F1 (FusionRAG equation 11): 0 is full reuse, 100 full "
        "attention; undefined where the gap between them is too small",
        "as_full_attention": "answers that are full attention's, token by token, in %",
    }[metric]
    return Table(
        title,
        [
            ["method", "encoder", *(NO_RATIO if r is None else f"{r:g}" for r in ratios)],
            *(
                [method, encoder or "", *(by_ratio.get(ratio, "") for ratio in ratios)]
                for (method, encoder), by_ratio in found.items()
            ),
        ],
        names=2,
    )


def _names(cell: Mapping[str, Any]) -> Sequence[str]:
    ratio = "" if cell["ratio"] is None else f"{cell['ratio']:g}"
    return cell["method"], cell["encoder"] or "", ratio

"""The result of ``own.evaluate`` as tables of at most 80 columns, and what to be careful about."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxrag.measure.table import Table

_FEW = 30  # questions, below which intervals are too narrow and differences seldom show
_MANY = 1000  # from which on a tenth of a point means something
_METRICS = ("exact_match", "f1", "holds")
_NAME = 18  # columns of a method's name
_CUT = 0.2  # share of answers that the bound may end before it is reported


def tables(result: Mapping[str, Any]) -> Iterator[Table]:
    """Scores, differences from full attention, agreement with it, and what answers cost."""
    rows = result["methods"]
    names = [_name(row, rows) for row in rows]
    yield Table(
        "right answers in %: word for word, F1 of words, and held by the answer",
        [
            ["method", "exact match", "F1", "holds it"],
            *(
                [name, *(_share(row[metric]) for metric in _METRICS)]
                for name, row in zip(names, rows, strict=True)
            ),
        ],
        names=1,
    )
    others = list(zip(names, rows, strict=True))[1:]
    if others:
        yield Table(
            "minus full attention, on the same questions, in points",
            [
                ["method", "exact match", "F1", "holds it"],
                *(
                    [name, *(_points(row["minus_full"][m]) for m in _METRICS)]
                    for name, row in others
                ),
            ],
            names=1,
        )
        yield Table(
            "as full attention answers, in %: whole answers; tokens, given its answer",
            [
                ["method", "same answer", "same tokens"],
                *(
                    [name, _share(row["same_answer"]), _share(row["same_tokens"])]
                    for name, row in others
                ),
            ],
            names=1,
        )
    yield Table(
        "median time to first token, chunks read from the store; that of full attention\n"
        "over it; chunk tokens an answer: reused, computed again, encoded as they lacked",
        [
            ["method", "ms", "full / own", "reused", "again", "encoded"],
            *(
                [
                    name,
                    _median(row["ttft"], 1000),
                    _median(row["full_over_own"]) if row is not rows[0] else "",
                    *(f"{row['tokens'][it]:.0f}" for it in ("reused", "recomputed", "encoded")),
                ]
                for name, row in zip(names, rows, strict=True)
            ),
        ],
        names=1,
    )


def heading(result: Mapping[str, Any]) -> str:
    """What was asked, and whether the search found what it should have."""
    asked = (
        f"{result['questions']} questions, k={result['k']}, template {result['template']}, "
        "95 % intervals"
    )
    if result["recall"] is None:
        return f"{asked}\nretrieval is not measured: no question names its sources"
    of = result["with_sources"]
    return f"{asked}\nrecall@{result['k']} of sources, in %: {_share(result['recall'])}, n={of}"


def warnings(result: Mapping[str, Any]) -> Iterator[str]:
    """What would make a reader of the tables take them for more than they are."""
    asked, full = result["questions"], result["methods"][0]
    if asked < _FEW:
        yield (
            f"{asked} questions are few: intervals are too narrow below some {_FEW}, and only "
            "large differences show"
        )
    if result["without_chunks"]:
        yield f"{result['without_chunks']} questions found no chunk, and were asked without any"
    cut = [
        f"{r['cut_off']} of {r['method']}" for r in result["methods"] if r["cut_off"] > _CUT * asked
    ]
    if cut:
        yield (
            f"answers were cut off at {result['max_new_tokens']} tokens ({', '.join(cut)}): the "
            "right one may have come later (--max-new-tokens), and exact match wants nothing else"
        )
    lacked = [row["method"] for row in result["methods"] if row["tokens"]["encoded"]]
    if lacked:
        yield (
            f"{', '.join(lacked)}: the knowledge base lacked chunks as they are wanted there; they "
            "were encoded when they were first asked for, and that is in no time"
        )
    if not full["holds"]["high"] > 0.5:
        yield (
            "full attention itself seldom holds the right answer: that others agree with it says "
            "little; look at retrieval, the template and the model first"
        )
    yield from result["notes"]


def _name(row: Mapping[str, Any], rows: Any) -> str:
    """The method, with its ratio where that is not in its name; cut to its column."""
    name = str(row["method"])
    if row["ratio"] is not None and len(name) + 5 <= _NAME:
        name = f"{name} {row['ratio']:g}"
    return name if len(name) <= _NAME else name[: _NAME - 1] + "…"


def _share(estimate: Mapping[str, float]) -> str:
    """75 [38.9, 93.4], from fractions."""
    value, low, high = (_number(100 * estimate[name]) for name in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def _points(estimate: Mapping[str, float]) -> str:
    """-25 [-57, +7], from fractions; tenths of many questions only."""
    form = "+.1f" if estimate["n"] >= _MANY else "+.0f"
    value, low, high = (f"{100 * estimate[name]:{form}}" for name in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def _number(percent: float) -> str:
    return f"{percent:.1f}".removesuffix(".0") if percent >= 99 else f"{percent:.1f}"


def _median(found: Mapping[str, Any], factor: float = 1) -> str:
    value = f"{factor * found['value']:.3g}"
    if found["low"] is None:
        return value
    return f"{value} [{factor * found['low']:.3g}, {factor * found['high']:.3g}]"

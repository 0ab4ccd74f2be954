"""What finished questions say of the methods: scores, times, reuse, and what was left out."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrag.base.types import HostArray
from jaxrag.measure.evals.asked import Line
from jaxrag.measure.evals.datasets.nearness import FULL, control_of, nearness_of, times_over
from jaxrag.measure.evals.datasets.spec import DatasetItem
from jaxrag.measure.evals.statistics import LEVEL, by_group, difference, median, plain, share

FinishedItem = tuple[DatasetItem, Mapping[str, Any]]  # a question and its finished line

ALL = "all"


def result_of(
    methods: Sequence[str],
    metrics: Sequence[str],
    score: Callable[[str, str, DatasetItem], float],
    lines: Sequence[FinishedItem],
) -> dict[str, Any]:
    """JSON-able; shares as fractions of 1, times in seconds, each with its interval.

    Args:
      methods: the first is what the others are compared with.
      score: of a metric, an answer and its question, 0..1.
    """
    skipped = Counter(line["skipped"] for _, line in lines if "skipped" in line)
    answered = [(item, line) for item, line in lines if "skipped" not in line]
    left_out = [line["left_out"] for _, line in answered]
    groups, samples = _groups([item for item, _ in answered])
    scores = {
        metric: {
            method: np.array(
                [score(metric, line["methods"][method]["text"], item) for item, line in answered],
                np.float64,
            )
            for method in methods
        }
        for metric in metrics
    }

    def row(method: str, of: HostArray) -> dict[str, Any]:
        lines = [answered[at][1] for at in np.flatnonzero(of)]
        return _costs(methods[0], method, lines) | _nearness(methods, method, lines, samples[of])

    return {
        "questions": len(answered),
        "skipped": dict(skipped),
        "documents": sum(line["documents"] for _, line in answered),
        "left_out": sum(left_out),
        "questions_cut": sum(map(bool, left_out)),
        "groups": {name: int(rows.sum()) for name, rows in groups.items()},
        "metrics": list(metrics),
        "interval": f"{LEVEL:.0%} (jaxrag/measure/evals/statistics.py)",
        "methods": [
            {
                "method": name,
                "scores": {
                    metric: by_group(groups, samples, share, of[name])
                    for metric, of in scores.items()
                },
                "minus_first": {
                    metric: by_group(groups, samples, difference, of[name], of[methods[0]])
                    for metric, of in scores.items()
                },
                **row(name, groups[ALL]),
                "by_group": {group: row(name, of) for group, of in groups.items() if group != ALL},
            }
            for name in methods
        ],
    }


def _groups(items: Sequence[DatasetItem]) -> tuple[dict[str, HostArray], HostArray]:
    """Questions by group, bool [Q], all of them first; and the number of each one's sample."""
    of = np.array([item.group for item in items])
    names = dict.fromkeys(item.group for item in items if item.group)
    groups = {ALL: np.ones(len(items), np.bool_)}
    if len(names) > 1:
        groups |= {name: of == name for name in names}
    _, samples = np.unique([item.sample for item in items], return_inverse=True)
    return groups, samples


def _costs(first: str, method: str, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of a method: times to first token, its part of the chunk tokens that were reused, FLOPs."""
    own = [line["methods"][method] for line in lines]
    other = [line["methods"][first] for line in lines]
    times = [item["ttft"] for item in own if item["ttft"] is not None]
    tokens = {
        name: float(np.mean([item["counts"][name] for item in own])) if own else 0.0
        for name in ("reused", "recomputed", "encoded")
    }
    total = sum(tokens.values())
    return {
        "ttft": plain(median(np.array(times))),
        "first_ttft": plain(median(np.array([item["first"] for item in own]))),
        "first_over_own": times_over(other, own),
        "without_time": len(own) - len(times),
        "tokens": tokens,
        "reuse": tokens["reused"] / total if total else 0.0,
        "recomputed": tokens["recomputed"] / total if total else 0.0,
        "prompt_tokens": plain(median(np.array([float(item["prompt_tokens"]) for item in own]))),
        "flops": float(np.mean([item["flops"] for item in own])) if own else 0.0,
        "cut_off": sum(item["finish_reason"] == "length" for item in own),
        "notes": sorted({note for item in own for note in item["notes"]}),
        "encoded": sum(item["encoded"] for item in own),
    }


def _nearness(
    methods: Sequence[str], method: str, lines: Sequence[Mapping[str, Any]], samples: HostArray
) -> dict[str, Any]:
    """How near answers and next tokens are to full attention's, where that was found out."""
    if not all("kl" in line["methods"][method] for line in lines):
        return {}

    def of(name: str) -> list[Line]:
        return [line["methods"][name] for line in lines]

    control, own, full = control_of(method, methods), of(method), of(FULL)
    same = [a["token_ids"] == b["token_ids"] for a, b in zip(own, full, strict=True)]
    found = nearness_of(own, full, samples, None if control is None else of(control))
    return {"same_answer": plain(share(np.array(same), samples)), **found}

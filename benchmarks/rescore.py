"""Published outputs of models, scored by the metrics here, beside the scores printed with them.

InfiniteBench (github.com/OpenBMB/InfiniteBench) has the outputs of seven models in ``results/`` and
their scores in a table of its README, both of one commit. Nothing of them is in this project.

example: python benchmarks/rescore.py --checkout InfiniteBench --out results.json
"""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from script import run_script

from jaxrag.base.errors import RequestError
from jaxrag.base.options import option
from jaxrag.measure.evals.metrics import character_f1, qa_f1
from jaxrag.measure.machine import describe
from jaxrag.tasks.long.scores import among_words, first_integer

TASKS = {
    "Retrieve.PassKey": ("passkey", first_integer),
    "Retrieve.Number": ("number_string", first_integer),
    "Retrieve.KV": ("kv_retrieval", among_words),
    "En.QA": ("longbook_qa_eng", qa_f1),
    "Zh.QA": ("longbook_qa_chn", character_f1),
}
# the columns of its table, and its folders
MODELS = ("gpt4", "yarn-mistral", "kimi", "claude2", "yi-6b-200k", "yi-34b-200k", "chatglm3")


@dataclasses.dataclass(frozen=True)
class RescoreOptions:
    """What is read."""

    checkout: Path = option(
        dataclasses.MISSING, "a git checkout of InfiniteBench, at the commit to be scored", "DIR"
    )


def measure(options: RescoreOptions) -> dict[str, Any]:
    """Every model and task; raises RequestError where the table or the outputs are missing."""
    readme = options.checkout / "README.md"
    if not readme.is_file():
        raise RequestError(f"{options.checkout}: expected a checkout of InfiniteBench")
    printed = table_of(readme.read_text(encoding="utf-8"))
    rows = []
    for task, (name, metric) in TASKS.items():
        for model, shown in zip(MODELS, printed[task], strict=True):
            path = options.checkout / "results" / model / f"preds_{name}.jsonl"
            scores, damaged = scored(path, metric)
            value = f"{100 * sum(scores) / len(scores):.2f}"
            row = {"task": task, "model": model, "n": len(scores), "damaged": damaged}
            rows.append(row | {"score": value, "printed": shown, "same": agrees(value, shown)})
    git = ["git", "-C", str(options.checkout), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    return {"outputs": commit, "rows": rows, "machine": describe()}


def table_of(readme: str) -> dict[str, list[str]]:
    """The printed scores in % by task, one for each of MODELS; raises RequestError without them."""
    found = {}
    for line in readme.splitlines():
        task, *cells = (it.strip() for it in line.strip().strip("|").split("|"))
        if task in TASKS and len(cells) == len(MODELS) and cells[0].endswith("%"):
            found[task] = [it.removesuffix("%") for it in cells]
    if missing := TASKS.keys() - found.keys():
        raise RequestError(f"README.md: expected scores of {min(missing)} for {len(MODELS)} models")
    return found


def scored(path: Path, metric: Any) -> tuple[list[float], int]:
    """The score of each output of a file, and how many of its lines are not JSON."""
    scores, damaged = [], 0
    for line in path.read_text(encoding="utf-8").split("\n"):
        if not line.strip():
            continue
        try:
            one = json.loads(line)
        except json.JSONDecodeError:
            damaged += 1
            continue
        said = one["prediction"] if "prediction" in one else one["pred"]
        right = one["ground_truth"] if "ground_truth" in one else one["label"]
        golds = right if isinstance(right, list) else [right]
        scores.append(metric(said, [str(it) for it in golds]))
    return scores, damaged


def agrees(value: str, printed: str) -> bool:
    """Whether a score is the printed one, to its last digit, or below a printed bound."""
    if printed.startswith("<"):
        return float(value) < float(printed.removeprefix("<"))
    return float(value) == float(printed)


def report(result: dict[str, Any]) -> list[str]:
    """One line a task, and what differs."""
    rows = result["rows"]
    lines = [f"{sum(it['same'] for it in rows)} of {len(rows)} scores as printed"]
    lines += [
        f"{it['task']}, {it['model']}: {it['score']} printed {it['printed']}, n={it['n']}, "
        f"{it['damaged']} damaged lines"
        for it in rows
        if not it["same"]
    ]
    return lines


if __name__ == "__main__":
    sys.exit(run_script(__doc__, RescoreOptions, measure, report))

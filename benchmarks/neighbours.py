"""How many neighbours a chunk is to be encoded behind, and what each part of FusionRAG brings.

Figures 7a, 17 and 18 of FusionRAG (arXiv:2601.12904) on the synthetic task. Many documents are a
knowledge base; a search in it chooses the chunks of every prompt, as it chooses the neighbours that
a chunk is encoded behind. One run of `jaxrag eval methods --retrieve` for each number of
neighbours, all with the same questions. Quality only: what the parts do to the time to first token
is measured by `jaxrag bench ttft`.

example: python benchmarks/neighbours.py --model checkpoints/synthetic-0.8m/full --out FILE.json
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrag.base.options import parse_ratios
from jaxrag.cli import run_command
from jaxrag.cli.options import add_json
from jaxrag.cli.output import give_out_tables, require_folder
from jaxrag.measure.evals.methods import run
from jaxrag.measure.evals.methods_report import verdict
from jaxrag.measure.evals.options import MethodsOptions
from jaxrag.measure.evals.synthetic import ALL
from jaxrag.measure.machine import describe
from jaxrag.measure.table import Table, percent, points
from jaxrag.tasks.synthetic import SyntheticTask

BEHIND = {"after_prefix": "the prefix", "neighbours": "neighbours"}


def main() -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, metavar="DIR", help="the model directory")
    parser.add_argument(
        "--neighbours", type=int, nargs="+", default=[2, 5, 10, 15], metavar="N", help="(2 5 10 15)"
    )
    parser.add_argument(
        "--ratios", type=parse_ratios, default="0,0.05,0.15", metavar="R,...", help="(0,0.05,0.15)"
    )
    parser.add_argument(
        "--num-questions",
        type=int,
        default=500,
        metavar="N",
        help="of a cell (500)",
    )
    parser.add_argument("--documents", type=int, default=48, metavar="N", help="of a base (48)")
    parser.add_argument("--retrieve", type=int, default=6, metavar="K", help="of a prompt (6)")
    parser.add_argument("--seed", type=int, default=7, help="of the questions (7)")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON result there")
    parser.add_argument("--markdown", metavar="FILE", help="also write the tables there")
    add_json(parser)
    return run_command(_measure, parser.parse_args())


def _measure(args: argparse.Namespace) -> int:
    require_folder(args.out)
    require_folder(args.markdown, "--markdown")
    first = MethodsOptions(
        model=args.model,
        methods=("fusionrag",),
        ratios=args.ratios,
        task=SyntheticTask(chunks=(args.documents,) * 2, split="test", questions=50),
        seed=args.seed,
        questions=args.num_questions,
        deviation=0,
        retrieve=args.retrieve,
        dtype="float32",
    )
    runs = {}
    for count in args.neighbours:
        found = run(dataclasses.replace(first, neighbours=count), progress=not args.json)
        runs[str(count)] = {key: found[key] for key in ("prompts", "cells", "differences")}
    shared = {key: found[key] for key in ("task", "seed", "questions", "samples", "model")}
    result = {**shared, "ratios": list(first.ratios), "runs": runs, "machine": describe()}
    give_out_tables(args, result, _tables)
    return 0


def _tables(result: Mapping[str, Any]) -> Iterator[Table]:
    runs = result["runs"]
    ratios = result["ratios"]
    yield Table(
        f"exact match in % by neighbours and recompute ratio, {result['questions'][ALL]} questions "
        f"over chunks that a search found in {result['samples']} knowledge bases, with 95 % "
        "intervals; fusionrag's selection",
        [
            ["behind", *(f"{ratio:g}" for ratio in ratios)],
            ["the prefix alone", *_row(_first(runs), "after_prefix", ratios)],
            *(
                [f"{count} neighbours", *_row(one, "neighbours", ratios)]
                for count, one in runs.items()
            ),
        ],
        names=1,
    )
    yield Table(
        "co-occurrence in %: is one of the best chunks of a question among the neighbours of "
        "another, by how many are taken; share of the chunks in front of a chunk that its KV saw",
        [
            ["neighbours", *_first(runs)["prompts"]["co_occurrence"], "in front"],
            *(
                [
                    count,
                    *(f"{100 * share:.1f}" for share in one["prompts"]["co_occurrence"].values()),
                    f"{100 * one['prompts']['seen']:.1f}",
                ]
                for count, one in runs.items()
            ),
        ],
        names=1,
    )
    largest = max(ratios)
    for count, one in runs.items():
        full = _cell(one, "full_attention", None, None)
        yield Table(
            f"what each part brings, {count} neighbours, {largest:g} recomputed: F1 in %, and "
            "normalised between full reuse (0) and full attention (100)",
            [
                ["chunks behind", "selection", "F1", "normalised"],
                *(
                    [BEHIND[encoder], chosen, _percent(cell["f1"]), _percent(cell["normalised_f1"])]
                    for encoder in BEHIND
                    for chosen, cell in (
                        ("none", _cell(one, "full_reuse", encoder, None)),
                        ("by the question", _cell(one, "fusionrag", encoder, largest)),
                    )
                ),
                ["full attention", "", _percent(full["f1"]), ""],
            ],
            names=2,
        )
    yield Table(
        f"neighbours against the prefix alone, at ratio {largest:g}: F1 in points, paired",
        [
            ["neighbours", "is", "difference"],
            *(
                [count, verdict(row["f1"][ALL]), points(row["f1"][ALL])]
                for count, one in runs.items()
                for row in one["differences"]
                if row["ratio"] == largest and row["second"] == "fusionrag, after_prefix"
            ),
        ],
        names=2,
    )


def _first(runs: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(iter(runs.values()))
    return found


def _row(one: Mapping[str, Any], encoder: str, ratios: list[float]) -> list[str]:
    return [_percent(_cell(one, "fusionrag", encoder, ratio)["exact_match"]) for ratio in ratios]


def _cell(
    one: Mapping[str, Any], method: str, encoder: str | None, ratio: float | None
) -> dict[str, Any]:
    wanted = (method, encoder, ratio)
    return next(c for c in one["cells"] if (c["method"], c["encoder"], c["ratio"]) == wanted)


def _percent(by_group: Mapping[str, Any]) -> str:
    return percent(by_group[ALL])


if __name__ == "__main__":
    sys.exit(main())

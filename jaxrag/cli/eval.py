"""`jaxrag eval`: how well models answer."""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrag.base.errors import RequestError
from jaxrag.cli import eval_long, eval_methods, eval_own
from jaxrag.cli.fields import add_fields, from_fields
from jaxrag.cli.options import (
    add_command,
    add_earlier_name,
    add_json,
    add_result,
    add_task,
    task_of,
)
from jaxrag.cli.output import give_out_tables, print_json, require_folders
from jaxrag.measure.evals.options import SyntheticOptions

if TYPE_CHECKING:
    from jaxrag.measure.evals.synthetic import Cell, Options


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command and its parts."""
    parser = add_command(
        commands,
        "eval",
        "measure how well models answer",
        "jaxrag eval own --kb kb --questions questions.jsonl",
    )
    kinds = parser.add_subparsers(title="evaluations", metavar="NAME", required=True)
    eval_own.add_parser(kinds)
    synthetic = add_command(
        kinds,
        "synthetic",
        "exact match on the synthetic multi-document task, read in full and block-wise",
        "jaxrag eval synthetic --model full=checkpoints/synthetic-0.8m/full "
        "--model dual=checkpoints/synthetic-0.8m/dual --compare dual:block,full:full --out x.json",
    )
    synthetic.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="a model directory and what to call it; repeatable",
    )
    add_fields(synthetic, SyntheticOptions)
    add_earlier_name(synthetic, "--questions", "questions")
    add_task(synthetic)
    synthetic.add_argument(
        "--compare",
        action="append",
        default=[],
        metavar="A:READ,B:READ",
        help="also the paired difference of these two; repeatable",
    )
    add_result(synthetic, markdown=True)
    synthetic.set_defaults(run=run_synthetic)
    eval_methods.add_parser(kinds)
    eval_long.add_parsers(kinds)
    curve = add_command(
        kinds,
        "curve",
        "draw accuracy over training steps, of one or more runs",
        "jaxrag eval curve dual=runs/dual control=runs/control --out curve.png",
    )
    curve.add_argument(
        "runs", nargs="+", metavar="RUN", help="folder of a run, or NAME=FOLDER for the legend"
    )
    curve.add_argument("--out", required=True, metavar="FILE", help="a .png, .svg or .pdf file")
    curve.add_argument(
        "--names", default="", metavar="NAME,...", help="which [[eval]] of the runs (all)"
    )
    add_json(curve)
    curve.set_defaults(run=run_curve)


def run_synthetic(args: argparse.Namespace) -> None:
    """Print the tables, or one JSON object."""
    from jaxrag.measure.evals.synthetic import run
    from jaxrag.measure.evals.synthetic_report import tables
    from jaxrag.measure.machine import describe

    options = _options(args)
    require_folders(args, "out", "markdown")
    from jaxrag.models.compiled import keep_compiled

    keep_compiled()
    result = run(options, progress=not args.json) | {"machine": describe()}
    give_out_tables(args, result, tables)


def run_curve(args: argparse.Namespace) -> None:
    """Write the picture; print its points as one JSON object, or where it is."""
    from jaxrag.measure.evals.plots import check_picture, draw_curves, read_curves

    out = Path(args.out)
    check_picture(out)
    runs = [(name or Path(path).name, Path(path)) for name, path in map(_named, args.runs)]
    if len({name for name, _ in runs}) < len(runs):
        raise RequestError("two runs have the same name; call them NAME=FOLDER")
    curves = read_curves(runs, [name for name in args.names.split(",") if name])
    draw_curves(curves, out)
    if args.json:
        print_json({"out": str(out), "curves": [curve._asdict() for curve in curves]})
    else:
        print(f"{out}: " + ", ".join(f"{curve.run} {curve.name}" for curve in curves))


def _options(args: argparse.Namespace) -> "Options":
    from jaxrag.measure.evals.synthetic import Options

    models: dict[str, str] = {}
    for text in args.model:
        name, path = _named(text)
        if not name or not path:
            raise RequestError(f"--model {text}: expected NAME=DIR")
        if name in models:
            raise RequestError(f"--model {text}: there is a model {name!r} already; rename one")
        models[name] = path
    return from_fields(
        Options,
        args,
        models=models,
        task=task_of(args),
        compare=tuple(map(_compared, args.compare)),
    )


def _named(text: str) -> tuple[str, str]:
    """NAME=PATH as both parts; the name is empty where there is none."""
    name, equals, path = text.partition("=")
    return (name, path) if equals else ("", text)


def _compared(text: str) -> "tuple[Cell, Cell]":
    from jaxrag.measure.evals.synthetic import Cell

    found = re.fullmatch(r"([^:,]+):([^:,]+),([^:,]+):([^:,]+)", text)
    if found is None:
        raise RequestError(f"--compare {text}: expected MODEL:READ,MODEL:READ")
    return Cell(found[1], found[2]), Cell(found[3], found[4])

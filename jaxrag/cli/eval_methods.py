"""`jaxrag eval methods`: how well methods of reuse answer, by recompute ratio."""

import argparse
import sys
from typing import TYPE_CHECKING

from jaxrag.base.options import parse_names
from jaxrag.cli.fields import add_fields, from_fields
from jaxrag.cli.options import add_command, add_earlier_name, add_result, add_task, task_of
from jaxrag.cli.output import give_out_tables, require_folders
from jaxrag.measure.evals.options import MethodsOptions

if TYPE_CHECKING:
    from jaxrag.measure.evals.methods_grid import Options


def add_parser(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the evaluation."""
    parser = add_command(
        kinds,
        "methods",
        "methods of reuse on the synthetic task, by recompute ratio",
        "jaxrag eval methods --model checkpoints/synthetic-0.8m/dual "
        "--methods turborag,fusionrag,cacheblend,random --recompute-ratios 0,0.15,1.0 --out x.json",
    )
    add_fields(parser, MethodsOptions)
    add_earlier_name(parser, "--ratios", "ratios")
    add_earlier_name(parser, "--encoders", "encoders", type=parse_names)
    add_earlier_name(parser, "--questions", "questions")
    add_task(parser)
    parser.add_argument(
        "--deviation",
        type=int,
        metavar="N",
        help="sets of chunks whose KV is compared with full attention's, 0 for none (32; with "
        "--retrieve 0)",
    )
    add_result(parser, markdown=True)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the tables, or one JSON object; exit code 3 where ratio 1 is not full attention."""
    from jaxrag.measure.evals.methods import run
    from jaxrag.measure.evals.methods_report import tables
    from jaxrag.measure.machine import describe

    options = _options(args)
    require_folders(args, "out", "markdown")
    from jaxrag.models.compiled import keep_compiled

    keep_compiled()
    result = run(options, progress=not args.json) | {"machine": describe()}
    give_out_tables(args, result, tables)
    differing = sum(len(row["differing"]) for row in result["whole"])
    if differing:
        print(
            f"jaxrag: {differing} answers at ratio 1 differ from full attention's; rounding can do "
            f"that in {result['model']['dtype']}, in float32 it is an error",
            file=sys.stderr,
        )
    return 3 if differing else 0


def _options(args: argparse.Namespace) -> "Options":
    from jaxrag.measure.evals.methods_grid import Options

    deviation = 0 if args.retrieve else 32
    return from_fields(
        Options,
        args,
        encoders=() if args.encoders == ("own",) else args.encoders,
        task=task_of(args),
        deviation=deviation if args.deviation is None else args.deviation,
    )

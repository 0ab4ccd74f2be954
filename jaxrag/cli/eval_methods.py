"""`jaxrag eval methods`: how well methods of reuse answer, by recompute ratio."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from jaxrag.cli.options import (
    add_command,
    add_earlier_name,
    add_json,
    chunks_of,
    ratios_of,
)
from jaxrag.cli.output import (
    give_out,
    require_folder,
    titled,
)

if TYPE_CHECKING:
    from jaxrag.evals.methods_grid import Options


def add_parser(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the evaluation."""
    parser = add_command(
        kinds,
        "methods",
        "methods of reuse on the synthetic task, by recompute ratio",
        "jaxrag eval methods --model checkpoints/synthetic-0.8m/dual "
        "--methods turborag,fusionrag,cacheblend,random --recompute-ratios 0,0.15,1.0 --out x.json",
    )
    parser.add_argument("--model", required=True, metavar="DIR", help="the model directory")
    parser.add_argument(
        "--methods",
        default="full_attention,full_reuse,turborag,fusionrag,cacheblend,cache_craft,epic,random",
        metavar="NAME,...",
        help="presets, random or .toml files; full attention and full reuse are measured always "
        "(these two, turborag, fusionrag, cacheblend, cache_craft, epic, random)",
    )
    parser.add_argument(
        "--recompute-ratios",
        default="0,0.05,0.10,0.15,0.30,1.0",
        metavar="R,...",
        help="recompute ratios, of methods that recompute (0,0.05,0.10,0.15,0.30,1.0)",
    )
    add_earlier_name(parser, "--ratios", "recompute_ratios")
    parser.add_argument(
        "--encoders",
        default="after_prefix,neighbours",
        metavar="NAME,...|own",
        help="measure every method that encodes chunks behind the prefix with each of these; "
        "own: as the method says (after_prefix,neighbours)",
    )
    parser.add_argument(
        "--neighbours", type=int, default=10, metavar="N", help="of a chunk, at most (10)"
    )
    parser.add_argument("--questions", type=int, default=500, metavar="N", help="of a cell (500)")
    parser.add_argument(
        "--chunks", default="6", metavar="N|N-M", help="documents of a question, as 6 or 4-6 (6)"
    )
    parser.add_argument(
        "--retrieve",
        type=int,
        metavar="K",
        help="ask a question over the K of its documents that a search finds (all of them); with "
        "many: --chunks 48 --set questions=50 --retrieve 6",
    )
    parser.add_argument("--seed", type=int, default=7, help="of the questions (7)")
    parser.add_argument("--split", choices=("test", "train"), default="test", help="(test)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="another setting of the task, such as relations=4; repeatable",
    )
    parser.add_argument(
        "--deviation",
        type=int,
        metavar="N",
        help="sets of chunks whose KV is compared with full attention's, 0 for none (32; with "
        "--retrieve 0)",
    )
    parser.add_argument(
        "--batch-size", type=int, default=32, metavar="N", help="questions that run together (32)"
    )
    parser.add_argument(
        "--template", metavar="NAME", help="a template's name or .toml file (the model's own)"
    )
    parser.add_argument(
        "--response-start",
        default="",
        metavar="TEXT",
        help="text before every answer, as data.response_start of the training ('')",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of weights, activations and KV (the model's)",
    )
    parser.add_argument("--out", metavar="FILE", help="also write the JSON result there")
    parser.add_argument("--markdown", metavar="FILE", help="also write the tables there")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the tables, or one JSON object; exit code 3 where ratio 1 is not full attention."""
    from jaxrag.bench.machine import describe
    from jaxrag.evals.methods import run
    from jaxrag.evals.methods_report import markdown, tables

    options = _options(args)
    require_folder(args.out)
    require_folder(args.markdown, "--markdown")
    from jaxrag.models.compiled import keep_compiled

    keep_compiled()
    result = run(options, progress=not args.json) | {"machine": describe()}
    give_out(args, result, titled(tables(result)), markdown)
    differing = sum(len(row["differing"]) for row in result["whole"])
    if differing:
        print(
            f"jaxrag: {differing} answers at ratio 1 differ from full attention's; rounding can do "
            f"that in {result['model']['dtype']}, in float32 it is an error",
            file=sys.stderr,
        )
    return 3 if differing else 0


def _options(args: argparse.Namespace) -> "Options":
    from jaxrag.evals.methods_grid import Options
    from jaxrag.tables import build, override
    from jaxrag.tasks.synthetic import SyntheticTask

    task: dict[str, Any] = {"chunks": chunks_of(args.chunks), "split": args.split}
    for assignment in args.set:
        task = override(task, assignment)
    deviation = 0 if args.retrieve else 32
    return Options(
        model=args.model,
        methods=tuple(name for name in args.methods.split(",") if name),
        ratios=ratios_of(args.recompute_ratios),
        encoders=() if args.encoders == "own" else tuple(filter(None, args.encoders.split(","))),
        neighbours=args.neighbours,
        task=build(SyntheticTask, task, "the task"),
        seed=args.seed,
        questions=args.questions,
        batch_size=args.batch_size,
        deviation=deviation if args.deviation is None else args.deviation,
        retrieve=args.retrieve,
        template=args.template,
        response_start=args.response_start,
        dtype=args.dtype,
    )

"""`jaxrag plan`: what a corpus and its questions will take, before anything is made."""

import argparse
from pathlib import Path

from jaxrag.cli.options import add_command, add_result
from jaxrag.cli.output import give_out_tables, require_folders


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = add_command(
        commands,
        "plan",
        "estimate disks, time to first token and engines of a corpus and its questions",
        "jaxrag plan llama-3-8b-on-one-h200 --set corpus.chunks=20000000",
    )
    parser.add_argument(
        "plan", metavar="PLAN", help="a .toml file as in configs/plans, or the name of one of them"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="replace a setting, such as queries.rate=20; repeatable",
    )
    parser.add_argument("--plot", metavar="FILE", help="also draw the times: .png, .svg or .pdf")
    add_result(parser, markdown=True)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print the sums; nothing is measured and no weight is read."""
    from jaxrag.measure.evals.plots import check_picture
    from jaxrag.measure.plan.report import plan_record, plan_tables
    from jaxrag.measure.plan.settings import load_plan

    require_folders(args, "out", "markdown")
    if args.plot:
        check_picture(Path(args.plot))
    settings, config = load_plan(args.plan, args.set)
    record = plan_record(settings, config)
    if args.plot:
        from jaxrag.measure.plan.picture import draw_plan

        draw_plan(record, Path(args.plot))
    give_out_tables(
        args,
        record,
        plan_tables,
        ["Sums of the settings, not measurements; docs/scale.md has every formula."],
    )

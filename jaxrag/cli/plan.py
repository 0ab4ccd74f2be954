"""`jaxrag plan`: what a corpus and its questions will take, before anything is made."""

from jaxrag.cli.command import SUMMARIES, Args, argument, command, values
from jaxrag.cli.options import result_options
from jaxrag.cli.output import give_out_tables, require_folders


def run(args: Args) -> None:
    """Print the sums; nothing is measured and no weight is read."""
    from jaxrag.measure.plan.report import plan_record, plan_tables
    from jaxrag.measure.plan.settings import load_plan

    require_folders(args, "out", "markdown")
    settings, config = load_plan(args.plan, args.set)
    record = plan_record(settings, config)
    give_out_tables(
        args,
        record,
        plan_tables,
        ["Sums of the settings, not measurements; jaxrag/measure/plan/formulas.py has each."],
    )


COMMAND = command(
    "plan",
    run,
    SUMMARIES["plan"],
    "jaxrag plan llama-3-8b-on-one-h200 --set corpus.chunks=20000000",
    argument("plan", "PLAN", "a .toml file as in configs/plans, or the name of one of them"),
    values("--set", "KEY=VALUE", "replace a setting, such as queries.rate=20; repeatable"),
    result_options(markdown=True),
)

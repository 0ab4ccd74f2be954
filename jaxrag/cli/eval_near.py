"""`jaxrag eval near`: how near methods come to full attention on a data set's prompts."""

import functools

from jaxrag.base.config import ModelOptions
from jaxrag.cli.command import Args, argument, command, fields, from_fields
from jaxrag.cli.opening import load
from jaxrag.cli.options import model_options, result_options
from jaxrag.cli.output import give_out_tables, measured, require_folders
from jaxrag.measure.evals.datasets.options import DATASET_NAMES, NearOptions


def run(args: Args) -> None:
    """Print the table, or one JSON object."""
    from jaxrag.measure.evals.datasets import near

    require_folders(args, "out", "markdown")
    options = from_fields(NearOptions, args, name=args.name, model=args.model, out=args.out)
    ask = functools.partial(near.run, load=lambda path: load(path, from_fields(ModelOptions, args)))
    give_out_tables(args, measured(args, ask, options), near.tables)


COMMAND = command(
    "near",
    run,
    "how near methods come to full attention, token by token: KL divergence and agreement",
    "jaxrag eval near nq_open --data nq-open-oracle.jsonl --model MODEL --num 50 --passages 5 "
    "--method full_reuse --method primed --primer lamps --primer tides --out near.json",
    argument("name", "NAME", ", ".join(DATASET_NAMES)),
    model_options(required=True),
    fields(NearOptions, but=("shard", "finished", "metrics", "max_new_tokens", "scores")),
    result_options(markdown=True),
    basic="model data num passages method controls encoder primer neighbours out markdown json",
)

"""`jaxrag eval dataset`: a published data set put to a model, method by method."""

import functools

from jaxrag.base.config import ModelOptions
from jaxrag.cli.command import Args, argument, command, fields, from_fields, value
from jaxrag.cli.opening import load
from jaxrag.cli.options import distributed_options, model_options, result_options
from jaxrag.cli.output import give_out_tables, measured, note, require_folders
from jaxrag.cli.processes import joined
from jaxrag.measure.evals.datasets.options import DATASET_NAMES, DatasetOptions


def run(args: Args) -> None:
    """Print the tables, or one JSON object."""
    from jaxrag.measure.evals.datasets import run as dataset_run
    from jaxrag.measure.evals.datasets.report import notes, tables

    require_folders(args, "out", "markdown")
    options = from_fields(
        DatasetOptions, args, name=args.name, model=args.model, kb=args.kb, out=args.out
    )
    with joined(args) as first:
        options_of_model = from_fields(ModelOptions, args)
        ask = functools.partial(
            dataset_run.run, load=lambda path: load(path, options_of_model), first=first
        )
        result = measured(args, ask, options, first)
    if not first:
        return
    give_out_tables(args, result, tables)
    if not args.json:
        for text in notes(result):
            note(text)


COMMAND = command(
    "dataset",
    run,
    "a published data set in its authors' form: scores by method, time and reuse",
    "jaxrag eval dataset rgb_zh --data rgb/zh_refine.json --model MODEL --num 50 "
    "--method full_attention --method turborag --out rgb.json",
    argument("name", "NAME", ", ".join(DATASET_NAMES)),
    model_options("what the knowledge base remembers"),
    distributed_options(),
    value("--kb", "DIR", "keep the KV of documents in this one"),
    fields(DatasetOptions),
    result_options(markdown=True),
    basic="model kb data method neighbours num max-new-tokens out markdown json",
)

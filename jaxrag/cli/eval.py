"""`jaxrag eval`: how well models answer."""

import re

from jaxrag.base.errors import RequestError
from jaxrag.cli import eval_dataset, eval_long, eval_near, eval_own
from jaxrag.cli.command import (
    SUMMARIES,
    Args,
    command,
    fields,
    from_fields,
    group,
    values,
)
from jaxrag.cli.options import TASK, result_options, task_of
from jaxrag.cli.output import give_out_tables, measured, require_folders
from jaxrag.measure.evals.options import ModelRead, SyntheticOptions


def run_synthetic(args: Args) -> None:
    """Print the tables, or one JSON object."""
    from jaxrag.measure.evals.synthetic import run
    from jaxrag.measure.evals.synthetic_report import tables

    options = _synthetic(args)
    require_folders(args, "out", "markdown")
    give_out_tables(args, measured(args, run, options), tables)


def _synthetic(args: Args) -> SyntheticOptions:
    models: dict[str, str] = {}
    for text in args.model:
        name, path = _named(text)
        if not name or not path:
            raise RequestError(f"--model {text}: expected NAME=DIR")
        if name in models:
            raise RequestError(f"--model {text}: there is a model {name!r} already; rename one")
        models[name] = path
    return from_fields(
        SyntheticOptions,
        args,
        models=models,
        task=task_of(args),
        compare=tuple(map(_compared, args.compare)),
    )


def _named(text: str) -> tuple[str, str]:
    """NAME=PATH as both parts; the name is empty where there is none."""
    name, equals, path = text.partition("=")
    return (name, path) if equals else ("", text)


def _compared(text: str) -> tuple[ModelRead, ModelRead]:
    match = re.fullmatch(r"([^:,]+):([^:,]+),([^:,]+):([^:,]+)", text)
    if match is None:
        raise RequestError(f"--compare {text}: expected MODEL:READ,MODEL:READ")
    return ModelRead(match[1], match[2]), ModelRead(match[3], match[4])


COMMAND = group(
    "eval",
    SUMMARIES["eval"],
    "jaxrag eval own --kb kb --questions questions.jsonl",
    eval_own.COMMAND,
    eval_dataset.COMMAND,
    eval_near.COMMAND,
    command(
        "synthetic",
        run_synthetic,
        "exact match on the synthetic multi-document task, read in full and block-wise",
        "jaxrag eval synthetic --model full=checkpoints/synthetic-0.8m/full --model "
        "dual=checkpoints/synthetic-0.8m/dual --compare dual:block,full:full --out "
        "x.json",
        values("--model", "NAME=DIR", "a model directory and what to call it; repeatable"),
        fields(SyntheticOptions),
        TASK,
        values("--compare", "A:READ,B:READ", "also the paired difference of these two; repeatable"),
        result_options(markdown=True),
        basic="model num-questions read template chunks split compare out markdown json",
    ),
    *eval_long.COMMANDS,
)

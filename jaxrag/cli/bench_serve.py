"""`jaxrag bench serve`: requests that come at given rates, for several settings and a peer."""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrag.cli.fields import add_fields, from_fields
from jaxrag.cli.options import add_command, add_result
from jaxrag.cli.output import give_out, require_folders
from jaxrag.measure.bench.options import ServeOptions, Slo, Traffic

if TYPE_CHECKING:
    from jaxrag.measure.bench.serve import Bench


def add_serve(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the benchmark."""
    parser = add_command(
        kinds,
        "serve",
        "serving under load: arrivals at a rate, static or continuous, loads inline or "
        "asynchronous, reuse or full attention, a peer over HTTP",
        "jaxrag bench serve --link 40MB/s --peer-python PEER/bin/python --out result.json",
    )
    add_arguments(parser)
    parser.set_defaults(run=run_serve)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the benchmark."""
    for options in (ServeOptions, Traffic, Slo):
        add_fields(parser, options)
    add_result(parser, markdown=True)
    parser.add_argument("--plot", metavar="FILE", help="also draw first-token times there")


def run_serve(
    args: argparse.Namespace,
    also: "Callable[[Bench], dict[str, Any]] | None" = None,
    beside: "Callable[[dict[str, Any]], Iterable[str]]" = lambda result: (),
) -> None:
    """Print a table, or one JSON object.

    Args:
      also: what else is measured for the result.
      beside: what else is said of the result.
    """
    from jaxrag.measure.bench.serve import run
    from jaxrag.measure.bench.serve_report import draw, markdown, report
    from jaxrag.measure.evals.plots import check_picture
    from jaxrag.models.compiled import keep_compiled

    require_folders(args, "out", "markdown", "plot")
    if args.plot:
        check_picture(Path(args.plot))
    options = from_fields(
        ServeOptions, args, traffic=from_fields(Traffic, args), slo=from_fields(Slo, args)
    )
    keep_compiled()
    result = run(options, also)
    if args.plot:
        draw(result, Path(args.plot))
    more = list(beside(result))
    give_out(args, result, [*report(result), *more], lambda found: markdown(found, *more))

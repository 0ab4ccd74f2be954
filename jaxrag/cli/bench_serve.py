"""`jaxrag bench serve`: requests that come at given rates, for several settings and a peer."""

import argparse

from jaxrag.cli.fields import add_fields, from_fields
from jaxrag.cli.options import add_command, add_result
from jaxrag.cli.output import give_out, require_folder
from jaxrag.measure.bench.options import ServeOptions, Slo, Traffic


def add_serve(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the benchmark."""
    parser = add_command(
        kinds,
        "serve",
        "serving under load: arrivals at a rate, static or continuous, loads inline or "
        "asynchronous, reuse or full attention, a peer over HTTP",
        "jaxrag bench serve --link 40MB/s --peer-python PEER/bin/python --out result.json",
    )
    for options in (ServeOptions, Traffic, Slo):
        add_fields(parser, options)
    add_result(parser)
    parser.set_defaults(run=run_serve)


def run_serve(args: argparse.Namespace) -> None:
    """Print a table, or one JSON object."""
    from jaxrag.measure.bench.serve import run
    from jaxrag.measure.bench.serve_report import report
    from jaxrag.models.compiled import keep_compiled

    require_folder(args.out)
    options = from_fields(
        ServeOptions, args, traffic=from_fields(Traffic, args), slo=from_fields(Slo, args)
    )
    keep_compiled()
    result = run(options)
    give_out(args, result, report(result))

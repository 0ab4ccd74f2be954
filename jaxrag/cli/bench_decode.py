"""`jaxrag bench decode`: latency per generated token by context length and decode rule."""

import argparse

from jaxrag.cli.fields import add_fields, from_fields
from jaxrag.cli.options import add_command, add_earlier_name, add_result
from jaxrag.cli.output import give_out, require_folder
from jaxrag.measure.bench.options import DecodeOptions, rules_of


def add_decode(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the benchmark."""
    parser = add_command(
        kinds,
        "decode",
        "latency per generated token by context length and decode rule, random weights",
        "jaxrag bench decode --contexts 4k,128k --decode dense --decode retrieval",
    )
    add_fields(parser, DecodeOptions)
    add_earlier_name(parser, "--rules", "rules", type=rules_of)
    add_result(parser)
    parser.set_defaults(run=run_decode)


def run_decode(args: argparse.Namespace) -> None:
    """Print a table, or one JSON object."""
    from jaxrag.measure.bench.decode import Options, report, run

    require_folder(args.out)
    result = run(from_fields(Options, args))
    give_out(args, result, report(result))

"""`jaxrag bench document`: questions about a stored long document by new processes."""

import argparse

from jaxrag.cli.fields import add_fields, from_fields
from jaxrag.cli.options import add_command, add_earlier_name, add_result
from jaxrag.cli.output import give_out, require_folder
from jaxrag.measure.bench.options import DocumentOptions


def add_document(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the benchmark."""
    parser = add_command(
        kinds,
        "document",
        "questions about a document that is stored with attention indexes, each by a new process",
        "jaxrag bench document --text long.txt --tokens 32768 --out result.json",
    )
    add_fields(parser, DocumentOptions)
    add_earlier_name(parser, "--questions", "questions")
    parser.add_argument(
        "--kinds",
        metavar="KIND;...",
        help="how it is asked, such as 'retrieval, kv=host;dense' (all)",
    )
    add_result(parser)
    parser.set_defaults(run=run_document)


def run_document(args: argparse.Namespace) -> None:
    """Print a table, or one JSON object."""
    from jaxrag.measure.bench.document import Options, report, run

    require_folder(args.out)
    kinds = {} if args.kinds is None else {"kinds": tuple(args.kinds.split(";"))}
    options = from_fields(Options, args, **kinds)
    result = run(options)
    give_out(args, result, report(result))

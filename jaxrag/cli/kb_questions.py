"""`jaxrag kb questions`: rows to train on over one's own documents, and held-out questions."""

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrag.cli.fields import add_fields, from_fields
from jaxrag.cli.opening import open_kb
from jaxrag.cli.options import add_command, add_json, add_model, add_secret
from jaxrag.cli.output import counted, print_json, require_folder
from jaxrag.measure.evals.options import RowsOptions
from jaxrag.serve.ask import Ask

if TYPE_CHECKING:
    from jaxrag.measure.evals.rows import MadeRows


def add_parser(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the action."""
    parser = add_command(
        actions,
        "questions",
        "write questions on the documents, as rows for `jaxrag train`; those on a share of the "
        "documents are kept from the rows, for `jaxrag kb gate` and `jaxrag eval own`",
        "jaxrag kb questions kb --out rows.jsonl --held-out held-out.jsonl",
    )
    parser.add_argument("kb", metavar="DIR", help="folder of the knowledge base")
    add_secret(parser)
    parser.add_argument(
        "--out",
        required=True,
        metavar="FILE",
        help="the rows, JSON lines: a question, its answers, and the passage among others that "
        "the search finds for it",
    )
    parser.add_argument(
        "--held-out",
        required=True,
        metavar="FILE",
        help="the questions that are kept from the rows",
    )
    parser.add_argument(
        "--questions",
        metavar="FILE",
        help="take these, as of `jaxrag eval own`, and write none (the model writes them, which "
        "must be an instruct model)",
    )
    add_fields(parser, RowsOptions)
    add_fields(parser, Ask, only=("k",))
    parser.add_argument(
        "--resume", action="store_true", help="go on behind the last line of the two files"
    )
    add_model(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Write both files, line by line, and print how many lines they have got."""
    from jaxrag.measure.evals.rows import RowFiles, make_rows
    from jaxrag.serve.question_files import QuestionFile

    options = from_fields(RowsOptions, args, k=args.k)
    for name, path in (("--out", args.out), ("--held-out", args.held_out)):
        require_folder(path, name)
    given = None if args.questions is None else QuestionFile.open(args.questions)
    with (
        RowFiles.open(Path(args.out), Path(args.held_out), resume=args.resume) as files,
        open_kb(args) as kb,
    ):
        report = make_rows(kb, files, options, given, progress=not args.json)
    if args.json:
        print_json(dataclasses.asdict(report))
    else:
        _print_report(report, args)


def _print_report(report: "MadeRows", args: argparse.Namespace) -> None:
    print(f"{args.out}: {counted(report.rows, 'row')} of {counted(report.documents, 'document')}")
    print(f"{args.held_out}: {counted(report.held_out, 'question')} on other documents")
    for why, count in report.dropped.items():
        if count:
            print(f"left out {count}: {why}")

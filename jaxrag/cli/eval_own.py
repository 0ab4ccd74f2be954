"""`jaxrag eval own`: one's own questions to one's own knowledge base, method by method."""

import argparse
import json
import textwrap
from pathlib import Path

from jaxrag.cli.fields import add_fields, from_fields
from jaxrag.cli.opening import open_kb, where_of
from jaxrag.cli.options import (
    add_command,
    add_distributed,
    add_found,
    add_json,
    add_model,
    add_secret,
)
from jaxrag.cli.output import print_json, require_folder, titled
from jaxrag.cli.processes import joined
from jaxrag.measure.evals.options import OwnOptions
from jaxrag.models.text.printable import printable


def add_parser(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the evaluation."""
    parser = add_command(
        kinds,
        "own",
        "your questions to your knowledge base: right answers, recall, agreement with full "
        "attention and time, by method",
        "jaxrag eval own --kb kb --questions questions.jsonl --k 6",
    )
    parser.add_argument("--kb", required=True, metavar="DIR", help="folder of the knowledge base")
    add_secret(parser)
    parser.add_argument(
        "--questions",
        required=True,
        metavar="FILE",
        help='JSON lines, {"question": "...", "answers": ["...", ...], "sources"?: [ids of '
        "documents]}, or a .csv file with these columns, lists parted by |",
    )
    add_fields(parser, OwnOptions)
    add_found(parser)
    parser.add_argument(
        "--out", metavar="FILE", help="also write a JSON line for every question and method there"
    )
    add_model(parser)
    add_distributed(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print the tables, or one JSON object."""
    from jaxrag.measure.evals.own import evaluate
    from jaxrag.measure.evals.own_report import heading, tables, warnings
    from jaxrag.measure.machine import describe
    from jaxrag.reuse.methods import method_named
    from jaxrag.serve.question_files import QuestionFile

    options = from_fields(OwnOptions, args, k=args.k, where=where_of(args))
    for name in options.methods:
        method_named(name)  # refused before a model is read
    require_folder(args.out)
    questions = QuestionFile.open(args.questions)
    with joined(args) as first, open_kb(args) as kb:
        found = evaluate(kb, questions, options, progress=first and not args.json)
    if not first:
        return
    result = found.to_dict()
    if args.out:
        lines = (json.dumps(record, ensure_ascii=False) for record in found.records())
        Path(args.out).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    if args.json:
        print_json(result | {"kb": args.kb, "file": args.questions, "machine": describe()})
        return
    print(heading(result), end="\n\n")
    print("\n".join(titled(tables(result))))
    for warning in warnings(result):
        print(textwrap.fill(f"note: {printable(warning)}", 80))

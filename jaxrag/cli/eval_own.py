"""`jaxrag eval own`: one's own questions to one's own knowledge base, method by method."""

import argparse
import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrag.base.errors import RequestError
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
from jaxrag.cli.parts import add_ray, in_parts
from jaxrag.cli.processes import joined
from jaxrag.measure.evals.options import OwnOptions
from jaxrag.models.text.printable import printable

if TYPE_CHECKING:
    from jaxrag.library.documents import Shard
    from jaxrag.measure.evals.own import Evaluation


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
    add_ray(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print the tables, or one JSON object."""
    from jaxrag.measure.evals.own import evaluate, whole
    from jaxrag.serve.question_files import QuestionFile

    options = options_of(args)
    questions = QuestionFile.open(args.questions)
    if args.ray:
        if args.distributed:
            raise RequestError(
                f"--ray {args.ray}: a worker is one process; leave --distributed out"
            )
        if args.out:
            args.out = str(Path(args.out).resolve())
        parts = in_parts(args, evaluate_part, "evaluate")
        give(args, whole(parts))
        for at in range(len(parts) if args.out else 0):
            _part_file(args, at, len(parts)).unlink()
        return
    with joined(args) as first, open_kb(args) as kb:
        found = evaluate(kb, questions, options, progress=first and not args.json)
    if first:
        give(args, found)


def evaluate_part(args: argparse.Namespace) -> "Callable[[Shard], Evaluation]":
    """What a worker of --ray does with a part of the questions; with --out a killed run goes on."""
    from jaxrag.measure.evals.own import evaluate
    from jaxrag.measure.evals.own_parts import evaluate_once
    from jaxrag.serve.question_files import QuestionFile

    questions, options = QuestionFile.open(args.questions), options_of(args)
    kb = open_kb(args)

    def work(shard: "Shard") -> "Evaluation":
        if not args.out:
            return evaluate(kb, questions, options, shard=shard)
        file = _part_file(args, shard.index, shard.count)
        return evaluate_once(kb, questions, options, shard, file)

    return work


def _part_file(args: argparse.Namespace, part: int, parts: int) -> Path:
    return Path(f"{args.out}.{part}-of-{parts}")


def options_of(args: argparse.Namespace) -> OwnOptions:
    """What is asked. RequestError, before a model is read, for a method or folder that is none."""
    from jaxrag.reuse.methods import method_named

    options = from_fields(OwnOptions, args, k=args.k, where=where_of(args))
    for name in options.methods:
        method_named(name)
    require_folder(args.out)
    return options


def give(args: argparse.Namespace, found: "Evaluation") -> None:
    """Print what was found, and write its lines."""
    from jaxrag.measure.evals.own_report import heading, tables, warnings
    from jaxrag.measure.machine import describe

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

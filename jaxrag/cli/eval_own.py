"""`jaxrag eval own`: one's own questions to one's own knowledge base, method by method."""

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrag.cli.command import Args, command, fields, from_fields, value
from jaxrag.cli.opening import open_kb, where_of
from jaxrag.cli.options import FOUND, JSON, SECRET, distributed_options, model_options
from jaxrag.cli.output import print_json, require_folder, titled
from jaxrag.cli.processes import joined
from jaxrag.measure.evals.options import OwnOptions
from jaxrag.models.text.printable import printable

if TYPE_CHECKING:
    from jaxrag.measure.evals.own import Evaluation


def run(args: Args) -> None:
    """Print the tables, or one JSON object."""
    from jaxrag.measure.evals.asked import forget, kept
    from jaxrag.measure.evals.own import evaluate
    from jaxrag.serve.question_files import QuestionFile

    options = options_of(args)
    questions = QuestionFile.open(args.questions)
    with joined(args) as first, open_kb(args) as kb:
        assert kb.model is not None
        with kept(args.out, kb.model.exchange, first) as path:
            found = evaluate(kb, questions, options, kept=path, progress=first and not args.json)
    if first:
        give(args, found)
        forget(args.out)


def options_of(args: Args) -> OwnOptions:
    """What is asked. RequestError, before a model is read, for a method or folder that is none."""
    from jaxrag.reuse.methods import method_named

    options = from_fields(OwnOptions, args, k=args.k, where=where_of(args))
    for name in options.methods:
        method_named(name)
    require_folder(args.out)
    return options


def give(args: Args, found: "Evaluation") -> None:
    """Print what was found, and write its lines."""
    from jaxrag.measure.evals.datasets.report import notes, tables
    from jaxrag.measure.machine import describe

    result = found.to_dict()
    if args.out:
        lines = (json.dumps(record, ensure_ascii=False) for record in found.records())
        Path(args.out).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    if args.json:
        print_json(result | {"kb": args.kb, "file": args.questions, "machine": describe()})
        return
    print("\n".join(titled(tables(result))))
    for note in notes(result):
        print(textwrap.fill(f"note: {printable(note)}", 80))


COMMAND = command(
    "own",
    run,
    "your questions to your knowledge base: right answers, recall, agreement with "
    "full attention and time, by method",
    "jaxrag eval own --kb kb --questions questions.jsonl --k 6",
    value("--kb", "DIR", "folder of the knowledge base", required=True),
    SECRET,
    value(
        "--questions",
        "FILE",
        'JSON lines, {"question": "...", "answers": ["...", ...], "sources"?: [ids of '
        "documents]}, or a .csv file with these columns, lists parted by |",
        required=True,
    ),
    fields(OwnOptions),
    FOUND,
    value("--out", "FILE", "also write a JSON line for every question and method there"),
    model_options(),
    distributed_options(),
    JSON,
    basic="kb questions methods template max-new-tokens k where model dtype out json",
)

"""`jaxrag kb questions`: rows to train on over one's own documents, and held-out questions."""

from pathlib import Path

from jaxrag.cli.command import Args, command, fields, flag, from_fields, value
from jaxrag.cli.opening import open_kb
from jaxrag.cli.options import JSON, KB, SECRET, model_options
from jaxrag.cli.output import counted, give, require_folder
from jaxrag.measure.evals.options import RowsOptions
from jaxrag.serve.ask import Ask


def run(args: Args) -> None:
    """Write both files, line by line, and print how many lines they have got."""
    from jaxrag.measure.evals.rows import RowFiles, make_rows
    from jaxrag.serve.question_files import QuestionFile

    options = from_fields(RowsOptions, args, k=args.k)
    for name, path in (("--out", args.out), ("--held-out", args.held_out)):
        require_folder(path, name)
    given = None if args.questions is None else QuestionFile.open(args.questions)
    with (
        RowFiles.open(Path(args.out), Path(args.held_out), options, resume=args.resume) as files,
        open_kb(args) as kb,
    ):
        report = make_rows(kb, files, options, given, progress=not args.json)
    left_out = (f"left out {count}: {why}" for why, count in report.dropped.items() if count)
    lines = [
        f"{args.out}: {counted(report.rows, 'row')} of {counted(report.documents, 'document')}",
        f"{args.held_out}: {counted(report.held_out, 'question')} on other documents",
        *left_out,
    ]
    give(args, report, lines)


COMMAND = command(
    "questions",
    run,
    "write questions on the documents, as rows for `jaxrag train`; those on a "
    "share of the documents are kept from the rows, for `jaxrag kb gate` and "
    "`jaxrag eval own`",
    "jaxrag kb questions kb --out rows.jsonl --held-out held-out.jsonl",
    KB,
    SECRET,
    value(
        "--out",
        "FILE",
        "the rows, JSON lines: a question, its answers, and the passage among others "
        "that the search finds for it",
        required=True,
    ),
    value("--held-out", "FILE", "the questions that are kept from the rows", required=True),
    value(
        "--questions",
        "FILE",
        "take these, as of `jaxrag eval own`, and write none (the model writes them, "
        "which must be an instruct model)",
    ),
    fields(RowsOptions),
    fields(Ask, only=("k",)),
    flag("--resume", "go on behind the last line of the two files"),
    model_options(),
    JSON,
    basic="out held-out questions held-out-share num-questions max-new-tokens k resume "
    "model secret-file json",
)

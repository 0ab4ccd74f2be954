"""`jaxrag kb export`: chunk KV as files for transformers, LMCache and zarr."""

from jaxrag.cli.command import Args, argument, command, exclusive, flag, value, values
from jaxrag.cli.opening import secret_of, where_of
from jaxrag.cli.options import FOUND, JSON, KB, SECRET
from jaxrag.cli.output import give, human_count
from jaxrag.models.text.printable import printable

FORMATS = ("safetensors", "lmcache", "zarr")
UNFINISHED = 3  # exit code when some chunks could not be exported


def run(args: Args) -> int:
    """Exit code 0 when everything was exported, 3 when chunks were missing or damaged."""
    exclusive(args, "document", "key", "question")
    exclusive(args, "rotate", "positions")
    from jaxrag.library.knowledge_base import KnowledgeBase
    from jaxrag.models.text.tokenizer import Tokenizer

    tokenizer = None if args.model is None else Tokenizer.load(args.model)
    with KnowledgeBase.open(args.kb, mode="r", secret=secret_of(args.secret_file)) as kb:
        report = kb.export(
            args.out,
            format=args.format,
            documents=args.document or None,
            keys=args.key,
            question=args.question,
            k=args.k,
            where=where_of(args),
            joined=args.joined,
            encoder=args.encoder,
            first_position=0 if args.rotate else args.positions,
            tokenizer=tokenizer,
            progress=not args.json,
        )
    summary = (
        f"{report.path}: {report.files} files ({report.kept} were there), {report.tokens} tokens, "
        f"{human_count(report.nbytes)}B"
    )
    refused = (f"not exported: {printable(name)}: {printable(why)}" for name, why in report.refused)
    give(args, report, [summary, *refused])
    return UNFINISHED if report.refused else 0


COMMAND = command(
    "export",
    run,
    "write the KV of chunks to files for other programs",
    'jaxrag kb export kb out --question "Who built the bridge?" --k 3',
    KB,
    argument("out", "OUT", "new or empty folder, or that of an export to go on with"),
    value(
        "--format",
        None,
        "transformers' cache layout, LMCache's, or a zarr v3 tree (safetensors)",
        "safetensors",
        choices=FORMATS,
    ),
    values(
        "--document",
        "ID",
        "only its chunks, as `jaxrag kb list` names it; repeatable (every document)",
    ),
    values("--key", "KEY", "a chunk by its key; repeatable"),
    value(
        "--question",
        "TEXT",
        "the prompt of a question as one file: prefix, retrieved chunks, final block's ids",
    ),
    FOUND,
    flag("--joined", "prefix and chunks as one file, rotated to their places in one prompt"),
    value("--encoder", "NAME", "KV variant (the first that the knowledge base keeps)"),
    flag("--rotate", "rotate keys to positions 0, 1, ... of every file"),
    value(
        "--positions",
        "START",
        "rotate keys to positions START, START + 1, ... of every file",
        type=int,
    ),
    value("--model", "DIR", "for its tokenizer (the one that the knowledge base remembers)"),
    SECRET,
    JSON,
    basic="format document key question k where joined rotate positions model secret-file json",
)

"""`jaxrag kb export`: chunk KV as files for transformers, LMCache and zarr."""

import argparse
import dataclasses

from jaxrag.cli.opening import secret_of, where_of
from jaxrag.cli.options import add_command, add_found, add_json, add_secret
from jaxrag.cli.output import human_count, print_json
from jaxrag.models.text.printable import printable

FORMATS = ("safetensors", "lmcache", "zarr")
UNFINISHED = 3  # exit code when some chunks could not be exported


def add_parser(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the action."""
    parser = add_command(
        actions,
        "export",
        "write the KV of chunks to files for other programs",
        'jaxrag kb export kb out --question "Who built the bridge?" --k 3',
    )
    parser.add_argument("kb", metavar="DIR", help="folder of the knowledge base")
    parser.add_argument(
        "out", metavar="OUT", help="new or empty folder, or that of an export to go on with"
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="safetensors",
        help="transformers' cache layout, LMCache's, or a zarr v3 tree (safetensors)",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--document",
        action="append",
        metavar="ID",
        help="only its chunks, as `jaxrag kb list` names it; repeatable (every document)",
    )
    what.add_argument(
        "--key", action="append", metavar="KEY", help="a chunk by its key; repeatable"
    )
    what.add_argument(
        "--question",
        metavar="TEXT",
        help="the prompt of a question as one file: prefix, retrieved chunks, final block's ids",
    )
    add_found(parser)
    parser.add_argument(
        "--joined",
        action="store_true",
        help="prefix and chunks as one file, rotated to their places in one prompt",
    )
    parser.add_argument(
        "--encoder", metavar="NAME", help="KV variant (the first that the knowledge base keeps)"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--rotate", action="store_true", help="rotate keys to positions 0, 1, ... of every file"
    )
    where.add_argument(
        "--positions",
        type=int,
        metavar="START",
        help="rotate keys to positions START, START + 1, ... of every file",
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="for its tokenizer (the one that the knowledge base remembers)",
    )
    add_secret(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when everything was exported, 3 when chunks were missing or damaged."""
    from jaxrag.library.knowledge_base import KnowledgeBase
    from jaxrag.models.text.tokenizer import Tokenizer

    tokenizer = None if args.model is None else Tokenizer.load(args.model)
    with KnowledgeBase.open(args.kb, mode="r", secret=secret_of(args.secret_file)) as kb:
        report = kb.export(
            args.out,
            format=args.format,
            documents=args.document,
            keys=args.key or (),
            question=args.question,
            k=args.k,
            where=where_of(args),
            joined=args.joined,
            encoder=args.encoder,
            first_position=0 if args.rotate else args.positions,
            tokenizer=tokenizer,
            progress=not args.json,
        )
    if args.json:
        print_json(dataclasses.asdict(report))
    else:
        print(
            f"{report.path}: {report.files} files ({report.kept} were there), "
            f"{report.tokens} tokens, {human_count(report.nbytes)}B"
        )
        for name, reason in report.refused:
            print(f"not exported: {printable(name)}: {printable(reason)}")
    return UNFINISHED if report.refused else 0

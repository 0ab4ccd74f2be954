"""`jaxrag ingest`: documents into a knowledge base."""

import argparse
import dataclasses
import sys
from pathlib import Path

from jaxrag.cli.options import add_command, add_json, add_model, human_count, load, print_json


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = add_command(
        commands,
        "ingest",
        "encode documents into a knowledge base, once",
        "jaxrag ingest docs/ notes.jsonl --kb kb --model models/llama",
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help=".txt, .md, .jsonl or a folder")
    parser.add_argument("--kb", required=True, metavar="DIR", help="made when missing")
    add_model(parser, required=True, text="Hugging Face or jaxrag checkpoint directory")
    parser.add_argument(
        "--encoder",
        action="append",
        metavar="NAME",
        help="isolated or after_prefix; may be repeated (isolated)",
    )
    parser.add_argument(
        "--template", metavar="NAME", help="turborag, block_attention, plain or a .toml file"
    )
    parser.add_argument("--chunk-tokens", type=int, metavar="N", help="largest chunk (512)")
    parser.add_argument("--overlap", type=int, metavar="N", help="tokens two chunks share (10)")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when everything was ingested, 3 when documents were left out."""
    from jaxrag.documents import read_paths
    from jaxrag.errors import DocumentError
    from jaxrag.knowledge_base import KnowledgeBase

    missing = [path for path in args.paths if not Path(path).exists()]
    if missing:
        raise DocumentError(f"{missing[0]}: no such file or folder")
    model = load(args, args.model, args.dtype)
    with KnowledgeBase.open(
        args.kb,
        model=model,
        template=args.template,
        chunk_tokens=args.chunk_tokens,
        overlap=args.overlap,
        encoders=args.encoder,
    ) as kb:
        report = kb.add(read_paths(args.paths), progress=not args.json)
    for bad in report.skipped:
        print(f"skipped {bad.source}: {bad.reason}", file=sys.stderr)
    if args.json:
        print_json({**dataclasses.asdict(report), "tokens_per_second": report.tokens_per_second})
    else:
        print(
            f"{report.documents} documents ({report.unchanged} unchanged, {report.replaced} "
            f"replaced), {report.chunks} chunks, {human_count(report.tokens)} tokens\n"
            f"encoded {report.encoded} chunks, reused {report.reused}; {report.seconds:.1f} s, "
            f"{human_count(report.tokens_per_second)} tokens/s"
        )
        if report.skipped:
            print(f"left out {len(report.skipped)}; see above")
    return 3 if report.skipped else 0

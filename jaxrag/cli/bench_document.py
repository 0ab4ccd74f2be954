"""`jaxrag bench document`: questions about a stored long document by new processes."""

import argparse

from jaxrag.cli.options import (
    add_command,
    add_json,
)
from jaxrag.cli.output import (
    give_out,
    require_folder,
)
from jaxrag.options import (
    parse_count,
)


def add_document(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the benchmark."""
    parser = add_command(
        kinds,
        "document",
        "questions about a document that is stored with attention indexes, each by a new process",
        "jaxrag bench document --text long.txt --tokens 32768 --out result.json",
    )
    parser.add_argument("--text", metavar="FILE", help="the document (invented words)")
    parser.add_argument(
        "--tokens", type=parse_count, default=32_768, metavar="N", help="of it at most (32768)"
    )
    parser.add_argument(
        "--attention-index",
        default="lists:exact_below=4096,probes=3",
        metavar="KIND",
        help="as of jaxrag ingest (lists:exact_below=4096,probes=3)",
    )
    parser.add_argument(
        "--chunk-tokens",
        type=parse_count,
        metavar="N",
        help="of its chunks, all retrieved (one chunk)",
    )
    parser.add_argument(
        "--kinds",
        metavar="KIND;...",
        help="how it is asked, such as 'retrieval, kv=host;dense' (all)",
    )
    parser.add_argument("--layers", type=int, default=4, metavar="L", help="of the model (4)")
    parser.add_argument(
        "--questions", type=int, default=3, metavar="N", help="after one that compiles (3)"
    )
    parser.add_argument("--max-new-tokens", type=parse_count, default=16, metavar="N", help="(16)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON result there")
    add_json(parser)
    parser.set_defaults(run=run_document)


def run_document(args: argparse.Namespace) -> None:
    """Print a table, or one JSON object."""
    from jaxrag.bench.document import Options, report, run

    require_folder(args.out)
    options = Options(
        text=args.text,
        tokens=args.tokens,
        chunk_tokens=args.chunk_tokens,
        **({} if args.kinds is None else {"kinds": tuple(args.kinds.split(";"))}),
        attention_index=args.attention_index,
        layers=args.layers,
        questions=args.questions,
        max_new_tokens=args.max_new_tokens,
        seed=args.seed,
    )
    result = run(options)
    give_out(args, result, report(result))

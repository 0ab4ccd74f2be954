"""`jaxrag ask`: a question to a knowledge base, or to documents given on the spot."""

import argparse
import sys
from pathlib import Path
from typing import Any

from jaxrag.cli.options import (
    add_command,
    add_json,
    add_model,
    human_count,
    load,
    open_kb,
    print_json,
    shorten,
    table,
)
from jaxrag.errors import DocumentError, RequestError


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = add_command(
        commands,
        "ask",
        "answer a question from cached chunks",
        'jaxrag ask "Who built the bridge?" --kb kb --method turborag --k 5',
    )
    parser.add_argument("question", help="the question, as text")
    parser.add_argument("--kb", metavar="DIR", help="knowledge base to retrieve from")
    parser.add_argument(
        "--documents", nargs="+", metavar="FILE", help="use these files as the chunks instead"
    )
    add_model(parser, required=False, text="the one that the knowledge base remembers")
    parser.add_argument(
        "--method",
        default="turborag",
        help="full_attention, full_reuse, turborag, turborag_composite, block_attention (turborag)",
    )
    parser.add_argument("--template", metavar="NAME", help="the knowledge base's own")
    parser.add_argument("--k", type=int, default=5, metavar="N", help="chunks to retrieve (5)")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="(64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (0)")
    parser.add_argument("--top-k", type=int, default=0, metavar="N", help="0 keeps all (0)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1 keeps all (1)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling (0)")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="ends the answer"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the answer as it grows, then its sources and its account; or one JSON object."""
    from jaxrag.generation import Result, generate
    from jaxrag.methods import method_named
    from jaxrag.sampling import Sampling

    method = method_named(args.method)
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    options: dict[str, Any] = {
        "documents": None if args.documents is None else [_read(path) for path in args.documents],
        "method": method,
        "template": args.template,
        "k": args.k,
        "max_new_tokens": args.max_new_tokens,
        "sampling": sampling,
        "stop": args.stop,
    }
    if args.kb is None:
        if args.model is None or args.documents is None:
            raise RequestError("pass --kb DIR, or --documents FILE... and --model DIR")
        options["model"] = load(args, args.model, args.dtype)
    else:
        options["kb"] = open_kb(args)
    try:
        if args.json:
            print_json(generate(args.question, **options).to_dict())
            return 0
        answer = generate(args.question, stream=True, **options)
        for piece in answer:
            sys.stdout.write(piece)
            sys.stdout.flush()
        print()
        assert isinstance(answer.result, Result)
        _print_account(answer.result)
    finally:
        if "kb" in options:
            options["kb"].close()
    return 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DocumentError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DocumentError(f"{path}: not readable as UTF-8 text ({error})") from None


def _print_account(result: Any) -> None:
    if result.sources:
        rows = [["source", "score", "text"]]
        for source in result.sources:
            score = "" if source.score is None else f"{source.score:.2f}"
            name = f"{source.document_id} #{source.chunk_index}"
            rows.append([shorten(name, 40), score, shorten(source.text, 60)])
        print("\n" + table(rows, right=(1,)))
    times = "  ".join(f"{name} {1000 * value:.1f} ms" for name, value in result.timings.items())
    counts = "  ".join(f"{name} {value}" for name, value in result.counts.items())
    print(f"\n{result.method}: {result.finish_reason}; {times}")
    print(f"chunk tokens: {counts}; {human_count(result.flops)}FLOP to the first token")
    for note in result.notes:
        print(f"note: {note}")

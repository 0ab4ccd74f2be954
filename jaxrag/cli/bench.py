"""`jaxrag bench`: measurements that anybody can repeat."""

import argparse
import json
from pathlib import Path

from jaxrag.cli.options import add_command, add_json, print_json
from jaxrag.errors import RequestError


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command and its benchmarks."""
    parser = add_command(commands, "bench", "measure", "jaxrag bench ttft --contexts 512,4096")
    kinds = parser.add_subparsers(title="benchmarks", metavar="NAME", required=True)
    ttft = add_command(
        kinds,
        "ttft",
        "time to first token: full prefill, cached chunks from pool and disk, a peer",
        "jaxrag bench ttft --peer transformers --peer-python PEER/bin/python --out result.json",
    )
    ttft.add_argument("--model", metavar="DIR", help="a random Llama of 100M parameters")
    ttft.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    ttft.add_argument("--contexts", default="512,1024,2048,4096,8192", metavar="N,N,...")
    ttft.add_argument("--question-tokens", type=int, default=50, metavar="N")
    ttft.add_argument("--method", default="full_reuse", help="a method that reuses (full_reuse)")
    ttft.add_argument("--repeats", type=int, default=5, metavar="N", help="after a warm-up (5)")
    ttft.add_argument("--peer", choices=("transformers",), help="measure this one beside ours")
    ttft.add_argument("--peer-python", metavar="PATH", help="interpreter that can import the peer")
    ttft.add_argument("--seed", type=int, default=0)
    ttft.add_argument("--out", metavar="FILE", help="also write the JSON result there")
    add_json(ttft)
    ttft.set_defaults(run=run_ttft)


def run_ttft(args: argparse.Namespace) -> None:
    """Print a table, or one JSON object."""
    from jaxrag.bench.ttft import Options, default_peer, report, run

    sizes = args.contexts.split(",")
    if not all(size.isdigit() for size in sizes):
        raise RequestError(f"--contexts {args.contexts!r}: expected integers such as 512,4096")
    if args.out and not Path(args.out).absolute().parent.is_dir():
        raise RequestError(f"--out {args.out}: its folder does not exist; make it first")
    if args.peer_python and not args.peer:
        raise RequestError("--peer-python without --peer; add --peer transformers")
    options = Options(
        model=args.model,
        dtype=args.dtype,
        contexts=tuple(map(int, sizes)),
        question_tokens=args.question_tokens,
        method=args.method,
        repeats=args.repeats,
        peer_python=(args.peer_python or default_peer()) if args.peer else None,
        seed=args.seed,
    )
    result = run(options)
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.json:
        print_json(result)
    else:
        print("\n".join(report(result)))

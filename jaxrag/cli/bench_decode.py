"""`jaxrag bench decode`: latency per generated token by context length and decode rule."""

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
    parse_counts,
)


def add_decode(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the benchmark."""
    parser = add_command(
        kinds,
        "decode",
        "latency per generated token by context length and decode rule, random weights",
        "jaxrag bench decode --contexts 4096,131072 --rules dense,retrieval --out result.json",
    )
    parser.add_argument(
        "--contexts",
        type=parse_counts,
        default="4096,16384,65536,131072",
        metavar="N,N,...",
        help="tokens in the cache (4096,16384,65536,131072)",
    )
    parser.add_argument(
        "--rules",
        default="dense,static_window,flat,ivf,retrieval,topn",
        metavar="RULE,...",
        help="decode rules; separated by semicolons where one has settings, as in "
        '"dense;topn:n=64" (dense,static_window,flat,ivf,retrieval,topn)',
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="of weights, activations and KV (float32)",
    )
    parser.add_argument(
        "--kv",
        choices=("device", "host"),
        help="where K and V are (where each rule is meant to have them)",
    )
    parser.add_argument("--layers", type=int, default=4, metavar="L", help="of the model (4)")
    parser.add_argument(
        "--question-tokens",
        type=parse_count,
        default=2048,
        metavar="N",
        help="run, not reused (2048)",
    )
    parser.add_argument(
        "--steps", type=int, default=16, metavar="N", help="tokens timed, and counted (16)"
    )
    parser.add_argument("--warm", type=int, default=3, metavar="N", help="tokens before them (3)")
    parser.add_argument(
        "--no-measure", action="store_true", help="leave recall and the share scanned out"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON result there")
    add_json(parser)
    parser.set_defaults(run=run_decode)


def run_decode(args: argparse.Namespace) -> None:
    """Print a table, or one JSON object."""
    from jaxrag.bench.decode import Options, report, rules_of, run

    require_folder(args.out)
    options = Options(
        contexts=args.contexts,
        rules=rules_of(args.rules),
        dtype=args.dtype,
        layers=args.layers,
        question_tokens=args.question_tokens,
        steps=args.steps,
        warm=args.warm,
        measure=not args.no_measure,
        kv=args.kv,
        seed=args.seed,
    )
    result = run(options)
    give_out(args, result, report(result))

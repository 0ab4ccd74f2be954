"""`jaxrag bench decode-throughput` and `jaxrag bench prefill`: beside peers on the same machine."""

import argparse
from typing import Any

from jaxrag.base.errors import RequestError
from jaxrag.base.options import parse_count, parse_counts
from jaxrag.cli.options import add_command, add_json
from jaxrag.cli.output import give_out, require_folder


def add_peer_benchmarks(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the two benchmarks."""
    decode = add_command(
        kinds,
        "decode-throughput",
        "tokens a second by batch and context, beside peers and the memory's bandwidth",
        "jaxrag bench decode-throughput --peer transformers --peer-python PEER/bin/python",
    )
    _add_model(decode)
    decode.add_argument(
        "--batch",
        type=parse_counts,
        default="1,4,8,32",
        metavar="N,...",
        help="rows that are decoded together (1,4,8,32)",
    )
    decode.add_argument(
        "--contexts",
        type=parse_counts,
        default="512,4k",
        metavar="N,...",
        help="tokens before the first that is generated (512,4k)",
    )
    decode.add_argument(
        "--tokens", type=parse_count, default=32, metavar="N", help="that every row generates (32)"
    )
    _add_rest(decode)
    decode.add_argument(
        "--llama-python", metavar="FILE", help="interpreter that imports llama_cpp and gguf"
    )
    decode.set_defaults(run=run_decode_throughput)
    prefill = add_command(
        kinds,
        "prefill",
        "time of a full prefill by context, beside a peer's and a matrix product",
        "jaxrag bench prefill --peer transformers --peer-python PEER/bin/python",
    )
    _add_model(prefill)
    prefill.add_argument(
        "--contexts",
        type=parse_counts,
        default="512,1k,2k,4k,8k",
        metavar="N,...",
        help="tokens of the prompt (512,1k,2k,4k,8k)",
    )
    _add_rest(prefill)
    prefill.set_defaults(run=run_prefill)


def run_decode_throughput(args: argparse.Namespace) -> None:
    """Print a table, or one JSON object."""
    from jaxrag.measure.bench.decode_throughput import Options, report, run

    require_folder(args.out)
    options = Options(
        **_common(args),
        batches=args.batch,
        contexts=args.contexts,
        tokens=args.tokens,
        llama_python=args.llama_python,
    )
    result = run(options, args.out, args.resume)
    give_out(args, result, report(result))


def run_prefill(args: argparse.Namespace) -> None:
    """Print a table, or one JSON object."""
    from jaxrag.measure.bench.prefill import Options, report, run

    require_folder(args.out)
    options = Options(**_common(args), contexts=args.contexts)
    result = run(options, args.out, args.resume)
    give_out(args, result, report(result))


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="MODEL", help="(a random Llama of 300M parameters)")
    parser.add_argument(
        "--dtype",
        default="float32,bfloat16",
        metavar="DTYPE,...",
        help="of weights, activations and KV (float32,bfloat16)",
    )


def _add_rest(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="after a warm-up (5)")
    parser.add_argument("--peer", choices=("transformers",), help="measure this one beside ours")
    parser.add_argument("--peer-python", metavar="FILE", help="interpreter that imports the peer")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn (0)")
    parser.add_argument(
        "--out", metavar="FILE", help="also write the JSON result there, row by row"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="measure only the rows that the file of --out does not hold yet",
    )
    add_json(parser)


def _common(args: argparse.Namespace) -> dict[str, Any]:
    """What both benchmarks are told alike."""
    from jaxrag.measure.bench.ttft import default_peer

    if args.peer_python and not args.peer:
        raise RequestError("--peer-python without --peer; add --peer transformers")
    return {
        "model": args.model,
        "dtypes": tuple(args.dtype.split(",")),
        "repeats": args.repeats,
        "peer_python": (args.peer_python or default_peer()) if args.peer else None,
        "seed": args.seed,
    }

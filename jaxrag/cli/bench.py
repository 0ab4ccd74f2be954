"""`jaxrag bench`: measurements that anybody can repeat."""

import argparse
import importlib
import shlex
from collections.abc import Sequence
from typing import Any

from jaxrag.cli.bench_serve import add_serve
from jaxrag.cli.fields import add_fields, from_fields
from jaxrag.cli.options import add_command, add_earlier_name, add_peer, add_result, peer_of
from jaxrag.cli.output import give_out, require_folder
from jaxrag.measure.bench.options import (
    DecodeOptions,
    IngestOptions,
    StoreOptions,
    TtftOptions,
    rules_of,
)

# What a checkout measures; no wheel has these scripts. They take the options of the command.
IN_A_CHECKOUT = {
    "decode-throughput": "decode_throughput.py",
    "document": "document.py",
    "explain": "explain.py",
    "prefill": "prefill.py",
    "train-step": "train_step.py",
}


class InACheckout(argparse.ArgumentParser):
    """Of a benchmark that is a script now: it says which, and takes nothing."""

    def __init__(self, prog: str, script: str) -> None:
        super().__init__(prog=prog, add_help=False)
        self._script = script

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """End the program with the command to type."""
        command = shlex.join(["python", f"benchmarks/{self._script}", *(args or ())])
        self.exit(2, f"{self.prog}: error: no part of the package; in a checkout: {command}\n")


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command and its benchmarks."""
    parser = add_command(commands, "bench", "measure", "jaxrag bench ttft --contexts 512,4096")
    kinds = parser.add_subparsers(title="benchmarks", metavar="NAME", required=True)
    ttft = _add(
        kinds,
        "ttft",
        TtftOptions,
        "time to first token: full prefill, cached chunks from pool and disk, a peer, batches",
        "--peer transformers --peer-python PEER/bin/python --out result.json",
    )
    add_earlier_name(ttft, "--ratios", "ratios")
    add_peer(ttft)
    store = _add(
        kinds,
        "store",
        StoreOptions,
        "throughput of the chunk store beside memcpy, plain reads, safetensors and zarr-python",
        "--chunks 8 --layers 32 --chunk-tokens 512 --out result.json",
    )
    add_earlier_name(store, "--rounds", "rounds")
    add_earlier_name(store, "--tokens", "tokens")
    _add(
        kinds,
        "ingest",
        IngestOptions,
        "throughput of ingest beside a plain forward pass of the same tokens",
        "--tokens 16384 --out benchmarks/results/ingest.json",
    )
    decode = _add(
        kinds,
        "decode",
        DecodeOptions,
        "latency per generated token by context length and decode rule, random weights",
        "--contexts 4k,128k --decode dense --decode retrieval",
    )
    add_earlier_name(decode, "--rules", "rules", type=rules_of)
    add_serve(kinds)
    for name, script in IN_A_CHECKOUT.items():
        kinds.choices[name] = InACheckout(f"{parser.prog} {name}", script)


def _add(
    kinds: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    options: type,
    summary: str,
    example: str,
) -> argparse.ArgumentParser:
    """Register the benchmark that the module of that name measures."""
    parser = add_command(kinds, name, summary, f"jaxrag bench {name} {example}")
    add_fields(parser, options)
    add_result(parser)
    parser.set_defaults(run=run, benchmark=name, options=options)
    return parser


def run(args: argparse.Namespace) -> None:
    """Print a table, or one JSON object."""
    module = importlib.import_module(f"jaxrag.measure.bench.{args.benchmark}")
    require_folder(args.out)
    peer = {"peer_python": peer_of(args)} if "peer_python" in args else {}
    result = module.run(from_fields(args.options, args, **peer))
    give_out(args, result, module.report(result))

"""`jaxrag bench`: measurements that anybody can repeat."""

import argparse

from jaxrag.cli.bench_serve import add_serve
from jaxrag.cli.fields import add_fields, from_fields
from jaxrag.cli.options import add_command, add_peer, add_result, peer_of
from jaxrag.cli.output import give_out, require_folder
from jaxrag.measure.bench.options import TimelineOptions, TtftOptions


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
    add_fields(ttft, TtftOptions)
    add_result(ttft)
    add_peer(ttft)
    ttft.set_defaults(run=run)
    timeline = add_command(
        kinds,
        "timeline",
        "one request from text to first byte, phase by phase: chunks in the pool, and in the store",
        "jaxrag bench timeline --requests 20 --out timeline.json",
    )
    add_fields(timeline, TimelineOptions)
    add_result(timeline)
    timeline.set_defaults(run=run_timeline)
    add_serve(kinds)


def run(args: argparse.Namespace) -> None:
    """Print a table, or one JSON object."""
    from jaxrag.measure.bench.ttft import report, run

    require_folder(args.out)
    result = run(from_fields(TtftOptions, args, peer_python=peer_of(args)))
    give_out(args, result, report(result))


def run_timeline(args: argparse.Namespace) -> None:
    """Print a table, or one JSON object."""
    from jaxrag.measure.bench.timeline import report, run

    require_folder(args.out)
    result = run(from_fields(TimelineOptions, args))
    give_out(args, result, report(result))

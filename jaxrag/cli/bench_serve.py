"""`jaxrag bench serve`: requests that come at given rates, for several settings and a peer."""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrag.base.errors import RequestError
from jaxrag.base.options import parse_bytes
from jaxrag.cli.fields import add_fields, from_fields
from jaxrag.cli.options import add_command, add_earlier_name, add_result
from jaxrag.cli.output import give_out, require_folders
from jaxrag.measure.bench.options import ServeOptions, TrafficOptions

if TYPE_CHECKING:
    from jaxrag.measure.bench.serve import Bench


def add_serve(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the benchmark."""
    parser = add_command(
        kinds,
        "serve",
        "serving under load: arrivals at a rate, static or continuous, loads inline or "
        "asynchronous, reuse or full attention, a peer over HTTP",
        "jaxrag bench serve --link 40MB/s --peer-python PEER/bin/python --out result.json",
    )
    add_arguments(parser)
    parser.set_defaults(run=run_serve)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the benchmark."""
    add_fields(parser, ServeOptions)
    add_earlier_name(parser, "--peer", "peer")
    add_fields(parser, TrafficOptions)
    add_earlier_name(parser, "--documents", "documents")
    add_earlier_name(parser, "--question", "question")
    add_earlier_name(parser, "--answers", "answers")
    parser.add_argument(
        "--arms",
        default="static;inline;asynchronous;full",
        metavar="ARM;...",
        help="of static, static_full, inline, asynchronous, full, fusionrag, fusionrag_inline; "
        "settings follow a colon, as in asynchronous:engine.load_threads=4,method=cacheblend "
        "(static;inline;asynchronous;full)",
    )
    parser.add_argument(
        "--engine",
        default="",
        metavar="NAME=VALUE,...",
        help="settings of the engine under all arms, such as load_threads=4 (its defaults)",
    )
    parser.add_argument(
        "--rates", default="2,4", metavar="N,N,...", help="requests a second; inf: at once (2,4)"
    )
    parser.add_argument(
        "--link", metavar="BYTES/s", help="speed of the store, such as 40MB/s (what it is)"
    )
    parser.add_argument(
        "--first-within", type=float, default=1.0, metavar="S", help="of a good request (1.0)"
    )
    parser.add_argument(
        "--per-token-within", type=float, default=0.1, metavar="S", help="of a good one (0.1)"
    )
    add_result(parser, markdown=True)
    parser.add_argument("--plot", metavar="FILE", help="also draw first-token times there")
    parser.add_argument("--fusionrag", action=_InAScript, nargs=0, help=argparse.SUPPRESS)


class _InAScript(argparse.Action):
    """Refuses what a script measures."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> None:
        """End the program."""
        parser.error("--fusionrag: in a checkout, python benchmarks/fusionrag.py measures that")


def run_serve(
    args: argparse.Namespace,
    also: "Callable[[Bench], dict[str, Any]] | None" = None,
    beside: "Callable[[dict[str, Any]], Iterable[str]]" = lambda result: (),
) -> None:
    """Print a table, or one JSON object.

    Args:
      args: as parsed.
      also: what else is measured for the result.
      beside: what else is said of the result.
    """
    from jaxrag.measure.bench.serve import Options, run
    from jaxrag.measure.bench.serve_arms import arms_of
    from jaxrag.measure.bench.serve_records import Slo
    from jaxrag.measure.bench.serve_report import draw, markdown, report
    from jaxrag.measure.bench.serve_workload import Traffic
    from jaxrag.measure.evals.plots import check_picture
    from jaxrag.models.compiled import keep_compiled

    require_folders(args, "out", "markdown", "plot")
    if args.plot:
        check_picture(Path(args.plot))
    options = from_fields(
        Options,
        args,
        traffic=from_fields(Traffic, args),
        arms=arms_of(args.arms, args.engine),
        rates=rates_of(args.rates),
        link=None if args.link is None else link_of(args.link),
        slo=Slo(first=args.first_within, per_token=args.per_token_within),
    )
    keep_compiled()
    result = run(options, also)
    if args.plot:
        draw(result, Path(args.plot))
    more = list(beside(result))
    give_out(args, result, [*report(result), *more], lambda found: markdown(found, *more))


def rates_of(text: str) -> tuple[float, ...]:
    """Requests a second such as 2,4 or inf; RequestError for what is no number above 0."""
    try:
        rates = tuple(map(float, text.split(",")))
    except ValueError:
        rates = ()
    if not rates or not all(rate > 0 for rate in rates):
        raise RequestError(f"--rates {text!r}: expected numbers above 0 such as 2,4, or inf")
    return rates


def link_of(text: str) -> float:
    """Bytes a second of a text such as 40MB/s; RequestError for others."""
    size, found, unit = text.partition("/")
    try:
        if (found, unit) == ("/", "s") and (number := parse_bytes(size)) > 0:
            return float(number)
    except argparse.ArgumentTypeError:
        pass
    raise RequestError(f"--link {text!r}: expected a speed such as 40MB/s")

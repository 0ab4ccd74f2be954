"""`jaxrag bench serve`: requests that come at given rates, for several settings and a peer."""

import argparse
import dataclasses
from pathlib import Path

from jaxrag.cli.options import (
    add_command,
    add_json,
)
from jaxrag.cli.output import (
    give_out,
    require_folder,
)
from jaxrag.errors import RequestError
from jaxrag.options import (
    parse_bytes,
)


def add_serve(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the benchmark."""
    parser = add_command(
        kinds,
        "serve",
        "serving under load: arrivals at a rate, static or continuous, loads inline or "
        "asynchronous, reuse or full attention, a peer over HTTP",
        "jaxrag bench serve --link 40MB/s --peer-python PEER/bin/python --out result.json",
    )
    parser.add_argument("--model", metavar="DIR", help="(a random Llama of 6 layers, width 256)")
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
    _add(parser, "requests", 60, "at every rate")
    _add(parser, "documents", 160, "of one chunk each")
    _add(parser, "chunk-tokens", 256, "of each")
    _add(parser, "chunks", 4, "of a request")
    _add(parser, "question", 24, "tokens of it")
    parser.add_argument(
        "--answers",
        default="8,8,8,8,16,16,16,32,32,64",
        metavar="N,N,...",
        help="lengths, all equally likely (8,8,8,8,16,16,16,32,32,64)",
    )
    parser.add_argument("--zipf", type=float, default=1.0, metavar="S", help="exponent (1.0)")
    _add(parser, "topics", 8, "that the chunks of a request mostly share")
    _add(parser, "tenants", 4, "that requests are of")
    _add(parser, "rows", 8, "that decode together")
    parser.add_argument(
        "--unwatched",
        action="store_true",
        help="nobody reads tokens as they come: the engine may run several at once",
    )
    _add(parser, "pool-chunks", 64, "that the page pool holds")
    parser.add_argument(
        "--link", metavar="BYTES/s", help="speed of the store, such as 40MB/s (what it is)"
    )
    parser.add_argument(
        "--first-within", type=float, default=1.0, metavar="S", help="of a good request (1.0)"
    )
    parser.add_argument(
        "--per-token-within", type=float, default=0.1, metavar="S", help="of a good one (0.1)"
    )
    parser.add_argument(
        "--highest-rate", action="store_true", help="also the highest rate with 95 %% good, by arm"
    )
    parser.add_argument(
        "--fusionrag", action="store_true", help="also FusionRAG's figures 11 and 15 in miniature"
    )
    parser.add_argument(
        "--http", action="store_true", help="also `jaxrag serve`, and the same engine beside it"
    )
    parser.add_argument("--peer", metavar="URL", help="a server that answers /v1/completions")
    parser.add_argument(
        "--peer-python", metavar="PATH", help="interpreter with vLLM, started on the same weights"
    )
    parser.add_argument("--folder", metavar="DIR", help="where the store goes (temporary files)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON result there")
    parser.add_argument("--markdown", metavar="FILE", help="also write the table there")
    parser.add_argument("--plot", metavar="FILE", help="also draw first-token times there")
    add_json(parser)
    parser.set_defaults(run=run_serve)


def run_serve(args: argparse.Namespace) -> None:
    """Print a table, or one JSON object."""
    from jaxrag.bench.serve import Options, run
    from jaxrag.bench.serve_arms import arms_of
    from jaxrag.bench.serve_records import Slo
    from jaxrag.bench.serve_report import draw, markdown, report
    from jaxrag.bench.serve_workload import Traffic
    from jaxrag.evals.plots import check_picture
    from jaxrag.models.compiled import keep_compiled

    for option in ("out", "markdown", "plot"):
        require_folder(getattr(args, option), f"--{option}")
    if args.plot:
        check_picture(Path(args.plot))
    answers = args.answers.split(",")
    if not all(it.isdigit() for it in answers):
        raise RequestError(f"--answers {args.answers!r}: expected integers such as 8,16,64")
    names = [field.name for field in dataclasses.fields(Traffic) if hasattr(args, field.name)]
    given = {name: getattr(args, name) for name in names}
    options = Options(
        model=args.model,
        traffic=Traffic(**{**given, "answers": tuple(map(int, answers))}),
        arms=arms_of(args.arms, args.engine),
        rates=rates_of(args.rates),
        rows=args.rows,
        watched=not args.unwatched,
        pool_chunks=args.pool_chunks,
        link=None if args.link is None else link_of(args.link),
        slo=Slo(first=args.first_within, per_token=args.per_token_within),
        highest_rate=args.highest_rate,
        fusionrag=args.fusionrag,
        http=args.http,
        peer=args.peer,
        peer_python=args.peer_python,
        folder=args.folder,
    )
    keep_compiled()
    result = run(options)
    if args.plot:
        draw(result, Path(args.plot))
    give_out(args, result, report(result), markdown)


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


def _add(parser: argparse.ArgumentParser, name: str, default: int, text: str) -> None:
    parser.add_argument(
        f"--{name}", type=int, default=default, metavar="N", help=f"{text} ({default})"
    )

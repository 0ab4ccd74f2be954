"""`jaxrag bench`: measurements that anybody can repeat."""

from jaxrag.cli.bench_serve import SERVE
from jaxrag.cli.command import SUMMARIES, Args, command, fields, from_fields, group
from jaxrag.cli.options import PEER, peer_of, result_options
from jaxrag.cli.output import give_out, require_folder
from jaxrag.measure.bench.options import TtftOptions


def run(args: Args) -> None:
    """Print a table, or one JSON object."""
    from jaxrag.measure.bench.ttft import report, run

    require_folder(args.out)
    result = run(from_fields(TtftOptions, args, peer_python=peer_of(args)))
    give_out(args, result, report(result))


COMMAND = group(
    "bench",
    SUMMARIES["bench"],
    "jaxrag bench ttft --contexts 512,4096",
    command(
        "ttft",
        run,
        "time to first token: full prefill, cached chunks from pool and disk, a peer",
        "jaxrag bench ttft --peer transformers --peer-python PEER/bin/python --out result.json",
        fields(TtftOptions),
        result_options(),
        PEER,
    ),
    SERVE,
)

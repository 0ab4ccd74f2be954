"""`jaxrag bench serve`: requests that come at given rates, for several settings and a peer."""

from jaxrag.cli.command import Args, command, fields, from_fields
from jaxrag.cli.options import result_options
from jaxrag.cli.output import give_out, require_folder
from jaxrag.measure.bench.options import ServeOptions, Slo, Traffic


def run_serve(args: Args) -> None:
    """Print a table, or one JSON object."""
    from jaxrag.measure.bench.serve import run
    from jaxrag.measure.bench.serve_report import report
    from jaxrag.models.compiled import keep_compiled

    require_folder(args.out)
    options = from_fields(
        ServeOptions, args, traffic=from_fields(Traffic, args), slo=from_fields(Slo, args)
    )
    keep_compiled()
    result = run(options)
    give_out(args, result, report(result))


SERVE = command(
    "serve",
    run_serve,
    "serving under load: arrivals at a rate, static or continuous, loads inline or "
    "asynchronous, reuse or full attention, a peer over HTTP",
    "jaxrag bench serve --link 40MB/s --peer-python PEER/bin/python --out result.json",
    *(fields(options) for options in (ServeOptions, Traffic, Slo)),
    result_options(),
    basic="model rows rates arms link requests num-documents chunk-tokens peer-url "
    "peer-python out json",
)

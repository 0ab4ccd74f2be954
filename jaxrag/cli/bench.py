"""`jaxrag bench`: measurements that anybody can repeat."""

import argparse
from pathlib import Path

from jaxrag.cli.bench_decode import add_decode
from jaxrag.cli.bench_document import add_document
from jaxrag.cli.bench_peer import add_peer_benchmarks
from jaxrag.cli.bench_serve import add_serve
from jaxrag.cli.fields import add_fields, from_fields
from jaxrag.cli.opening import open_kb, where_of
from jaxrag.cli.options import (
    add_command,
    add_earlier_name,
    add_found,
    add_json,
    add_model,
    add_peer,
    add_result,
    add_secret,
    peer_of,
)
from jaxrag.cli.output import give_out, require_folder
from jaxrag.measure.bench.options import IngestOptions, StoreOptions, TrainStepOptions, TtftOptions


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command and its benchmarks."""
    parser = add_command(commands, "bench", "measure", "jaxrag bench ttft --contexts 512,4096")
    kinds = parser.add_subparsers(title="benchmarks", metavar="NAME", required=True)
    ttft = add_command(
        kinds,
        "ttft",
        "time to first token: full prefill, cached chunks from pool and disk, a peer, batches",
        "jaxrag bench ttft --peer transformers --peer-python PEER/bin/python --out result.json",
    )
    add_fields(ttft, TtftOptions)
    add_earlier_name(ttft, "--ratios", "ratios")
    add_peer(ttft)
    add_result(ttft)
    ttft.set_defaults(run=run_ttft)
    store = add_command(
        kinds,
        "store",
        "throughput of the chunk store beside memcpy, plain reads, safetensors and zarr-python",
        "jaxrag bench store --chunks 8 --layers 32 --chunk-tokens 512 --out result.json",
    )
    add_fields(store, StoreOptions)
    add_earlier_name(store, "--rounds", "rounds")
    add_earlier_name(store, "--tokens", "tokens")
    add_result(store)
    store.set_defaults(run=run_store)
    ingest = add_command(
        kinds,
        "ingest",
        "throughput of ingest beside a plain forward pass of the same tokens",
        "jaxrag bench ingest --tokens 16384 --out benchmarks/results/ingest.json",
    )
    add_fields(ingest, IngestOptions)
    add_result(ingest)
    ingest.set_defaults(run=run_ingest)
    explain = add_command(
        kinds,
        "explain",
        "pictures of one prompt: KV deviation, tokens that selectors choose, question attention",
        'jaxrag bench explain --kb kb --question "Who built the bridge?" --out pictures',
    )
    explain.add_argument("--kb", required=True, metavar="DIR", help="where chunks come from")
    add_secret(explain)
    explain.add_argument("--question", required=True, metavar="TEXT", help="the question, as text")
    add_model(explain)
    explain.add_argument(
        "--method",
        default="fusionrag",
        metavar="NAME",
        help="whose stored KV is looked at (fusionrag)",
    )
    explain.add_argument(
        "--recompute-ratio",
        type=float,
        metavar="R",
        help="share of the chunk tokens that selectors choose (the method's own, or 0.15)",
    )
    explain.add_argument(
        "--template", metavar="NAME", help="a template's name or .toml file (that of --kb)"
    )
    add_found(explain)
    explain.add_argument(
        "--out", required=True, metavar="DIR", help="folder for the pictures and explain.json"
    )
    add_json(explain)
    explain.set_defaults(run=run_explain)
    train = add_command(
        kinds,
        "train-step",
        "time of a training step, full and block, beside a peer; growth with packed chunks",
        "jaxrag bench train-step --peer transformers --peer-python PEER/bin/python",
    )
    add_fields(train, TrainStepOptions)
    add_peer(train)
    add_result(train)
    train.set_defaults(run=run_train_step)
    add_decode(kinds)
    add_peer_benchmarks(kinds)
    add_document(kinds)
    add_serve(kinds)


def run_ttft(args: argparse.Namespace) -> None:
    """Print a table, or one JSON object."""
    from jaxrag.measure.bench.ttft import Options, report, run

    require_folder(args.out)
    options = from_fields(Options, args, peer_python=peer_of(args))
    result = run(options)
    give_out(args, result, report(result))


def run_store(args: argparse.Namespace) -> None:
    """Print a table, or one JSON object."""
    from jaxrag.measure.bench.store import Options, report, run

    require_folder(args.out)
    options = from_fields(Options, args)
    result = run(options)
    give_out(args, result, report(result))


def run_train_step(args: argparse.Namespace) -> None:
    """Print two tables, or one JSON object."""
    from jaxrag.measure.bench.train_step import Options, report, run

    require_folder(args.out)
    options = from_fields(Options, args, peer_python=peer_of(args))
    result = run(options)
    give_out(args, result, report(result))


def run_ingest(args: argparse.Namespace) -> None:
    """Print a table, or one JSON object."""
    from jaxrag.measure.bench.ingest import Options, report, run

    require_folder(args.out)
    options = from_fields(Options, args)
    result = run(options)
    give_out(args, result, report(result))


def run_explain(args: argparse.Namespace) -> None:
    """Write the pictures and the numbers; print a summary, or one JSON object."""
    from jaxrag.measure.bench.explain import explain, method_to_explain, report
    from jaxrag.measure.bench.explain_plots import check_folder, draw
    from jaxrag.serve.ask import Ask
    from jaxrag.serve.questions import prepare, resolve

    folder, where = Path(args.out), where_of(args)
    method = method_to_explain(args.method, args.recompute_ratio)
    check_folder(folder)
    with open_kb(args) as kb:
        settings = resolve(
            Ask(method=method, template=args.template, k=args.k, max_new_tokens=1, where=where),
            kb=kb,
        )
        question = prepare(settings, args.question)
        result = {"question": args.question, **explain(settings, question)}
    pictures = draw(result, folder)
    args.out = folder / "explain.json"
    give_out(args, result, [*report(result), "", *[f"wrote {path}" for path in pictures]])

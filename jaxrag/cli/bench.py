"""`jaxrag bench`: measurements that anybody can repeat."""

import argparse
from pathlib import Path

from jaxrag.cli.bench_decode import add_decode
from jaxrag.cli.bench_document import add_document
from jaxrag.cli.bench_peer import add_peer_benchmarks
from jaxrag.cli.bench_serve import add_serve
from jaxrag.cli.opening import (
    open_kb,
    where_of,
)
from jaxrag.cli.options import (
    add_command,
    add_earlier_name,
    add_found,
    add_json,
    add_model,
    add_secret,
)
from jaxrag.cli.output import (
    give_out,
    require_folder,
)
from jaxrag.errors import RequestError
from jaxrag.options import (
    parse_count,
    parse_counts,
)


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
    ttft.add_argument("--model", metavar="DIR", help="(a random Llama of 100M parameters)")
    _add_dtype(ttft)
    ttft.add_argument(
        "--contexts",
        type=parse_counts,
        default="512,1024,2048,4096,8192",
        metavar="N,N,...",
        help="tokens of all chunks, multiples of 512 (512,1024,2048,4096,8192)",
    )
    ttft.add_argument("--question-tokens", type=parse_count, default=50, metavar="N", help="(50)")
    ttft.add_argument("--method", default="full_reuse", help="a method that reuses (full_reuse)")
    ttft.add_argument(
        "--recompute-ratios",
        metavar="R,R,...",
        help="recompute ratios such as 0,0.05,0.15,0.30,1.0, of a method that recomputes (its own)",
    )
    add_earlier_name(ttft, "--ratios", "recompute_ratios")
    ttft.add_argument(
        "--repeats",
        default="5",
        metavar="N[,N,...]",
        help="after a warm-up, for all contexts or for each (5)",
    )
    ttft.add_argument(
        "--batch",
        metavar="N,N,...",
        help="also batches of so many requests at one moment, such as 1,2,4,8 (none)",
    )
    ttft.add_argument(
        "--batch-context",
        type=parse_count,
        default=4096,
        metavar="N",
        help="of each request (4096)",
    )
    ttft.add_argument(
        "--batch-repeats", type=int, default=3, metavar="N", help="after a warm-up (3)"
    )
    ttft.add_argument("--peer", choices=("transformers",), help="measure this one beside ours")
    ttft.add_argument("--peer-python", metavar="PATH", help="interpreter that can import the peer")
    ttft.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    ttft.add_argument("--out", metavar="FILE", help="also write the JSON result there")
    add_json(ttft)
    ttft.set_defaults(run=run_ttft)
    store = add_command(
        kinds,
        "store",
        "throughput of the chunk store beside memcpy, plain reads, safetensors and zarr-python",
        "jaxrag bench store --chunks 8 --layers 32 --tokens 512 --out result.json",
    )
    store.add_argument("--chunks", type=int, default=8, metavar="N", help="of one request (8)")
    store.add_argument("--layers", type=int, default=32, metavar="L", help="(32)")
    store.add_argument(
        "--tokens", type=parse_count, default=512, metavar="T", help="of a chunk (512)"
    )
    store.add_argument("--kv-heads", type=int, default=8, metavar="K", help="(8)")
    store.add_argument("--head-dim", type=int, default=128, metavar="H", help="(128)")
    store.add_argument("--rounds", type=int, default=7, metavar="N", help="after a warm-up (7)")
    store.add_argument("--no-cold", action="store_true", help="leave out reads from the disk")
    store.add_argument("--folder", metavar="DIR", help="a disk to measure (temporary files)")
    store.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    store.add_argument("--out", metavar="FILE", help="also write the JSON result there")
    add_json(store)
    store.set_defaults(run=run_store)
    ingest = add_command(
        kinds,
        "ingest",
        "throughput of ingest beside a plain forward pass of the same tokens",
        "jaxrag bench ingest --tokens 16384 --out benchmarks/results/ingest.json",
    )
    ingest.add_argument("--model", metavar="DIR", help="(a random Llama of 100M parameters)")
    _add_dtype(ingest)
    ingest.add_argument("--tokens", type=parse_count, default=16_384, metavar="N", help="(16384)")
    ingest.add_argument("--chunk-tokens", type=parse_count, default=512, metavar="N", help="(512)")
    ingest.add_argument("--repeats", type=int, default=5, metavar="N", help="after a warm-up (5)")
    ingest.add_argument("--folder", metavar="DIR", help="a disk to measure (temporary files)")
    ingest.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    ingest.add_argument("--out", metavar="FILE", help="also write the JSON result there")
    ingest.add_argument(
        "--encoder",
        choices=("isolated", "neighbours", "neighbours_joint"),
        default="isolated",
        help="also encode every chunk behind similar ones (isolated)",
    )
    ingest.add_argument("--neighbours", type=int, default=10, metavar="N", help="how many (10)")
    add_json(ingest)
    ingest.set_defaults(run=run_ingest)
    explain = add_command(
        kinds,
        "explain",
        "pictures of one prompt: KV deviation, tokens that selectors choose, question attention",
        'jaxrag bench explain --kb kb --question "Who built the bridge?" --out pictures',
    )
    explain.add_argument("--kb", required=True, metavar="DIR", help="where chunks come from")
    add_secret(explain)
    explain.add_argument("--question", required=True, metavar="Q", help="the question, as text")
    add_model(explain)
    explain.add_argument(
        "--method", default="fusionrag", help="whose stored KV is looked at (fusionrag)"
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
    train.add_argument("--models", default="0.8M,15M", metavar="NAME,...", help="(0.8M,15M)")
    train.add_argument("--rows", type=int, default=8, metavar="B", help="of a step (8)")
    train.add_argument("--row-tokens", type=parse_count, default=512, metavar="T", help="(512)")
    train.add_argument("--repeats", type=int, default=5, metavar="N", help="after a warm-up (5)")
    train.add_argument(
        "--growth", default="8,16,32,64,128", metavar="N,...", help="chunks of a row; '' for none"
    )
    train.add_argument("--peer", choices=("transformers",), help="measure this one beside ours")
    train.add_argument("--peer-python", metavar="PATH", help="interpreter that imports the peer")
    train.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    train.add_argument("--out", metavar="FILE", help="also write the JSON result there")
    add_json(train)
    train.set_defaults(run=run_train_step)
    add_decode(kinds)
    add_peer_benchmarks(kinds)
    add_document(kinds)
    add_serve(kinds)


def run_ttft(args: argparse.Namespace) -> None:
    """Print a table, or one JSON object."""
    from jaxrag.bench.ttft import Options, default_peer, report, run

    require_folder(args.out)
    if args.peer_python and not args.peer:
        raise RequestError("--peer-python without --peer; add --peer transformers")
    options = Options(
        model=args.model,
        dtype=args.dtype,
        contexts=args.contexts,
        question_tokens=args.question_tokens,
        method=args.method,
        ratios=_numbers("--recompute-ratios", args.recompute_ratios),
        repeats=_integers("--repeats", args.repeats, "5 or 5,1"),
        batches=_integers("--batch", args.batch, "1,2,4,8"),
        batch_context=args.batch_context,
        batch_repeats=args.batch_repeats,
        peer_python=(args.peer_python or default_peer()) if args.peer else None,
        seed=args.seed,
    )
    result = run(options)
    give_out(args, result, report(result))


def run_store(args: argparse.Namespace) -> None:
    """Print a table, or one JSON object."""
    from jaxrag.bench.store import Options, report, run

    require_folder(args.out)
    options = Options(
        chunks=args.chunks,
        layers=args.layers,
        tokens=args.tokens,
        kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        rounds=args.rounds,
        cold=not args.no_cold,
        folder=args.folder,
        seed=args.seed,
    )
    result = run(options)
    give_out(args, result, report(result))


def run_train_step(args: argparse.Namespace) -> None:
    """Print two tables, or one JSON object."""
    from jaxrag.bench.train_step import Options, report, run
    from jaxrag.bench.ttft import default_peer

    require_folder(args.out)
    if args.peer_python and not args.peer:
        raise RequestError("--peer-python without --peer; add --peer transformers")
    sizes = [size for size in args.growth.split(",") if size]
    if not all(size.isdigit() for size in sizes):
        raise RequestError(f"--growth {args.growth!r}: expected integers such as 8,16,32")
    options = Options(
        models=tuple(args.models.split(",")),
        rows=args.rows,
        row_tokens=args.row_tokens,
        repeats=args.repeats,
        growth=tuple(map(int, sizes)),
        peer_python=(args.peer_python or default_peer()) if args.peer else None,
        seed=args.seed,
    )
    result = run(options)
    give_out(args, result, report(result))


def run_ingest(args: argparse.Namespace) -> None:
    """Print a table, or one JSON object."""
    from jaxrag.bench.ingest import Options, report, run

    require_folder(args.out)
    options = Options(
        model=args.model,
        dtype=args.dtype,
        tokens=args.tokens,
        chunk_tokens=args.chunk_tokens,
        repeats=args.repeats,
        folder=args.folder,
        seed=args.seed,
        encoder=args.encoder,
        neighbours=args.neighbours,
    )
    result = run(options)
    give_out(args, result, report(result))


def run_explain(args: argparse.Namespace) -> None:
    """Write the pictures and the numbers; print a summary, or one JSON object."""
    from jaxrag.bench.explain import explain, method_to_explain, report
    from jaxrag.bench.explain_plots import check_folder, draw
    from jaxrag.engine.sampling import SamplingParams
    from jaxrag.serve.questions import prepare, resolve

    folder, where = Path(args.out), where_of(args)
    method = method_to_explain(args.method, args.recompute_ratio)
    check_folder(folder)
    with open_kb(args) as kb:
        settings = resolve(
            kb=kb, model=None, method=method, template=args.template, k=args.k,
            max_new_tokens=1, stop=(), where=where,
        )  # fmt: skip
        question = prepare(settings, args.question, None, SamplingParams())
        result = {"question": args.question, **explain(settings, question)}
    pictures = draw(result, folder)
    args.out = folder / "explain.json"
    give_out(args, result, [*report(result), "", *[f"wrote {path}" for path in pictures]])


def _add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="of weights, activations and KV (float32)",
    )


def _numbers(option: str, text: str | None) -> tuple[float, ...]:
    """The numbers of an option such as --recompute-ratios 0,0.15; none where it is left out."""
    try:
        return () if text is None else tuple(map(float, text.split(",")))
    except ValueError:
        raise RequestError(f"{option} {text!r}: expected numbers such as 0,0.15,1.0") from None


def _integers(option: str, text: str | None, such_as: str) -> tuple[int, ...]:
    """The integers of an option; none where it is left out."""
    sizes = [] if text is None else text.split(",")
    if not all(size.isdigit() for size in sizes):
        raise RequestError(f"{option} {text!r}: expected integers such as {such_as}")
    return tuple(map(int, sizes))

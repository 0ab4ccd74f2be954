"""Attention indexes beside exact search, IVF and HNSW, on generated heads or on a model's own.

example: python benchmarks/index.py --contexts 32768,131072 --out benchmarks/results/index.json
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import index_answers
import index_distance
import index_measure
import index_report
from attention_heads import Heads
from index_measure import Options
from model_heads import answer_heads, model_heads

from jaxrag.base.errors import RequestError
from jaxrag.cli import run_command
from jaxrag.cli.options import add_json
from jaxrag.cli.output import give_out, require_folder
from jaxrag.models.model import load_model
from jaxrag.reuse.attention_index.document import Indexing
from jaxrag.reuse.decode import Retrieval
from jaxrag.tasks.long.tasks import SUITES


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--contexts", default="32768,131072", metavar="N,...", help="tokens (32768,131072)"
    )
    parser.add_argument(
        "--heads",
        default="ivf24,ivf41",
        metavar="NAME,...",
        help="kinds of generated heads (ivf24,ivf41)",
    )
    parser.add_argument(
        "--model", metavar="DIR", help="instead of --heads: the heads of this model over --text"
    )
    parser.add_argument(
        "--text", metavar="FILE", help="with --model; as long as the longest context and --ask"
    )
    parser.add_argument("--layers", metavar="N,...", help="of the model, from 0 (all)")
    parser.add_argument(
        "--engines", metavar="NAME;...", help='kinds of index, as in "flat fp16;graph 8-bit" (all)'
    )
    parser.add_argument(
        "--sink", type=int, default=128, metavar="N", help="first tokens left out (128)"
    )
    parser.add_argument(
        "--recent", type=int, default=512, metavar="N", help="last tokens left out (512)"
    )
    parser.add_argument("--k", type=int, default=100, metavar="N", help="keys wanted (100)")
    parser.add_argument(
        "--train",
        type=int,
        metavar="N",
        help="queries of the context to learn from (those of the rule, or of a stored document)",
    )
    parser.add_argument(
        "--ask", type=int, default=512, metavar="N", help="queries behind the context (512)"
    )
    parser.add_argument(
        "--cold-mb", type=int, default=1200, metavar="N", help="of heads visited in turn (1200)"
    )
    parser.add_argument(
        "--slow-up-to", type=int, default=131_072, metavar="N", help="tokens for HNSW (131072)"
    )
    parser.add_argument(
        "--distances",
        metavar="N,...",
        help="instead: indexes built with a document, asked from so many tokens behind it",
    )
    parser.add_argument(
        "--answers",
        metavar="TASK,...",
        help="instead: every decode rule at the answers to tasks of RULER (village), with --model",
    )
    parser.add_argument(
        "--searches",
        metavar="KIND,...",
        help="with --answers: only what indexes of these kinds find and scan, by task "
        f"({', '.join(index_answers.SEARCHES)})",
    )
    parser.add_argument(
        "--sampled",
        type=int,
        metavar="N",
        help="with --answers: N tokens that the model draws, instead of the right answers",
    )
    parser.add_argument(
        "--window", choices=("short", "default"), default="short", help="with --answers (short)"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="after a warm-up (3)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON result there")
    add_json(parser)
    return run_command(run, parser.parse_args(argv))


def run(args: argparse.Namespace) -> None:
    """Print tables, or one JSON object."""
    require_folder(args.out)
    if args.answers is not None:
        _answers(args)
        return
    learned = Retrieval().queries if args.distances is None else Indexing().queries
    options = Options(
        contexts=_integers("--contexts", args.contexts),
        heads=tuple(args.heads.split(",")),
        engines=tuple(args.engines.split(";")) if args.engines else tuple(index_measure.ENGINES),
        k=args.k,
        sink=args.sink,
        recent=args.recent,
        train=args.train or learned,
        ask=args.ask,
        cold_bytes=args.cold_mb * 1_000_000,
        rounds=args.rounds,
        slow_up_to=args.slow_up_to,
        seed=args.seed,
    )
    given = _model_heads(args, options)
    if args.distances is None:
        result = index_measure.run(options, given)
        lines = index_report.report(result)
    else:
        distances = _integers("--distances", args.distances)
        result = index_distance.run(options, index_distance.KINDS, distances, given)
        lines = index_distance.report(result)
    if given is not None:
        del result["options"]["heads"]  # of those that are generated
        result["options"] |= {"model": args.model, "text": Path(args.text).name}
    give_out(args, result, lines)


def _answers(args: argparse.Namespace) -> None:
    """The rules of --answers, at contexts of the first of --contexts."""
    if args.model is None:
        raise RequestError("--answers needs --model, a model of the synthetic language")
    tasks, known = args.answers.split(","), SUITES["ruler", "village"]
    if odd := [task for task in tasks if task not in known]:
        raise RequestError(f"--answers {odd[0]!r}: expected some of {', '.join(known)}")
    kinds, ours = (args.searches or "lists").split(","), index_answers.SEARCHES
    if odd := [kind for kind in kinds if kind not in ours]:
        raise RequestError(f"--searches {odd[0]!r}: expected some of {', '.join(ours)}")
    length = _integers("--contexts", args.contexts)[0]
    model = load_model(args.model, dtype="float32")
    layers = None if args.layers is None else _integers("--layers", args.layers)
    heads = answer_heads(model, tasks, length, args.seed, layers, sampled=args.sampled)
    if args.searches is None:
        result, report = index_answers.run(heads, args.window), index_answers.report
    else:
        result, report = index_answers.run_searches(heads, kinds), index_answers.report_searches
    result |= {"model": args.model, "tasks": tasks, "length": length, "layers": layers}
    result |= {"sampled": args.sampled, "seed": args.seed}
    give_out(args, result, report(result))


def _model_heads(args: argparse.Namespace, options: Options) -> Iterator[tuple[str, Heads]] | None:
    """The heads of --model over --text, or None."""
    if (args.model is None) != (args.text is None):
        raise RequestError("--model and --text go together; give both or neither")
    if args.model is None:
        return None
    if not Path(args.text).is_file():
        raise RequestError(f"--text {args.text}: no such file")
    model = load_model(args.model, dtype="float32")
    text = Path(args.text).read_text(encoding="utf-8")
    ids = model.text_tokenizer().encode(text).tolist()
    layers = None if args.layers is None else _integers("--layers", args.layers)
    return model_heads(model, ids, options, layers)


def _integers(option: str, text: str) -> tuple[int, ...]:
    sizes = text.split(",")
    if not all(size.isdigit() for size in sizes):
        raise RequestError(f"{option} {text!r}: expected integers such as 512,4096")
    return tuple(map(int, sizes))


if __name__ == "__main__":
    sys.exit(main())

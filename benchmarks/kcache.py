"""KCache's tables in miniature: tokens a second under fixed device memory, answers, bytes moved.

*throughput* (table 3): prompts of stored chunks in the pool, every row with chunks of its own,
decode together in one lane. The pool takes ``device_bytes`` of device memory, weights not counted,
under ``dense`` with K and V on the device and under ``topn`` with V of most layers in host memory.
Every batch that fits is run, and the largest that does; of others the refusal is recorded. Weights
and text are random: only time and bytes mean anything.

*quality* (table 2): a suite of `jaxrag eval` under dense attention, then with V of the first L
layers read whole and of others the N best rows.

*traffic*: prompts that are computed as a whole, V of most layers in host memory: bytes pushed
there and brought back, as multiples of the bytes of that V; then what decode steps fetch, as
multiples of N rows a query head and layer, and the share of it that heads of a group share.

example: python benchmarks/kcache.py --out benchmarks/results/kcache.json
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from kcache_measure import QUICK, Options, throughput, traffic

from jaxrag.base.options import parse_bytes
from jaxrag.cli import run_command
from jaxrag.cli.options import add_json
from jaxrag.cli.output import give_out, require_folder
from jaxrag.measure.evals.long.run import run as run_eval
from jaxrag.measure.evals.options import LongOptions
from jaxrag.measure.machine import describe
from jaxrag.measure.zoo import random_named


def run(options: Options) -> dict[str, Any]:
    """Measure; JSON-able."""
    config = options.config()
    found: dict[str, Any] = {
        "benchmark": "kcache",
        "options": dataclasses.asdict(options),
        "model": random_named(config, shape=True),
        "kv_bytes_per_token": config.kv_bytes_per_token,
    }
    if "throughput" in options.parts:
        found["throughput"] = throughput(options, config)
    if "traffic" in options.parts:
        found["traffic"] = traffic(options, config)
    if "quality" in options.parts:
        found["quality"] = quality(options)
    return found | {"machine": describe()}


def quality(options: Options) -> dict[str, Any]:
    """Scores by task, layers kept and N, beside dense attention."""
    settings = list(itertools.product(options.kept, options.counts))
    names = {(kept, n): f"L{kept}_N{n}" for kept, n in settings}
    rules = [f"{names[kept, n]}=topn:n={n},device_layers={kept}" for kept, n in settings]
    result = run_eval(
        LongOptions(
            suite=options.suite,
            flavour=options.flavour,
            model=options.model,
            lengths=(options.length,),
            tasks=options.tasks,
            decode=("dense=dense", *rules),
            questions=options.questions,
            batch_size=options.batch_size,
        )
    )
    (method,) = dict.fromkeys(name.rpartition(", ")[0] for name in result["methods"])
    scores = {(cell["method"], cell["task"]): cell["score"] for cell in result["cells"]}
    same = {
        (one["method"], one["task"]): one["share"]
        for one in result["agreement"]
        if one["length"] is None
    }
    rows = [
        {
            "task": task,
            "device_layers": kept,
            "n": n,
            "score": scores[f"{method}, {names[kept, n]}", task],
            "same_as_dense": same[f"{method}, {names[kept, n]}", task],
        }
        for task in options.tasks
        for kept, n in settings
    ]
    kept_of_eval = ("suite", "flavour", "tasks", "lengths", "questions", "seed", "model")
    return {
        **{name: result[name] for name in kept_of_eval},
        "dense": {task: scores[f"{method}, dense", task] for task in options.tasks},
        "rows": rows,
    }


def report(result: dict[str, Any]) -> Iterator[str]:
    """The result as lines of tables."""
    options = result["options"]
    if "throughput" in result:
        yield (
            f"{result['model']}, {options['dtype']}; {options['device_bytes'] / 1e6:.0f} MB of KV "
            f"on the device; tokens a second, n={options['n']}"
        )
        yield f"{'context':>8} {'batch':>5} {'dense':>10} {'topn':>10} {'of dense':>8}"
        rows = {(row["context"], row["batch"], row["rule"]): row for row in result["throughput"]}
        for context, batch in dict.fromkeys((c, b) for c, b, _ in rows):
            dense, topn = (rows.get((context, batch, rule), {}) for rule in ("dense", "topn"))
            pair = [row.get("tokens_per_second") for row in (dense, topn)]
            share = f"{pair[1] / pair[0]:.2f}" if all(pair) else ""
            cells = " ".join(f"{_rate(row):>10}" for row in (dense, topn))
            yield f"{context:>8} {batch:>5} {cells} {share:>8}"
    for row in result.get("traffic", ()):
        yield (
            f"prompt of {row['prompt_tokens']} tokens: V pushed {row['pushed_of_v']:.2f} times, "
            f"brought back {row['brought_of_v']:.2f} times; a step fetches {row['rows_of_n']:.2f} "
            f"of N rows a head and layer, {row['distinct_share']:.0%} of them different ones, in "
            f"{row['calls_per_layer']:.0f} calls a layer"
        )
    if "quality" in result:
        found = result["quality"]
        counts = options["counts"]
        for task in found["tasks"]:
            yield f"{task}, {options['length']} tokens: dense {_percent(found['dense'][task])}"
            yield f"{'':>4} " + " ".join(f"{f'N={n}':>8}" for n in counts)
            scores = {
                (row["device_layers"], row["n"]): row["score"]
                for row in found["rows"]
                if row["task"] == task
            }
            for kept in options["kept"]:
                cells = " ".join(f"{_percent(scores[kept, n]):>8}" for n in counts)
                yield f"L={kept:<2} {cells}"


def _rate(row: dict[str, Any]) -> str:
    if "refused" in row:
        return "no pages"
    return f"{row['tokens_per_second']:.1f}" if row else ""


def _percent(score: dict[str, float]) -> str:
    return f"{100 * score['value']:.1f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, run, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for field in dataclasses.fields(Options):
        name, default = f"--{field.name.replace('_', '-')}", field.default
        if isinstance(default, tuple):
            shown = ",".join(map(str, default))
            kind = type(default[0])
            parser.add_argument(name, type=_several(kind), metavar="LIST", help=f"({shown})")
        elif field.name == "device_bytes":
            parser.add_argument(name, type=parse_bytes, metavar="SIZE", help="(176MB)")
        else:
            parser.add_argument(name, type=type(default), help=f"({default})")
    parser.add_argument("--quick", action="store_true", help="small sizes, a minute in all")
    parser.add_argument("--out", metavar="FILE", help="write the result here, as JSON")
    add_json(parser)
    return run_command(_main, parser.parse_args(argv))


def _several(kind: type) -> Any:
    """A parser of values with commas between them."""

    def values(text: str) -> tuple[Any, ...]:
        return tuple(kind(part) for part in text.split(",") if part)

    return values


def _main(args: argparse.Namespace) -> int:
    require_folder(args.out)
    names = [field.name for field in dataclasses.fields(Options)]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    result = run(dataclasses.replace(QUICK if args.quick else Options(), **given))
    give_out(args, result, report(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`jaxrag eval needle|ruler|infinitebench`: tasks on long prompts, by method."""

import functools
import json
import re
from collections.abc import Iterable
from pathlib import Path

from jaxrag.base.config import ModelOptions
from jaxrag.cli.command import (
    Args,
    CliCommand,
    command,
    fields,
    flag,
    from_fields,
    value,
)
from jaxrag.cli.opening import mesh_of
from jaxrag.cli.options import distributed_options, result_options
from jaxrag.cli.output import give, give_out_tables, measured, require_folders
from jaxrag.cli.processes import joined
from jaxrag.measure.evals.options import LongOptions


def run(args: Args) -> None:
    """Print the tables, or one JSON object; write what was asked for."""
    from jaxrag.measure.evals.long.report import tables
    from jaxrag.measure.evals.long.run import prompts, run

    options = from_fields(LongOptions, args, suite=args.suite)
    require_folders(args, "out", "markdown", "prompts")
    if args.prompts:
        rows = prompts(options, progress=not args.json)
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        Path(args.prompts).write_text(text, encoding="utf-8")
        written = {"prompts": args.prompts, "count": len(rows)}
        give(args, written, [f"{args.prompts}: {len(rows)} prompts"])
        return
    with joined(args) as first:
        ask = functools.partial(run, mesh=mesh_of(args.mesh), out=args.out, first=first)
        result = measured(args, ask, options, first)
    if not first:
        return
    if args.no_items:
        del result["items"]
    notes = [
        f"{name}: {note}" for name, found in result["notes"].items() for note in grouped(found)
    ]
    give_out_tables(args, result, tables, notes)


def grouped(notes: Iterable[str]) -> list[str]:
    """Of notes that differ in their numbers only, the first one and how many more there are."""
    like: dict[str, list[str]] = {}
    for note in notes:
        like.setdefault(re.sub(r"\d+", "#", note), []).append(note)
    return [
        first + (f" (and {len(more)} more with other numbers)" if more else "")
        for first, *more in like.values()
    ]


def _command(suite: str, help: str, example: str, *but: str, questions: int = 20) -> CliCommand:
    return command(
        suite,
        run,
        help,
        example,
        fields(LongOptions, but=but, defaults={"questions": questions}),
        fields(ModelOptions, only=("mesh",)),
        distributed_options(),
        value(
            "--prompts",
            "FILE",
            "only write the prompts, as JSONL that `jaxrag train` reads, and ask nothing",
        ),
        flag("--no-items", "leave the single questions out of the JSON"),
        result_options(markdown=True),
        basic="model contexts methods decode num-questions chunk-tokens template out markdown json "
        + " ".join({"tasks", "depths"} - {*but}),
        suite=suite,
    )


COMMANDS = (
    _command(
        "needle",
        "needle in a haystack, by length and depth",
        "jaxrag eval needle --model MODEL --template plain --contexts 1k,2k,4k "
        "--depths 0,0.5,1 --methods full_attention,turborag --chunk-tokens 512",
        "answers",
        "tasks",
        questions=3,
    ),
    _command(
        "ruler",
        "RULER's needles (niah_single_1 to _3, niah_multikey_1 to _3, niah_multivalue, "
        "niah_multiquery), variable tracking (vt) and word counts (cwe, fwe), in words of our "
        "own; of the village flavour niah_multivalue, niah_multiquery, vt, majority, cwe, copy",
        "jaxrag eval ruler --model MODEL --template plain --contexts 4k,8k --tasks "
        "niah_single_2,niah_multikey_2 --num-questions 50 --out ruler.json",
        "depths",
    ),
    _command(
        "infinitebench",
        "InfiniteBench's passkey, number_string and kv_retrieval, in words of our own",
        "jaxrag eval infinitebench --model checkpoints/synthetic-0.8m/dual --flavour "
        "village --contexts 256,512,1000 --decode dense --decode "
        "static_window:sink=4,recent=64 --num-questions 100 --batch-size 16",
        "answers",
        "filler",
        "depths",
    ),
)

"""`jaxrag eval needle|ruler|infinitebench`: tasks on long prompts, by method."""

import functools
import json
import re
from collections.abc import Iterable
from pathlib import Path

from jaxrag.base.config import ModelOptions
from jaxrag.base.errors import RequestError
from jaxrag.base.options import parse_names
from jaxrag.cli.command import (
    Args,
    CliCommand,
    Parameter,
    command,
    fields,
    flag,
    from_fields,
    value,
)
from jaxrag.cli.opening import mesh_of
from jaxrag.cli.options import distributed_options, result_options
from jaxrag.cli.output import give_out_tables, measured, print_json, require_folders
from jaxrag.cli.processes import joined
from jaxrag.measure.evals.options import GRID_DEPTHS, LongOptions


def run(args: Args) -> None:
    """Print the tables, or one JSON object; write what was asked for."""
    from jaxrag.measure.evals.long.heatmap import draw_heatmap
    from jaxrag.measure.evals.long.report import tables
    from jaxrag.measure.evals.long.run import prompts, run
    from jaxrag.measure.evals.plots import check_picture

    options = _options(args)
    require_folders(args, "out", "markdown", "prompts")
    picture = getattr(args, "heatmap", None)
    if picture:
        check_picture(Path(picture))
    if args.prompts:
        rows = prompts(options, progress=not args.json)
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        Path(args.prompts).write_text(text, encoding="utf-8")
        if args.json:
            print_json({"prompts": args.prompts, "count": len(rows)})
        else:
            print(f"{args.prompts}: {len(rows)} prompts")
        return
    with joined(args) as first:
        ask = functools.partial(run, mesh=mesh_of(args.mesh))
        result = measured(args, ask, options, first)
    if not first:
        return
    if args.no_items:
        del result["items"]
    notes = [
        f"{name}: {note}" for name, found in result["notes"].items() for note in grouped(found)
    ]
    give_out_tables(args, result, tables, notes)
    if picture:
        draw_heatmap(result, Path(picture))
        if not args.json:
            print(picture)


def _options(args: Args) -> LongOptions:
    depths = tuple(map(_depth, parse_names(args.depths))) if args.suite == "needle" else GRID_DEPTHS
    return from_fields(
        LongOptions,
        args,
        suite=args.suite,
        tasks=parse_names(getattr(args, "tasks", "")),
        depths=depths,
    )


def _depth(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise RequestError(f"--depths {text}: expected numbers from 0 to 1") from None


def grouped(notes: Iterable[str]) -> list[str]:
    """Of notes that differ in their numbers only, the first one and how many more there are."""
    like: dict[str, list[str]] = {}
    for note in notes:
        like.setdefault(re.sub(r"\d+", "#", note), []).append(note)
    return [
        first + (f" (and {len(more)} more with other numbers)" if more else "")
        for first, *more in like.values()
    ]


def _command(
    suite: str, help: str, example: str, own: list[Parameter], *but: str, questions: int = 20
) -> CliCommand:
    return command(
        suite,
        run,
        help,
        example,
        fields(LongOptions, but=but, defaults={"questions": questions}),
        fields(ModelOptions, only=("mesh",)),
        distributed_options(),
        own,
        value(
            "--prompts",
            "FILE",
            "only write the prompts, as JSONL that `jaxrag train` reads, and ask nothing",
        ),
        flag("--no-items", "leave the single questions out of the JSON"),
        result_options(markdown=True),
        basic="model contexts methods decode num-questions chunk-tokens template out markdown json "
        + " ".join(it.opts[0].lstrip("-") for it in own),
        suite=suite,
    )


def _tasks(names: str) -> list[Parameter]:
    return [value("--tasks", "NAME,...", f"{names} (all of them)", "")]


COMMANDS = (
    _command(
        "needle",
        "needle in a haystack, by length and depth",
        "jaxrag eval needle --model MODEL --template plain --contexts 1k,2k,4k "
        "--depths 0,0.5,1 --methods full_attention,turborag --chunk-tokens 512 "
        "--heatmap needle.png",
        [
            value(
                "--depths",
                "D,...",
                "shares of the filler that stand before the needle (0,0.1,...,1)",
                "0,0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,1",
            ),
            value("--heatmap", "FILE", "draw a .png, .svg or .pdf file"),
        ],
        "answers",
        questions=3,
    ),
    _command(
        "ruler",
        "RULER's needles, variable tracking and word counts, in words of our own",
        "jaxrag eval ruler --model MODEL --template plain --contexts 4k,8k --tasks "
        "niah_single_2,niah_multikey_2 --num-questions 50 --out ruler.json",
        _tasks(
            "niah_single_1 to _3, niah_multikey_1 to _3, niah_multivalue, niah_multiquery, "
            "vt, cwe, fwe; of the village flavour niah_multivalue, niah_multiquery, vt, "
            "majority, cwe, copy"
        ),
    ),
    _command(
        "infinitebench",
        "InfiniteBench's passkey, number and key-value retrieval, in words of our own",
        "jaxrag eval infinitebench --model checkpoints/synthetic-0.8m/dual --flavour "
        "village --contexts 256,512,1000 --decode dense --decode "
        "static_window:sink=4,recent=64 --num-questions 100 --batch-size 16",
        _tasks("passkey, number_string, kv_retrieval"),
        "answers",
        "filler",
    ),
)

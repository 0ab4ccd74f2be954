"""`jaxrag eval needle|ruler|infinitebench`: tasks on long prompts, by method."""

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrag.cli.options import (
    add_command,
    add_json,
)
from jaxrag.cli.output import (
    give_out,
    print_json,
    require_folder,
    titled,
)
from jaxrag.errors import RequestError
from jaxrag.options import (
    parse_count,
    parse_counts,
)

if TYPE_CHECKING:
    from jaxrag.evals.long.plan import Options

_TASKS = {  # for the help; evals.long.tasks has the tasks
    "ruler": "niah_single_1 to _3, niah_multikey_1 to _3, niah_multivalue, niah_multiquery, vt, "
    "cwe, fwe; of the village flavour niah_multivalue, niah_multiquery, vt, majority, cwe, copy",
    "infinitebench": "passkey, number_string, kv_retrieval",
}


def add_parsers(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the three evaluations."""
    needle = add_command(
        kinds,
        "needle",
        "needle in a haystack, by length and depth",
        "jaxrag eval needle --model MODEL --template plain --lengths 1k,2k,4k --depths 0,0.5,1 "
        "--methods full_attention,turborag --chunk-tokens 512 --heatmap needle.png",
    )
    ruler = add_command(
        kinds,
        "ruler",
        "RULER's needles, variable tracking and word counts, in words of our own",
        "jaxrag eval ruler --model MODEL --template plain --lengths 4k,8k "
        "--tasks niah_single_2,niah_multikey_2 --questions 50 --out ruler.json",
    )
    infinitebench = add_command(
        kinds,
        "infinitebench",
        "InfiniteBench's passkey, number and key-value retrieval, in words of our own",
        "jaxrag eval infinitebench --model checkpoints/synthetic-0.8m/dual --flavour village "
        "--lengths 256,512,1000 --decode dense --decode static_window:sink=4,recent=64 "
        "--questions 100 --batch-size 16",
    )
    for suite, parser in (("needle", needle), ("ruler", ruler), ("infinitebench", infinitebench)):
        _add_arguments(parser, suite)
        parser.set_defaults(run=run, suite=suite)


def _add_arguments(parser: argparse.ArgumentParser, suite: str) -> None:
    parser.add_argument("--model", required=True, metavar="DIR", help="the model directory")
    parser.add_argument(
        "--methods",
        default="full_attention",
        metavar="NAME,...",
        help="presets or .toml files; all answer the same prompts and are compared with the first "
        "(full_attention)",
    )
    parser.add_argument(
        "--decode",
        action="append",
        default=[],
        metavar="RULE",
        help="how generated tokens attend, such as dense, static_window:sink=4,recent=64 or "
        "topn:n=64, NAME=RULE to call it so; repeatable, every method answers under each (the "
        "method's own)",
    )
    parser.add_argument(
        "--lengths",
        type=parse_counts,
        required=True,
        metavar="N,...",
        help="tokens of the whole prompt without the answer; 4k is 4096",
    )
    if suite == "needle":
        parser.add_argument(
            "--depths",
            default="0,0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,1",
            metavar="D,...",
            help="shares of the filler that stand before the needle (0,0.1,...,1)",
        )
        parser.add_argument("--heatmap", metavar="FILE", help="draw a .png, .svg or .pdf file")
    else:
        parser.add_argument(
            "--tasks", default="", metavar="NAME,...", help=f"{_TASKS[suite]} (all of them)"
        )
    parser.add_argument(
        "--flavour",
        choices=("plain", "village"),
        default="plain",
        help="village: in the words of the synthetic task, for models that know no others (plain)",
    )
    parser.add_argument(
        "--split",
        choices=("test", "train"),
        default="test",
        help="of the people whom the village flavour asks about (test)",
    )
    if suite == "ruler":
        parser.add_argument(
            "--answers",
            type=int,
            default=16,
            metavar="N",
            help="names that an answer of the village flavour has; fewer are for training (16)",
        )
    if suite != "infinitebench":
        parser.add_argument(
            "--filler",
            action="append",
            default=[],
            metavar="FILE",
            help="text whose sentences are the prose of haystacks; repeatable (generated ones)",
        )
    parser.add_argument(
        "--questions",
        type=int,
        default=3 if suite == "needle" else 20,
        metavar="N",
        help="of every length and depth (3)"
        if suite == "needle"
        else "of every task and length (20)",
    )
    parser.add_argument("--seed", type=int, default=7, help="of the prompts (7)")
    parser.add_argument(
        "--chunk-tokens",
        type=parse_count,
        metavar="N",
        help="cut the haystack between sentences into chunks of up to N tokens (one chunk)",
    )
    parser.add_argument(
        "--no-lead",
        action="store_true",
        help="do not end prompts with the first words of the answer",
    )
    parser.add_argument(
        "--max-new-tokens", type=parse_count, metavar="N", help="of an answer (the benchmark's)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=1, metavar="N", help="questions that run together (1)"
    )
    parser.add_argument(
        "--host-values",
        action="store_true",
        help="keep K and V, or V, in host memory under rules that are meant to have them there",
    )
    parser.add_argument(
        "--template", metavar="NAME", help="a template's name or .toml file (the model's own)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of weights, activations and KV (the model's)",
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="only write the prompts, as JSONL that `jaxrag train` reads, and ask nothing",
    )
    parser.add_argument(
        "--no-items", action="store_true", help="leave the single questions out of the JSON"
    )
    parser.add_argument("--out", metavar="FILE", help="also write the JSON result there")
    parser.add_argument("--markdown", metavar="FILE", help="also write the tables there")
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Print the tables, or one JSON object; write what was asked for."""
    from jaxrag.bench.machine import describe
    from jaxrag.evals.long.heatmap import draw_heatmap
    from jaxrag.evals.long.report import markdown, tables
    from jaxrag.evals.long.run import prompts, run
    from jaxrag.evals.plots import check_picture

    options = _options(args)
    for option in ("out", "markdown", "prompts"):
        require_folder(getattr(args, option), f"--{option}")
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
    from jaxrag.models.compiled import keep_compiled

    keep_compiled()
    result = run(options, progress=not args.json) | {"machine": describe()}
    if args.no_items:
        del result["items"]
    notes = [
        f"{name}: {note}" for name, found in result["notes"].items() for note in grouped(found)
    ]
    give_out(args, result, [*titled(tables(result)), *notes], markdown)
    if picture:
        draw_heatmap(result, Path(picture))
        if not args.json:
            print(picture)


def _options(args: argparse.Namespace) -> "Options":
    from jaxrag.evals.long.plan import GRID_DEPTHS, Options

    depths = tuple(map(_depth, _listed(args.depths))) if args.suite == "needle" else GRID_DEPTHS
    return Options(
        suite=args.suite,
        model=args.model,
        lengths=args.lengths,
        methods=tuple(_listed(args.methods)),
        decode=tuple(args.decode),
        tasks=tuple(_listed(getattr(args, "tasks", ""))),
        flavour=getattr(args, "flavour", "plain"),
        depths=depths,
        questions=args.questions,
        seed=args.seed,
        split=getattr(args, "split", "test"),
        answers=getattr(args, "answers", 16),
        chunk_tokens=args.chunk_tokens,
        filler=tuple(getattr(args, "filler", ())),
        lead=not args.no_lead,
        max_new_tokens=args.max_new_tokens,
        batch_size=args.batch_size,
        host_values=args.host_values,
        template=args.template,
        dtype=args.dtype,
    )


def _listed(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


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

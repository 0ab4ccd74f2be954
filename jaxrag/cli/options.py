"""Arguments that several commands share, and how they are turned into objects."""

import argparse
import atexit
import contextlib
import dataclasses
import gc
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrag.errors import ConfigError, KnowledgeBaseError, RequestError
from jaxrag.text.printable import printable

if TYPE_CHECKING:
    from jaxrag.engine.sampling import SamplingParams
    from jaxrag.evals.synthetic_report import Table
    from jaxrag.knowledge_base import KnowledgeBase
    from jaxrag.methods import Method
    from jaxrag.models.model import Model


SECRET_VARIABLE = "JAXRAG_SECRET_FILE"  # in the environment: a path, never a secret


def add_command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    summary: str,
    example: str,
) -> argparse.ArgumentParser:
    """A sub-command whose help ends with an example."""
    return commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example: {example}",
    )


Options = argparse._ActionsContainer  # a parser, or a group of one


def add_model(to: argparse.ArgumentParser, required: bool, text: str) -> None:
    """--model, --dtype, --mesh, --cache-tokens, --kernels and where V lies."""
    parser = to.add_argument_group("the model, and where it runs")
    parser.add_argument("--model", metavar="DIR", required=required, help=text)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of weights, activations and KV (as the model is stored)",
    )
    parser.add_argument(
        "--mesh",
        metavar="D,F,T",
        help="devices along the data, fsdp and tensor axes, such as 1,1,8 (one device)",
    )
    parser.add_argument(
        "--cache-tokens",
        type=parse_count,
        metavar="N",
        help="tokens of KV that the device pool holds (by memory, at most 8 contexts)",
    )
    parser.add_argument(
        "--kernels",
        choices=("measured", "xla", "pallas_triton"),
        default="measured",
        help="body of the attention ops; pallas_triton needs NVIDIA GPUs (measured: of each the "
        "fastest that was right on such a device)",
    )
    parser.add_argument(
        "--value-layers",
        type=int,
        metavar="N",
        help="keep V of N layers on the device, of the others in host memory (under --decode topn "
        "its device_layers, else all)",
    )
    parser.add_argument(
        "--max-host-bytes", type=parse_bytes, metavar="SIZE", help="ceiling of that host memory"
    )


def add_earlier_name(parser: Options, name: str, now: str, **options: Any) -> None:
    """An option's earlier spelling, understood and shown nowhere."""
    parser.add_argument(
        name, dest=now, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **options
    )


def add_json(parser: Options) -> None:
    """--json."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_secret(parser: Options) -> None:
    """--secret-file."""
    parser.add_argument(
        "--secret-file",
        metavar="FILE",
        help="file of the secret that seals the KV of --kb, 16 random bytes or more (the file that "
        f"{SECRET_VARIABLE} names)",
    )


def secret_of(given: str | None) -> bytes | None:
    """The secret of --secret-file, else of the file in the environment; None where none is named.

    Raises StoreError for a file that holds none.
    """
    from jaxrag.store.seal import read_secret

    path = given or os.environ.get(SECRET_VARIABLE)
    return None if not path else read_secret(path)


def add_where(parser: Options) -> None:
    """--where."""
    parser.add_argument(
        "--where",
        metavar="JSON",
        help='only documents with this metadata, such as \'{"year": {"$gte": 2020}}\'',
    )


def add_search(parser: Options) -> None:
    """--where, --search, --min-score and --unanswerable."""
    add_where(parser)
    parser.add_argument(
        "--search",
        choices=("bm25", "vector", "hybrid"),
        help="by words, by meaning, or by both (hybrid where every chunk has a vector, else bm25)",
    )
    parser.add_argument(
        "--min-score",
        type=float,
        metavar="X",
        help="leave out chunks that score less, by words or by meaning (none)",
    )
    parser.add_argument(
        "--unanswerable",
        choices=("abstain", "ask"),
        default="abstain",
        help="where --where or --min-score leave no chunk: say so, or ask without any (abstain)",
    )


def add_generation(to: argparse.ArgumentParser) -> None:
    """--method and what changes it, --template, --k, --max-new-tokens, --stop and sampling."""
    parser = to.add_argument_group("how chunks are reused and read")
    parser.add_argument(
        "--method",
        default="turborag",
        help="full_attention, full_reuse, turborag, turborag_composite, block_attention, "
        "cacheblend, cache_craft, epic, fusionrag, retrieval_attention, kcache, or a .toml file "
        "(turborag)",
    )
    parser.add_argument(
        "--recompute-ratio",
        type=float,
        metavar="R",
        help="share of the chunk tokens computed again, 0 to 1 (what `jaxrag kb gate` found, else "
        "the method's own)",
    )
    parser.add_argument(
        "--misses",
        choices=("encode", "in_place"),
        help="chunks that the store does not hold: encode and keep them, or compute them where "
        "they stand, over all that precedes them, and keep nothing (the method's own)",
    )
    parser.add_argument(
        "--prefix-cache",
        action="store_true",
        help="keep leading parts as full attention computed them, for prompts that begin alike",
    )
    parser.add_argument(
        "--decode",
        metavar="RULE",
        help="how generated tokens attend: dense, static_window, snapkv, infllm, quest, flat, ivf, "
        "retrieval, topn; settings follow a colon, as in topn:n=64 (the method's own)",
    )
    parser.add_argument(
        "--kv",
        choices=("device", "host"),
        help="where K and V are (where the method's decode rule is meant to have them)",
    )
    parser.add_argument(
        "--template",
        metavar="NAME",
        help="a template's name or .toml file (that of --kb or --model)",
    )
    parser = to.add_argument_group("what is retrieved")
    parser.add_argument("--k", type=int, default=5, metavar="N", help="chunks to retrieve (5)")
    add_search(parser)
    parser = to.add_argument_group("the answer")
    parser.add_argument("--max-new-tokens", type=parse_count, default=64, metavar="N", help="(64)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (0)"
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="N", help="0 keeps all (0)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1 keeps all (1)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling (0)")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="ends the answer; repeatable"
    )


@contextlib.contextmanager
def few_collections() -> Iterator[None]:
    """Look for garbage seldom, in a process that ends soon, and not once more at its end.

    Importing and tracing make a million objects that live as long as the process: to go over them
    takes a tenth of a second.
    """
    usual = gc.get_threshold()
    gc.set_threshold(2_000_000, 50, 50)
    atexit.register(gc.freeze)
    try:
        yield
    finally:
        gc.freeze()  # what is young becomes old: restored, the threshold would go over all of it
        gc.unfreeze()
        gc.set_threshold(*usual)


def ratios_of(text: str) -> tuple[float, ...]:
    """Recompute ratios such as 0,0.15,1.0; RequestError when one is not a number from 0 to 1."""
    ratios = []
    for part in filter(None, text.split(",")):
        try:
            ratios.append(float(part))
        except ValueError:
            ratios.append(-1.0)
        if not 0 <= ratios[-1] <= 1:
            raise RequestError(
                f"--recompute-ratios {text}: {part!r} is no number from 0 to 1, such as 0.15"
            )
    return tuple(ratios)


def chunks_of(text: str) -> list[int]:
    """Fewest and most chunks of --chunks, such as 6 or 4-6."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if found is None:
        raise RequestError(f"--chunks {text}: expected a number such as 6, or 4-6")
    return [int(found[1]), int(found[2] or found[1])]


def where_of(args: argparse.Namespace) -> dict[str, Any] | None:
    """The filter of --where; RequestError when it is not JSON of an object."""
    if args.where is None:
        return None
    try:
        where = json.loads(args.where)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"--where {args.where[:200]!r} is not JSON ({error}); write it as '{{\"year\": 2020}}'"
        ) from None
    if not isinstance(where, dict):
        raise RequestError(
            f'--where {args.where[:200]!r}: expected an object such as {{"year": 2020}}'
        )
    return where


def sampling_of(args: argparse.Namespace) -> "SamplingParams":
    """The SamplingParams of --temperature, --top-k, --top-p and --seed."""
    from jaxrag.engine.sampling import SamplingParams

    return SamplingParams(args.temperature, args.top_k, args.top_p, args.seed)


def method_of(args: argparse.Namespace) -> "Method":
    """The method of --method, --recompute-ratio and --decode."""
    from jaxrag.decode import rule_from
    from jaxrag.methods import method_named

    method = method_named(args.method)
    if args.recompute_ratio is not None:
        method = method.with_ratio(args.recompute_ratio)
    if args.decode is not None:
        method = dataclasses.replace(method, decode=rule_from(args.decode, "--decode"))
    return method


def load(
    args: argparse.Namespace, path: str, dtype: str | None, method: "Method | None" = None
) -> "Model":
    """The model of --model and of the options beside it.

    Where these leave it open, K and V are where the method is meant to have them, if the model can
    have them there; ``serve.suits.unplaced`` says so in every answer if it cannot.
    """
    from jaxrag.models.model import load_model
    from jaxrag.serve.suits import placed
    from jaxrag.sharding import make_mesh

    mesh = None
    if args.mesh is not None:
        sizes = args.mesh.split(",")
        if len(sizes) != 3 or not all(size.isdigit() for size in sizes):
            raise ConfigError(f"--mesh {args.mesh!r}: expected three integers such as 1,1,8")
        data, fsdp, tensor = map(int, sizes)
        mesh = make_mesh(data, fsdp, tensor)
    kv = None if method is None else args.kv  # `jaxrag ingest` has a --kv of another meaning
    model = load_model(
        path,
        mesh=mesh,
        dtype=dtype,
        cache_tokens=args.cache_tokens,
        value_layers=args.value_layers,
        max_host_bytes=args.max_host_bytes,
        kernels=args.kernels,
        kv=kv or "device",
    )
    if method is None or kv is not None:
        return model
    with contextlib.suppress(ConfigError, RequestError):
        model = placed(model, method)
    return model


def open_kb(args: argparse.Namespace, method: "Method | None" = None) -> "KnowledgeBase":
    """The knowledge base of --kb with the model it remembers, or that of --model, as ``load``."""
    from jaxrag.knowledge_base import KnowledgeBase

    model = model_of_kb(args, method)
    return KnowledgeBase.open(args.kb, model=model, secret=secret_of(args.secret_file))


def model_of_kb(args: argparse.Namespace, method: "Method | None" = None) -> "Model":
    """The model that the knowledge base of --kb remembers, or that of --model, as ``load``.

    The knowledge base is opened without a model first, so that what is wrong with it is said before
    weights are read.
    """
    from jaxrag.knowledge_base import KnowledgeBase

    with KnowledgeBase.open(args.kb, secret=secret_of(args.secret_file)) as remembered:
        path = args.model or remembered.model_path
        dtype = args.dtype or remembered.store.layout.dtype
    if path is None:
        raise KnowledgeBaseError(f"{args.kb} does not remember a model directory; pass --model DIR")
    if args.model is None and not Path(path).is_dir():
        raise KnowledgeBaseError(
            f"{args.kb} was made with the model in {path}, which is not there any more; pass "
            "--model DIR to say where it is now"
        )
    return load(args, path, dtype, method)


def print_json(value: Any) -> None:
    """One JSON object on one line, text as it is wherever stdout can write it."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value)
    print(text)


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Rows of text in aligned columns; the columns in ``right`` are right-aligned.

    Control characters of a cell, the ends of its lines too, are shown as their escapes.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(columns(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = []
        for i, (cell, width) in enumerate(zip(row, widths, strict=True)):
            space = " " * (width - columns(cell))
            cells.append(space + cell if i in right else cell + space)
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def columns(text: str) -> int:
    """Columns of a terminal that the text takes; wide characters take two."""
    import unicodedata

    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def shorten(text: str, width: int) -> str:
    """The text on one line, cut to that many columns."""
    text = " ".join(text.split())
    used, fits = 0, 0  # columns; characters of which "…" still finds a place behind
    for number, character in enumerate(text, 1):
        used += columns(character)
        if used > width:
            return text[:fits] + "…"
        if used < width:
            fits = number
    return text


def parse_seconds(text: str) -> float:
    """90s, 30m, 1h or 7d as seconds, for ``type=`` of an option."""
    return _scaled(text, {"s": 1, "m": 60, "h": 3600, "d": 86400}, "a time such as 30m or 1h")


def parse_bytes(text: str) -> int:
    """200MB, 1.5GB or 64MiB as bytes, for ``type=`` of an option."""
    units = {"B": 1}
    for power, letter in enumerate("kMGT", 1):
        units[f"{letter}B"] = 1000**power
        units[f"{letter.upper()}iB"] = 1024**power
    return round(_scaled(text, units, "a size such as 200MB or 64GiB"))


def parse_count(text: str) -> int:
    """4096 or 4k (1024 times as many; also M) as a number of tokens, for ``type=`` of an option."""
    found = re.fullmatch(r"([0-9]+)([kKM]?)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of tokens, as 4096 or 4k")
    return int(found[1]) * {"": 1, "k": 1024, "K": 1024, "M": 1024**2}[found[2]]


def parse_counts(text: str) -> tuple[int, ...]:
    """Several of them, such as 512,4k."""
    return tuple(map(parse_count, filter(None, text.split(","))))


def _scaled(text: str, units: Mapping[str, int], expected: str) -> float:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]+)", text)
    if found is None or found[2] not in units:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected {expected}; the units are {', '.join(units)}"
        )
    return float(found[1]) * units[found[2]]


def counted(number: int, what: str) -> str:
    """1 chunk, 2 chunks."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def human_count(number: float) -> str:
    """1234567 -> 1.23M."""
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def require_folder(out: str | None, option: str = "--out") -> None:
    """Refuse a file to write, given by an option, whose folder is not there; before the work."""
    if out and not Path(out).absolute().parent.is_dir():
        raise RequestError(f"{option} {out}: its folder does not exist; make it first")


def give_out(
    args: argparse.Namespace,
    result: dict[str, Any],
    lines: Iterable[str],
    markdown: Callable[[dict[str, Any]], str] | None = None,
) -> None:
    """Write a result to --out, and by ``markdown`` to --markdown; print it as JSON or as lines."""
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if markdown is not None and args.markdown:
        Path(args.markdown).write_text(markdown(result), encoding="utf-8")
    if args.json:
        print_json(result)
    else:
        print("\n".join(lines))


def titled(tables: "Iterable[Table]", width: int = 80) -> Iterator[str]:
    """Tables as lines: each under its title and followed by an empty line.

    A table that is wider is folded: some columns after the others, the names in front of each.
    """
    import textwrap

    for one in tables:
        title = "\n".join(textwrap.fill(line, width) for line in one.title.splitlines())
        folds = _folded(one.rows, one.names, width)
        yield title + "".join(f"\n{table(it, range(one.names, len(it[0])))}\n" for it in folds)


def _folded(rows: Sequence[Sequence[str]], names: int, width: int) -> list[list[list[str]]]:
    """The rows, cut between columns so that each part has the names and fits the width."""
    widths = [2 + max(columns(row[i]) for row in rows) for i in range(len(rows[0]))]
    room = width + 2 - sum(widths[:names])
    parts: list[list[int]] = [[]]
    for i in range(names, len(widths)):
        if parts[-1] and sum(widths[j] for j in parts[-1]) + widths[i] > room:
            parts.append([])
        parts[-1].append(i)
    return [[[*row[:names], *(row[i] for i in part)] for row in rows] for part in parts]

"""What commands print: JSON, tables, texts cut to a width; and the files they write."""

import dataclasses
import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrag.base.errors import RequestError
from jaxrag.base.installed import CHANGED, RESULTS, TREE, commit
from jaxrag.cli.command import Args
from jaxrag.models.text.printable import printable

if TYPE_CHECKING:
    from argparse import Namespace

    from jaxrag.measure.table import Table


def print_json(value: Any) -> None:
    """One JSON object on one line, text as it is wherever stdout can write it."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value)
    print(text)


def give(args: "Args | Namespace", value: Any, lines: Iterable[str]) -> None:
    """Print a value, or a report's fields, as JSON where that is asked for; else lines."""
    if args.json:
        is_report = dataclasses.is_dataclass(value) and not isinstance(value, type)
        print_json(dataclasses.asdict(value) if is_report else value)
    else:
        print("".join(f"{line}\n" for line in lines), end="")


def note(text: str) -> None:
    """A remark on stderr: on a terminal broken at words to 80 columns, in a pipe one line."""
    line = f"note: {printable(text)}"
    if sys.stderr.isatty():
        line = textwrap.fill(line, 80, break_long_words=False, break_on_hyphens=False)
    print(line, file=sys.stderr, flush=True)


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

    if text.isascii():
        return len(text)
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


def counted(number: int, what: str) -> str:
    """1 chunk, 2 chunks."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def human_count(number: float) -> str:
    """1234567 -> 1.23M."""
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 0.9995 * size:  # 999.5M is written as 1G
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def require_folder(out: str | None, option: str = "--out") -> None:
    """Refuse a file to write, given by an option, whose folder is not there; before the work."""
    if out and not Path(out).absolute().parent.is_dir():
        raise RequestError(f"{option} {out}: its folder does not exist; make it first")
    if out:
        _require_commit(Path(out), option, TREE)


def _require_commit(out: Path, option: str, tree: Path) -> None:
    """Refuse a result among those of the repository from a tree that no commit stands for."""
    results = tree / RESULTS
    if out.absolute().parent.resolve() != results.resolve() or not results.is_dir():
        return
    if commit(tree).endswith(CHANGED):
        raise RequestError(
            f"{option} {out}: results of the repository are of a commit, and the working tree has "
            "changes; commit or stash them, or write elsewhere"
        )


def give_out(
    args: "Args | Namespace",
    result: dict[str, Any],
    lines: Iterable[str],
    markdown: Callable[[dict[str, Any]], str] | None = None,
) -> None:
    """Write a result to --out, and by ``markdown`` to --markdown; print it as JSON or as lines."""
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if markdown is not None and args.markdown:
        Path(args.markdown).write_text(markdown(result), encoding="utf-8")
    give(args, result, lines)


def require_folders(args: Args, *options: str) -> None:
    """``require_folder`` of several options, by the names of their values."""
    for option in options:
        require_folder(getattr(args, option), f"--{option}")


def give_out_tables(
    args: "Args | Namespace",
    result: dict[str, Any],
    tables: "Callable[[dict[str, Any]], Iterable[Table]]",
    notes: Iterable[str] = (),
) -> None:
    """``give_out`` of a result that is shown as tables, with notes below them."""
    from jaxrag.measure.table import page

    give_out(args, result, [*titled(tables(result)), *notes], lambda it: page(tables(it)))


def measured(
    args: Args, run: Callable[..., dict[str, Any]], options: Any, shown: bool = True
) -> dict[str, Any]:
    """What ``run`` measures, beside the machine that it ran on; programs are kept compiled.

    Its progress is shown, unless for a program or where ``shown`` says otherwise.
    """
    from jaxrag.measure.machine import describe
    from jaxrag.models.compiled import keep_compiled

    keep_compiled()
    return run(options, progress=shown and not args.json) | {"machine": describe()}


def titled(tables: "Iterable[Table]", width: int = 80) -> Iterator[str]:
    """Tables as lines: each under its title and followed by an empty line.

    A table that is wider is folded: some columns after the others, the names in front of each.
    """
    for table_ in tables:
        title = "\n".join(textwrap.fill(line, width) for line in table_.title.splitlines())
        folds = _folded(table_.rows, table_.names, width)
        yield title + "".join(f"\n{table(it, range(table_.names, len(it[0])))}\n" for it in folds)


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

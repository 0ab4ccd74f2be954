"""How far work is, on stderr: a bar on a terminal, now and then a line in a pipe or a log.

A notebook gets a widget where it can show one, else the lines.
"""

import importlib.util
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tqdm import tqdm

_SECONDS = 10.0  # at least between two lines
_LINES = 10  # about, of long work


def progress_bar(
    total: int | None,
    name: str,
    unit: str,
    *,
    shown: bool = True,
    scale: bool = False,
    done: int = 0,
) -> "tqdm[Any]":
    """A bar of so many units. In a pipe or a log it is lines, and none of short work.

    Args:
      total: units; None where that is not known.
      shown: False draws nothing.
      scale: write 12.3k for 12345.
      done: units that were there before.
    """
    common: dict[str, Any] = {
        "total": total, "desc": name, "unit": unit, "unit_scale": scale, "initial": done,
    }  # fmt: skip
    if not shown or sys.stderr is None:
        return tqdm(**common, disable=True)
    if sys.stderr.isatty():
        return tqdm(**common)
    if _in_notebook():
        from tqdm.notebook import tqdm as widget

        return widget(**common)
    return tqdm(
        **common,
        file=_Lines(),
        ncols=79,
        delay=_SECONDS,
        mininterval=_SECONDS,
        maxinterval=math.inf,
        miniters=max(1, (total or 0) // _LINES),
    )


def followed[T](items: Sequence[T], name: str, unit: str, *, shown: bool = True) -> Iterator[T]:
    """The items, one after the other, with a bar of how many are done."""
    with progress_bar(len(items), name, unit, shown=shown) as bar:
        for item in items:
            yield item
            bar.update()


def announce(text: str, *, shown: bool = True) -> None:
    """A line of what comes next, before it."""
    if shown and sys.stderr is not None:
        print(text, file=sys.stderr, flush=True)


def _in_notebook() -> bool:
    """Whether a kernel runs this that can show widgets."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None and bool(
        importlib.util.find_spec("ipywidgets")
    )


class _Lines:
    """Takes what tqdm would draw over itself, and writes it as lines of stderr."""

    def __init__(self) -> None:
        self.encoding = getattr(sys.stderr, "encoding", None) or "utf-8"

    def write(self, text: str) -> None:
        if line := text.strip():
            print(line, file=sys.stderr)

    def flush(self) -> None:
        sys.stderr.flush()

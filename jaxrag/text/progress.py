"""How far work is, on stderr: a bar on a terminal, now and then a line anywhere else."""

import math
import sys
from typing import Any

from tqdm import tqdm

_SECONDS = 10.0  # at least between two lines
_LINES = 10  # about, of long work


def progress_bar(
    total: int | None, name: str, unit: str, *, shown: bool = True, scale: bool = False
) -> "tqdm[Any]":
    """A bar of so many units. In a pipe, a log or a notebook it is lines, and none of short work.

    Args:
      total: units; None where nobody knows.
      name: of the work.
      unit: what is counted.
      shown: False draws nothing.
      scale: write 12.3k for 12345.
    """
    common: dict[str, Any] = {"total": total, "desc": name, "unit": unit, "unit_scale": scale}
    if not shown or sys.stderr is None:
        return tqdm(**common, disable=True)
    if sys.stderr.isatty():
        return tqdm(**common)
    return tqdm(
        **common,
        file=_Lines(),
        ncols=79,
        delay=_SECONDS,
        mininterval=_SECONDS,
        maxinterval=math.inf,
        miniters=max(1, (total or 0) // _LINES),
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

"""What is tried, and how it must end."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Literal

Ending = Literal["refused", "left out", "done"]


@dataclasses.dataclass(frozen=True)
class Case:
    """Something hostile, and a command that meets it.

    Attributes:
      name: of a row of the table: its group, a colon, and what it is.
      make: writes it into a folder, where a good model lies in ``model`` and a knowledge base of it
        in ``asked``, and returns the arguments of ``jaxrag``.
      ends: "refused", by one line and without a knowledge base that was not there before; "left
        out", by one line for each document that was, the others taken; or "done", without a line.
      says: a pattern that the lines hold, each of them.
      lines: that are printed where something is left out.
      documents: that the knowledge base ``kb`` holds behind it, where there is to be one.
      panics: whether the tokenizers' library, written in Rust, prints its own lines before.
    """

    name: str
    make: Callable[[Path], list[str]]
    ends: Ending
    says: str = ""
    lines: int = 1
    documents: int = 1
    panics: bool = False

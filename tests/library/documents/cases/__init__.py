"""Files made after public reports of lost or wrong text, and what a person reads in them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Case:
    """One file and what its text has to hold.

    Attributes:
      kind: of the loss, such as "merged cells".
      name: of the file; its suffix is the format.
      write: makes it at a path.
      kept: texts that stand in it, in this order; spaces and line breaks count as one space.
      invented: texts that do not.
      said: parts of the lines that say what was left out.
      refused: part of the reason, where the file has to be refused.
    """

    kind: str
    name: str
    write: Callable[[Path], object]
    kept: tuple[str, ...] = ()
    invented: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    refused: str = ""


def judged(case: Case, text: str) -> tuple[list[str], list[str]]:
    """What of a case is lost in a text, and what is invented."""
    found, at, lost = " ".join(text.split()), 0, []
    for part in (" ".join(it.split()) for it in case.kept):
        place = found.find(part, at)
        if place < 0:
            lost.append(part)
        else:
            at = place + len(part)
    return lost, [it for it in case.invented if " ".join(it.split()) in found]

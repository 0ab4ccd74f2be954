"""With how many partitions of an index a question is compared: as many as were needed.

How many that is depends on the vectors. So when an index is made, some of its own vectors are asked
for with ever more partitions, until nearly all that comparing every row finds is found. The
number, with a margin as questions lie farther off than what is stored, is kept in a file beside the
table. Where it is missing or unlike its digest, every partition is compared.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from jaxrag.library.retrieve.base import Ids

FILE = "probes.json"
RECALL = 0.985  # of the 10 best, on average of what is asked
DEPTH = 10
ASKED = 64  # vectors
_FEWEST = 8
_STEP = 1.25  # times as many partitions
_GROWN = 1.5  # times as many rows, or as few, from which an index is made anew


class Probes(NamedTuple):
    """What was measured of an index when it was made.

    Attributes:
      rows: how many there were.
      partitions: how many were enough.
      of: how many there were; 0 for an index of before that was kept.
    """

    rows: int
    partitions: int
    of: int = 0

    @property
    def xxh3(self) -> str:
        """The digest of all."""
        known = self if self.of else self[:2]
        return xxhash.xxh3_64_hexdigest(" ".join(map(str, known)).encode())

    def fits(self, rows: int) -> bool:
        """Whether an index that was made then serves so many rows."""
        return bool(self.of) and self.rows <= _GROWN * rows and rows < _GROWN * self.rows


def measured(
    rows: int, of: int, exact: Sequence[Ids], ask: Callable[[int], Sequence[Ids]]
) -> Probes:
    """One step more than the least number of partitions that finds RECALL of what is exact.

    Args:
      rows: of the table.
      of: partitions that there are.
      exact: the best ids of every vector that is asked for.
      ask: the same as found in so many partitions.
    """
    partitions = _FEWEST
    while partitions < of and _recall(exact, ask(partitions)) < RECALL:
        partitions = int(partitions * _STEP)
    return Probes(rows, min(int(partitions * _STEP), of), of)


def _recall(exact: Sequence[Ids], found: Sequence[Ids]) -> float:
    hits = sum(len(np.intersect1d(one, other)) for one, other in zip(exact, found, strict=True))
    return hits / max(1, sum(map(len, exact)))


def read(folder: Path) -> Probes | None:
    """What was measured last of the index in a folder; None where that cannot be told."""
    try:
        known = json.loads((folder / FILE).read_text())
        found = Probes(int(known["rows"]), int(known["partitions"]), int(known.get("of", 0)))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if known.get("xxh3") == found.xxh3 else None


def write(folder: Path, found: Probes) -> None:
    """Keep what was measured."""
    new = folder / f"{FILE}.{os.getpid()}"
    new.write_text(json.dumps({**found._asdict(), "xxh3": found.xxh3}))
    os.replace(new, folder / FILE)

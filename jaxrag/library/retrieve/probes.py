"""With how many partitions of an index a question is compared: as many as were needed.

How many that is depends on the vectors. So when an index has grown, some of its own vectors are
asked for with ever more partitions, until nearly all that comparing every row finds is found. The
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
RECALL = 0.995  # of the 10 best, on average of what is asked
DEPTH = 10
ASKED = 32  # vectors
_FEWEST = 8
_STEP = 1.5  # times as many partitions


class Probes(NamedTuple):
    """What was measured: of how many rows, and how many partitions were enough."""

    rows: int
    partitions: int

    @property
    def xxh3(self) -> str:
        """The digest of both."""
        return xxhash.xxh3_64_hexdigest(f"{self.rows} {self.partitions}".encode())


def measured(
    rows: int, most: int, exact: Sequence[Ids], ask: Callable[[int], Sequence[Ids]]
) -> Probes:
    """One step more than the least number of partitions that finds RECALL of what is exact.

    Args:
      rows: of the table.
      most: partitions, at most.
      exact: the best ids of every vector that is asked for.
      ask: the same as found in so many partitions.
    """
    partitions = _FEWEST
    while partitions < most and _recall(exact, ask(partitions)) < RECALL:
        partitions = int(partitions * _STEP)
    return Probes(rows, min(int(partitions * _STEP), most))


def _recall(exact: Sequence[Ids], found: Sequence[Ids]) -> float:
    hits = sum(len(np.intersect1d(one, other)) for one, other in zip(exact, found, strict=True))
    return hits / max(1, sum(map(len, exact)))


def read(folder: Path) -> Probes | None:
    """What was measured last of the index in a folder; None where that cannot be told."""
    try:
        known = json.loads((folder / FILE).read_text())
        found = Probes(int(known["rows"]), int(known["partitions"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if known.get("xxh3") == found.xxh3 else None


def write(folder: Path, found: Probes) -> None:
    """Keep what was measured."""
    new = folder / f"{FILE}.{os.getpid()}"
    new.write_text(json.dumps({**found._asdict(), "xxh3": found.xxh3}))
    os.replace(new, folder / FILE)

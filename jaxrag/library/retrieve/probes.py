"""With how many partitions of an index a question is compared: as many as were needed.

How many that is depends on the vectors. So when an index has grown, some of its own vectors are
asked for with ever more partitions, until nearly all that comparing every row finds is found.
Questions lie farther off than what is stored, and find a little less. The number is kept in a file
beside the table. Where it is missing or unlike its digest, every partition is compared.
"""

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from jaxrag.library.retrieve.base import Ids

FILE = "probes.json"
RECALL = 0.99  # of the 10 best, on average of what is asked
DEPTH = 10
ASKED = 64  # vectors
_FEWEST = 8
_STEP = 1.2  # times as many partitions
_GROWN = 1.2  # times as many rows, or as few, from which it is measured again


class Probes(NamedTuple):
    """What was measured: of how many rows, and how many partitions were enough for a recall."""

    rows: int
    partitions: int
    recall: float = RECALL

    @property
    def xxh3(self) -> str:
        """The digest of all."""
        return xxhash.xxh3_64_hexdigest(" ".join(map(str, self)).encode())

    def serves(self, rows: int) -> bool:
        """Whether it is as good as what would be measured of so many rows."""
        as_many = self.rows <= _GROWN * rows and rows < _GROWN * self.rows
        return as_many and self.recall == RECALL


def measured(
    rows: int, most: int, exact: Sequence[Ids], ask: Callable[[int], Sequence[Ids]]
) -> Probes:
    """The least number of partitions, in steps, that finds RECALL of what is exact.

    Args:
      rows: of the table.
      most: partitions, at most.
      exact: the best ids of every vector that is asked for.
      ask: the same as found in so many partitions.
    """
    partitions = _FEWEST
    while partitions < most and _recall(exact, ask(partitions)) < RECALL:
        partitions = math.ceil(partitions * _STEP)
    return Probes(rows, min(partitions, most))


def _recall(exact: Sequence[Ids], found: Sequence[Ids]) -> float:
    hits = sum(len(np.intersect1d(one, other)) for one, other in zip(exact, found, strict=True))
    return hits / max(1, sum(map(len, exact)))


def read(folder: Path) -> Probes | None:
    """What was measured last of the index in a folder; None where that cannot be told."""
    try:
        known = json.loads((folder / FILE).read_text())
        found = Probes(int(known["rows"]), int(known["partitions"]), float(known["recall"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if known.get("xxh3") == found.xxh3 else None


def write(folder: Path, found: Probes) -> None:
    """Keep what was measured."""
    new = folder / f"{FILE}.{os.getpid()}"
    new.write_text(json.dumps({**found._asdict(), "xxh3": found.xxh3}))
    os.replace(new, folder / FILE)

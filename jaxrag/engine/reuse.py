"""What of a prompt was reused and what was not, and why: the account that a result gives."""

import dataclasses
from collections.abc import Iterable
from typing import Literal, get_args

How = Literal["prefix hit", "chunk hit", "encoded", "in place", "computed"]
KVTier = Literal["pool", "host", "store"]


@dataclasses.dataclass(frozen=True)
class PartReuse:
    """The prefix, one chunk or one earlier turn of a prompt.

    Attributes:
      part: "prefix", or "chunk 0", "chunk 1", ... in the order of the sources; "turn 0", "turn 1",
        ... of what was said before. A turn of which a part was found and a part was not has a row
        for each.
      recomputed: how many of them were chosen and computed again.
      how: "prefix hit": found, and exact behind what precedes it here; "chunk hit": found, whatever
        preceded it when it was encoded; "encoded": missed, its stored form was made; "in place":
        missed, computed in its place; "computed": by a method that asks no store, or of a turn.
      where: "pool" (the device already held it), "host" (the arena did, from before) or "store",
        where it was found; else None.
      why: why nothing was found; "" where something was.
    """

    part: str
    tokens: int
    how: How
    where: KVTier | None
    recomputed: int
    why: str


KVSource = Literal["pool", "host", "store", "encoded", "computed"]


def tokens_by_source(rows: Iterable[PartReuse], num_tokens: int) -> dict[KVSource, int]:
    """All tokens of a prompt by where their KV came from; they add up to ``num_tokens``.

    "encoded" were missed and their stored form made; what was chosen and computed again, what was
    missed and computed in its place, and the final block are "computed".
    """
    counts = dict.fromkeys(get_args(KVSource), 0)
    for row in rows:
        source = row.where or ("encoded" if row.how == "encoded" else "computed")
        counts[source] += row.tokens - row.recomputed
    counts["computed"] += num_tokens - sum(counts.values())
    return counts


def token_counts(rows: Iterable[PartReuse]) -> dict[str, int]:
    """Tokens of chunks and turns by where their KV came from; what was missed is encoded only."""
    counts = {"reused": 0, "recomputed": 0, "encoded": 0}
    for row in rows:
        if row.part == "prefix":
            continue
        if row.how in ("encoded", "in place"):
            counts["encoded"] += row.tokens
        elif row.how == "computed":
            counts["recomputed"] += row.tokens
        else:
            counts["recomputed"] += row.recomputed
            counts["reused"] += row.tokens - row.recomputed
    return counts

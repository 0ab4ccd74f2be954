"""What of a prompt was reused and what was not, and why: the account that a result gives."""

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Literal, get_args

import numpy as np

from jaxrag.engine.mapping import PromptPart, RequestState
from jaxrag.reuse.methods import Method

How = Literal["prefix hit", "chunk hit", "encoded", "in place", "computed"]
Where = Literal["pool", "host", "store"]


@dataclasses.dataclass(frozen=True)
class PartReuse:
    """The prefix, one chunk or one earlier turn of a prompt.

    Attributes:
      part: "prefix", or "chunk 0", "chunk 1", ... in the order of the sources; "turn 0", "turn 1",
        ... of what was said before. A turn of which a part was found and a part was not has a row
        for each.
      tokens: its length.
      recomputed: how many of them were chosen and computed again.
      how: "prefix hit": found, and exact behind what precedes it here; "chunk hit": found, whatever
        preceded it when it was encoded; "encoded": missed, its stored form was made; "in place":
        missed, computed where it stands; "computed": by a method that asks no store, or of a turn.
      where: "pool" (the device already held it), "host" (the arena did, from before) or "store",
        where it was found; else None.
      why: why nothing was found; "" where something was.
    """

    part: str
    tokens: int
    how: How
    where: Where | None
    recomputed: int
    why: str


def account(
    method: Method, mapped: RequestState, maintained: Collection[str] | None = None
) -> list[PartReuse]:
    """What became of the prefix (unless it is empty), of every chunk and of every turn.

    ``maintained`` are the encoders under which a knowledge base keeps the chunks, where all of them
    were retrieved from one: it tells a chunk whose KV is gone from one that never had any.
    """
    chunks = mapped.parts[1:]
    recomputed = np.zeros(len(chunks), int)
    if mapped.choice is not None:
        ends = np.cumsum([len(part.ids) for part in chunks])
        of = np.searchsorted(ends, mapped.choice.tokens, side="right")
        recomputed = np.bincount(of, minlength=len(chunks))
    rows: list[PartReuse] = []
    names = _names(mapped.parts)
    for name, part, again in zip(names, mapped.parts, (0, *recomputed), strict=True):
        if not len(part.ids):
            continue
        how, where, why = _turn(method, part) if part.turn else _found(method, part)
        if why and part.chunk >= 0 and part.found is not None and maintained is not None:
            why += _since_ingest(method.encoder_of(part.chunk), maintained)
        row = PartReuse(name, len(part.ids), how, where, int(again), why)
        same = [at for at, it in enumerate(rows) if (it.part, it.how) == (name, how)]
        if same:  # pages of one turn
            row = dataclasses.replace(row, tokens=rows[same[0]].tokens + row.tokens)
            rows[same[0]] = row
        else:
            rows.append(row)
    return rows


def _names(parts: Sequence[PromptPart]) -> list[str]:
    """Of every part, chunks and turns counted each on their own."""
    numbers: dict[int, str] = {-1: "prefix"}
    counts = {"chunk": 0, "turn": 0}
    for part in parts:
        if part.chunk not in numbers:
            kind = "turn" if part.turn else "chunk"
            numbers[part.chunk] = f"{kind} {counts[kind]}"
            counts[kind] += 1
    return [numbers[part.chunk] for part in parts]


def _turn(method: Method, part: PromptPart) -> tuple[How, Literal["pool"] | None, str]:
    if part.kept:
        return "prefix hit", "pool", ""
    if part.kept_key:
        return "computed", None, "not in the pool: nothing left it behind all that precedes it here"
    return "computed", None, f"{method.name} keeps no turns here"


def _found(method: Method, part: PromptPart) -> tuple[How, Where | None, str]:
    if part.kept:
        return "prefix hit", "pool", ""
    found = part.found
    if found is None:
        why = f"{method.name} reuses no chunk"
        if method.prefix_cache:
            why += " but behind equal leading parts, and no earlier prompt left this one"
        return "computed", None, why
    if found.how == "pool" or found.how == "host" or found.how == "store":
        return "prefix hit" if part.exact else "chunk hit", found.how, ""
    return "encoded" if found.how == "encoded" else "in place", None, found.why


def _since_ingest(encoder: str, maintained: Collection[str]) -> str:
    if encoder not in maintained:
        return f"; the knowledge base keeps {', '.join(maintained)}, not {encoder}"
    moved = ", or its neighbours are others now" if encoder.startswith("neighbours") else ""
    return f"; it was there once: evicted or removed{moved}"


Source = Literal["pool", "host", "store", "encoded", "computed"]


def tokens_by_source(rows: Iterable[PartReuse], num_tokens: int) -> dict[Source, int]:
    """All tokens of a prompt by where their KV came from; they add up to ``num_tokens``.

    "encoded" were missed and their stored form made; what was chosen and computed again, what was
    missed and computed where it stands, and the final block are "computed".
    """
    counts = dict.fromkeys(get_args(Source), 0)
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

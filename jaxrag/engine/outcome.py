"""What one request took, once it is done: what of its prompt was reused, and why not the rest."""

import dataclasses
import itertools
from collections import abc
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np

from jaxrag.engine.attribution import Attribution
from jaxrag.engine.progress import Outcome
from jaxrag.engine.reuse import How, KVTier, PartReuse
from jaxrag.engine.sequence import PromptPart, Sequence
from jaxrag.engine.staging import ChunkOrigin
from jaxrag.kv.store.memory import MemoryStore
from jaxrag.models.flops import turborag_flops
from jaxrag.models.model import Model
from jaxrag.reuse.decode import Account
from jaxrag.reuse.methods import Method

INDEX_COUNTS = ("keys", "stored", "trained")  # of decode.Account


def outcome_of(
    model: Model,
    sequence: Sequence,
    searched: Account | None,
    *,
    now: float,
    compiling: Callable[[float, float], float],
    attribution: Attribution | None,
) -> Outcome:
    """The account of a request that is done.

    Args:
      now: when it had its last token.
      compiling: seconds between two moments in which the engine compiled.
      attribution: which chunks its tokens were chosen for, where that is asked and known.
    """
    request, tokens, moments = sequence.request, sequence.read, dict(sequence.moments)
    moments.setdefault("admitted", moments["added"])
    moments.setdefault("ready", moments["admitted"])
    ends = [*(moments[name] for name in ("added", "admitted", "ready", "first")), now]
    wait, load, prefill, decode = (
        end - start - compiling(start, end) for start, end in itertools.pairwise(ends)
    )
    rule = request.method.decode
    searched = searched or Account()  # the first token needs no index
    return Outcome(
        wait_seconds=wait,
        load_seconds=load,
        prefill_seconds=prefill,
        per_token=decode / (tokens - 1) if tokens > 1 else 0.0,
        first_seconds=moments["first"] - moments["added"],
        compile_seconds=compiling(moments["added"], now),
        computed=len(sequence.run.ids),
        flops=_flops(model, sequence),
        reuse=account(sequence),
        indexes={} if rule.searches is None else {n: getattr(searched, n) for n in INDEX_COUNTS},
        notes=[
            *notes_on_missed(sequence, isinstance(request.store, MemoryStore)),
            *(f"decode rule {rule.name!r}: {note}" for note in searched.notes),
        ],
        attribution=attribution,
        moments=moments,
    )


def _flops(model: Model, sequence: Sequence) -> int:
    flops = turborag_flops(model.config, len(sequence.run.ids), sequence.num_tokens)
    flops += 0 if sequence.choice is None else sequence.choice.flops
    runs = [run for part in sequence.distinct if part.origin for run in part.origin.runs]
    return flops + sum(turborag_flops(model.config, *run) for run in runs)


def notes_on_missed(sequence: Sequence, in_memory: bool = False) -> Iterator[str]:
    """A line on what was not found of the prefix, and one on the chunks of each encoder.

    ``in_memory``: the store is the engine's own and ends with it.
    """
    stored = "kept in memory" if in_memory else "stored"
    groups: dict[tuple[bool, str], list[tuple[int, ChunkOrigin]]] = {}
    for part in sequence.distinct:
        if part.load is not None and part.origin is not None and not part.origin.hit:
            group = (part is not sequence.parts[0], part.load.encoder)
            groups.setdefault(group, []).append((len(part.ids), part.origin))
    for missed in groups.values():
        origins = [origin for _, origin in missed]
        corrupt = sum(origin.corrupt for origin in origins)
        unsealed = sum(origin.unsealed for origin in origins)
        lacking = len(missed) - corrupt - unsealed
        why = f"{lacking} not in the store, {corrupt} corrupt there"
        if unsealed:
            why += f", {unsealed} not sealed"
        in_place = origins[0].how == "nowhere"
        reasons = [origin.not_stored for origin in origins if origin.not_stored is not None]
        kept = f"not stored: {reasons[-1]}" if reasons else "not stored" if in_place else stored
        done = "computed in place" if in_place else "encoded"
        runs = [run for origin in origins for run in origin.runs]
        if len(runs) > len(missed):  # neighbours had to be encoded first
            done += f" in {len(runs)} passes over {sum(computed for computed, _ in runs)} tokens"
        tokens = sum(length for length, _ in missed)
        yield f"{len(missed)} chunk(s), {tokens} tokens, {done} ({why}) and {kept}"


def account(sequence: Sequence) -> list[PartReuse]:
    """What became of the prefix (unless it is empty), of every chunk and of every turn."""
    method = sequence.request.method
    chunks = sequence.parts[1:]
    recomputed = np.zeros(len(chunks), int)
    if sequence.choice is not None:
        ends = np.cumsum([len(part.ids) for part in chunks])
        of = np.searchsorted(ends, sequence.choice.tokens, side="right")
        recomputed = np.bincount(of, minlength=len(chunks))
    rows: list[PartReuse] = []
    names = _names(sequence.parts)
    for name, part, again in zip(names, sequence.parts, (0, *recomputed), strict=True):
        if not len(part.ids):
            continue
        how, where, why = _turn(method, part) if part.turn else _found(method, part)
        row = PartReuse(name, len(part.ids), how, where, int(again), why)
        same = [at for at, earlier in enumerate(rows) if (earlier.part, earlier.how) == (name, how)]
        if same:  # pages of one turn
            row = dataclasses.replace(row, tokens=rows[same[0]].tokens + row.tokens)
            rows[same[0]] = row
        else:
            rows.append(row)
    return rows


def _names(parts: abc.Sequence[PromptPart]) -> list[str]:
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


def _found(method: Method, part: PromptPart) -> tuple[How, KVTier | None, str]:
    if part.kept:
        return "prefix hit", "pool", ""
    origin = part.origin
    if origin is None:
        why = f"{method.name} reuses no chunk"
        if method.prefix_cache:
            why += " but behind equal leading parts, and no earlier prompt left this one"
        return "computed", None, why
    if origin.how == "pool" or origin.how == "host" or origin.how == "store":
        return "prefix hit" if part.exact else "chunk hit", origin.how, ""
    return "encoded" if origin.how == "encoded" else "in place", None, origin.why

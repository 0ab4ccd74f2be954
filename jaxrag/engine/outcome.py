"""What one request took, once it is done: what of its prompt was reused, and why not the rest."""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Literal

import numpy as np

from jaxrag.engine.mapping import PromptPart, RequestState
from jaxrag.engine.progress import Outcome
from jaxrag.engine.request import Request
from jaxrag.engine.reuse import How, KVTier, PartReuse
from jaxrag.engine.staging import ChunkOrigin
from jaxrag.kv.store.memory import MemoryStore
from jaxrag.models.flops import turborag_flops
from jaxrag.models.model import Model
from jaxrag.reuse.decode import Account
from jaxrag.reuse.methods import Method

INDEX_COUNTS = ("keys", "stored", "trained")  # of decode.Account


def outcome_of(
    model: Model,
    request: Request,
    state: RequestState,
    searched: Account | None,
    *,
    moments: tuple[float, float, float, float, float],
    compiling: Callable[[float, float], float],
    tokens: int,
) -> Outcome:
    """The account of a request that is done.

    Args:
      moments: when it was added, admitted, ready, had its first token, and its last.
      compiling: seconds between two moments in which the engine compiled.
      tokens: of its answer.
    """
    wait, load, prefill, decode = (
        end - start - compiling(start, end) for start, end in itertools.pairwise(moments)
    )
    rule = request.method.decode
    searched = searched or Account()  # the first token needs no index
    return Outcome(
        wait_seconds=wait,
        load_seconds=load,
        prefill_seconds=prefill,
        per_token=decode / (tokens - 1) if tokens > 1 else 0.0,
        compile_seconds=compiling(moments[0], moments[3]),
        computed=len(state.ids),
        flops=_flops(model, request, state),
        reuse=account(request.method, state, request.encoders),
        indexes={} if rule.searches is None else {n: getattr(searched, n) for n in INDEX_COUNTS},
        notes=[
            *notes_on_missed(state, isinstance(request.store, MemoryStore)),
            *(f"decode rule {rule.name!r}: {note}" for note in searched.notes),
        ],
    )


def _flops(model: Model, request: Request, state: RequestState) -> int:
    flops = turborag_flops(model.config, len(state.ids), request.prompt.num_tokens)
    flops += 0 if state.choice is None else state.choice.flops
    runs = [run for part in state.distinct for run in part.found.runs]  # type: ignore[union-attr]
    return flops + sum(turborag_flops(model.config, *run) for run in runs)


def notes_on_missed(state: RequestState, in_memory: bool = False) -> Iterator[str]:
    """A line on what was not found of the prefix, and one on the chunks of each encoder.

    ``in_memory``: the store is the engine's own and ends with it.
    """
    stored = "kept in memory" if in_memory else "stored"
    groups: dict[tuple[bool, str], list[tuple[int, ChunkOrigin]]] = {}
    for part in state.distinct:
        if part.load is not None and part.found is not None and not part.found.hit:
            group = (part is not state.parts[0], part.load.encoder)
            groups.setdefault(group, []).append((len(part.ids), part.found))
    for missed in groups.values():
        found = [it for _, it in missed]
        corrupt, unsealed = sum(it.corrupt for it in found), sum(it.unsealed for it in found)
        lacking = len(missed) - corrupt - unsealed
        why = f"{lacking} not in the store, {corrupt} corrupt there"
        if unsealed:
            why += f", {unsealed} not sealed"
        in_place = found[0].how == "nowhere"
        reasons = [it.not_stored for it in found if it.not_stored is not None]
        kept = f"not stored: {reasons[-1]}" if reasons else "not stored" if in_place else stored
        done = "computed in place" if in_place else "encoded"
        runs = [run for it in found for run in it.runs]
        if len(runs) > len(missed):  # neighbours had to be encoded first
            done += f" in {len(runs)} passes over {sum(computed for computed, _ in runs)} tokens"
        tokens = sum(length for length, _ in missed)
        yield f"{len(missed)} chunk(s), {tokens} tokens, {done} ({why}) and {kept}"


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


def _found(method: Method, part: PromptPart) -> tuple[How, KVTier | None, str]:
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

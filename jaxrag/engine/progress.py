"""What the engine says of a request: new tokens, why it ended, and what it took."""

import dataclasses
from collections.abc import Callable, Iterator

from jaxrag.engine.loader import Found
from jaxrag.engine.mapping import RequestState
from jaxrag.engine.request import FinishReason, Request
from jaxrag.engine.reuse import PartReuse, account
from jaxrag.kv.store.memory import MemoryStore
from jaxrag.models.flops import turborag_flops
from jaxrag.models.model import Model
from jaxrag.reuse.decode import Account

INDEX_COUNTS = ("keys", "stored", "trained")  # of decode.Account


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one request took, once it is done.

    Attributes:
      wait_seconds: until its pages were reserved.
      load_seconds: from there until its chunks' KV was in the pool: storage and encoding.
      prefill_seconds: from there until the first token was on the host; waiting for a row is part
        of it.
      per_token: mean seconds of the other tokens; 0 where there are none.
      computed: tokens of the prompt that were run: what was not found, and what was chosen to be
        computed again.
      flops: to the first token, TurboRAG appendix C: prefill with what is recomputed, the
        selector's own passes, and encoding on the fly.
      reuse: of the prefix, every chunk and every turn: what was reused, how, and why not.
      indexes: of a decode rule that searches some, summed over layers and KV heads: keys indexed,
        those of them in indexes that were stored with their chunks, and indexes that were trained
        for the question; empty for other rules.
      notes: on chunks that were not found, and on indexes that were not used.
    """

    wait_seconds: float
    load_seconds: float
    prefill_seconds: float
    per_token: float
    computed: int
    flops: int
    reuse: list[PartReuse]
    indexes: dict[str, int]
    notes: list[str]


@dataclasses.dataclass(frozen=True)
class Progress:
    """The news of one request.

    Attributes:
      number: as ``Engine.add`` returned it.
      new: token ids since the last time, without the one that ended the answer.
      logprobs: of each the logarithm of its probability, before temperature, top-k and top-p.
      finish_reason: "stop" after a token of ``eos_ids`` or ``Engine.stop``, "length" at the bound;
        None while it goes on, and where it failed.
      outcome: with the finish reason.
      error: why it failed; nothing follows.
    """

    number: int
    new: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    outcome: Outcome | None = None
    error: BaseException | None = None

    @property
    def last(self) -> bool:
        """Does nothing follow?"""
        return self.finish_reason is not None or self.error is not None


@dataclasses.dataclass(frozen=True)
class Where:
    """Where a request stands.

    Attributes:
      status: such as "waiting", "loading" or "decode".
      there: chunks that it was given and that are in the pool.
      chunks: that it was given pages for; 0 while it waits.
    """

    status: str
    there: int
    chunks: int


# Is called on the engine's thread, and must not wait. True: no more tokens are wanted; the outcome
# still comes.
Sink = Callable[[Progress], bool | None]


def outcome_of(
    model: Model,
    request: Request,
    state: RequestState,
    searched: Account | None,
    *,
    wait: float,
    load: float,
    prefill: float,
    per_token: float,
) -> Outcome:
    """The account of a request that is done; seconds as in ``Outcome``."""
    rule = request.method.decode
    searched = searched or Account()  # the first token needs no index
    return Outcome(
        wait_seconds=wait,
        load_seconds=load,
        prefill_seconds=prefill,
        per_token=per_token,
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
    groups: dict[tuple[bool, str], list[tuple[int, Found]]] = {}
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

"""Which of several engines gets a request: from what they hold, and what they have to do."""

import dataclasses
import hashlib
from collections.abc import Callable, Container, Sequence
from typing import Literal

Routing = Literal["residency", "hashing", "round_robin", "random"]


@dataclasses.dataclass(frozen=True)
class PromptPiece:
    """A part of a prompt that an engine may hold.

    Attributes:
      name: of its KV, 64 bits.
      nbytes: that are read from the store where an engine does not hold it.
      tokens: that are computed there instead, where no store has it.
    """

    name: int
    nbytes: int = 0
    tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An engine that takes requests.

    Attributes:
      name: of the engine.
      pool: names of the KV in its pool.
      host: names of the KV in its host memory.
      queued: tokens that it has to compute for what it was given.
      rate: tokens a second that it computes.
      store_rate: bytes a second at which it reads from the store.
      host_rate: bytes a second from its host memory into its pool.
    """

    name: str
    pool: Container[int] = frozenset()
    host: Container[int] = frozenset()
    queued: float = 0.0
    rate: float = 1.0
    store_rate: float = 1.0
    host_rate: float = 1.0


def seconds(pieces: Sequence[PromptPiece], candidate: Candidate) -> float:
    """Until the engine could begin: its queue, and what it has to read or compute first."""
    spent = candidate.queued / candidate.rate
    for piece in pieces:
        if piece.name in candidate.pool:
            continue
        if piece.name in candidate.host:
            spent += piece.nbytes / candidate.host_rate
        else:
            spent += piece.nbytes / candidate.store_rate + piece.tokens / candidate.rate
    return spent


def ranked(
    routing: Routing, pieces: Sequence[PromptPiece], candidates: Sequence[Candidate], number: int
) -> list[str]:
    """Names of the engines, the one to ask first.

    Args:
      pieces: of the prompt, in its order.
      candidates: in an order that does not change.
      number: of the request; requests are counted from 0.
    """
    order = sorted(candidates, key=lambda it: _ORDERS[routing](pieces, it, candidates, number))
    return [it.name for it in order]


_Key = tuple[float, float]


def _residency(
    pieces: Sequence[PromptPiece], it: Candidate, among: Sequence[Candidate], number: int
) -> _Key:
    """Who begins first; of equals the one that chunks like these go to."""
    return seconds(pieces, it), _weight(it.name, pieces[0].name if pieces else number)


def _hashing(
    pieces: Sequence[PromptPiece], it: Candidate, among: Sequence[Candidate], number: int
) -> _Key:
    """By the first chunk alone: few move where an engine comes or goes."""
    return _weight(it.name, pieces[0].name if pieces else number), 0.0


def _round_robin(
    pieces: Sequence[PromptPiece], it: Candidate, among: Sequence[Candidate], number: int
) -> _Key:
    return (among.index(it) - number) % len(among), 0.0


def _random(
    pieces: Sequence[PromptPiece], it: Candidate, among: Sequence[Candidate], number: int
) -> _Key:
    return _weight(it.name, number), 0.0


_ORDERS: dict[
    Routing, Callable[[Sequence[PromptPiece], Candidate, Sequence[Candidate], int], _Key]
] = {
    "residency": _residency,
    "hashing": _hashing,
    "round_robin": _round_robin,
    "random": _random,
}


def _weight(name: str, of: int) -> float:
    """0 to 1, the same in every process."""
    digest = hashlib.blake2b(f"{name} {of}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64

"""Which of several engines gets a request: from what they hold, and what they have to do."""

import dataclasses
import hashlib
from collections.abc import Callable, Container, Sequence
from statistics import fmean
from typing import Literal

Routing = Literal["residency", "hashing", "round_robin", "random"]

_MORE = 1.5  # of the mean load, that an engine may have before what it holds no longer counts
_ROWS = 3.0  # requests like this one that may be there before: an engine serves some together


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
class RoutedRequest:
    """A request, as engines are chosen for it.

    Attributes:
      pieces: of its prompt, in their order.
      cost: tokens that an engine computes for it.
      number: requests are counted from 0.
    """

    pieces: Sequence[PromptPiece]
    cost: float = 1.0
    number: int = 0


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

    @property
    def load(self) -> float:
        """Seconds until it has done what it was given."""
        return self.queued / self.rate


def missing(request: RoutedRequest, candidate: Candidate, among: Sequence[Candidate]) -> float:
    """Seconds to read and compute what an engine lacks, at the mean rates of all of them.

    So engines that lack the same are equal, whatever was measured of each of late.
    """
    store = fmean(engine.store_rate for engine in among)
    host = fmean(engine.host_rate for engine in among)
    rate = fmean(engine.rate for engine in among)
    spent = 0.0
    for piece in request.pieces:
        if piece.name in candidate.pool:
            continue
        if piece.name in candidate.host:
            spent += piece.nbytes / host
        else:
            spent += piece.nbytes / store + piece.tokens / rate
    return spent


def ranked(routing: Routing, request: RoutedRequest, candidates: Sequence[Candidate]) -> list[str]:
    """Names of the engines, the one to ask first; ``candidates`` in an order that does not change.

    "residency": of the engines that are not loaded above the others, the one that lacks least; of
    equals the one with the least to do. The others follow by when they could begin.
    """
    order = sorted(candidates, key=lambda it: _ORDERS[routing](request, it, candidates))
    return [it.name for it in order]


_Key = tuple[float, ...]


def _residency(request: RoutedRequest, engine: Candidate, among: Sequence[Candidate]) -> _Key:
    own = request.cost / fmean(other.rate for other in among)
    mean = fmean(other.load for other in among) + own / len(among)
    lacks = missing(request, engine, among)
    if engine.load > max(_MORE * mean, _ROWS * own):
        return 1.0, engine.load + lacks
    return 0.0, lacks, engine.load, _weight(engine.name, _first(request))


def _hashing(request: RoutedRequest, engine: Candidate, among: Sequence[Candidate]) -> _Key:
    """By the first chunk alone: few move where an engine comes or goes."""
    return (_weight(engine.name, _first(request)),)


def _round_robin(request: RoutedRequest, engine: Candidate, among: Sequence[Candidate]) -> _Key:
    return ((among.index(engine) - request.number) % len(among),)


def _random(request: RoutedRequest, engine: Candidate, among: Sequence[Candidate]) -> _Key:
    return (_weight(engine.name, request.number),)


_ORDERS: dict[Routing, Callable[[RoutedRequest, Candidate, Sequence[Candidate]], _Key]] = {
    "residency": _residency,
    "hashing": _hashing,
    "round_robin": _round_robin,
    "random": _random,
}


def _first(request: RoutedRequest) -> int:
    return request.pieces[0].name if request.pieces else request.number


def _weight(name: str, of: int) -> float:
    """0 to 1, the same in every process."""
    digest = hashlib.blake2b(f"{name} {of}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64

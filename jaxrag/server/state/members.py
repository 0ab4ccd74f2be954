"""What a server knows of one of its engines, and what it has given it."""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Protocol

from jaxrag.engine.jobs import Job, JobNews, ReplicaReport, name_of
from jaxrag.engine.progress import Sink, Where
from jaxrag.engine.request import Request
from jaxrag.engine.routing import PromptPiece
from jaxrag.engine.sequence import Sequence

_BYTES = 1e9  # a second of a link that was not measured yet
_FLOOR = 1e-9


class ReplicaLink(Protocol):
    """The way to one engine. Raises EngineUnavailable where it is gone."""

    @property
    def name(self) -> str:
        """Of the engine, among those of the server."""

    def serve(self, job: Job) -> AsyncGenerator[JobNews, None]:
        """As ``Replica.serve``."""

    async def report(self, server: str) -> ReplicaReport:
        """As ``Replica.report``."""

    async def stop(self, server: str, number: int) -> None:
        """As ``Replica.stop``."""

    async def drop(self, keys: list[str]) -> None:
        """As ``Replica.drop``."""

    async def forget(self, tenant: str) -> int:
        """As ``Replica.forget``."""


@dataclasses.dataclass(eq=False)
class SentRequest:
    """A request on its way, until its end."""

    number: int
    request: Request
    sink: Sink
    pieces: list[PromptPiece]
    prompt_cost: float
    since: float
    at: str = ""  # the engine that has it
    heard: int = 0  # tokens of its answer
    begun: bool = False  # something was told of it: it cannot begin again elsewhere
    lost: str = ""  # why the engine that had it is given up
    aborted: bool = False
    where: Where | None = None
    task: "asyncio.Task[None] | None" = None


class ReplicaMember:
    """What is known of one engine."""

    def __init__(self, link: ReplicaLink, now: float) -> None:
        self.link = link
        self.report: ReplicaReport | None = None
        self.up = False
        self.refused = ""  # why it is not used though it is there
        self.leaving = False
        self.last = now  # when it last reported
        self.in_pool: set[int] = set()
        self.host: set[int] = set()
        self.watch: asyncio.Task[None] | None = None
        self.sent: dict[int, SentRequest] = {}
        self.coming = Counter[int]()  # pieces of what it has, and is not over
        self.since_report: set[int] = set()  # of what it was given since it was last looked at

    def __contains__(self, name: object) -> bool:
        """Is it in its pool, or will be once it has begun what it was given?"""
        return name in self.in_pool or name in self.since_report or name in self.coming

    def give(self, sent: SentRequest) -> None:
        """It has a request from now on."""
        self.sent[sent.number] = sent
        names = [piece.name for piece in sent.pieces]
        self.coming.update(names)
        self.since_report.update(names)

    def take_back(self, sent: SentRequest) -> None:
        """It is done with a request, or gone."""
        if self.sent.pop(sent.number, None) is not None:
            self.coming -= Counter(piece.name for piece in sent.pieces)


def pieces_of(sequence: Sequence, private: bool) -> list[PromptPiece]:
    """What an engine may hold of a prompt: its chunks, then its earlier turns.

    ``private``: no store but the engine's own has its chunks. The prefix is left out, which every
    engine soon holds.
    """
    chunks, turns = [], []
    for part in sequence.parts:
        if part.chunk < 0 or not len(part.ids):
            continue
        tokens = len(part.ids)
        if part.load is not None and not private:
            chunks.append(PromptPiece(name_of(part.load.key), nbytes=part.load.nbytes))
        elif part.load is not None:
            chunks.append(PromptPiece(name_of(part.load.key), tokens=tokens))
        elif part.kept_key:
            turns.append(PromptPiece(name_of(part.kept_key), tokens=tokens))
    return chunks + turns


def rate_of(report: ReplicaReport | None) -> float | None:
    """Tokens a second of an engine; None where it has not said."""
    return None if report is None or report.status is None else report.status.rate


def link_rates(report: ReplicaReport | None, location: str) -> tuple[float, float]:
    """Bytes a second from the store at a location, and from host memory, as an engine has it."""
    links = () if report is None or report.tiers is None else report.tiers.links
    known = {link.name: link.rate for link in links if link.rate}
    return max(known.get(location, _BYTES), _FLOOR), max(known.get("host", _BYTES), _FLOOR)

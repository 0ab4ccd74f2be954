"""What a server and the engines that answer for it say to each other."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import xxhash

from jaxrag.base.types import HostArray
from jaxrag.engine.progress import Progress, Where
from jaxrag.engine.status import EngineStatus, Tiers
from jaxrag.kv.store import KVLayout

SILENT_SECONDS = 15.0  # without a word of a server, or of an engine, after which it counts as gone

ReplicaPhase = Literal["starting", "ready", "failed"]


@dataclasses.dataclass(frozen=True)
class StoreRef:
    """Which store a request reads, for a process that opens it itself.

    Attributes:
      kind: "base", a knowledge base by its name; "chunks", a repository by its location; "memory",
        of a tenant, whose KV each engine has for itself.
      name: of the knowledge base or the tenant, or the location.
      fingerprint: of the store.
      layout: of its chunks.
      secret: that seals its chunks.
    """

    kind: Literal["base", "chunks", "memory"]
    name: str
    fingerprint: str
    layout: KVLayout
    secret: bytes | None = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(frozen=True)
class Job:
    """A request for another process.

    Attributes:
      server: that sends it; no two have the same.
      number: among the server's.
      request: as ``wire.request_table`` writes it.
    """

    server: str
    number: int
    store: StoreRef
    request: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class JobNews:
    """What is new of one request, and what the engine's clock says as it is sent."""

    now: float
    progress: tuple[Progress, ...]


@dataclasses.dataclass(frozen=True)
class ReplicaReport:
    """An engine at one moment, as its server hears it.

    Attributes:
      phase: whether it takes requests.
      why: it failed; "" where it did not.
      about: what must be the same in all engines of a server, by name.
      pid: of its process.
      num_pages: of its pool.
      pool: names of the KV in its pool, uint64.
      host: names of the KV in its host memory, uint64.
      status: as ``Engine.status`` says; None before its first request.
      tiers: as ``Engine.tiers`` says.
      compiled: programs, by function.
      iterations: of its loop.
      silence: seconds for which it has been at one of these.
      where: requests of the server that asks, by number.
    """

    phase: ReplicaPhase
    why: str = ""
    about: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pid: int = dataclasses.field(default_factory=os.getpid)
    num_pages: int = 0
    pool: HostArray = dataclasses.field(default_factory=lambda: np.zeros(0, np.uint64))
    host: HostArray = dataclasses.field(default_factory=lambda: np.zeros(0, np.uint64))
    status: EngineStatus | None = None
    tiers: Tiers | None = None
    compiled: Mapping[str, int] = dataclasses.field(default_factory=dict)
    iterations: int = 0
    silence: float = 0.0
    where: Mapping[int, Where] = dataclasses.field(default_factory=dict)


def name_of(key: str) -> int:
    """64 bits of a key, under which engines and routers know its KV."""
    return xxhash.xxh3_64_intdigest(key.encode())

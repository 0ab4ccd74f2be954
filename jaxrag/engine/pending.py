"""Chunks that the pool waits for, and those that are read together."""

import dataclasses
import threading
from collections import abc

from jaxrag.base.types import HostArray
from jaxrag.engine.arena import HostArena
from jaxrag.engine.links import Read
from jaxrag.engine.sequence import Sequence
from jaxrag.engine.staging import ChunkLoad, ChunkOrigin, Fetched, Staged
from jaxrag.kv.cache import PagedCache
from jaxrag.kv.store import OwnRead

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5  # seconds between two looks for what others encode


@dataclasses.dataclass(eq=False)
class PendingChunk:
    """A chunk that the pool waits for.

    Attributes:
      owner: the request that asked first.
      pages: of the pool, for its KV.
      deadline: by the engine's clock, when it is computed instead, or with a ``pause`` looked for
        again; None: it is waited for.
      batch: that it is read in.
      late: it is read and computed, and the first to finish claims it.
      origin: why it is to be encoded.
      stores: its store gets it once it is encoded.
      pause: another process encodes it: seconds until it is looked for again.
    """

    load: ChunkLoad
    owner: Sequence
    cache: PagedCache
    pages: tuple[int, ...]
    deadline: float | None
    batch: "ReadBatch | None" = None
    late: bool = False
    origin: ChunkOrigin = dataclasses.field(default_factory=lambda: ChunkOrigin("encoded"))
    stores: bool = True
    pause: float = 0.0
    _claim: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def claim(self) -> bool:
        """True for the first caller: only its KV is placed. On any thread."""
        return self._claim.acquire(blocking=False)

    @property
    def claimed(self) -> bool:
        """Is its KV there, or given up?"""
        return self._claim.locked()

    def abandon(self) -> bool:
        """As ``claim``, for nothing to be placed."""
        self.release()
        return self.claim()

    def wait(self, now: float) -> None:
        """Another process encodes it: it is looked for again, less often with every time."""
        self.pause = min(2 * self.pause or _FIRST_PAUSE, _LONGEST_PAUSE)
        self.deadline = now + self.pause

    def release(self) -> None:
        """Other processes may encode it, or find it in the store; on any thread."""
        self.load.encoding.store.release(self.load.stored_key)


@dataclasses.dataclass(eq=False)
class ReadBatch:
    """Chunks that are read together, from where they are until they are placed.

    Attributes:
      waiting: by key, those that the pool waits for; once they are fetched, those claimed.
      held: they are in the arena.
      read: over a link; None where there is none.
      placed: blocks that are written there.
    """

    loads: abc.Sequence[ChunkLoad]
    waiting: dict[str, PendingChunk]
    held: bool = False
    read: Read | None = None
    staged: Staged | None = None
    placed: int = 0

    def mark(self, what: str, now: float) -> None:
        """A moment of those who asked for its chunks first; on any thread."""
        for chunk in list(self.waiting.values()):
            chunk.owner.moments[what] = now

    def keep(self, arena: HostArena, fetched: Fetched | BaseException) -> None:
        """Put what was read into the arena; on any thread."""
        if isinstance(fetched, BaseException) or self.held or not arena.max_bytes:
            return
        for load in self.loads:
            if load.key in fetched.at and not load.encoding.store.private:
                arena.put(load.key, fetched.of(load))


@dataclasses.dataclass(eq=False)
class SharedRead:
    """A batch of which every process reads its part.

    Attributes:
      own: the part of this process, once it is read.
    """

    batch: ReadBatch
    own: tuple[OwnRead, HostArray | None] | BaseException | None = None

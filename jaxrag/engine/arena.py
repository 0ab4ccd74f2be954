"""The host arena: chunk KV in host memory, between the stores and the pool on the device."""

import dataclasses
import heapq
import threading
from collections.abc import Callable, Iterable

from jaxrag.base.types import HostArray
from jaxrag.kv.cache.budget import available_bytes
from jaxrag.kv.cache.heat import HALF_LIFE, NEVER, DecayedHeat

_SHARE = 4  # of the memory that is free: one part in so many, by default
_MOST = 64 << 30  # bytes, by default
_UNKNOWN = 4 << 30  # bytes that are taken to be free where the system does not say
_COLD = 8  # one part in so many, the coldest, in which the pool's chunks leave first


def default_arena_bytes() -> int:
    """A quarter of the memory that is free now, 64 GiB at most."""
    return min((available_bytes() or _UNKNOWN) // _SHARE, _MOST)


@dataclasses.dataclass(frozen=True)
class ArenaState:
    """The arena at one moment.

    Attributes:
      max_bytes: that may be.
      evicted: how many had to leave.
    """

    nbytes: int
    max_bytes: int
    chunks: int
    evicted: int


class HostArena:
    """Chunk KV [L, 2, T, K, H] as its store gives it, verified when it was read, up to a bound.

    The coldest leaves first. Heat is how often a chunk was asked for, each time counted half with
    every ``half_life`` requests since. In the coldest eighth those go first that lie in the pool
    too; were it so everywhere, chunks that no request asks for would stay for good. Safe to
    share between threads.
    """

    def __init__(
        self, max_bytes: int, in_pool: Callable[[str], bool], half_life: float = HALF_LIFE
    ) -> None:
        """Empty. ``in_pool`` says, on any thread, whether the device has a chunk."""
        self.max_bytes = max_bytes
        self._in_pool = in_pool
        self._lock = threading.Lock()
        self._kv: dict[str, HostArray] = {}
        self._heat = DecayedHeat[str](half_life)
        self._ahead: set[str] = set()  # read, and not used yet
        # The next to leave, and their heat; last first.
        self._victims: list[tuple[str, tuple[float, int]]] = []
        self._nbytes = self._evicted = 0

    @property
    def nbytes(self) -> int:
        """Bytes held at this moment."""
        return self._nbytes

    @property
    def state(self) -> ArenaState:
        """How much there is."""
        with self._lock:
            return ArenaState(self._nbytes, self.max_bytes, len(self._kv), self._evicted)

    def __contains__(self, key: str) -> bool:
        return key in self._kv

    def keys(self) -> list[str]:
        """Of the KV that it has at this moment."""
        with self._lock:
            return list(self._kv)

    def asked(self, keys: Iterable[str]) -> None:
        """A request asks for these chunks, wherever they are."""
        if not self.max_bytes:
            return
        with self._lock:
            self._heat.tick()
            for key in keys:
                self._heat.use(key)

    def get(self, key: str) -> HostArray | None:
        """The KV of a chunk, not to be changed; it stays whole if the chunk leaves meanwhile."""
        with self._lock:
            return self._kv.get(key)

    def use(self, key: str) -> bool:
        """A request is given a chunk; True for the first, who is the one that it was read for."""
        with self._lock:
            first = key in self._ahead
            self._ahead.discard(key)
            return first

    def put(self, key: str, kv: HostArray) -> bool:
        """Hold ``kv``, which does not change any more; False where it is larger than the arena."""
        if kv.nbytes > self.max_bytes:
            return False
        with self._lock:
            if key in self._kv:
                return True
            if self._heat.of(key) == NEVER:  # read ahead of who asks for it
                self._heat.use(key)
            while self._nbytes + kv.nbytes > self.max_bytes:
                self._evict()
            self._kv[key] = kv
            self._ahead.add(key)
            self._nbytes += kv.nbytes
            return True

    def drop(self, keys: Iterable[str]) -> None:
        """Let these go, of those that are here."""
        with self._lock:
            for key in keys:
                kv = self._kv.pop(key, None)
                self._ahead.discard(key)
                self._nbytes -= 0 if kv is None else kv.nbytes

    def clear(self) -> None:
        """Let everything go."""
        with self._lock:
            self._kv.clear()
            self._ahead.clear()
            self._victims.clear()
            self._nbytes = 0

    def check(self) -> None:
        """AssertionError unless the bytes are those of the chunks, and within the bound."""
        with self._lock:
            assert self._nbytes == sum(kv.nbytes for kv in self._kv.values()) <= self.max_bytes
            assert self._ahead <= self._kv.keys()

    def _evict(self) -> None:
        """Let the next go: of the coldest as they were found, one that was not asked for since."""
        while True:
            while self._victims:
                key, heat = self._victims.pop()
                if key in self._kv and self._heat.of(key) == heat:
                    self._nbytes -= self._kv.pop(key).nbytes
                    self._ahead.discard(key)
                    self._evicted += 1
                    return
            count = max(1, len(self._kv) // _COLD)
            coldest = heapq.nsmallest(count, self._kv, key=self._heat.of)
            coldest.sort(key=lambda key: not self._in_pool(key))
            self._victims = [(key, self._heat.of(key)) for key in reversed(coldest)]

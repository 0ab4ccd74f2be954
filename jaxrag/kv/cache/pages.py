"""Who owns which page of the pool: free pages, and chunks that lie in it, shared by requests."""

import dataclasses
from collections.abc import Iterable, Sequence
from types import MappingProxyType

from jaxrag.base.errors import RequestError
from jaxrag.base.types import HostArray
from jaxrag.kv.cache.heat import HALF_LIFE, Coldest, DecayedHeat
from jaxrag.kv.cache.pool import PAGE


def pages_for(tokens: int) -> int:
    """How many pages hold this many tokens."""
    return -(-tokens // PAGE)


def parts_of(pages: Sequence[int], count: int, parts: int) -> Sequence[int]:
    """``count`` parts as tables name them (``PagePool``), so many in each of ``pages``."""
    return [-1 - (pages[it // parts] * parts + it % parts) for it in range(count)]


@dataclasses.dataclass
class CachedChunk:
    """A chunk whose KV lies in the pool, or is on its way there.

    Attributes:
      tokens: how many it has; 0 while it is loading.
      dropped: which of them its store left out, so that nobody may see them; None: none of them.
      ref_count: requests in flight that map it or wait for it; never evicted while positive.
      ready: whether its KV lies in its pages; False while it is loading.
    """

    pages: tuple[int, ...]
    tokens: int
    ref_count: int = 0
    ready: bool = True
    dropped: HostArray | None = None


class PageAllocator:
    """Host-side bookkeeping: free pages, and chunks (the coldest leaves first).

    A chunk is loading (its pages are reserved, nothing takes them), then resident: pinned while a
    request maps it, else unpinned, which is what leaves when space is needed. A request that maps
    it is a use; half a use after ``half_life`` more requests. Of equally warm ones that leaves
    which was not used for longer.

    Attributes:
      evicted: chunks that have left it.
    """

    def __init__(self, num_pages: int, half_life: float = HALF_LIFE) -> None:
        self.num_pages = num_pages
        self.evicted = 0
        self._free = list(range(num_pages - 1, -1, -1))
        self._chunks: dict[str, CachedChunk] = {}
        self._heat = DecayedHeat[str](half_life)
        self._unpinned = Coldest(self._heat)
        self._num_unpinned = 0

    @property
    def num_free(self) -> int:
        """Pages that no request or chunk holds."""
        return len(self._free)

    @property
    def num_unpinned(self) -> int:
        """Pages of resident chunks that no request maps."""
        return self._num_unpinned

    @property
    def num_pinned(self) -> int:
        """Pages of resident chunks that some request maps."""
        return sum(len(it.pages) for it in self._chunks.values() if it.ready and it.ref_count)

    @property
    def num_loading(self) -> int:
        """Pages of chunks that are on their way."""
        return sum(len(it.pages) for it in self._chunks.values() if not it.ready)

    @property
    def num_available(self) -> int:
        """Pages that a request could get now: free ones, and those of chunks that none maps."""
        return len(self._free) + self._num_unpinned

    @property
    def chunks(self) -> MappingProxyType[str, CachedChunk]:
        """Every chunk, resident or loading."""
        return MappingProxyType(self._chunks)

    def __contains__(self, key: str) -> bool:
        found = self._chunks.get(key)
        return found is not None and found.ready

    def tick(self) -> None:
        """One more request is served: uses of chunks before it count a little less."""
        self._heat.tick()

    def allocate(self, count: int, why: str) -> tuple[int, ...]:
        """Reserve pages, evicting unused resident chunks; RequestError when they do not fit."""
        if count > self.num_available:
            raise RequestError(
                f"{why} needs {count * PAGE} tokens of cache and {self.num_available * PAGE} of "
                f"{self.num_pages * PAGE} are free; raise cache_tokens or ask fewer at once"
            )
        while len(self._free) < count:
            self.evict(self._unpinned.first())
        return tuple(self._free.pop() for _ in range(count))

    def free(self, pages: Sequence[int]) -> None:
        """Return pages that a request owned."""
        self._free.extend(reversed(pages))

    def insert(
        self, key: str, pages: tuple[int, ...], tokens: int, dropped: HostArray | None = None
    ) -> CachedChunk:
        """Record a chunk whose KV was written to these pages; it starts with one user."""
        assert key not in self._chunks, f"chunk {key} is in the pool already"
        self._heat.use(key)
        self._chunks[key] = CachedChunk(pages, tokens, ref_count=1, dropped=dropped)
        return self._chunks[key]

    def subscribe(self, key: str) -> CachedChunk | None:
        """Map a resident chunk, or wait for a loading one; None when it is neither."""
        found = self._chunks.get(key)
        if found is not None:
            if self._unpinned.discard(key):
                self._num_unpinned -= len(found.pages)
            self._heat.use(key)
            found.ref_count += 1
        return found

    def release(self, key: str) -> None:
        """A request no longer maps this chunk; it stays resident until space is needed.

        One that is loading goes on loading, and is resident and unpinned once it is there.
        """
        found = self._chunks.get(key)
        if found is not None:
            assert found.ref_count > 0, f"chunk {key} is released more often than it was mapped"
            found.ref_count -= 1
            self._unpin(key, found)

    def evict(self, key: str) -> None:
        """Drop a resident chunk that no request maps."""
        if self._unpinned.discard(key):
            pages = self._chunks.pop(key).pages
            self._num_unpinned -= len(pages)
            self._free.extend(reversed(pages))
            self.evicted += 1

    def begin(self, key: str, count: int, why: str) -> CachedChunk:
        """Reserve pages for a chunk that is going to be loaded; it starts with one user."""
        assert key not in self._chunks, f"chunk {key} is in the pool already"
        self._chunks[key] = CachedChunk(self.allocate(count, why), 0, ref_count=1, ready=False)
        self._heat.use(key)
        return self._chunks[key]

    def complete(self, key: str, tokens: int, dropped: HostArray | None = None) -> None:
        """The KV of a loading chunk lies in its pages, but for the tokens that were ``dropped``."""
        found = self._chunks[key]
        assert not found.ready, f"chunk {key} is not loading"
        found.tokens, found.ready, found.dropped = tokens, True, dropped
        self._unpin(key, found)

    def abandon(self, key: str) -> None:
        """A loading chunk, which no request waits for any more, will not come."""
        found = self._chunks.pop(key)
        assert not found.ready and not found.ref_count, f"chunk {key} is resident or waited for"
        self._free.extend(reversed(found.pages))

    def check(self, owned: Iterable[int] = ()) -> None:
        """AssertionError unless every page is free, of one chunk, or among those owned, once."""
        pages = [*self._free, *owned]
        for it in self._chunks.values():
            pages += it.pages
            assert it.ref_count >= 0
        assert sorted(pages) == list(range(self.num_pages)), "a page is lost or held twice"
        unpinned = {k: it for k, it in self._chunks.items() if it.ready and not it.ref_count}
        assert len(unpinned) == len(self._unpinned) and all(k in self._unpinned for k in unpinned)
        self._unpinned.check()
        assert self._num_unpinned == sum(len(it.pages) for it in unpinned.values())

    def _unpin(self, key: str, chunk: CachedChunk) -> None:
        if chunk.ready and not chunk.ref_count:
            self._unpinned.add(key)
            self._num_unpinned += len(chunk.pages)

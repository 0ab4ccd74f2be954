"""Who owns which page of the pool: free pages, and chunks that lie in it, shared by requests."""

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from jaxrag.base.errors import RequestError
from jaxrag.base.types import HostArray
from jaxrag.kv.cache.heat import HALF_LIFE, Coldest, DecayedHeat
from jaxrag.kv.cache.pool import PAGE


def pages_for(tokens: int) -> int:
    """How many pages hold this many tokens."""
    return -(-tokens // PAGE)


def whole_pages(counts: Iterable[int], page_parts: int) -> int:
    """How many pages hold these, each a number of pages, or below 0 of parts, side by side."""
    whole = parts = 0
    for count in counts:
        whole, parts = (whole + count, parts) if count > 0 else (whole, parts + count)
    return whole - parts // page_parts


@dataclasses.dataclass
class CachedChunk:
    """A chunk whose KV lies in the pool, or is on its way there.

    Attributes:
      pages: as tables name them; below 0 are parts of pages (``PagePool``).
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

    Chunks may share a page by its parts; it is pinned, or loading, with any of them. Where pages
    or chunks are counted by a number, one below 0 is that of parts.

    Attributes:
      page_parts: how many a page has.
      evicted: chunks that have left it.
    """

    def __init__(self, num_pages: int, half_life: float = HALF_LIFE, page_parts: int = 1) -> None:
        self.num_pages = num_pages
        self.page_parts = page_parts
        self.evicted = 0
        self._free = list(range(num_pages - 1, -1, -1))
        self._open: dict[int, list[int]] = {}  # free parts of pages that chunks have some parts of
        self._pins = Counter[int]()  # of pages in parts: how many are of chunks in use or loading
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
        return len(self._pages_of(it for it in self._held() if it.ready and it.ref_count))

    @property
    def num_loading(self) -> int:
        """Pages of chunks that are on their way, and of none that some request maps."""
        pinned = self._pages_of(chunk for chunk in self._held() if chunk.ready and chunk.ref_count)
        return len(self._pages_of(chunk for chunk in self._held() if not chunk.ready) - pinned)

    @property
    def num_held(self) -> int:
        """Pages of chunks, resident or loading."""
        return len(self._pages_of(self._held()))

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

    def lacking(self, own: int, chunks: Mapping[str, int]) -> int:
        """How many pages more would have to be available for a request.

        ``chunks``: pages of each by its key, of which those that are not here count.
        """
        new = [count for key, count in chunks.items() if key not in self._chunks]
        free = [self._chunks[key] for key in chunks if key in self._unpinned]
        mapped = sum(not self._pins[it] for it in self._pages_of(free))
        return own + whole_pages(new, self.page_parts) + mapped - self.num_available

    def freed(self, gone: Iterable[str], but: Collection[str]) -> int:
        """Pages that are available once nobody maps these chunks, beside those of some others."""
        pins = Counter(self._page(it) for key in gone for it in self._chunks[key].pages)
        stay = self._pages_of(it for key in but if (it := self._chunks.get(key)))
        return sum(self._pins.get(it, n) == n for it, n in pins.items() if it not in stay)

    def allocate(self, count: int, why: str) -> tuple[int, ...]:
        """Reserve pages, evicting unused resident chunks; RequestError when they do not fit."""
        inside = sum(self.page_parts - pin for pin in self._pins.values()) if count < 0 else 0
        pages = count if count >= 0 else -((count + inside) // self.page_parts)
        if pages > self.num_available:
            raise RequestError(
                f"{why} needs {pages * PAGE} tokens of cache and {self.num_available * PAGE} of "
                f"{self.num_pages * PAGE} are free; raise cache_tokens or ask fewer at once"
            )
        if count < 0:
            return tuple(self._part() for _ in range(-count))
        while len(self._free) < count:
            self.evict(self._unpinned.first())
        return tuple(self._free.pop() for _ in range(count))

    def free(self, pages: Sequence[int]) -> None:
        """Return pages that a request owned."""
        self._free.extend(it for it in reversed(pages) if it >= 0)
        for part in reversed(pages):
            if part < 0:
                parts = self._open.setdefault(page := self._page(part), [])
                parts.append(part)
                if len(parts) == self.page_parts:
                    del self._open[page]
                    self._free.append(page)
                    self._num_unpinned -= 1

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
        chunk = self._chunks.get(key)
        if chunk is not None:
            if self._unpinned.discard(key):
                self._pin(chunk.pages)
            self._heat.use(key)
            chunk.ref_count += 1
        return chunk

    def release(self, key: str) -> None:
        """A request no longer maps this chunk; it stays resident until space is needed.

        One that is loading goes on loading, and is resident and unpinned once it is there.
        """
        chunk = self._chunks.get(key)
        if chunk is not None:
            assert chunk.ref_count > 0, f"chunk {key} is released more often than it was mapped"
            chunk.ref_count -= 1
            self._unpin(key, chunk)

    def evict(self, key: str) -> None:
        """Drop a resident chunk that no request maps."""
        if self._unpinned.discard(key):
            pages = self._chunks.pop(key).pages
            self._num_unpinned -= sum(page >= 0 for page in pages)
            self.free(pages)
            self.evicted += 1

    def begin(self, key: str, count: int, why: str) -> CachedChunk:
        """Reserve pages for a chunk that is going to be loaded; it starts with one user."""
        assert key not in self._chunks, f"chunk {key} is in the pool already"
        pages = self.allocate(count, why)
        self._chunks[key] = CachedChunk(pages, 0, ref_count=1, ready=False)
        self._pin([page for page in pages if page < 0])
        self._heat.use(key)
        return self._chunks[key]

    def complete(self, key: str, tokens: int, dropped: HostArray | None = None) -> None:
        """The KV of a loading chunk lies in its pages, but for the tokens that were ``dropped``."""
        chunk = self._chunks[key]
        assert not chunk.ready, f"chunk {key} is not loading"
        chunk.tokens, chunk.ready, chunk.dropped = tokens, True, dropped
        self._unpin(key, chunk)

    def abandon(self, key: str) -> None:
        """A loading chunk, which no request waits for any more, will not come."""
        chunk = self._chunks.pop(key)
        assert not chunk.ready and not chunk.ref_count, f"chunk {key} is resident or waited for"
        self._pin([it for it in chunk.pages if it < 0], -1)
        self.free(chunk.pages)

    def check(self, owned: Iterable[int] = ()) -> None:
        """AssertionError unless every page is free, of one chunk, or among those owned, once.

        Or it is in parts, and each of those is free or of one chunk.
        """
        held = [page for chunk in self._chunks.values() for page in chunk.pages]
        parts = [it for it in held if it < 0]
        open_parts = [it for those in self._open.values() for it in those]
        split = {self._page(part) for part in parts}
        every = [
            -1 - it
            for page in split
            for it in range(page * self.page_parts, (page + 1) * self.page_parts)
        ]
        assert sorted(every) == sorted([*parts, *open_parts]), "a part is lost or held twice"
        pages = [*self._free, *owned, *split, *(it for it in held if it >= 0)]
        assert sorted(pages) == list(range(self.num_pages)), "a page is lost or held twice"
        assert all(chunk.ref_count >= 0 for chunk in self._chunks.values())
        unpinned = {k: it for k, it in self._chunks.items() if it.ready and not it.ref_count}
        assert len(unpinned) == len(self._unpinned) and all(k in self._unpinned for k in unpinned)
        self._unpinned.check()
        pinned = [chunk for key, chunk in self._chunks.items() if key not in unpinned]
        pins = Counter(self._page(page) for chunk in pinned for page in chunk.pages if page < 0)
        assert +self._pins == pins
        only = self._pages_of(unpinned.values()) - self._pages_of(pinned)
        assert self._num_unpinned == len(only)

    def _page(self, page: int) -> int:
        return page if page >= 0 else (-1 - page) // self.page_parts

    def _pages_of(self, chunks: Iterable[CachedChunk]) -> set[int]:
        return {self._page(page) for it in chunks for page in it.pages}

    def _held(self) -> list[CachedChunk]:
        return list(self._chunks.values())

    def _part(self) -> int:
        """A free part, of a page that others have parts of where there is one."""
        while not (self._open or self._free):
            self.evict(self._unpinned.first())
        if not self._open:
            page = self._free.pop()
            first = page * self.page_parts
            self._open[page] = [-1 - it for it in range(first, first + self.page_parts)][::-1]
            self._num_unpinned += 1
        page = next(reversed(self._open))
        part = self._open[page].pop()
        if not self._open[page]:
            del self._open[page]
        return part

    def _pin(self, pages: Sequence[int], change: int = 1) -> None:
        """Chunks with these pages are in use, or are not any more."""
        self._num_unpinned -= change * sum(it >= 0 for it in pages)
        for page in (self._page(it) for it in pages if it < 0):
            was, self._pins[page] = self._pins[page], self._pins[page] + change
            self._num_unpinned += (not self._pins[page]) - (not was)
            if not self._pins[page]:
                del self._pins[page]

    def _unpin(self, key: str, chunk: CachedChunk) -> None:
        if chunk.ready and not chunk.ref_count:
            self._unpinned.add(key)
            self._pin(chunk.pages, -1)

"""Who owns which page of the pool: free pages, and chunks that lie in it, shared by requests."""

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence

from jaxrag.cache.pool import PAGE
from jaxrag.errors import RequestError


def pages_for(tokens: int) -> int:
    """How many pages hold this many tokens."""
    return -(-tokens // PAGE)


@dataclasses.dataclass
class CachedChunk:
    """A chunk whose KV lies in the pool."""

    pages: tuple[int, ...]
    tokens: int
    ref_count: int = 0  # requests in flight that map it; never evicted while positive


class PageAllocator:
    """Host-side bookkeeping: free pages, resident chunks (least recently used leaves first)."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._resident: OrderedDict[str, CachedChunk] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Pages that a request could get now: free ones, and those of chunks that nobody maps."""
        unused = (len(it.pages) for it in self._resident.values() if it.ref_count == 0)
        return len(self._free) + sum(unused)

    def __contains__(self, key: str) -> bool:
        return key in self._resident

    def allocate(self, count: int, why: str) -> tuple[int, ...]:
        """Reserve pages, evicting unused resident chunks; RequestError when they do not fit."""
        while len(self._free) < count:
            victim = next((k for k, r in self._resident.items() if r.ref_count == 0), None)
            if victim is None:
                raise RequestError(
                    f"{why} needs {count * PAGE} tokens of cache and {len(self._free) * PAGE} of "
                    f"{self.num_pages * PAGE} are free; raise cache_tokens or ask fewer at once"
                )
            self._free.extend(reversed(self._resident.pop(victim).pages))
        return tuple(self._free.pop() for _ in range(count))

    def free(self, pages: Sequence[int]) -> None:
        """Return pages that a request owned."""
        self._free.extend(reversed(pages))

    def insert(self, key: str, pages: tuple[int, ...], tokens: int) -> CachedChunk:
        """Record a chunk whose KV was written to these pages; it starts with one user."""
        self._resident[key] = CachedChunk(pages, tokens, ref_count=1)
        return self._resident[key]

    def acquire(self, key: str) -> CachedChunk | None:
        """Map a resident chunk into a request; None when it is not in the pool."""
        found = self._resident.get(key)
        if found is not None:
            self._resident.move_to_end(key)
            found.ref_count += 1
        return found

    def release(self, key: str) -> None:
        """A request no longer maps this chunk; it stays resident until space is needed."""
        found = self._resident.get(key)
        if found is not None:
            found.ref_count -= 1

    def evict(self, key: str) -> None:
        """Drop a resident chunk that no request maps."""
        found = self._resident.get(key)
        if found is not None and found.ref_count == 0:
            self._free.extend(reversed(self._resident.pop(key).pages))

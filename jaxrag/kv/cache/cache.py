"""The pool and the record of who owns its pages, and the host memory that belongs to them."""

import re
from collections.abc import Callable
from typing import Any

from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import RequestError
from jaxrag.kv.cache.heat import HALF_LIFE
from jaxrag.kv.cache.host import HostValues, Moved
from jaxrag.kv.cache.host_pool import HostPool, host_pool_bytes
from jaxrag.kv.cache.pages import PageAllocator, pages_for
from jaxrag.kv.cache.pool import PAGE, PagePool, empty_pool


class PagedCache:
    """A pool on the device and the record of who owns its pages.

    One thread uses it at a time, that of the engine.

    Attributes:
      allocator: which pages are free, owned or shared.
      host: the same pages in host memory: of K and V, then the pool itself has none, or of V of
        some layers; None where all of it is on the device.
      values: what compiled steps know of ``host`` where it holds V alone; else None.
    """

    def __init__(
        self,
        pool: PagePool,
        num_pages: int,
        host: HostPool | None = None,
        half_life: float = HALF_LIFE,
    ) -> None:
        """Over a pool of zeros, and host memory."""
        self.allocator = PageAllocator(num_pages, half_life)
        self.host = host
        self.values = None
        if host is not None and host.k is None:
            self.values = HostValues(host.first_layer, host.v)
        self._pool = pool

    @property
    def moved(self) -> Moved:
        """K and V that went between device and host so far, by prefill and by steps."""
        prefill = Moved() if self.host is None else self.host.moved
        return prefill if self.values is None else prefill + self.values.moved

    @property
    def away(self) -> bool:
        """Are K and V in host memory only?"""
        return self.host is not None and self.host.k is not None

    @property
    def pool(self) -> PagePool:
        """The pool as it is now; a step that writes to it goes through ``run``."""
        return self._pool

    @property
    def lost(self) -> bool:
        """Was a step interrupted after the pool had been donated to it?"""
        return bool(self._pool.k.is_deleted())

    def run(self, step: Callable[..., tuple[Any, ...]], *args: Any, **kwargs: Any) -> Any:
        """Call ``step(pool, *args, **kwargs)``, a jitted function that donates the pool.

        The first of its results is the pool after it, which is kept. Returns the second, or a tuple
        of all others where there are more.
        """
        self._pool, *rest = step(self._pool, *args, **kwargs)
        return rest[0] if len(rest) == 1 else tuple(rest)

    @classmethod
    def create(
        cls,
        config: ModelConfig,
        tokens: int,
        sharding: Any = None,
        value_layers: int | None = None,
        max_host_bytes: int | None = None,
        *,
        away: bool = False,
        half_life: float = HALF_LIFE,
    ) -> "PagedCache":
        """A pool that holds this many tokens, rounded up to whole pages.

        Uses of its chunks halve with every ``half_life`` requests; the coldest chunk leaves first.
        With ``away`` K and V lie in host memory, with ``value_layers`` V of later layers does.
        Raises RequestError, before anything is allocated, where that takes more than
        ``max_host_bytes`` or than there is, and for a pool that the device has no room for.
        """
        num_pages = pages_for(tokens)
        first = 0 if away else config.num_layers if value_layers is None else value_layers
        host = None
        if first < config.num_layers:
            need = host_pool_bytes(config, num_pages * PAGE, first, away)
            if max_host_bytes is not None and need > max_host_bytes:
                what = "K and V" if away else f"V of {config.num_layers - first} layers"
                raise RequestError(
                    f"{what} of {num_pages * PAGE} tokens takes {need} bytes of host memory, "
                    f"max_host_bytes={max_host_bytes}; raise it, or lower cache_tokens"
                )
            host = HostPool(config, num_pages, first, away)
        try:
            on_device = 0 if away else num_pages
            pool = empty_pool(config, on_device, sharding, value_layers if host else None)
        except (RuntimeError, OverflowError) as error:  # XLA's, and of sizes beyond 64 bits
            if not re.search("RESOURCE_EXHAUSTED|overflow", str(error)):
                raise
            need = num_pages * PAGE * config.kv_bytes_per_token
            raise RequestError(
                f"the pool of {num_pages * PAGE} tokens takes {need / 2**30:,.1f} GiB, more than "
                "there is free on the device; lower cache_tokens"
            ) from None
        return cls(pool, num_pages, host, half_life)

"""The pool and the record of who owns its pages, and the host memory that belongs to them."""

import re
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import RequestError
from jaxrag.kv.cache.heat import HALF_LIFE
from jaxrag.kv.cache.host import HostValues, Moved
from jaxrag.kv.cache.host_pool import HostPool
from jaxrag.kv.cache.pages import PageAllocator, pages_for
from jaxrag.kv.cache.pool import PAGE, PagePool, empty_pool
from jaxrag.kv.placement import ON_DEVICE, KVPlacement


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
        mesh: Mesh | None = None,
    ) -> None:
        self._half_life = half_life
        self.allocator = PageAllocator(num_pages, half_life, pool.page_parts)
        self.host = host
        self.values = None
        if host is not None and host.k is None:
            self.values = HostValues(host.first_layer, host.v, mesh, host.first_head)
        self._pool = pool

    @property
    def moved(self) -> Moved:
        """K and V that went between device and host so far, by prefill and by steps."""
        prefill = Moved() if self.host is None else self.host.moved
        return prefill if self.values is None else prefill + self.values.moved

    @property
    def pool(self) -> PagePool:
        """The pool as it is now; a step that writes to it goes through ``run``."""
        return self._pool

    @property
    def lost(self) -> bool:
        """Was a step interrupted after the pool had been donated to it?"""
        return bool(self._pool.k.is_deleted())

    def update(self, step: Callable[..., tuple[Any, ...]], *args: Any, **kwargs: Any) -> Any:
        """Call ``step(pool, *args, **kwargs)``, a jitted function that donates the pool.

        The first of its results is the pool after it, which is kept. Returns the second, or a tuple
        of all others where there are more.
        """
        self._pool, *rest = step(self._pool, *args, **kwargs)
        return rest[0] if len(rest) == 1 else tuple(rest)

    def clear(self) -> None:
        """Every page is free; the arrays stay, as making them takes longer than a short answer."""
        was = self.allocator
        self.allocator = PageAllocator(was.num_pages, self._half_life, was.page_parts)

    @classmethod
    def create(
        cls,
        config: ModelConfig,
        tokens: int,
        sharding: Any = None,
        placement: KVPlacement = ON_DEVICE,
        half_life: float = HALF_LIFE,
        mesh: Mesh | None = None,
        heads: tuple[int, int] | None = None,
    ) -> "PagedCache":
        """A pool that holds this many tokens, rounded up to whole pages.

        ``heads`` are the KV heads of which this process has host memory, from the first up to the
        second (None: all), for the devices of ``mesh``.
        Uses of its chunks halve with every ``half_life`` requests; the coldest chunk leaves first.
        Raises RequestError, before anything is allocated, where host memory is to hold more than
        ``max_host_bytes`` or than there is, and for a pool that the device has no room for.
        """
        num_pages = pages_for(tokens)
        host = None if placement.on_device else HostPool(config, num_pages, placement, heads)
        try:
            on_device = 0 if placement.away else num_pages
            pool = empty_pool(config, on_device, sharding, placement.layers_on_device(config))
        except (RuntimeError, OverflowError) as error:  # XLA's, and of sizes beyond 64 bits
            if not re.search("RESOURCE_EXHAUSTED|overflow", str(error)):
                raise
            need = num_pages * PAGE * config.kv_bytes_per_token
            raise RequestError(
                f"the pool of {num_pages * PAGE} tokens takes {need / 2**30:,.1f} GiB, more than "
                "there is free on the device; lower cache_tokens"
            ) from None
        return cls(pool, num_pages, host, half_life, mesh)

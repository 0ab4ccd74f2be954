"""The pool and the record of who owns its pages, and the host memory that belongs to them."""

import math
import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxrag.cache.host import HostValues, host_buffer
from jaxrag.cache.pages import PageAllocator, pages_for
from jaxrag.cache.pool import PAGE, PagePool, empty_pool
from jaxrag.config import ModelConfig
from jaxrag.errors import RequestError
from jaxrag.types import HostArray


class PagedCache:
    """A pool on the device and the record of who owns its pages.

    One thread uses it at a time, that of the engine.

    Attributes:
      allocator: which pages are free, owned or shared.
      host: [L - n, P, page, K, H] the memory behind ``values``; None where the pool holds V of all
        layers.
      values: V of the layers from n on, in host memory; None as well there.
    """

    def __init__(
        self,
        pool: PagePool,
        num_pages: int,
        host: HostArray | None = None,
        values: HostValues | None = None,
    ) -> None:
        """Over a pool of zeros and, with ``values``, the host memory that they lie in."""
        self.allocator = PageAllocator(num_pages)
        self.host = host
        self.values = values
        self._pool = pool

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
    ) -> "PagedCache":
        """A pool that holds this many tokens, rounded up to whole pages.

        With ``value_layers``, V of later layers lies in host memory. Raises RequestError, before
        anything is allocated, where that takes more than ``max_host_bytes``, and for a pool that
        the device has no room for.
        """
        num_pages = pages_for(tokens)
        host, values = None, None
        if value_layers is not None and value_layers < config.num_layers:
            away = config.num_layers - value_layers
            shape = (away, num_pages, PAGE, config.num_kv_heads, config.head_dim)
            need = math.prod(shape) * jnp.dtype(config.dtype).itemsize
            if max_host_bytes is not None and need > max_host_bytes:
                raise RequestError(
                    f"V of {away} layers of {num_pages * PAGE} tokens takes {need} bytes of host "
                    f"memory, max_host_bytes={max_host_bytes}; raise it, or lower cache_tokens"
                )
            host = host_buffer(shape, jnp.dtype(config.dtype))
            values = HostValues(value_layers, host)
        try:
            pool = empty_pool(config, num_pages, sharding, value_layers if values else None)
        except (RuntimeError, OverflowError) as error:  # XLA's, and of sizes beyond 64 bits
            if not re.search("RESOURCE_EXHAUSTED|overflow", str(error)):
                raise
            need = num_pages * PAGE * config.kv_bytes_per_token
            raise RequestError(
                f"the pool of {num_pages * PAGE} tokens takes {need / 2**30:,.1f} GiB, more than "
                "there is free on the device; lower cache_tokens"
            ) from None
        return cls(pool, num_pages, host, values)

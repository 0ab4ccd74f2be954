"""The pool and the record of who owns its pages, and the host memory that belongs to them."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from jaxrag.cache.host import HostValues, StagingBuffers, host_buffer
from jaxrag.cache.pages import PageOwners, pages_for
from jaxrag.cache.pool import PAGE, PagePool, empty_pool
from jaxrag.config import ModelConfig
from jaxrag.errors import RequestError
from jaxrag.types import HostArray


@dataclasses.dataclass
class PagedCache:
    """A pool on the device and the record of who owns its pages.

    ``pool`` is replaced by every jitted call that writes to it (the buffer itself is donated).
    ``host`` [L - n, P, page, K, H] is the memory behind ``values``, V of the layers from n on; both
    are None where the pool holds V of all layers.
    """

    pool: PagePool
    owners: PageOwners
    host: HostArray | None = None
    values: HostValues | None = None
    staging: StagingBuffers = dataclasses.field(default_factory=StagingBuffers)

    def staging_buffer(self, config: ModelConfig, tokens: int) -> HostArray:
        """A reused host buffer [L, 2, tokens, K, H]: fresh pages cost more than the copy."""
        shape = (config.num_layers, 2, tokens, config.num_kv_heads, config.head_dim)
        return self.staging.take(shape, jnp.dtype(config.dtype))

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
        anything is allocated, where that takes more than ``max_host_bytes``.
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
        pool = empty_pool(config, num_pages, sharding, value_layers if values else None)
        return cls(pool, PageOwners(num_pages), host, values)

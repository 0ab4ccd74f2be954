"""A model on its device: the page pool, who owns its pages, and the host's side of search."""

import functools
import threading
import weakref
from typing import Any

import jax

from jaxrag.cache import PAGE, PagedCache, pages_for
from jaxrag.cache.heat import HALF_LIFE
from jaxrag.cache.host import StagingBlocks
from jaxrag.cache.host_pool import default_host_tokens
from jaxrag.decode import HostSearch
from jaxrag.models.model import Model
from jaxrag.models.spec import num_params
from jaxrag.sharding import Rules, sharding

_CPU_CACHE_BYTES = 1 << 30
_GPU_CACHE_SHARE = 0.5  # of the memory that is free once the parameters are loaded

BLOCK_TOKENS = 256  # of a chunk that are written to the pool at once


class ModelRunner:
    """What every function of this room works on: a model and what its requests share.

    Attributes:
      model: the weights, config and mesh.
      host_search: where indexes of this model's requests are searched. Compiled steps name it, so
        it holds nothing of the model, and is closed with the runner.
    """

    def __init__(self, model: Model, half_life: float = HALF_LIFE) -> None:
        """Allocates nothing yet; ``half_life`` is of the pool's chunks, in requests."""
        self.model = model
        self._half_life = half_life
        self.host_search = HostSearch()
        self._cache: PagedCache | None = None
        self._making = threading.Lock()
        weakref.finalize(self, self.host_search.close)

    @property
    def cache(self) -> PagedCache:
        """The paged pool and its pages' owners, made when they are first needed."""
        with self._making:
            if self._cache is None:
                model = self.model
                self._cache = PagedCache.create(
                    model.config,
                    self._tokens,
                    self._sharding(),
                    model.value_layers,
                    model.max_host_bytes,
                    away=model.kv == "host",
                    half_life=self._half_life,
                )
            return self._cache

    def has(self, key: str) -> bool:
        """Does the pool have a chunk, or wait for it? On any thread, at some moment of late."""
        cache = self._cache
        return cache is not None and key in cache.allocator.chunks

    def forget_cache(self) -> None:
        """Drop the pool; the next request makes a new one and chunks are mapped again."""
        self._cache = None

    @functools.cached_property
    def num_pages(self) -> int:
        """Pages of the pool, whether it is made yet or not."""
        return pages_for(self._tokens)

    @functools.cached_property
    def num_params(self) -> int:
        """Weights of the model."""
        return num_params(self.model.config)

    @functools.cached_property
    def staging(self) -> StagingBlocks:
        """Host buffers [L, 2, BLOCK_TOKENS, K / ways, H] in which chunk KV waits for the device."""
        layout = self.model.kv_layout
        return StagingBlocks(layout.shape(BLOCK_TOKENS), layout.numpy_dtype)

    def _sharding(self) -> Any:
        mesh, config = self.model.mesh, self.model.config
        if mesh is None:
            return None
        shape = (1, PAGE, config.num_kv_heads, config.head_dim)
        return sharding(mesh, shape, (None, None, "kv_heads", None), Rules(), "KV pool")

    @functools.cached_property
    def _tokens(self) -> int:
        return self.model.cache_tokens or self._default_tokens()

    def _default_tokens(self) -> int:
        config = self.model.config
        if self.model.kv == "host":
            return min(default_host_tokens(config), 8 * config.max_positions)
        device = jax.tree.leaves(self.model.params)[0].addressable_shards[0].device
        stats = device.memory_stats() if device.platform != "cpu" else None
        budget = _CPU_CACHE_BYTES
        if stats:
            budget = int((stats["bytes_limit"] - stats["bytes_in_use"]) * _GPU_CACHE_SHARE)
        budget = min(self.model.exchange(budget))  # of every process: the pool is one array
        layers = config.num_layers
        here = layers + (layers if self.model.value_layers is None else self.model.value_layers)
        tokens = budget * 2 * layers // (here * config.kv_bytes_per_token)
        if self.model.max_host_bytes is not None and here < 2 * layers:
            per_token = (2 * layers - here) * config.kv_bytes_per_token // (2 * layers)
            there = self.model.max_host_bytes // per_token // PAGE * PAGE
            tokens = min(tokens, max(there, PAGE))  # a ceiling below a page is refused later
        return min(tokens, 8 * config.max_positions)

"""A model on its device: the page pool, who owns its pages, and the host's side of search."""

import functools
import threading
import weakref
from typing import Any

import jax

from jaxrag.base.sharding import Rules, sharding
from jaxrag.kv.cache import PAGE, PagedCache, pages_for
from jaxrag.kv.cache.budget import default_host_tokens, default_pool_tokens, pool_budget
from jaxrag.kv.cache.heat import HALF_LIFE
from jaxrag.kv.cache.host import StagingBlocks
from jaxrag.models.memory import free_bytes
from jaxrag.models.model import Model
from jaxrag.models.spec import num_params
from jaxrag.reuse.decode import DecodeRule, HostSearch
from jaxrag.reuse.decode.stored import StoredIndexes

BLOCK_TOKENS = 256  # of a chunk that are written to the pool at once


class ModelRunner:
    """What the functions of this package work on: a model and what its requests share.

    Attributes:
      model: the weights, config and mesh.
      compiles: whether its steps are programs of ours.
      host_search: where indexes of this model's requests are searched. Compiled steps name it, so
        it holds nothing of the model, and is closed with the runner.
    """

    compiles = True

    def __init__(self, model: Model, half_life: float = HALF_LIFE) -> None:
        """Allocates nothing yet; ``half_life`` is of the pool's chunks, in requests."""
        self.model = model
        self._half_life = half_life
        share = model.head_share
        documents = StoredIndexes(share=share)
        self.host_search = HostSearch(documents=documents, mesh=model.mesh, share=share)
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
                    model.placement,
                    self._half_life,
                    model.mesh,
                    model.head_share.heads(model.config.num_kv_heads),
                )
            return self._cache

    def searches(self, rule: DecodeRule) -> HostSearch | None:
        """Where tokens search that attend by this rule; None where the device has all they read."""
        away = self.model.placement.away
        return self.host_search if away or rule.searches is not None else None

    def has(self, key: str) -> bool:
        """Does the pool have a chunk, or wait for it? On any thread; as of a moment ago."""
        cache = self._cache
        return cache is not None and key in cache.allocator.chunks

    def forget_cache(self, keep_pool: bool = False) -> None:
        """Chunks are mapped again, into a new pool, or into the one that is there still."""
        if keep_pool and self._cache is not None and not self._cache.lost:
            self._cache.clear()
        else:
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
        model = self.model
        if model.placement.away:
            return default_host_tokens(model.config)
        device = jax.tree.leaves(model.params)[0].addressable_shards[0].device
        budget = pool_budget(free_bytes(device), device.platform == "cpu")
        budget = min(model.exchange(budget))  # of every process: the pool is one array
        return default_pool_tokens(model.config, budget, model.placement)

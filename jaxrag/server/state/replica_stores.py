"""What a server tells its replicas of its stores, and how a replica opens them."""

import hashlib
import threading
from collections.abc import Iterator, Mapping

import cachetools
import jax

from jaxrag.base.errors import StoreError
from jaxrag.base.installed import __version__
from jaxrag.engine.jobs import StoreRef
from jaxrag.engine.request import Request
from jaxrag.kv.store import ChunkStore, KVStore, MemoryStore
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.models.model import Model
from jaxrag.server.state.state import ServerState

_OPEN = 256  # repositories of vector stores that a replica keeps open


def about(model: Model, bases: Mapping[str, KnowledgeBase]) -> dict[str, str]:
    """What has to be the same in a server and in all its replicas, by name."""
    return {
        "version": f"{__version__} with jax {jax.__version__}",
        "weights": model.fingerprint,
        **{f"knowledge base {name}": base.store.fingerprint for name, base in bases.items()},
    }


def store_ref(state: ServerState, request: Request) -> StoreRef:
    """How a replica finds the store of a request."""
    store = request.store
    for name, base in state.knowledge_bases.items():
        if base.store is store:
            return StoreRef("base", name, store.fingerprint, store.layout)
    if isinstance(store, ChunkStore):
        secret = state.tenants.seal_secret(request.tenant)
        folder = store.directory
        where = store.location if folder is None else str(folder.resolve())
        return StoreRef("chunks", where, store.fingerprint, store.layout, secret)
    return StoreRef("memory", request.tenant, store.fingerprint, store.layout)


class ReplicaStores:
    """The stores of a replica, by what its server calls them. Safe to share between threads."""

    def __init__(
        self,
        model: Model,
        bases: Mapping[str, KnowledgeBase],
        tenants: int,
        max_bytes: int,
    ) -> None:
        """``max_bytes``: of KV in memory, of as many tenants together; each gets an equal part."""
        self._model, self._bases = model, dict(bases)
        self._max_bytes = max(1, max_bytes // max(tenants, 1))
        self._memory: dict[str, MemoryStore] = {}
        self._chunks: cachetools.LRUCache[str, ChunkStore] = cachetools.LRUCache(_OPEN)
        self._lock = threading.Lock()

    def __call__(self, ref: StoreRef) -> KVStore:
        """The store. Raises StoreError for one that is not there, or is another."""
        with self._lock:
            store = self._found(ref)
        if store.fingerprint != ref.fingerprint:
            raise StoreError(
                f"{ref.kind} {ref.name} has the fingerprint {store.fingerprint[:16]} here and "
                f"{ref.fingerprint[:16]} on the server; start all alike"
            )
        return store

    def memory_keys(self) -> Iterator[str]:
        """Of what it holds for tenants."""
        with self._lock:
            stores = list(self._memory.values())
        for store in stores:
            yield from store.keys()

    def forget(self, tenant: str) -> list[str]:
        """Drop what it holds for a tenant; its keys."""
        with self._lock:
            held = self._memory.pop(tenant, None)
        return [] if held is None else list(held.keys())

    def _found(self, ref: StoreRef) -> KVStore:
        if ref.kind == "base":
            if ref.name not in self._bases:
                raise StoreError(f"knowledge base {ref.name!r} is not open here; start all alike")
            return self._bases[ref.name].store
        most = self._model.config.max_positions
        if ref.kind == "memory":
            held = self._memory.get(ref.name)
            if held is None or held.fingerprint != ref.fingerprint:  # the tenant has all forgotten
                held = MemoryStore(
                    ref.fingerprint, ref.layout, max_tokens=most, max_bytes=self._max_bytes
                )
                self._memory[ref.name] = held
            return held
        secret = hashlib.sha256(ref.secret or b"").hexdigest()
        name = f"{ref.name} {ref.fingerprint} {secret}"
        if name not in self._chunks:
            self._chunks[name] = ChunkStore.open(
                ref.name,
                ref.fingerprint,
                ref.layout,
                mode="rw",
                max_tokens=most,
                secret=ref.secret,
            )
        return self._chunks[name]

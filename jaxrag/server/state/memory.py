"""KV of what tenants bring with their requests: in memory, or in their folders on disk."""

import json
import secrets
import shutil
import threading
from pathlib import Path

from jaxrag.base.errors import ConfigError, StoreError
from jaxrag.kv.store import ChunkStore, KVStore, MemoryStore
from jaxrag.kv.store.base import NewChunk
from jaxrag.kv.store.keys import derive
from jaxrag.kv.store.wrapper import StoreWrapper
from jaxrag.kv.store.writer import PutResult
from jaxrag.models.model import Model
from jaxrag.server.durable import make_folder, write_durably
from jaxrag.server.tenants import Tenants, folder_name

PLAIN = "plain"  # in the data folder
_CURRENT = "current.json"


class TenantStore(StoreWrapper):
    """A tenant's store on disk, which takes nothing any more once it is closed."""

    inner: ChunkStore

    def __init__(self, inner: ChunkStore) -> None:
        """Over a store that is open for writing."""
        super().__init__(inner)
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Let go of files; when this returns nothing is being written, nor will be."""
        with self._lock:
            self._closed = True
        self.inner.close()

    def _put(self, new: NewChunk) -> PutResult:
        with self._lock:
            if self._closed:
                raise StoreError(f"chunk {new.key}: the tenant has all forgotten meanwhile")
            return super()._put(new)


class TenantMemory:
    """A store for each tenant: KV of documents that come without a knowledge base.

    One tenant's documents neither are found under the keys of another's, nor push them out. On
    disk, DIR/TENANT/ERA holds them; a tenant that has all forgotten begins a new era, whose keys
    are others, so that nothing of before is found anywhere.
    """

    def __init__(
        self,
        model: Model,
        tenants: Tenants,
        max_bytes: int,
        folder: Path | None = None,
        disk_bytes: int = 0,
    ) -> None:
        """Start empty, or with what ``folder`` holds of this model.

        Args:
          model: whose KV it is.
          tenants: who brings documents.
          max_bytes: in memory, for all tenants together; each gets an equal part.
          folder: where KV lies that is to outlive the process; None: it is in memory.
          disk_bytes: there, likewise; what was read least leaves first.
        """
        count = len(tenants.names)
        self._model, self._tenants, self._folder = model, tenants, folder
        self._max_bytes, self._disk_bytes = max(1, max_bytes // count), disk_bytes // count
        self._stores: dict[str, KVStore] = {}
        self._eras: dict[str, str] = {}
        self._lock = threading.Lock()

    def store(self, tenant: str) -> KVStore:
        """The store of a tenant. Raises StoreError for a folder that cannot be used."""
        with self._lock:
            if tenant not in self._stores:
                self._stores[tenant] = self._open(tenant)
            return self._stores[tenant]

    def forget(self, tenant: str) -> list[str]:
        """Drop all of a tenant, in memory or on disk; the keys of what there was.

        What is being answered ends as it began. Raises StoreError where the disk fails.
        """
        store = self.store(tenant)
        keys = list(store.keys())
        with self._lock:
            self._eras[tenant] = secrets.token_hex(8)
            del self._stores[tenant]
            if isinstance(store, TenantStore):
                store.close()
                self._begin(tenant, self._eras[tenant])
        return keys

    def close(self) -> None:
        """Let go of files; what is to be written yet is not."""
        for store in self._stores.values():
            if isinstance(store, TenantStore):
                store.close()

    def _open(self, tenant: str) -> KVStore:
        folder = None if self._folder is None else self._folder / folder_name(tenant)
        if folder is not None:
            self._eras[tenant] = self._era(folder) or self._begin(tenant, secrets.token_hex(8))
        salt, layout = self._tenants.salt(tenant), self._model.kv_layout
        fingerprint = derive(self._model.fingerprint, salt=salt + self._eras.get(tenant, ""))
        positions = self._model.config.max_positions
        if folder is None:
            most = self._max_bytes
            return MemoryStore(fingerprint, layout, max_tokens=positions, max_bytes=most)
        disk = ChunkStore.open(
            folder / self._eras[tenant],
            fingerprint,
            layout,
            mode="rw",
            max_tokens=positions,
            max_bytes=self._disk_bytes,
            durable=False,  # what a power cut takes is encoded again
            secret=self._tenants.seal_secret(tenant),
        )
        return TenantStore(disk)

    def _era(self, folder: Path) -> str | None:
        """That of a tenant's folder; None where it holds none of this model."""
        try:
            current = json.loads((folder / _CURRENT).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder / _CURRENT}: {error}; remove {folder}") from None
        return current["era"] if current["model"] == self._model.fingerprint else None

    def _begin(self, tenant: str, era: str) -> str:
        """A new era of a tenant's folder. Of any before nothing is left when this returns."""
        assert self._folder is not None
        folder = self._folder / folder_name(tenant)
        make_folder(folder)
        table = {"era": era, "model": self._model.fingerprint}
        write_durably(folder / _CURRENT, json.dumps(table).encode())
        for old in folder.iterdir():
            if old.is_dir() and old.name != era:
                shutil.rmtree(old)
        return era

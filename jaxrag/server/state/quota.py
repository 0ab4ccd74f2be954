"""How much of the disk a tenant takes, and may take.

Uploaded files are counted to the byte. KV, texts and vectors of its vector stores are measured by
looking at the folder, no more often than that is cheap: they may pass the limit by what is indexed
meanwhile.
"""

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from jaxrag.server.errors import quota_exceeded
from jaxrag.server.state.registry import Registry
from jaxrag.server.tenants import Tenants

_LOOK_SECONDS = 10.0  # between two looks at a folder
_LOOK_SHARE = 50  # times as long as a look takes, at least


class Quota:
    """What all tenants take. Safe to share between threads."""

    def __init__(
        self, registry: Registry, tenants: Tenants, stores_of: Callable[[str], Path]
    ) -> None:
        """``stores_of`` gives the folder of a tenant's vector stores, which may be missing."""
        self._registry, self._tenants, self._stores_of = registry, tenants, stores_of
        self._lock = threading.Lock()
        self._writing = Counter[str]()  # bytes of uploads that are not whole, by tenant
        self._measured: dict[str, tuple[float, int]] = {}  # when to look again, and the bytes

    def used(self, tenant: str) -> int:
        """Bytes that a tenant takes."""
        return self._registry.bytes_of_tenant(tenant) + self._writing[tenant] + self._stores(tenant)

    def check(self, tenant: str, more: int = 0) -> None:
        """Problem 413 where a tenant has used up what it may, or would with so many bytes more."""
        most = self._tenants.limits(tenant).max_bytes
        if most is None:
            return
        used = self.used(tenant)
        if used + max(more, 1) > most:
            raise quota_exceeded(
                f"{used} of the {most} bytes that you may store are used; remove files or vector "
                "stores, or ask for a larger max_bytes"
            )

    def write(self, tenant: str, nbytes: int) -> None:
        """Count more bytes of an upload. Raises Problem 413."""
        with self._lock:
            self.check(tenant, nbytes)
            self._writing[tenant] += nbytes

    def written(self, tenant: str, nbytes: int) -> None:
        """An upload is over: it counts as a file now, or not at all."""
        with self._lock:
            self._writing[tenant] -= nbytes

    def _stores(self, tenant: str) -> int:
        due, nbytes = self._measured.get(tenant, (0.0, 0))
        begun = time.monotonic()
        if begun >= due:
            nbytes = folder_bytes(self._stores_of(tenant))
            now = time.monotonic()
            pause = max(_LOOK_SECONDS, _LOOK_SHARE * (now - begun))
            self._measured[tenant] = (now + pause, nbytes)
        return nbytes


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder; 0 where there is none. Files may go meanwhile."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_size
    return total

"""KV in memory, and on disk what was asked for twice, so that it is there after a restart."""

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any

from numpy.typing import NDArray

from jaxrag.base.errors import ChunkCorrupt, StoreError
from jaxrag.kv.store.chunk_store import ChunkStore
from jaxrag.kv.store.memory import MemoryStore
from jaxrag.kv.store.reading import Lookup, ReadRequest, Refused
from jaxrag.kv.store.record import Provenance, Record
from jaxrag.kv.store.wrapper import StoreWrapper

_LOG = logging.getLogger("jaxrag")


class SecondSight(StoreWrapper):
    """A store in memory over one on disk, which gets what is asked for a second time.

    Puts go to memory, and reads take memory first. What lies on disk damaged is removed there, and
    is missing from then on.
    """

    inner: MemoryStore

    def __init__(self, memory: MemoryStore, disk: ChunkStore, threads: Executor) -> None:
        """``disk`` is open for writing and of the same fingerprint; ``threads`` write to it.

        Raises StoreError for KV that is not stored as it is.
        """
        if memory.layout.stored != "native":
            raise StoreError(f"KV stored as {memory.layout.stored}: expected native")
        super().__init__(memory)
        self.disk, self._threads = disk, threads
        self._lock = threading.Lock()
        self._writing: set[str] = set()
        self._closed = False

    @property
    def private(self) -> bool:
        """Another process may have written what lies on disk; reading it takes a while."""
        return False

    def keys(self) -> Iterator[str]:
        """Every key in memory or on disk at this moment, ascending."""
        return iter(sorted({*self.inner.keys(), *self.disk.keys()}))

    def close(self) -> None:
        """Write no more, and let go of files; when this returns nothing is being written."""
        with self._lock:
            self._closed = True
        with contextlib.suppress(RuntimeError):  # its threads have ended already
            self._threads.submit(lambda: None).result()
        self.disk.close()

    def sighted(self, keys: Iterable[str]) -> None:
        """Somebody asks for these: what is in memory already is written, on a thread."""
        known = self.inner.find(keys)
        with self._lock:
            here = [key for key, it in known.items() if isinstance(it, Record)]
            new = [key for key in here if key not in self._writing]
            self._writing.update(new)
            if new and not self._closed:
                self._threads.submit(self._write, new)

    def _write(self, keys: Sequence[str]) -> None:
        try:
            there = self.disk.find(keys)
            for key in keys:
                if not self._closed and not isinstance(there[key], Record):
                    self._copy(key)
        except StoreError as error:
            _LOG.warning("KV of passages that were seen twice is not written: %s", error)
        finally:
            with self._lock:
                self._writing.difference_update(keys)

    def _copy(self, key: str) -> None:
        record = self.inner.find([key])[key]
        if not isinstance(record, Record):
            return  # it had to leave meanwhile
        made = Provenance(record.encoder, record.content_id, record.context_id)
        aux = {name: self.inner.aux(key, name) for name in record.aux}
        self.disk.put(key, self.inner.get(key), record=made, aux=aux)

    def _find(self, keys: Sequence[str]) -> dict[str, Lookup]:
        found = self.inner.find(keys)
        absent = [key for key, it in found.items() if not isinstance(it, Record)]
        there = self.disk.find(absent) if absent else {}
        self._remove([key for key, it in there.items() if isinstance(it, ChunkCorrupt)])
        return found | {key: it for key, it in there.items() if isinstance(it, Record)}

    def _nearest(self, keys: Sequence[str]) -> dict[str, Lookup]:
        return self._find(keys)

    def _load(self, wanted: Sequence[ReadRequest]) -> Sequence[Refused | None]:
        near = [self.inner.holds(want.record) for want in wanted]
        both = list(zip(wanted, near, strict=True))
        found = iter(self.inner._load([want for want, here in both if here]))
        read = iter(self.disk._load([want for want, here in both if not here]))
        refused = [next(found if here else read) for here in near]
        damaged = zip(wanted, refused, strict=True)
        self._remove([want.record.key for want, it in damaged if isinstance(it, ChunkCorrupt)])
        return refused

    def _read_aux(self, record: Record, name: str) -> NDArray[Any] | Refused:
        store = self.inner if self.inner.holds(record) else self.disk
        return store._read_aux(record, name)

    def _delete(self, key: str) -> bool:
        here = self.inner.delete([key])
        return bool(self.disk.delete([key]) or here)

    def _remove(self, keys: Sequence[str]) -> None:
        if keys:
            _LOG.warning("KV on disk of %d passages is damaged: removed", len(keys))
            self.disk.delete(keys)

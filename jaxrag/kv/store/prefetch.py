"""Bringing chunks nearer before they are asked for: into the page cache, or into host memory."""

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import cachetools
import numpy as np
from numpy.typing import NDArray

from jaxrag.base.errors import ChunkCorrupt, ChunkMissing, StoreError
from jaxrag.kv.store.namespace import Namespace
from jaxrag.kv.store.reading import ReadRequest, Refused, require_choice
from jaxrag.kv.store.record import Record

Tier = Literal["page", "host"]

DEFAULT_HOST_BYTES = 1 << 30

_BLOCK = 1 << 20  # Linux brings in no more than its read-ahead size for one piece of advice

Load = Callable[[Sequence[ReadRequest]], Sequence[Refused | None]]


class HostTier:
    """Whole chunks [L, 2, T, K, H] as a reader gets them, the least recently used leave first.

    They were verified when they came in. Safe to share between threads.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._kv: cachetools.LRUCache[str, NDArray[Any]] = cachetools.LRUCache(
            max_bytes, lambda kv: kv.nbytes
        )  # by attempt: never another's
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes held at this moment."""
        return int(self._kv.currsize)

    def get(self, attempt: str) -> NDArray[Any] | None:
        """The KV written under an attempt, if it is here; not to be changed."""
        with self._lock:
            return self._kv.get(attempt)

    def keep(self, attempt: str, kv: NDArray[Any]) -> bool:
        """Hold ``kv``, which does not change any more; False when it is larger than the tier."""
        if kv.nbytes > self.max_bytes:
            return False
        with self._lock:
            if attempt not in self._kv:
                self._kv[attempt] = kv
        return True

    def load(self, requests: Sequence[ReadRequest], load: Load) -> list[Refused | None]:
        """Fill each destination from here, or else by ``load``; per chunk, why not or None."""
        answers: list[Refused | None] = [None] * len(requests)
        absent = []
        for index, request in enumerate(requests):
            kv = self.get(request.record.attempt)
            if kv is None:
                absent.append(index)
            else:
                for layer in request.layers:
                    np.copyto(request.layer_out(layer), kv[layer][:, :, request.heads])
        if absent:
            found = load([requests[index] for index in absent])
            for index, answer in zip(absent, found, strict=True):
                answers[index] = answer
        return answers


class Prefetcher:
    """The tiers of one store, and the thread that fills them."""

    def __init__(
        self, space: Namespace, get: Callable[[str], NDArray[Any]], host_bytes: int
    ) -> None:
        """Prefetch the chunks of ``space``, of which ``get`` reads one."""
        self.host = HostTier(host_bytes)
        self._space = space
        self._get = get
        self._thread = ThreadPoolExecutor(1, "jaxrag-prefetch")

    def start(self, keys: Sequence[str], tier: Tier) -> "Future[int]":
        """``ChunkStore.prefetch`` says what this does."""
        require_choice(tier, Tier, "tier")
        distinct = list(dict.fromkeys(keys))
        if tier == "host":
            return self._thread.submit(self._into_host, distinct)
        directory = self._space.backend.directory
        if directory is None:
            raise StoreError(
                f"{self._space.backend.location} is no local directory and has no page cache: "
                "prefetch into the tier 'host', or put a local store in front "
                "(jaxrag.kv.store.ReadThrough)"
            )
        return self._thread.submit(self._into_pages, distinct, directory)

    def close(self) -> None:
        """Wait for what was begun and end the thread."""
        self._thread.shutdown()

    def _into_pages(self, keys: Sequence[str], directory: Path) -> int:
        files = []
        for record in self._records(keys):
            files += [directory / path for path in self._space.files(record)]
        return read_through(files)

    def _into_host(self, keys: Sequence[str]) -> int:
        nbytes = 0
        for record in self._records(keys):
            kv = self.host.get(record.attempt)
            if kv is None:
                try:
                    kv = self._get(record.key)
                except (ChunkMissing, ChunkCorrupt):
                    continue  # left to whoever asks for it
                if not self.host.keep(record.attempt, kv):
                    continue
            nbytes += kv.nbytes
        return nbytes

    def _records(self, keys: Sequence[str]) -> list[Record]:
        return [found for found in self._space.find(keys).values() if isinstance(found, Record)]


def read_through(paths: Sequence[Path]) -> int:
    """Read files to the end so that the page cache holds them; returns bytes read.

    A file that is gone is skipped.
    """
    scratch = bytearray(_BLOCK)
    total = 0
    with contextlib.ExitStack() as stack:
        files = []
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer is empty
                stack.callback(os.close, fd)
                files.append(fd)
                for offset in range(0, os.fstat(fd).st_size, _BLOCK):  # all, before any is awaited
                    os.posix_fadvise(fd, offset, _BLOCK, os.POSIX_FADV_WILLNEED)
        for fd in files:
            while count := os.readv(fd, [scratch]):
                total += count
    return total

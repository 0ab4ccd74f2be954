"""Chunks from where they are kept into a caller's buffer, several at a time."""

import concurrent.futures
import itertools
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxrag.errors import ChunkCorrupt
from jaxrag.store.assemble import Refused
from jaxrag.store.backend import ReadFuture
from jaxrag.store.grid import aux_grid
from jaxrag.store.local_files import load_layers
from jaxrag.store.namespace import Namespace, aux_path
from jaxrag.store.reading import Wanted, settle
from jaxrag.store.record import SCALE, Record, digest

# Each reads one file from front to back, which the system's read-ahead likes best. Measured cold:
# four such threads reach 1.1 of dd, eight that share a file 0.7, and advice to read ahead less.
_THREADS = 4


class Loader:
    """Reads the bytes of records. Safe to share between threads."""

    def __init__(self, space: Namespace) -> None:
        """Read under ``space``, in threads that start when they are needed."""
        self._space = space
        self._backend = space.backend
        self._threads = concurrent.futures.ThreadPoolExecutor(_THREADS, "jaxrag-read")

    def load(self, wanted: Sequence[Wanted]) -> list[Refused | None]:
        """Fill each destination; per chunk, why it is refused or None.

        Raises:
            StoreError: the storage failed.
        """
        directory = self._backend.directory
        if directory is None:
            tasks = [self._start_remote(want) for want in wanted]
        else:
            runs = max(1, _THREADS // max(1, len(wanted)))
            tasks = [self._start_local(want, directory, runs) for want in wanted]
        # Until every task is done the destinations are not the caller's.
        concurrent.futures.wait(itertools.chain.from_iterable(tasks))
        return [_first([task.result() for task in run]) for run in tasks]

    def read_aux(self, record: Record, name: str, verify: bool) -> NDArray[Any] | Refused:
        """An auxiliary array that the record names, or why it is refused."""
        entry = record.aux[name]
        array = np.empty(entry.shape, entry.dtype)
        grid = aux_grid(entry.shape, entry.dtype, len(entry.xxh3))
        path = aux_path(self._space.bytes_of(record), name)
        read = self._backend.start_read(path, grid, array)
        refused = self._backend.finish_read(read, record.key)
        if refused is not None:
            return refused
        for rank, expected in enumerate(entry.xxh3 if verify else ()):
            actual = digest(np.ascontiguousarray(array[grid.slices(rank)]))
            if actual != expected:
                return ChunkCorrupt(
                    f"chunk {record.key}: auxiliary array {name!r} has xxh3 {actual}, expected "
                    f"{expected}"
                )
        return array

    def _start_local(
        self, want: Wanted, directory: Path, runs: int
    ) -> list[Future[Refused | None]]:
        """Begin to read a chunk, in that many runs of layers at a time."""
        first, end = want.layers
        runs = min(end - first, runs)
        edges = [first + (end - first) * run // runs for run in range(runs + 1)]
        attempt = directory / self._space.bytes_of(want.record)
        scale = self._scale(want)
        return [
            self._threads.submit(self._local, want, attempt, range(a, b), scale)
            for a, b in itertools.pairwise(edges)
        ]

    def _local(
        self, want: Wanted, attempt: Path, layers: range, scale: NDArray[Any] | Refused | None
    ) -> Refused | None:
        if isinstance(scale, Refused):
            return scale
        return load_layers(attempt, self._backend.io_mode, want, layers, scale)

    def _start_remote(self, want: Wanted) -> list[Future[Refused | None]]:
        size = want.layers[1] - want.layers[0]
        shape = (size, *want.record.shape[1:])
        stored = want.out if want.direct else np.empty(shape, want.record.layout.stored_dtype)
        path = self._space.bytes_of(want.record)
        read = self._backend.start_read(path, want.grid, stored, want.layers)
        return [self._threads.submit(self._remote, want, read, stored)]

    def _remote(self, want: Wanted, read: ReadFuture, stored: NDArray[Any]) -> Refused | None:
        refused = self._backend.finish_read(read, want.record.key)
        if refused is not None:
            return refused
        scale = self._scale(want)
        if isinstance(scale, Refused):
            return scale
        for layer, whole in zip(range(*want.layers), stored, strict=True):
            parts = np.stack(np.split(whole, want.record.ways, axis=2))
            if want.direct:
                parts = whole[None]
            refused = settle(want, layer, parts, scale)
            if refused is not None:
                return refused
        return None

    def _scale(self, want: Wanted) -> NDArray[Any] | Refused | None:
        if SCALE not in want.record.aux:
            return None
        return self.read_aux(want.record, SCALE, want.verify)


def _first(answers: Iterable[Refused | None]) -> Refused | None:
    return next((answer for answer in answers if answer is not None), None)

"""Chunks from where they are kept into a caller's buffer, several at a time.

Layers come straight out of the files of a local directory. The fastest way from the page cache into
a buffer, measured: map the file, copy a layer, hash it while it is still in the processor's cache.
TensorStore reads the same files at about half of that; it reads what lies elsewhere.
"""

import concurrent.futures
import contextlib
import errno
import itertools
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from jaxrag.base.errors import ChunkCorrupt, ChunkMissing, ChunkNotSealed, StoreError
from jaxrag.kv.store.backend import IOMode, ReadFuture
from jaxrag.kv.store.grid import Grid, aux_grid
from jaxrag.kv.store.namespace import Namespace, aux_path
from jaxrag.kv.store.reading import ReadRequest, Refused, settle
from jaxrag.kv.store.record import SCALE, Record, digest
from jaxrag.kv.store.seal import same_seal

# Each reads one file from front to back, which the system's read-ahead likes best. Measured cold:
# four such threads reach 1.1 of dd, eight that share a file 0.7, and advice to read ahead less.
_THREADS = 4

_CHECKSUM_BYTES = 4  # crc32c behind the index

ReadLayer = Callable[[int, NDArray[Any]], None]  # layer, and [2, T, K / ways, H] to fill


class _DamagedFileError(Exception):
    """The file cannot be what was written; the text says why."""


class Loader:
    """Reads the bytes of records. Safe to share between threads."""

    def __init__(self, space: Namespace) -> None:
        self._space = space
        self._backend = space.backend
        self._threads = concurrent.futures.ThreadPoolExecutor(_THREADS, "jaxrag-read")

    def load(self, requests: Sequence[ReadRequest]) -> list[Refused | None]:
        """Fill each destination; per chunk, why it is refused or None.

        Raises:
            StoreError: the storage failed.
        """
        directory = self._backend.directory
        if directory is None:
            tasks = [self._start_remote(request) for request in requests]
        else:
            runs = max(1, _THREADS // max(1, len(requests)))
            tasks = [self._start_local(request, directory, runs) for request in requests]
        # Until every task is done the destinations are not the caller's.
        concurrent.futures.wait(itertools.chain.from_iterable(tasks))
        return [_first([task.result() for task in run]) for run in tasks]

    def read_aux(self, record: Record, name: str) -> NDArray[Any] | Refused:
        """An auxiliary array that the record names, or why it is refused."""
        entry = record.aux[name]
        array = np.empty(entry.shape, entry.dtype)
        grid = aux_grid(entry.shape, entry.dtype, len(entry.xxh3))
        path = aux_path(self._space.bytes_of(record), name)
        read = self._backend.start_read(path, grid, array)
        refused = self._backend.finish_read(read, record.key)
        if refused is not None:
            return refused
        where, sealer = f"chunk {record.key}: auxiliary array {name!r}", self._space.sealer
        for rank, expected in enumerate(entry.xxh3):
            part = np.ascontiguousarray(array[grid.slices(rank)])
            if sealer is not None and same_seal(sealer.of_array(part), entry.seals[rank]):
                continue
            actual = digest(part)
            if actual != expected:
                return ChunkCorrupt(f"{where} has xxh3 {actual}, expected {expected}")
            if sealer is not None:
                return ChunkNotSealed(f"{where} is not what was sealed")
        return array

    def _start_local(
        self, request: ReadRequest, directory: Path, runs: int
    ) -> list[Future[Refused | None]]:
        """Begin to read a chunk, in that many runs of layers at a time."""
        count = len(request.layers)
        runs = max(1, min(count, runs))
        edges = [count * run // runs for run in range(runs + 1)]
        attempt = directory / self._space.bytes_of(request.record)
        scale = self._scale(request)
        return [
            self._threads.submit(self._local, request, attempt, request.layers[a:b], scale)
            for a, b in itertools.pairwise(edges)
        ]

    def _local(
        self,
        request: ReadRequest,
        directory: Path,
        layers: Sequence[int],
        scale: NDArray[Any] | Refused | None,
    ) -> Refused | None:
        """Read, verify and place some layers of a chunk whose array lies in ``directory``.

        Args:
            layers: those of its range to do here.
            scale: float32 [L, 2, T, K], of an int8 chunk, or why it is refused.

        Raises:
            StoreError: the files are there and cannot be read.
        """
        if isinstance(scale, Refused):
            return scale
        key = request.record.key
        grid = request.grid
        buffer = None if request.direct else request.buffer()
        try:
            with contextlib.ExitStack() as stack:
                reads = []
                for rank in request.ranks:
                    # A pipe in place of the file would keep who opens it waiting.
                    fd = os.open(directory / grid.file(rank), os.O_RDONLY | os.O_NONBLOCK)
                    stack.callback(os.close, fd)
                    offsets = _layer_offsets(fd, grid)
                    reads.append(_reader(fd, offsets, self._backend.io_mode))
                for layer in layers:
                    parts = request.layer_out(layer)[None] if buffer is None else buffer
                    for read, part in zip(reads, parts, strict=True):
                        read(layer, part)
                    refused = settle(request, layer, parts, scale, self._space.sealer)
                    if refused is not None:
                        return refused
        except FileNotFoundError:
            return ChunkMissing(f"chunk {key}: committed, but its bytes are gone")
        except _DamagedFileError as error:
            return ChunkCorrupt(f"chunk {key}: bytes refused: {error}")
        except OSError as error:
            if error.errno in (errno.EIO, errno.ENOTDIR, errno.EISDIR):
                return ChunkCorrupt(f"chunk {key}: bytes refused: {error.strerror}")
            raise StoreError(f"{directory}: cannot read chunk {key}: {error.strerror}") from error
        return None

    def _start_remote(self, request: ReadRequest) -> list[Future[Refused | None]]:
        _, kinds, tokens, part, dim = request.grid.part
        heads = slice(request.ranks.start * part, request.ranks.stop * part)
        shape = (len(request.layers), kinds, tokens, heads.stop - heads.start, dim)
        stored = (
            request.out if request.direct else np.empty(shape, request.record.layout.stored_dtype)
        )
        path = self._space.bytes_of(request.record)
        read = self._backend.start_read(path, request.grid, stored, request.layers, heads)
        return [self._threads.submit(self._remote, request, read, stored)]

    def _remote(
        self, request: ReadRequest, read: ReadFuture, stored: NDArray[Any]
    ) -> Refused | None:
        refused = self._backend.finish_read(read, request.record.key)
        if refused is not None:
            return refused
        scale = self._scale(request)
        if isinstance(scale, Refused):
            return scale
        for layer, whole in zip(request.layers, stored, strict=True):
            ways = len(request.ranks)
            parts = whole[None] if request.direct else np.stack(np.split(whole, ways, axis=2))
            refused = settle(request, layer, parts, scale, self._space.sealer)
            if refused is not None:
                return refused
        return None

    def _scale(self, request: ReadRequest) -> NDArray[Any] | Refused | None:
        if SCALE not in request.record.aux:
            return None
        return self.read_aux(request.record, SCALE)


def _first(answers: Iterable[Refused | None]) -> Refused | None:
    return next((answer for answer in answers if answer is not None), None)


def _reader(fd: int, offsets: tuple[int, ...], io_mode: IOMode) -> ReadLayer:
    if io_mode == "default":
        return lambda layer, part: _read_fully(fd, part, offsets[layer])
    # A mapping of a file that others cut short is a signal, no exception: this is why the size was
    # checked, and why no process writes to files of a committed chunk.
    try:
        mapped = np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ), np.uint8)
    except ValueError:
        raise _DamagedFileError("the file ends early") from None

    def copy(layer: int, part: NDArray[Any]) -> None:
        stored = mapped[offsets[layer] :][: part.nbytes]
        for target, source in zip(part, np.split(stored, 2), strict=True):
            target.reshape(-1).view(np.uint8)[...] = source

    return copy


def _read_fully(fd: int, part: NDArray[Any], offset: int) -> None:
    for target in part:
        left = memoryview(target.reshape(-1).view(np.uint8))
        while left:
            count = os.preadv(fd, [left], offset)
            if not count:
                raise _DamagedFileError("the file ends early")
            left = left[count:]
            offset += count


def _layer_offsets(fd: int, grid: Grid) -> tuple[int, ...]:
    """Where each layer begins, from the index at the file's end."""
    layers = grid.shape[0]
    tail_nbytes = 16 * layers + _CHECKSUM_BYTES
    size = os.fstat(fd).st_size
    expected = layers * grid.layer_nbytes + tail_nbytes
    if size != expected:
        raise _DamagedFileError(f"the file has {size} bytes, expected {expected}")
    tail = os.pread(fd, tail_nbytes, size - tail_nbytes)
    return _parse_index(tail, layers, grid.layer_nbytes)


def _parse_index(tail: bytes, layers: int, layer_nbytes: int) -> tuple[int, ...]:
    """The offsets in a shard index: (offset, bytes) of each layer, uint64, and a crc32c."""
    if len(tail) != 16 * layers + _CHECKSUM_BYTES:
        raise _DamagedFileError("the file ends early")
    index, (stated,) = tail[:-_CHECKSUM_BYTES], struct.unpack("<I", tail[-_CHECKSUM_BYTES:])
    if google_crc32c.value(index) != stated:
        raise _DamagedFileError("the index differs from its checksum")
    offsets, nbytes = np.frombuffer(index, "<u8").reshape(layers, 2).T
    last = (layers - 1) * layer_nbytes
    if (nbytes != layer_nbytes).any() or (offsets > last).any():
        raise _DamagedFileError("the index does not fit the record")
    return tuple(offsets.tolist())

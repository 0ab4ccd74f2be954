"""Layers straight out of the files of a local directory.

The fastest way from the page cache into a buffer, measured: map the file, copy a layer, hash it
while it is still in the processor's cache. TensorStore reads the same files, at about half of that.
"""

import contextlib
import errno
import functools
import itertools
import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxrag.errors import ChunkCorrupt, ChunkMissing, StoreError
from jaxrag.store.backend import IOMode
from jaxrag.store.grid import Grid
from jaxrag.store.reading import Wanted, settle

_CHECKSUM_BYTES = 4  # crc32c behind the index
_POLYNOMIAL = 0x82F63B78  # of crc32c, reflected

ReadLayer = Callable[[int, NDArray[Any]], None]  # layer, and [2, T, K / ways, H] to fill


class _DamagedFileError(Exception):
    """The file cannot be what was written; the text says why."""


def load_layers(
    directory: Path,
    io_mode: IOMode,
    wanted: Wanted,
    layers: range,
    scale: NDArray[np.float32] | None,
) -> ChunkMissing | ChunkCorrupt | None:
    """Read, verify and place some layers of a chunk whose array lies in ``directory``.

    Args:
        directory: of the attempt. io_mode: "memmap" maps the files, "default" reads them.
        wanted: the chunk and its destination. layers: those of its range to do here.
        scale: float32 [L, 2, T, K], of an int8 chunk.

    Returns:
        None, or why the chunk is refused.

    Raises:
        StoreError: the files are there and cannot be read.
    """
    key = wanted.record.key
    grid = wanted.grid
    buffer = None if wanted.direct else wanted.buffer()
    try:
        with contextlib.ExitStack() as stack:
            reads = []
            for rank in range(grid.ways):
                fd = os.open(directory / grid.file(rank), os.O_RDONLY)
                stack.callback(os.close, fd)
                offsets = _layer_offsets(fd, grid)
                reads.append(_reader(fd, offsets, io_mode))
            for layer in layers:
                parts = wanted.layer_out(layer)[None] if buffer is None else buffer
                for read, part in zip(reads, parts, strict=True):
                    read(layer, part)
                refused = settle(wanted, layer, parts, scale)
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


def _reader(fd: int, offsets: tuple[int, ...], io_mode: IOMode) -> ReadLayer:
    if io_mode == "default":
        return lambda layer, part: _read_fully(fd, part, offsets[layer])
    # A mapping of a file that others cut short is a signal, no exception: this is why the size was
    # checked, and why nobody writes to files of a committed chunk.
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


@functools.lru_cache(maxsize=256)  # chunks of equal shape have equal indices
def _parse_index(tail: bytes, layers: int, layer_nbytes: int) -> tuple[int, ...]:
    """The offsets in a shard index: (offset, bytes) of each layer, uint64, and a crc32c."""
    if len(tail) != 16 * layers + _CHECKSUM_BYTES:
        raise _DamagedFileError("the file ends early")
    index, (stated,) = tail[:-_CHECKSUM_BYTES], struct.unpack("<I", tail[-_CHECKSUM_BYTES:])
    if _crc32c(index) != stated:
        raise _DamagedFileError("the index differs from its checksum")
    offsets, nbytes = np.frombuffer(index, "<u8").reshape(layers, 2).T
    last = (layers - 1) * layer_nbytes
    if (nbytes != layer_nbytes).any() or (offsets > last).any():
        raise _DamagedFileError("the index does not fit the record")
    return tuple(offsets.tolist())


def _crc32c(data: bytes) -> int:
    state = 0xFFFFFFFF
    table = _crc32c_table()
    for byte in data:
        state = table[(state ^ byte) & 0xFF] ^ (state >> 8)
    return state ^ 0xFFFFFFFF


@functools.cache
def _crc32c_table() -> tuple[int, ...]:
    def entry(value: int) -> int:
        for _ in itertools.repeat(None, 8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        return value

    return tuple(entry(byte) for byte in range(256))

"""Host memory that the device copies from; page-locked where the device is a CUDA GPU.

``HostValues`` is the seam of KCache (section 3.1): V of most layers lies there, in the rows of the
pool, and compiled steps of decoding exchange rows with it through callbacks.

A copy from page-locked memory runs at the speed of the bus and beside other work. From pageable
memory the driver first copies into a page-locked buffer of its own.
"""

import contextlib
import ctypes
import dataclasses
import functools
import logging
import math
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from jaxrag.cache.pool import PAGE
from jaxrag.types import Array, HostArray

_LOG = logging.getLogger("jaxrag")

_ALIGNMENT = 4096  # bytes; a page, and enough for JAX on the CPU to read the buffer in place
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: page-locked for every GPU of the process


class _DriverError(Exception):
    """A call to the CUDA driver that failed."""


def host_buffer(shape: Sequence[int], dtype: Any) -> HostArray:
    """Zeros in host memory, page-aligned; page-locked if JAX's default backend is a GPU.

    The memory is unlocked when the last view of it is gone. Where it cannot be locked, a warning
    says why, once, and the buffer is pageable: copies from it are right and slower.
    """
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    block = memory[start : start + size]
    if size and jax.default_backend() == "gpu":
        try:
            _lock(memory, block.ctypes.data, size, jax.local_devices()[0].local_hardware_id)
        except (OSError, _DriverError) as error:
            _report(str(error))
    return block.view(dtype).reshape(shape)


def to_device(buffer: HostArray) -> Array:
    """A ``host_buffer`` as a device array; a CPU reads it in place, without a copy.

    Leave it as it is until everything that reads it is ready.
    """
    return jax.device_put(buffer, may_alias=True)


def arrived(array: Array) -> Array:
    """The same array once its copy to the device is done; for threads that may wait."""
    return jax.block_until_ready(array)


@dataclasses.dataclass
class _Slot:
    memory: HostArray | None = None
    reader: Array | None = None  # ready once the device no longer needs the memory


class StagingBuffers:
    """Two host buffers in turns: one is filled while the device still reads from the other."""

    def __init__(self) -> None:
        """Nothing is allocated before the first buffer is asked for."""
        self._slots = (_Slot(), _Slot())
        self._turn = 0

    def take(self, shape: Sequence[int], dtype: Any) -> HostArray:
        """A buffer to fill, with old contents; waits until the device has read those.

        The buffer before this one stays as it is, this one until ``take`` is called twice more.
        """
        self._turn = 1 - self._turn
        slot = self._slots[self._turn]
        if slot.reader is not None:
            jax.block_until_ready(slot.reader)
            slot.reader = None
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if slot.memory is None or slot.memory.size < size:
            slot.memory = None  # the old one goes before the new one comes
            slot.memory = host_buffer((size,), np.uint8)
        return slot.memory[:size].view(dtype).reshape(shape)

    def read_by(self, reader: Array) -> None:
        """Say what reads the buffer taken last: it is filled again once ``reader`` is ready."""
        self._slots[self._turn].reader = reader


class StagingBlocks:
    """Host buffers of one size, for threads that fill them and one that has the device read them.

    As many as are in use at once are kept; nobody waits for one.
    """

    def __init__(self, shape: Sequence[int], dtype: Any) -> None:
        """Nothing is allocated before the first block is asked for."""
        self._shape, self._dtype = tuple(shape), np.dtype(dtype)
        self._lock = threading.Lock()
        self._free: deque[tuple[HostArray, Array | None]] = deque()

    def take(self) -> HostArray:
        """A block to fill, with old contents, that the device does not read any more."""
        with self._lock:
            for _ in range(len(self._free)):
                block, reader = self._free.popleft()
                if reader is None or reader.is_ready():  # type: ignore[attr-defined]
                    return block
                self._free.append((block, reader))
        return host_buffer(self._shape, self._dtype)

    def give(self, block: HostArray, reader: Array | None = None) -> None:
        """The block may be filled again once ``reader`` is ready; None: nothing reads it."""
        with self._lock:
            self._free.append((block, reader))


class HostValues:
    """V in host memory of the layers from ``first_layer`` on, by the rows of the pool.

    Compiled programs name this object, and outlive the memory: whoever made that holds it, and a
    program that still runs when it is gone fails. Within a program a layer writes and reads in one
    callback, so that its own token is among what it reads.

    Attributes:
      fetched: rows of V that steps of decoding read.
    """

    def __init__(self, first_layer: int, memory: HostArray) -> None:
        """Over ``memory`` [L - first_layer, K, R, H]."""
        self.first_layer = first_layer
        self.fetched = 0
        self._memory = weakref.ref(memory)

    def rows(self, layer: Array, pages: Array, slots: Array, v: Array, wanted: Array) -> Array:
        """Write v [B, T, K, H] of a layer to slots [B, T], then read slots ``wanted``.

        ``pages`` [B, M] are the requests'. Slots beyond them are dropped. ``wanted`` [B, K, G, n]
        are of one KV head each. Returns [B, K, G, n, H].
        """
        shape = jax.ShapeDtypeStruct((*wanted.shape, v.shape[-1]), v.dtype)

        def exchange(layer: Any, pages: Any, slots: Any, v: Any, wanted: Any) -> HostArray:
            pages, slots, wanted = np.asarray(pages), np.asarray(slots), np.asarray(wanted)
            mine: HostArray = self._array()[int(layer) - self.first_layer]
            row, column = np.nonzero(slots < pages.shape[1] * PAGE)
            inside = slots[row, column]
            at = pages[row, inside // PAGE] * PAGE + inside % PAGE
            mine[:, at] = np.asarray(v)[row, column].swapaxes(0, 1)
            batch = np.arange(len(pages))[:, None, None, None]
            heads = np.arange(wanted.shape[1])[None, :, None, None]
            read: HostArray = mine[heads, pages[batch, wanted // PAGE] * PAGE + wanted % PAGE]
            self.fetched += wanted.size
            return read

        found: Array = io_callback(exchange, shape, layer, pages, slots, v, wanted, ordered=False)
        return found

    def _array(self) -> HostArray:
        memory = self._memory()
        if memory is None:
            raise RuntimeError("the host memory of this cache was given back")
        return memory


def _lock(memory: HostArray, address: int, size: int, ordinal: int) -> None:
    """Page-lock part of ``memory``, until ``memory`` is freed."""
    driver = ctypes.CDLL("libcuda.so.1")
    with _context(driver, ordinal):
        _call(
            driver,
            "cuMemHostRegister_v2",
            ctypes.c_void_p(address),
            ctypes.c_size_t(size),
            ctypes.c_uint(_PORTABLE),
        )
    # At exit the driver may be gone already, and the memory goes with the process.
    weakref.finalize(memory, _unlock, driver, address, ordinal).atexit = False


def _unlock(driver: Any, address: int, ordinal: int) -> None:
    with contextlib.suppress(_DriverError), _context(driver, ordinal):
        _call(driver, "cuMemHostUnregister", ctypes.c_void_p(address))


@contextlib.contextmanager
def _context(driver: Any, ordinal: int) -> Iterator[None]:
    """Make the primary context of a GPU, which JAX uses too, current on this thread."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call(driver, "cuInit", ctypes.c_uint(0))
    _call(driver, "cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
    _call(driver, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    try:
        _call(driver, "cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            _call(driver, "cuCtxPopCurrent_v2", ctypes.byref(context))
    finally:
        _call(driver, "cuDevicePrimaryCtxRelease_v2", device)


def _call(driver: Any, name: str, *arguments: Any) -> None:
    status = getattr(driver, name)(*arguments)
    if status:
        raise _DriverError(f"{name} failed with CUDA error {status}")


@functools.cache
def _report(reason: str) -> None:
    _LOG.warning(
        "host buffers are not page-locked (%s); copies to the GPU are slower; look at the "
        "locked-memory limit (ulimit -l) and the CUDA driver",
        reason,
    )

"""Host memory that the device copies from; page-locked where the device is a CUDA GPU.

``HostValues`` is the seam of KCache (section 3.1): V of most layers lies there, in the rows of the
pool. Compiled steps of decoding exchange rows with it through callbacks; on a GPU a kernel of the
step addresses it, where it is page-locked, and no Python runs in the step.

A copy from page-locked memory runs at the speed of the bus and beside other work. From pageable
memory the driver first copies into a page-locked buffer of its own.
"""

import contextlib
import ctypes
import dataclasses
import functools
import importlib.util
import logging
import math
import operator
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import io_callback
from jax.sharding import Mesh

from jaxrag.base.sharding import by_device, device_axes
from jaxrag.base.types import Array, HostArray
from jaxrag.kv.cache.pool import PAGE

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

    As many as are in use at once are kept; no copy waits for one.
    """

    def __init__(self, shape: Sequence[int], dtype: Any) -> None:
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


@dataclasses.dataclass(frozen=True)
class Moved:
    """What went between device and host memory of K and V; differences are of two moments.

    Attributes:
      pushed: bytes written to host memory.
      brought: bytes read from it.
      rows: rows of one KV head that decode steps fetched, one for each query head that chose it.
      distinct: those of ``rows`` that no other head of the group fetched in the same step, and one
        of each that several did; 0 where that is not counted (``HostValues.measure``).
      calls: exchanges between a compiled program and the host.
    """

    pushed: int = 0
    brought: int = 0
    rows: int = 0
    distinct: int = 0
    calls: int = 0

    def __add__(self, other: "Moved") -> "Moved":
        return Moved(*map(operator.add, self._fields(), other._fields()))

    def __sub__(self, other: "Moved") -> "Moved":
        return Moved(*map(operator.sub, self._fields(), other._fields()))

    def _fields(self) -> tuple[int, ...]:
        # dataclasses.astuple copies, which a step would notice.
        return self.pushed, self.brought, self.rows, self.distinct, self.calls


@dataclasses.dataclass(frozen=True)
class Mapped:
    """Page-locked memory of V as kernels of the GPU address it.

    Attributes:
      steps: values between one layer, one KV head and one slot and the next.
    """

    address: int
    steps: tuple[int, int, int]


def way_to_rows(
    backend: str, address: int | None, missing: str | None
) -> tuple[Literal["kernel", "callback"], str]:
    """How decode steps read rows of V, and what to tell of it ("": nothing).

    Args:
      address: of the memory for the GPU; None where it is not page-locked.
      missing: a module that the kernel needs and that is not installed.
    """
    if backend != "gpu":
        return "callback", ""
    if address is None:
        return "callback", "its memory is not page-locked; look at the locked-memory limit"
    if missing is not None:
        return "callback", f"the module {missing!r} is not installed; install jaxrag[cuda]"
    return "kernel", ""


def mapped(memory: HostArray) -> Mapped | None:
    """A ``host_buffer`` [L', K, R, H] for kernels; None where steps go through callbacks.

    On a GPU a warning says why, once.
    """
    backend = jax.default_backend()
    address = _device_address(memory) if backend == "gpu" else None
    modules = ("triton", "jax_triton")
    missing = next((name for name in modules if not importlib.util.find_spec(name)), None)
    way, why = way_to_rows(backend, address, missing)
    if why:
        _report_callbacks(why)
    if way == "callback" or address is None:
        return None
    layer, head, slot, _ = (step // memory.itemsize for step in memory.strides)
    return Mapped(address, (layer, head, slot))


class HostValues:
    """V in host memory of the layers from ``first_layer`` on, by the rows of the pool.

    Compiled programs name this object, and outlive the memory: whoever made that holds it, and a
    program that still runs when it is gone fails. Within a program a layer writes and reads in one
    callback, so that its own tokens are among what it reads. On a mesh every device asks the memory
    of its process, for its rows and its KV heads.

    Attributes:
      first_layer: the first whose V lies here.
      mapped: what the kernel of a decode step needs to read and write here in place of ``rows``;
        None where there is no such kernel, and on a mesh. It counts nothing.
      measure: count the distinct rows of ``moved`` too; it costs half as much again as fetching.
    """

    def __init__(
        self, first_layer: int, memory: HostArray, mesh: Mesh | None = None, first_head: int = 0
    ) -> None:
        """Over ``memory`` [L - first_layer, K, R, H], of the KV heads from ``first_head`` on."""
        self.first_layer = first_layer
        self.mapped = mapped(memory) if mesh is None else None
        self._mesh, self._first_head = mesh, first_head
        self.measure = False
        self._memory = weakref.ref(memory)
        self._moved = Moved()
        self._counting = threading.Lock()

    @property
    def moved(self) -> Moved:
        """Everything that was moved until now; padding, which is not read, is left out."""
        return self._moved

    def rows(self, layer: Array, pages: Array, slots: Array, v: Array, chosen: Array) -> Array:
        """Write v [B, 1, K, H] of a layer to slots [B, 1], then read slots ``chosen``.

        ``pages`` [B, M] are the requests', slots beyond them are dropped. ``chosen`` [B, K, G, n]
        are of one KV head each. Returns [B, K, G, n, H], with anything in a row of the batch whose
        own slot is beyond the pages.
        """
        rows, heads = device_axes("batch"), device_axes("batch", "kv_heads")
        new = device_axes("batch", None, "kv_heads")
        exchange = by_device(
            self._mesh, self._exchange, (device_axes(), rows, rows, new, heads), heads
        )
        return exchange(layer, pages, slots, v, chosen)

    def _exchange(
        self, share: Array | int, layer: Array, pages: Array, slots: Array, v: Array, chosen: Array
    ) -> Array:
        """``rows`` of one device."""
        shape = jax.ShapeDtypeStruct((*chosen.shape, v.shape[-1]), v.dtype)

        def exchange(share: Any, layer: Any, *arrays: Any) -> HostArray:
            pages, slots, v, chosen = map(np.asarray, arrays)
            first = int(share) * v.shape[2] - self._first_head
            mine: HostArray = self._array()[int(layer) - self.first_layer]
            mine = mine[first : first + v.shape[2]]
            out = np.empty(shape.shape, mine.dtype)
            live = np.flatnonzero(slots[:, 0] < pages.shape[1] * PAGE)
            everyone = len(live) == len(out)
            if not everyone:
                pages, slots, v, chosen = (x[live] for x in (pages, slots, v, chosen))
            newest = _lines(0, pages, slots)[:, 0]
            mine[:, newest] = v[:, 0].swapaxes(0, 1)
            lines = _lines(mine.shape[1], pages, chosen)
            rows = mine.reshape(-1, mine.shape[-1])
            if everyone:  # into place: with mode="raise" there would be a copy
                np.take(rows, lines, axis=0, out=out, mode="clip")
            else:
                out[live] = rows[lines]
            distinct = _distinct(lines) if self.measure else 0
            brought = lines.size * out.shape[-1] * out.itemsize
            self._count(Moved(v.nbytes, brought, lines.size, distinct, calls=1))
            return out

        asked = (share, layer, pages, slots, v, chosen)
        found: Array = io_callback(exchange, shape, *asked, ordered=False)
        return found

    def _count(self, moved: Moved) -> None:
        with self._counting:
            self._moved += moved

    def _array(self) -> HostArray:
        memory = self._memory()
        if memory is None:
            raise RuntimeError("the host memory of this cache was given back")
        return memory


def _lines(rows: int, pages: HostArray, slots: HostArray) -> HostArray:
    """Where slots [B, K, ...] of tables [B, M] lie among the lines of [K, rows, H], in turn."""
    flat = slots.reshape(len(slots), math.prod(slots.shape[1:]))  # there may be no row at all
    which = np.take_along_axis(pages, flat // PAGE, axis=1)
    line = which.reshape(slots.shape).astype(np.int64) * PAGE + slots % PAGE
    heads = np.arange(slots.shape[1]).reshape(-1, *(1,) * (slots.ndim - 2))
    return np.asarray(line + rows * heads)


def _distinct(lines: HostArray) -> int:
    """How many different ones there are; sorting takes a third of what ``np.unique`` does."""
    ordered = np.sort(lines, axis=None)
    return int(np.count_nonzero(ordered[1:] != ordered[:-1])) + bool(ordered.size)


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


def _device_address(memory: HostArray) -> int | None:
    """Where the GPU finds page-locked memory; None where it is not page-locked."""
    found = ctypes.c_void_p()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        with _context(driver, jax.local_devices()[0].local_hardware_id):
            address = ctypes.c_void_p(memory.ctypes.data)
            _call(driver, "cuMemHostGetDevicePointer_v2", ctypes.byref(found), address, 0)
    except (OSError, _DriverError):
        return None
    return found.value


def _unlock(driver: Any, address: int, ordinal: int) -> None:
    with contextlib.suppress(_DriverError), _context(driver, ordinal):
        _call(driver, "cuCtxSynchronize")  # a kernel may still address it
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


@functools.cache
def _report_callbacks(reason: str) -> None:
    _LOG.warning("decode steps read V in host memory through Python (%s)", reason)

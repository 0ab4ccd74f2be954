"""Host buffers: aligned, page-locked on a GPU host or said not to be; staging buffers in turns."""

import ctypes
import gc
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrag.kv.cache import host as offload
from jaxrag.kv.cache.host import (
    HostValues,
    Mapped,
    StagingBuffers,
    host_buffer,
    to_device,
    way_to_rows,
)


class FakeDriver:
    """A CUDA driver that notes every call; ``failing`` names the one that fails."""

    def __init__(self, failing=None):
        self.failing = failing
        self.calls = []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, [getattr(a, "value", None) for a in arguments]))
            return 2 if name == self.failing else 0

        return call

    def names(self):
        return [name for name, _ in self.calls]


@pytest.fixture
def gpu_host(monkeypatch):
    """``gpu_host(failing=None)``: a host whose default backend is a GPU with this driver."""

    def make(failing=None):
        driver = FakeDriver(failing)
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
        return driver

    offload._report.cache_clear()
    return make


def test_a_buffer_is_zeros_and_aligned():
    buffer = host_buffer((3, 5, 7), "bfloat16")
    assert buffer.shape == (3, 5, 7)
    assert buffer.dtype == jnp.bfloat16
    assert buffer.ctypes.data % 4096 == 0
    assert buffer.flags.c_contiguous and buffer.flags.writeable
    assert not buffer.any()
    assert host_buffer((0, 4), np.float32).shape == (0, 4)


def test_on_a_cpu_host_the_driver_is_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail("asked for the driver"))
    host_buffer((4,), np.float32)


def test_on_a_gpu_host_it_is_locked_until_its_last_view_is_gone(gpu_host):
    driver = gpu_host()
    buffer = host_buffer((16, 16), np.float32)
    assert driver.names() == [
        "cuInit",
        "cuDeviceGet",
        "cuDevicePrimaryCtxRetain",
        "cuCtxPushCurrent_v2",
        "cuMemHostRegister_v2",
        "cuCtxPopCurrent_v2",
        "cuDevicePrimaryCtxRelease_v2",
    ]
    address = buffer.ctypes.data
    assert driver.calls[4][1] == [address, 16 * 16 * 4, 1]
    part = buffer[3:].reshape(-1)
    del buffer
    gc.collect()
    assert "cuMemHostUnregister" not in driver.names()
    del part
    gc.collect()
    unlocked = [arguments for name, arguments in driver.calls if name == "cuMemHostUnregister"]
    assert unlocked == [[address]]
    assert driver.names()[-2:] == ["cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2"]


@pytest.mark.parametrize("failing", ["cuInit", "cuCtxPushCurrent_v2", "cuMemHostRegister_v2"])
def test_a_failure_is_said_once_and_the_buffer_is_pageable(gpu_host, caplog, failing):
    driver = gpu_host(failing)
    with caplog.at_level(logging.WARNING, "jaxrag"):
        buffers = [host_buffer((8,), np.float32) for _ in range(3)]
    (record,) = caplog.records
    message = record.getMessage()
    assert message.startswith(f"host buffers are not page-locked ({failing} failed with CUDA")
    buffers[0][:] = 1
    retained = driver.names().count("cuDevicePrimaryCtxRetain")
    assert driver.names().count("cuDevicePrimaryCtxRelease_v2") == retained
    del buffers
    gc.collect()
    assert "cuMemHostUnregister" not in driver.names()


def test_a_missing_driver_is_said(gpu_host, monkeypatch, caplog):
    gpu_host()

    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with caplog.at_level(logging.WARNING, "jaxrag"):
        assert host_buffer((8,), np.float32).shape == (8,)
    assert "libcuda.so.1: cannot open" in caplog.text


@pytest.mark.parametrize(
    ("backend", "address", "missing", "way", "why"),
    [
        ("gpu", 1 << 46, None, "kernel", ""),
        ("gpu", 1 << 46, "jax_triton", "callback", "'jax_triton' is not installed; install jaxrag"),
        ("gpu", None, None, "callback", "not page-locked"),
        ("cpu", None, None, "callback", ""),
        ("tpu", None, "triton", "callback", ""),
    ],
)
def test_the_way_to_rows(backend, address, missing, way, why):
    found, told = way_to_rows(backend, address, missing)
    assert found == way
    assert why in told and bool(told) == bool(why)


class LockingDriver(FakeDriver):
    """One that says where the GPU finds host memory: elsewhere than the CPU does."""

    def cuMemHostGetDevicePointer_v2(self, found, here, flags):
        found._obj.value = here.value + (1 << 40)
        return 0


def test_memory_of_a_gpu_host_is_mapped_for_kernels(monkeypatch, caplog):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: LockingDriver())
    installed = {"triton"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name in installed or None)
    offload._report_callbacks.cache_clear()
    memory = host_buffer((3, 2, 5 * 16, 8), "bfloat16")  # layers, heads, rows, dims
    with caplog.at_level(logging.WARNING, "jaxrag"):
        values = [HostValues(1, memory) for _ in range(3)]
    assert [one.mapped for one in values] == [None] * 3
    (record,) = caplog.records
    assert record.getMessage() == (
        "decode steps read V in host memory through Python (the module 'jax_triton' is not "
        "installed; install jaxrag[cuda])"
    )
    installed.add("jax_triton")
    assert HostValues(1, memory).mapped == Mapped(
        memory.ctypes.data + (1 << 40), (2 * 5 * 16 * 8, 5 * 16 * 8, 8)
    )


def test_locked_memory_is_given_back_when_no_kernel_addresses_it(gpu_host):
    driver = gpu_host()
    buffer = host_buffer((8,), np.float32)
    assert "cuCtxSynchronize" not in driver.names()
    del buffer
    gc.collect()
    names = driver.names()
    assert names.index("cuCtxSynchronize") == names.index("cuMemHostUnregister") - 1


def test_staging_buffers_take_turns_and_are_reused():
    staging = StagingBuffers()
    first = staging.take((4, 3), np.float32)
    second = staging.take((4, 3), np.float32)
    assert not np.shares_memory(first, second)
    third = staging.take((2, 5), np.float32)
    assert np.shares_memory(first, third)
    larger = staging.take((100, 3), np.float32)
    assert larger.shape == (100, 3)
    assert not np.shares_memory(larger, third)
    assert np.shares_memory(larger, [staging.take((1,), "bfloat16") for _ in range(2)][1])


def test_a_staging_buffer_waits_for_its_reader(monkeypatch):
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    staging = StagingBuffers()
    staging.take((4,), np.float32)
    staging.read_by("first")
    staging.take((4,), np.float32)
    staging.read_by("second")
    assert waited == []
    staging.take((4,), np.float32)
    assert waited == ["first"]
    staging.take((4,), np.float32)
    staging.take((4,), np.float32)  # nobody reads the one before last
    assert waited == ["first", "second"]


def test_a_cpu_reads_a_buffer_in_place():
    buffer = host_buffer((3, 5), np.float32)
    assert to_device(buffer).unsafe_buffer_pointer() == buffer.ctypes.data


def test_a_filled_again_buffer_does_not_change_what_was_copied_from_it():
    staging = StagingBuffers()
    copy = jax.jit(lambda x: (x * 1, jnp.max(x)))
    results = []
    for value in range(6):
        buffer = staging.take((1 << 20,), np.float32)
        buffer[:] = value
        result, read = copy(to_device(buffer))
        staging.read_by(read)
        results.append(result)
    for value, result in enumerate(results):
        assert float(result.min()) == float(result.max()) == value


@pytest.mark.gpu
def test_the_driver_reports_a_buffer_as_page_locked():
    buffer = host_buffer((1 << 20,), np.float32)
    driver = ctypes.CDLL("libcuda.so.1")
    ordinal = jax.local_devices()[0].local_hardware_id
    flags = ctypes.c_uint()
    address = ctypes.c_void_p(buffer.ctypes.data)
    with offload._context(driver, ordinal):
        assert driver.cuMemHostGetFlags(ctypes.byref(flags), address) == 0
    buffer[:] = np.arange(buffer.size)
    np.testing.assert_array_equal(jax.device_put(buffer), buffer)
    del buffer
    gc.collect()
    with offload._context(driver, ordinal):
        assert driver.cuMemHostGetFlags(ctypes.byref(flags), address) != 0

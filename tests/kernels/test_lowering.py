"""Every Triton body is accepted for a GPU where there is none; and who refuses to run where."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from cases import CASES
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding
from refusal import refused

from jaxrag.base.config import KERNELS
from jaxrag.base.errors import ConfigError
from jaxrag.models.attention import check_kernels
from pallas_kernels import (
    BODIES,
    IMPLS,
    KernelError,
    Pages,
    Pool,
    Rotary,
    check_impl,
    sparse_attention,
    topn_attention,
)

H200 = AbstractMesh(
    (1,), ("x",), (AxisType.Auto,), abstract_device=AbstractDevice("NVIDIA H200", 132, "cuda")
)


def lowered(function, arguments):
    with jax.sharding.use_abstract_mesh(H200):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


CALLS = {  # what a body becomes
    "pallas_triton": "xla.gpu.triton",
    "pallas_mosaic": "mosaic_gpu",
    "jax_triton": "triton_kernel_call",
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_checked_kernel_lowers_for_a_gpu(case):
    if case.impl == "jax_triton":  # it compiles as it lowers, by the plug-in's means
        pytest.importorskip("jax_triton")
        pytest.importorskip("jax_cuda13_plugin")
    assert CALLS[case.impl] in lowered(case.function, case.arguments)


def test_every_gpu_body_is_checked():
    """An interpreted check is no check of a GPU: each is paired with a lowering."""
    bodies = {(op, impl) for op, impls in BODIES.items() for impl in impls if impl in CALLS}
    assert {(case.op, case.impl) for case in CASES.values()} == bodies


def paged_arguments(rows, dim, pairs, interleaved=False):
    """Shapes of a paged op for queries [*rows, 6, dim]."""
    shape, ids = jax.ShapeDtypeStruct, functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    kv, angles = shape((40, 16, 2, dim), jnp.bfloat16), shape((512, pairs), jnp.float32)
    table = Pages(ids((1, 32)), ids((1, 32)), ids((1, 512)))
    q = shape((*rows, 6, dim), jnp.bfloat16)
    return q, Pool(kv, kv), table, ids(rows), Rotary(angles, angles, interleaved)


@pytest.mark.parametrize(
    ("op", "dim", "interleaved"),
    [
        (sparse_attention, 10, True),
        (sparse_attention, 256, False),
        (topn_attention, 80, False),
        (topn_attention, 10, True),
    ],
)
def test_odd_heads_lower_too(op, dim, interleaved):
    rows = (1,) if op is topn_attention else (1, 70)
    options = {"n": 20, "renormalise": True} if op is topn_attention else {}
    call = functools.partial(op, scale=0.1, impl="pallas_triton", **options)
    arguments = paged_arguments(rows, dim, dim // 4, interleaved)
    assert "xla.gpu.triton" in lowered(call, arguments)


@pytest.mark.parametrize("op", BODIES)
def test_a_body_that_cannot_run_here_refuses_by_name(op):
    with refused(KernelError, op):
        check_impl(op, "pallas_triton")
    with refused(KernelError, op):
        check_impl(op, "cuda")
    check_impl(op, "pallas_interpret")


def test_the_body_in_tritons_own_language_says_what_it_needs(monkeypatch):
    with refused(KernelError, "'jax_triton'"):
        check_impl("topn_attention", "jax_triton")
    with refused(KernelError, "'jax_triton'"):
        check_impl("sparse_attention", "jax_triton")
    # For a GPU it is refused where its packages are missing, by their names.
    there = {"triton"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name in there or None)
    with (
        jax.sharding.use_abstract_mesh(H200),
        refused(KernelError, "'jax_triton'"),
    ):
        check_impl("topn_attention", "jax_triton")
    there.add("jax_triton")
    with jax.sharding.use_abstract_mesh(H200):
        check_impl("topn_attention", "jax_triton")


def test_a_chip_that_is_only_described_has_to_be_known():
    pytest.importorskip("jax_triton")
    other = AbstractDevice("NVIDIA H300", 132, "cuda")
    mesh = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=other)
    case = CASES["topn_128_of_32k_in_host_memory_jax_triton"]
    with (
        jax.sharding.use_abstract_mesh(mesh),
        refused(KernelError, "'NVIDIA H300'"),
    ):
        jax.jit(case.function).trace(*case.arguments)


def test_values_of_the_top_n_may_lie_in_host_memory():
    """They reach the kernel as they are: nothing moves them to the device."""
    case = CASES["topn_128_of_32k"]
    host = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    q, pool, *rest = case.arguments
    away = jax.ShapeDtypeStruct(pool.v.shape, pool.v.dtype, sharding=host)
    text = lowered(case.function, (q, pool._replace(v=away), *rest))
    assert re.search(r"%arg2: tensor<[^>]*> {mhlo.memory_kind = \"pinned_host\"", text)
    assert "annotate_device_placement" not in text


def test_mosaic_names_the_heads_it_does_not_take():
    call = functools.partial(sparse_attention, scale=0.1, impl="pallas_mosaic")
    with refused(KernelError, "16-bit"):
        lowered(call, paged_arguments((1, 70), 64, 32))


def test_the_choice_is_refused_before_anything_is_loaded():
    # Of one op each, and verified nowhere.
    assert set(IMPLS) - set(KERNELS) == {"pallas_mosaic", "jax_triton"}
    with refused(ConfigError, "kernels='pallas_triton'"):
        check_kernels("pallas_triton")
    check_kernels("pallas_interpret")

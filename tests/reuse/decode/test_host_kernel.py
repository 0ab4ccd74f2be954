"""Where a kernel addresses V in host memory, no Python runs in a step, and the answer is the same.

The kernel itself: scripts/kernels/check_triton_numbers.py runs it in Triton's interpreter, and
``make check-kernels`` compiles it for a GPU. It has not run on one.
"""

import ctypes
import dataclasses
import re
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jaxrag.base.types import Step
from jaxrag.engine import steps
from jaxrag.engine.engine import engine_of
from jaxrag.kv.cache import PAGE, PagePool, PageTable
from jaxrag.kv.cache.host import HostValues, Mapped
from jaxrag.kv.placement import KVPlacement
from jaxrag.models.decoder import Decoder
from jaxrag.models.rope import RopeTable
from jaxrag.models.spec import init_params
from jaxrag.reuse.decode import Decoding, TopN
from jaxrag.serve.generate import generate

H200 = AbstractMesh(
    (1,), ("x",), (AxisType.Auto,), abstract_device=AbstractDevice("NVIDIA H200", 132, "cuda")
)
PART = 1 << 30


def address_parts(address):
    return address % PART, address // PART


def by_address(best, slots, pages, layer, fresh, new, address, *, page, steps):
    """``mix_kept_kernel`` written out: rows of float32 are read and written at their addresses."""

    def run(best, slots, pages, layer, fresh, new, address):
        arrays = (best, slots, pages, layer, fresh, new, address)
        best, slots, pages, layer, fresh, new, address = map(np.asarray, arrays)
        batch, heads, _ = best.shape
        _, kv_heads, dim = new.shape
        base = int(address[0]) + PART * int(address[1])

        def at(b, k, slot):
            line = int(pages[b, slot // page]) * page + slot % page
            return base + 4 * (int(layer) * steps[0] + k * steps[1] + line * steps[2])

        for b, k in np.ndindex(batch, kv_heads):
            if fresh[b] < pages.shape[1] * page:
                value = np.ascontiguousarray(new[b, k], np.float32)
                ctypes.memmove(at(b, k, int(fresh[b])), value.ctypes.data, value.nbytes)
        out = np.zeros((batch, heads, dim), np.float32)
        lse = np.full((batch, heads), -np.inf, np.float32)
        for b, n in np.ndindex(batch, heads):
            seen = np.flatnonzero(best[b, n] > -np.inf)
            if not len(seen):
                continue
            lse[b, n] = np.logaddexp.reduce(best[b, n, seen].astype(np.float64))
            for one in seen:
                row = ctypes.string_at(at(b, n * kv_heads // heads, int(slots[b, n, one])), 4 * dim)
                out[b, n] += np.exp(best[b, n, one] - lse[b, n]) * np.frombuffer(row, np.float32)
        return out, lse

    shapes = (
        jax.ShapeDtypeStruct((*best.shape[:2], new.shape[-1]), jnp.float32),
        jax.ShapeDtypeStruct(best.shape[:2], jnp.float32),
    )
    return io_callback(run, shapes, best, slots, pages, layer, fresh, new, address)


@pytest.mark.parametrize("renormalise", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_tokens_are_those_of_the_callback(model_of, ids, monkeypatch, renormalise):
    """Through another kernel in its place, which checks what it is given: where, and how far apart.

    Two questions in one batch, one of which ends before the other.
    """
    model = dataclasses.replace(model_of(), placement=KVPlacement(value_layers=1))
    options = {
        "documents": list(ids(50, 33)),
        "method": "turborag",
        "decode": TopN(n=8, renormalise=renormalise),
        "max_new_tokens": 9,
    }
    questions = [list(map(int, q)) for q in ids(9, 4)]
    expected = generate(questions, model=model, **options)
    stub = SimpleNamespace(mix_kept_kernel=by_address, address_parts=address_parts)
    monkeypatch.setitem(sys.modules, "pallas_kernels.jax_triton.topn", stub)
    by_kernel = dataclasses.replace(model)
    cache = engine_of(by_kernel).runner.cache
    values, memory = cache.values, cache.values._array()
    layer, head, slot, _ = (step // memory.itemsize for step in memory.strides)
    values.mapped = Mapped(memory.ctypes.data, (layer, head, slot))
    ours = generate(questions, model=by_kernel, **options)
    assert [out.token_ids for out in ours] == [out.token_ids for out in expected]
    assert values.moved.rows == 0 and cache.moved.pushed
    other = engine_of(model).runner.cache.values
    assert other.moved.rows


def shapes_of_a_step(config, rows, num_pages, pool_tokens):
    """The arguments of ``steps.run_by_rule`` for a model with V of layer 0 on the device."""

    def numbers(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    of_page = (PAGE, config.num_kv_heads, config.head_dim)
    pages = pool_tokens // PAGE
    pool = PagePool(
        k=jax.ShapeDtypeStruct((config.num_layers * pages, *of_page), config.dtype),
        v=jax.ShapeDtypeStruct((pages, *of_page), config.dtype),
    )
    angles = jax.ShapeDtypeStruct((num_pages * PAGE, config.rope.rotary_dim // 2), jnp.float32)
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    table = PageTable(
        pages=numbers(rows, num_pages),
        offsets=numbers(rows, num_pages),
        slot_position=numbers(rows, num_pages * PAGE),
    )
    state = Decoding(order=numbers(rows, num_pages * PAGE), state=None)
    decoder = Decoder(params=params, rope=RopeTable(angles, angles), config=config)
    return decoder, pool, table, state, Step(*(numbers(rows, 1),) * 3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_step_for_a_gpu_holds_the_kernel_and_no_callback(tiny_config, dtype):
    pytest.importorskip("jax_triton")
    pytest.importorskip("jax_cuda13_plugin")
    config = dataclasses.replace(tiny_config(), head_dim=16, dtype=dtype)
    memory = np.zeros((config.num_layers - 1, config.num_kv_heads, 8 * PAGE, 16), dtype)
    values = HostValues(1, memory)

    arguments = shapes_of_a_step(config, rows=2, num_pages=4, pool_tokens=8 * PAGE)
    plan = steps.Plan(TopN(n=8), None, values)

    def traced():
        def step(*arguments):
            return steps.run_by_rule(*arguments, plan)

        return jax.jit(step).trace(*arguments)

    assert "io_callback" in str(traced().jaxpr)
    values.mapped = Mapped(1 << 46, (8 * PAGE * 2 * 16, 8 * PAGE * 16, 16))
    with jax.sharding.use_abstract_mesh(H200):
        by_kernel = traced()
        text = by_kernel.lower(lowering_platforms=("cuda",)).as_text()
    assert "callback" not in str(by_kernel.jaxpr) and "callback" not in text
    assert len(re.findall(r"custom_call @\S*triton_kernel_call", text)) == 1


@pytest.mark.gpu
def test_on_a_gpu_the_kernel_gives_the_tokens_of_values_there(model_of, ids):
    options = {
        "documents": list(ids(50, 33)),
        "method": "turborag",
        "decode": TopN(n=8),
        "max_new_tokens": 24,
    }
    questions = [list(map(int, q)) for q in ids(9, 4)]
    far = dataclasses.replace(model_of(), placement=KVPlacement(value_layers=1))
    expected, ours = (generate(questions, model=m, **options) for m in (model_of(), far))
    assert [out.token_ids for out in ours] == [out.token_ids for out in expected]
    values = engine_of(far).runner.cache.values
    assert values.mapped is not None and values.moved.calls == 0

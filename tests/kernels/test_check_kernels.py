"""The check of kernels without a GPU: what it reads, what it refuses, and that it runs."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import check_kernels
import jax
import jax.numpy as jnp
import pytest
from cases import BROKEN, CASES
from described import pin
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

H200 = AbstractMesh(
    (1,), ("x",), (AxisType.Auto,), abstract_device=AbstractDevice("NVIDIA H200", 132, "cuda")
)
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "kernels" / "check_kernels.py"

REPORT = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'loop_fusion' for 'sm_90a'
ptxas info    : Function properties for loop_fusion
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers
ptxas info    : Compiling entry function 'paged_attention' for 'sm_90a'
ptxas info    : Function properties for paged_attention
    368 bytes stack frame, 200 bytes spill stores, 168 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers
"""


def test_reads_the_report_of_one_kernel():
    assert check_kernels.usage_of(REPORT, "paged_attention") == check_kernels.Usage(255, 368)
    assert check_kernels.usage_of(REPORT, "loop_fusion") == check_kernels.Usage(12, 0)
    assert check_kernels.usage_of(REPORT, "absent") is None


def test_over_budget_is_said():
    case = CASES["decode_one_row"]
    assert check_kernels.verdict(check_kernels.Usage(case.registers, 0), case) == ""
    assert "169 registers a thread, the budget is 168" in check_kernels.verdict(
        check_kernels.Usage(169, 0), case
    )
    assert "spill of 8 bytes" in check_kernels.verdict(check_kernels.Usage(20, 8), case)


def test_arguments_are_said_to_lie_in_host_memory():
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    lowered = jax.jit(lambda x, y: x + y).lower(shape, shape)
    pin(lowered.compiler_ir(), (1,))
    (place,) = re.findall(r"%arg(\d): tensor<4xf32> {[^}]*pinned_host", lowered.as_text())
    assert place == "1"


def test_values_that_leave_host_memory_are_noticed():
    def plan(taken, device, host):
        return SimpleNamespace(
            host_argument_size_in_bytes=taken,
            temp_size_in_bytes=device,
            host_temp_size_in_bytes=host,
        )

    check_kernels.stay_on_host(plan(100, 60, 30), 100)
    check_kernels.stay_on_host(plan(0, 999, 0), 0)
    with pytest.raises(RuntimeError):
        check_kernels.stay_on_host(plan(0, 0, 0), 100)
    with pytest.raises(RuntimeError):
        check_kernels.stay_on_host(plan(100, 60, 50), 100)


def test_an_unsupported_primitive_does_not_lower():
    case, word = BROKEN["unsupported_primitive"]
    with jax.sharding.use_abstract_mesh(H200), pytest.raises(Exception, match=word):
        jax.jit(case.function).trace(*case.arguments).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("width", [1, 64])
def test_a_whole_step_lowers_for_a_gpu(width):
    step = check_kernels.Step(2, width, temporary=0, num_layers=2, context=512, pool_tokens=1024)
    function, arguments = step.program()
    with jax.sharding.use_abstract_mesh(H200):
        text = function.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"custom_call @\S*triton", text)) == 1  # in the scan over the layers
    assert text.count("tf.aliasing_output") + text.count("jax.buffer_donor") == 2  # both pools


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("jax_cuda13_plugin", "jax_triton"))),
    reason="needs the extra check-kernels",
)
@pytest.mark.parametrize("arguments", [[], ["--self-test"]])
def test_compiles_without_a_gpu_and_refuses_broken_kernels(arguments):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr

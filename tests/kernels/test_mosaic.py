"""The schedule of the Mosaic body, run on a CPU by a model of its machine.

No interpreter runs such a kernel. Here its own code runs with numpy in place of the GPU: three
threads, one at a time in random order, shared memory that begins as NaN, copies that arrive late,
barriers with the parity of the chip's. What it cannot say: layouts, and the chip's own arithmetic.
"""

import dataclasses
import functools
import itertools
import random
import threading
from types import SimpleNamespace
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import paged

CLOSE = {"rtol": 3e-2, "atol": 3e-2}


class Machine:
    """Runs one program: its threads take turns, and late copies arrive between them."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.late = []  # copies on their way
        self.ready = {}  # thread -> may it go on?
        self.events = {}
        self.failure = None

    def run(self, threads):
        """Run all to their ends; raises what one raised, and where all wait for each other."""
        self.events = {which: threading.Event() for which in range(len(threads))}
        self.ready = {which: lambda: True for which in self.events}

        def begin(which, function):
            try:
                self._sleep(which)
                function()
            except BaseException as error:
                self.failure = self.failure or error
            finally:
                del self.ready[which]
                self._next()

        running = [threading.Thread(target=begin, args=x, daemon=True) for x in enumerate(threads)]
        for thread in running:
            thread.start()
        self._next()
        for thread in running:
            thread.join(600)
            assert not thread.is_alive()
        if self.failure is not None:
            raise self.failure
        assert not self.late, "a copy arrives after the program's end"

    def turn(self, which, ready=lambda: True):
        """Let others go on, until ``ready``."""
        self.ready[which] = ready
        self._next()
        self._sleep(which)

    def _sleep(self, which):
        self.events[which].wait()
        self.events[which].clear()
        if self.failure is not None:
            raise self.failure

    def _next(self):
        while self.ready:
            able = [which for which, ready in self.ready.items() if self.failure or ready()]
            if not able and not self.late:
                self.failure = AssertionError("every thread waits for another")
                continue
            choice = self.random.randrange(len(able) + len(self.late))
            if choice < len(able):
                self.events[able[choice]].set()
                return
            self.late.pop(choice - len(able))()


class Barrier:
    """An mbarrier: a wait is for the other parity than that of the phase that is under way."""

    def __init__(self, num_arrivals):
        self.num_arrivals, self.arrivals, self.waits = num_arrivals, 0, {}

    def arrive(self):
        self.arrivals += 1

    def wait(self, machine, which):
        mine = self.waits.get(which, 0)

        def ready():
            phases = self.arrivals // self.num_arrivals
            return phases > mine and (phases - mine) % 2 == 1

        machine.turn(which, ready)
        self.waits[which] = mine + 1


class Memory:
    """A ref over a numpy array, or over barriers."""

    def __init__(self, array):
        self.array = array

    at = property(lambda self: View(self))
    T = property(lambda self: Memory(self.array.T))
    shape = property(lambda self: self.array.shape)
    dtype = property(lambda self: self.array.dtype)

    def __getitem__(self, index):
        return np.array(self.array[whole(index)])

    def __setitem__(self, index, value):
        assert value.dtype == self.array.dtype
        self.array[whole(index)] = value


class View:
    """``ref.at``."""

    def __init__(self, ref):
        self.ref = ref

    def __getitem__(self, index):
        return Memory(self.ref.array[whole(index)])


def whole(index):
    """An index that does not count from the end."""
    parts = index if isinstance(index, tuple) else (index,)
    for part in parts:
        low = part.start if isinstance(part, slice) else part
        assert low is None or low is Ellipsis or low >= 0, index
    return index


def made(kind):
    """Shared memory that holds nothing yet, or barriers."""
    if isinstance(kind, plgpu.Barrier):
        return Memory(np.array([Barrier(kind.num_arrivals) for _ in range(*kind.num_barriers)]))
    return Memory(np.full(kind.shape, np.nan, kind.dtype))


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Stands for ``plgpu`` in the module of the kernel; ``seed`` orders what may happen."""

    seed: int

    def __getattr__(self, name):
        return getattr(plgpu, name)

    def kernel(self, body, *, out_type, grid, grid_names, num_threads, thread_name, scratch_types,
               compiler_params):  # fmt: skip
        """Run the programs one by one."""

        def call(*operands):
            inputs = [Memory(np.array(x)) for x in operands]
            outs = [Memory(np.full(x.shape, np.nan, x.dtype)) for x in out_type]
            for place in itertools.product(*map(range, grid)):
                axes = dict(zip(grid_names, place, strict=True))
                run = functools.partial(body, *inputs, *outs, *map(made, scratch_types))
                self._program(run, axes, thread_name, num_threads)
            return tuple(jnp.asarray(out.array) for out in outs)

        return call

    def _program(self, run, axes, thread_name, num_threads):
        machine, here = Machine(f"{self.seed} {axes}"), threading.local()

        def thread(which):
            here.which = which
            with np.errstate(all="ignore"):
                run()

        def turn():
            machine.turn(here.which)

        def barrier_wait(ref):
            ref.array.wait(machine, here.which)

        def barrier_arrive(ref):
            turn()
            ref.array.arrive()

        def copy_gmem_to_smem(source, to, barrier):
            assert source.shape == to.shape
            to.array[...] = np.nan

            def arrives():
                to.array[...] = source.array
                barrier.array.arrive()

            machine.late.append(arrives)
            turn()

        def copy_smem_to_gmem(source, to):
            assert np.isnan(to.array).all(), "written twice"
            to.array[...] = source.array

        def load(ref, layout, optimized):
            turn()
            return np.array(ref.array)

        def wgmma(acc, a, b):
            turn()
            left = a.array if isinstance(a, Memory) else a
            acc.array += left.astype(np.float32) @ b.array.astype(np.float32)

        class ACC(Memory):
            def __init__(self, shape, dtype):
                super().__init__(np.zeros(shape, dtype))

            @classmethod
            def init(cls, value):
                return Memory(np.array(value))

        def run_state(body):
            def call(acc):
                body(acc)
                return acc.array

            return call

        def when(condition):
            return lambda function: function() if condition else None

        def loop(low, high):
            def repeat(function):
                for number in range(low, high):
                    function(np.int32(number))

            return repeat

        def fori_loop(low, high, body, state):
            for number in range(low, high):
                state = body(np.int32(number), state)
            return state

        def broadcast_in_dim(x, shape, dims):
            (axis,) = dims
            return np.broadcast_to(np.expand_dims(x, 1 - axis), shape)

        of_gpu = SimpleNamespace(
            set_max_registers=lambda count, action: None,
            load=load, wgmma=wgmma, ACC=ACC, commit_smem=turn,
            barrier_wait=barrier_wait, barrier_arrive=barrier_arrive,
            copy_gmem_to_smem=copy_gmem_to_smem, copy_smem_to_gmem=copy_smem_to_gmem,
            wait_smem_to_gmem=lambda count: None, layout_cast=lambda x, layout: x,
            broadcasted_iota=lambda dtype, shape, axis, layout: np.indices(shape, dtype)[axis],
        )  # fmt: skip
        of_pallas = SimpleNamespace(
            when=when, loop=loop, run_state=run_state,
            run_scoped=lambda function, acc: function(acc),
            ds=lambda start, size: slice(int(start), int(start) + size),
        )  # fmt: skip
        of_lax = SimpleNamespace(
            axis_index=lambda name: here.which if name == thread_name else np.int32(axes[name]),
            div=lambda a, b: a // b, rem=lambda a, b: a % b, max=max, min=min,
            fori_loop=fori_loop, broadcast_in_dim=broadcast_in_dim,
            optimization_barrier=lambda x: x,
        )  # fmt: skip
        with mock.patch.multiple(paged, plgpu=of_gpu, pl=of_pallas, lax=of_lax, jnp=np):
            machine.run([functools.partial(thread, which) for which in range(num_threads)])


def run(scene, seed=0, splits=1):
    with mock.patch.object(paged, "plgpu", Gpu(seed)):
        return paged.paged_mosaic_kernel(*scene.arguments, **scene.options, splits=splits)


def check(scene, out, lse):
    expected, expected_lse = scene.dense()
    np.testing.assert_allclose(out, expected, **CLOSE)
    np.testing.assert_allclose(lse, expected_lse, **CLOSE)
    blind = np.isneginf(expected_lse)
    assert blind.any() and (np.asarray(out)[blind] == 0).all()


@pytest.fixture
def scene(paged_scene):
    return functools.partial(paged_scene, "half128", dim=128, dtype=jnp.bfloat16)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(
    ("page", "kv_heads"), [(16, 1), pytest.param(64, 2, marks=pytest.mark.slow)]
)
def test_equals_dense_with_poisoned_slots(scene, page, kv_heads, window):
    made = scene(page=page, window=window, kv_heads=kv_heads, queries=50)
    check(made, *run(made, splits=2))


@pytest.mark.slow
def test_any_order_of_events_gives_the_same(scene):
    made = scene(kv_heads=1, queries=4, chunks=(37, 16))
    first, *others = (run(made, seed) for seed in range(3))
    check(made, *first)
    for other in others:
        for x, y in zip(first, other, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("more", [True, False])
@pytest.mark.parametrize("which", ["v_free", "k_free", "v_full", "k_full"])
def test_a_wrong_count_of_arrivals_is_noticed(scene, which, more):
    """One more than there are is waited for, or the first is enough."""
    made, scratch = scene(kv_heads=1, queries=4, chunks=(200,)), paged._scratch
    at = -1 - ["v_free", "k_free", "v_full", "k_full"].index(which)

    def wrong(*sizes):
        kinds = scratch(*sizes)
        count = kinds[at].num_arrivals + 1 if more else 1
        kinds[at] = dataclasses.replace(kinds[at], num_arrivals=count)
        return kinds

    with mock.patch.object(paged, "_scratch", wrong), pytest.raises(AssertionError):
        for seed in range(10):
            check(made, *run(made, seed))

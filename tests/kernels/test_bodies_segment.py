"""The Pallas body of packed attention, interpreted, against the reference body and its gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrag.segments import example_ids, lay_out
from pallas_kernels import segment_attention
from pallas_kernels.triton.segment import SegmentTiling, segment_kernel

CLOSE = {"rtol": 2e-4, "atol": 2e-5}


def rows_of(kind, length):
    """positions, segments, examples of two rows."""
    segments, examples = np.zeros((2, length), np.int32), None
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (2, length)).copy()
    for row, parts in enumerate(((5, [17, 3, 30], 9), (0, [40, 1], length - 50))):
        layout = lay_out(*parts)
        segments[row, : len(layout.segments)] = layout.segments
        positions[row, : len(layout.segments)] = layout.positions
    if kind == "examples":
        examples = np.full((2, length), example_ids(0), np.int32)
        examples[:, 20:40] = example_ids(0, 1)
        examples[:, 40:] = example_ids(1)
        examples = jnp.asarray(examples)
    return jnp.asarray(positions), jnp.asarray(segments), examples


def heads(rng, length, n, k, h, dtype=jnp.float32):
    return [jnp.asarray(rng.normal(size=(2, length, m, h)), dtype) for m in (n, k, k)]


@pytest.mark.parametrize("prefix_visible", [False, True])
@pytest.mark.parametrize(
    ("kind", "window", "n", "k"),
    [("rows", None, 4, 2), ("examples", None, 3, 1), ("rows", 7, 2, 2)],
)
def test_equals_the_reference(rng, kind, window, n, k, prefix_visible):
    length = 83
    rows, qkv = rows_of(kind, length), heads(rng, length, n, k, 10)
    op = functools.partial(
        segment_attention, scale=0.3, prefix_visible=prefix_visible, window=window
    )
    expected, expected_lse = jax.jit(op)(*qkv, *rows)
    out, lse = jax.jit(functools.partial(op, impl="pallas_interpret"))(*qkv, *rows)
    np.testing.assert_allclose(out, expected, **CLOSE)
    np.testing.assert_allclose(lse, expected_lse, **CLOSE)
    blind = np.isneginf(np.asarray(lse))
    assert blind.any() and (np.asarray(out)[blind] == 0).all()


def test_gradient_equals_that_of_the_reference(rng):
    rows, qkv = rows_of("rows", 70), heads(rng, 70, 4, 2, 8)

    def gradient(impl):
        def scalar(q, k, v):
            op = functools.partial(segment_attention, scale=0.3, prefix_visible=False, impl=impl)
            return (op(q, k, v, *rows)[0] ** 2).sum()

        return jax.jit(jax.grad(scalar, (0, 1, 2)))(*qkv)

    for got, expected in zip(gradient("pallas_interpret"), gradient("xla"), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("tile", [16, 32, 64])
@pytest.mark.parametrize("pack", [1, 2, 4])
@pytest.mark.parametrize("kind", ["rows", "examples"])
def test_product_of_tilings(rng, kind, pack, tile, dtype):
    length = 150
    rows, qkv = rows_of(kind, length), heads(rng, length, 8, 2, 16, dtype)
    expected, expected_lse = segment_attention(*qkv, *rows, scale=0.3, prefix_visible=True)
    out, lse = segment_kernel(
        *qkv, (*rows, None), scale=0.3, prefix_visible=True, interpret=True,
        tiling=SegmentTiling(tile, pack, 4, 2),
    )  # fmt: skip
    close = CLOSE if dtype == jnp.float32 else {"rtol": 3e-2, "atol": 3e-2}
    wide = functools.partial(np.asarray, dtype=np.float32)
    np.testing.assert_allclose(wide(out), wide(expected), **close)
    np.testing.assert_allclose(lse, expected_lse, **close)

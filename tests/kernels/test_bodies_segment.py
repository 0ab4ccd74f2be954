"""The Pallas bodies of packed attention and its gradient, interpreted, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrag.models.segments import example_ids, lay_out
from pallas_kernels import Rows, segment_attention
from pallas_kernels.packed_tiles import Residuals
from pallas_kernels.triton.segment import SegmentTiling, segment_kernel
from pallas_kernels.triton.segment_gradient import segment_gradient_kernel

CLOSE = {"rtol": 2e-4, "atol": 2e-5}


def rows_of(kind, length):
    """Two rows."""
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
    return Rows(jnp.asarray(positions), jnp.asarray(segments), examples)


def heads(rng, length, n, k, h, dtype=jnp.float32):
    return [jnp.asarray(rng.normal(size=(2, length, m, h)), dtype) for m in (n, k, k)]


@pytest.mark.parametrize(
    ("kind", "window", "n", "k", "prefix_visible"),
    [
        ("rows", None, 4, 2, False),
        ("examples", None, 3, 1, True),
        ("rows", 7, 2, 2, True),
        pytest.param("rows", None, 4, 2, True, marks=pytest.mark.slow),
        pytest.param("examples", None, 3, 1, False, marks=pytest.mark.slow),
        pytest.param("examples", 7, 4, 2, False, marks=pytest.mark.slow),
    ],
)
def test_equals_the_reference(rng, kind, window, n, k, prefix_visible):
    length = 83
    rows, qkv = rows_of(kind, length), heads(rng, length, n, k, 10)
    op = functools.partial(
        segment_attention, scale=0.3, prefix_visible=prefix_visible, window=window
    )
    expected, expected_lse = jax.jit(op)(*qkv, rows)
    out, lse = jax.jit(functools.partial(op, impl="pallas_interpret"))(*qkv, rows)
    np.testing.assert_allclose(out, expected, **CLOSE)
    np.testing.assert_allclose(lse, expected_lse, **CLOSE)
    blind = np.isneginf(np.asarray(lse))
    assert blind.any() and (np.asarray(out)[blind] == 0).all()


def gradient(op, qkv, rows):
    """Of a scalar that reads out and lse; rows that see nothing do not count."""

    def scalar(q, k, v):
        out, lse = op(q, k, v, rows)
        weight = jnp.arange(out.size).reshape(out.shape) % 7 - 3.0
        seen = jnp.where(jnp.isfinite(lse), lse, 0.0)
        return (out.astype(jnp.float32) * weight).sum() + (seen**2).sum()

    return jax.jit(jax.grad(scalar, (0, 1, 2)))(*qkv)


@pytest.mark.parametrize(
    ("kind", "window", "n", "k"), [("rows", None, 4, 2), ("examples", 9, 3, 1)]
)
def test_gradient_equals_that_of_the_reference(rng, kind, window, n, k):
    rows, qkv = rows_of(kind, 70), heads(rng, 70, n, k, 8)
    found = [
        gradient(
            functools.partial(
                segment_attention, scale=0.3, prefix_visible=True, window=window, impl=impl
            ),
            qkv,
            rows,
        )
        for impl in ("pallas_interpret", "xla")
    ]
    for got, expected in zip(*found, strict=True):
        assert float(jnp.abs(expected).max()) > 0.1
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("tile", [16, 64])
@pytest.mark.parametrize("pack", [1, 2, 4])
@pytest.mark.parametrize("kind", ["rows", "examples"])
def test_gradient_product_of_tilings(rng, kind, pack, tile, dtype):
    length = 150
    rows, qkv = rows_of(kind, length), heads(rng, length, 8, 2, 16, dtype)
    op = functools.partial(segment_attention, scale=0.3, prefix_visible=False)
    (out, lse), pull = jax.vjp(lambda *x: op(*x, rows), *qkv)
    d_out = jnp.asarray(rng.normal(size=out.shape), dtype)
    d_lse = jnp.asarray(rng.normal(size=lse.shape), jnp.float32)
    expected = pull((d_out, d_lse))
    found = segment_gradient_kernel(
        Residuals(*qkv, out, lse, (rows, None)), (d_out, d_lse), scale=0.3, prefix_visible=False,
        interpret=True, tiling=SegmentTiling(tile, pack, 4, 2),
    )  # fmt: skip
    close = {"rtol": 1e-3, "atol": 1e-4} if dtype == jnp.float32 else {"rtol": 5e-2, "atol": 5e-2}
    for got, other in zip(found, expected, strict=True):
        assert got.dtype == dtype
        wide = functools.partial(np.asarray, dtype=np.float32)
        np.testing.assert_allclose(wide(got), wide(other), **close)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("tile", [16, 32, 64])
@pytest.mark.parametrize("pack", [1, 2, 4])
@pytest.mark.parametrize("kind", ["rows", "examples"])
def test_product_of_tilings(rng, kind, pack, tile, dtype):
    length = 150
    rows, qkv = rows_of(kind, length), heads(rng, length, 8, 2, 16, dtype)
    expected, expected_lse = segment_attention(*qkv, rows, scale=0.3, prefix_visible=True)
    out, lse = segment_kernel(
        *qkv, (rows, None), scale=0.3, prefix_visible=True, interpret=True,
        tiling=SegmentTiling(tile, pack, 4, 2),
    )  # fmt: skip
    close = CLOSE if dtype == jnp.float32 else {"rtol": 3e-2, "atol": 3e-2}
    wide = functools.partial(np.asarray, dtype=np.float32)
    np.testing.assert_allclose(wide(out), wide(expected), **close)
    np.testing.assert_allclose(lse, expected_lse, **close)

"""Products of activations and weights: their gradients, what these keep, and how they compile."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrag.models import linear as linear_of
from jaxrag.models.linear import linear, over_rows, product

SHAPES = [((12,), (5,)), ((5,), (12,)), ((6,), (2, 3)), ((2, 3), (4,))]  # of I and O


def operands(rng, inner, outer, dtype=jnp.float32):
    x = jnp.asarray(rng.normal(size=(3, 7, *inner)), dtype)
    weight = jnp.asarray(rng.normal(size=(*inner, *outer)), dtype)
    return x, weight, jnp.asarray(rng.normal(size=(3, 7, *outer)), dtype)


@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_value_and_gradients_are_those_of_the_plain_product(rng, inner, outer):
    x, weight, d_out = operands(rng, inner, outer)

    def plain(x, weight):
        return jnp.tensordot(x, weight, len(inner))

    out, gradients = jax.vjp(linear, x, weight)
    expected, expected_gradients = jax.vjp(plain, x, weight)
    np.testing.assert_array_equal(out, expected)
    for found, right in zip(gradients(d_out), expected_gradients(d_out), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)


def test_no_rows(rng):
    for inner, outer in SHAPES:
        x, weight, _ = operands(rng, inner, outer)
        assert linear(x[:, :0], weight).shape == (3, 0, *outer)


def test_one_row_of_bfloat16_is_that_row_of_two(rng):
    x, weight, _ = operands(rng, (12,), (5,), jnp.bfloat16)
    one, two = linear(x[:1, :1], weight), linear(x[:2, :1], weight)[:1]
    np.testing.assert_array_equal(one.astype(jnp.float32), two.astype(jnp.float32))


@pytest.mark.parametrize("cores", [1, 2, 3, 48])
def test_one_row_is_shared_by_the_cores(rng, monkeypatch, cores):
    monkeypatch.setattr(linear_of, "processors", lambda: cores)
    row, weight = rng.normal(size=(1, 96)), rng.normal(size=(96, 768))
    x, w = (jnp.array(it, jnp.float32) for it in (row, weight))
    assert w.nbytes >= linear_of._SHARED
    for out in (linear(x[None], w.reshape(96, 3, 256)).reshape(1, -1), product(x, w.T, 1)):
        np.testing.assert_allclose(out, row @ weight, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("inner", "outer"), [((8,), (4,)), ((4,), (8,))])
def test_bfloat16_gradients_are_bfloat16(rng, inner, outer):
    x, weight, d_out = operands(rng, inner, outer, jnp.bfloat16)
    for found, operand in zip(jax.vjp(linear, x, weight)[1](d_out), (x, weight), strict=True):
        assert (found.dtype, found.shape) == (operand.dtype, operand.shape)


def test_only_what_a_gradient_needs_is_kept(rng):
    x, weight, _ = operands(rng, (12,), (5,))

    def kept(function, at):
        return {leaf.shape for leaf in jax.tree.leaves(jax.vjp(function, at)[1])}

    assert x.shape not in kept(lambda x: linear(x, weight), x)
    assert weight.shape not in kept(lambda weight: linear(x, weight), weight)


def test_a_result_that_nobody_uses_has_no_gradient(rng):
    x, weight, _ = operands(rng, (12,), (5,))
    gradients = jax.grad(lambda x, weight: (linear(x, weight), x.sum())[1], (0, 1))(x, weight)
    np.testing.assert_array_equal(gradients[0], np.ones(x.shape))
    np.testing.assert_array_equal(gradients[1], np.zeros(weight.shape))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="is about the CPU")
@pytest.mark.parametrize(("inner", "outer"), [(48, 16), (16, 48)])
def test_the_cpu_transposes_the_narrower_operand_and_copies_none(inner, outer):
    rows = 640
    a, b = (jax.ShapeDtypeStruct((rows, size), jnp.float32) for size in (inner, outer))
    text = jax.jit(over_rows).lower(a, b).compile().as_text()
    (product,) = re.findall(r"f32\[(\d+,\d+)\]\S* dot\(", text)
    assert product == "16,48"
    assert not re.search(rf"f32\[\d*,?{rows}[^=]* (copy|transpose)\(", text)

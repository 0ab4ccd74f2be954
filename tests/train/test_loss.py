"""Sliced cross-entropy against the plain one, value and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrag.train.loss import token_loss, weighted_loss


def plain(hidden, head, targets, weights, wanted, tied, cap=None):
    def within(logits):
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    rows = head.T if tied else head
    logits = within(hidden @ rows)
    logp = jax.nn.log_softmax(logits.astype(jnp.float32))
    loss = -jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]
    if wanted is not None:
        wanted = within(wanted @ jax.lax.stop_gradient(rows))
        aim = jax.nn.log_softmax(wanted.astype(jnp.float32))
        loss = (jnp.exp(aim) * (aim - logp)).sum(-1)
    return (loss * weights).sum(), (loss, logits.argmax(-1) == targets)


def inputs(rng, tied, dtype=jnp.float32):
    hidden = jnp.asarray(rng.normal(size=(3, 10, 6)), dtype)
    head = jnp.asarray(rng.normal(size=(17, 6) if tied else (6, 17)), dtype)
    targets = jnp.asarray(rng.integers(0, 17, (3, 10)), jnp.int32)
    weights = jnp.asarray(rng.random((3, 10)) * (rng.random((3, 10)) > 0.4), jnp.float32)
    return hidden, head, targets, weights


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 12, 1000])
@pytest.mark.parametrize("objective", ["labels", "distill"])
@pytest.mark.parametrize("cap", [None, 1.3])
def test_equals_the_plain_loss(rng, objective, tied, tokens, cap):
    hidden, head, targets, weights = inputs(rng, tied)
    wanted = None
    if objective == "distill":
        wanted = jnp.asarray(rng.normal(size=hidden.shape), jnp.float32)
    (value, found), gradients = jax.value_and_grad(weighted_loss, (0, 1), has_aux=True)(
        hidden, head, targets, weights, wanted, tied, tokens, cap
    )
    (expected, parts), expected_gradients = jax.value_and_grad(plain, (0, 1), has_aux=True)(
        hidden, head, targets, weights, wanted, tied, cap
    )
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(found.loss, parts[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found.correct, parts[1])
    for a, b in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_without_a_gradient_it_is_the_same(rng):
    hidden, head, targets, weights = inputs(rng, tied=True)
    value, found = weighted_loss(hidden, head, targets, weights, None, True, 8)
    alone = token_loss(hidden, head, targets, True, 1000)
    np.testing.assert_allclose(found.loss, alone.loss, rtol=1e-6)
    np.testing.assert_allclose(value, (alone.loss * weights).sum(), rtol=1e-6)


def test_bfloat16_losses_are_float32(rng):
    hidden, head, targets, weights = inputs(rng, tied=False, dtype=jnp.bfloat16)
    value, found = weighted_loss(hidden, head, targets, weights, None, False, 8)
    assert value.dtype == found.loss.dtype == jnp.float32
    wide = plain(
        hidden.astype(jnp.float32), head.astype(jnp.float32), targets, weights, None, False
    )[0]  # fmt: skip
    np.testing.assert_allclose(value, wide, rtol=1e-2)


def test_logits_of_the_batch_never_exist(rng):
    vocabulary, length = 20_000, 512
    shapes = [
        jax.ShapeDtypeStruct((2, length, 8), jnp.float32),
        jax.ShapeDtypeStruct((vocabulary, 8), jnp.float32),
        jax.ShapeDtypeStruct((2, length), jnp.int32),
        jax.ShapeDtypeStruct((2, length), jnp.float32),
    ]
    gradient = jax.grad(lambda *x: weighted_loss(*x, None, True, 64)[0], (0, 1))
    memory = jax.jit(gradient).lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * 2 * length * vocabulary / 3

"""Scores within a cap: in every op's `xla` body, with gradient; other bodies refuse them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrag.base.errors import ConfigError
from pallas_kernels import (
    Capped,
    KernelError,
    Rows,
    key_mass,
    paged_attention,
    paged_decode_attention,
    paged_scores,
    segment_attention,
    slot_scores,
    sparse_attention,
    topn_attention,
)

CAP = Capped(scale=0.7, cap=0.9)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def within(products):
    return 0.9 * jnp.tanh(products * 0.7 / 0.9)


def test_packed_rows_and_their_gradient(rng):
    q, k, v = (jnp.asarray(rng.normal(size=(1, 140, n, 4)), jnp.float32) for n in (4, 2, 2))
    at = jnp.arange(140, dtype=jnp.int32)[None]
    segments = jnp.where(at < 135, 2, 0)  # five are empty

    def op(q, k, v):
        rows = Rows(at, segments)
        return segment_attention(q, k, v, rows, scale=CAP, prefix_visible=True, window=90)

    def dense(q, k, v):
        k, v = (jnp.repeat(x, 2, 2) for x in (k, v))
        gap = at[0][:, None] - at[0]
        see = (gap >= 0) & (gap < 90) & (segments[0] != 0)
        scores = jnp.where(see, within(jnp.einsum("btnh,bsnh->bnts", q, k)), -1e30)
        out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, -1), v)
        return out, jax.nn.logsumexp(scores, -1).swapaxes(1, 2)

    def both(attend, *heads):
        def loss(*heads):
            out, lse = (x[:, :135] for x in attend(*heads))
            return (out**3).sum() + (lse**2).sum(), (out, lse)

        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*heads)

    found, expected = both(op, q, k, v), both(dense, q, k, v)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)


def test_every_op_over_the_pool(paged_scene):
    """Of one query behind all keys: what one op says of them, the others do."""
    scene = paged_scene(chunks=(20, 16, 5), queries=4)
    q, pool, table, at, rotary = scene.arguments
    last = jnp.full_like(at[:, :1], 1000)
    whole = (q[:, :1], pool, table, last, rotary)
    one = (q[:, 0], pool, table, last[:, 0], rotary)
    scored = (q[:, 0], pool.k, table, last[:, 0], rotary)
    free, scores = (np.asarray(paged_scores(*scored, scale=it)) for it in (1.0, CAP))
    seen = np.isfinite(free)
    np.testing.assert_allclose(scores[seen], within(free[seen]), **CLOSE)
    assert np.abs(free[seen]).max() > 3
    weights = np.where(seen, np.exp(np.where(seen, scores, 0)), 0)
    lse = np.log(weights.sum(-1)).reshape(len(q), -1)
    page = pool.k.shape[1]
    values = np.where(
        seen.any((1, 2))[..., None, None], np.asarray(pool.v)[table.pages].reshape(
            len(q), -1, *pool.v.shape[2:]
        ), 0
    )  # fmt: skip
    out = np.einsum("bkgs,bskh->bkgh", weights / weights.sum(-1, keepdims=True), values)
    out = out.reshape(len(q), -1, q.shape[-1])
    for found in (
        tuple(x[:, 0] for x in paged_attention(*whole, scale=CAP)),
        paged_decode_attention(*one, scale=CAP),
        topn_attention(*one, n=1000, renormalise=False, scale=CAP),
    ):
        np.testing.assert_allclose(found[0], out, **CLOSE)
        np.testing.assert_allclose(found[1], lse, **CLOSE)
    slots = jnp.arange(seen.shape[-1], dtype=jnp.int32)[None, None, None]
    slots = jnp.broadcast_to(slots, (len(q), *slots.shape[1:]))
    turn = jnp.repeat(table.offsets, page, 1)[:, None, None]
    by_slot = slot_scores(
        q[:, 0], pool.k, table.pages, slots, seen[:, :1, :1], last[:, 0], turn, rotary, scale=CAP
    )
    np.testing.assert_allclose(by_slot, scores, **CLOSE)
    mass = key_mass(
        q[:, :1], pool.k, table, last, jnp.zeros_like(table.pages), rotary, scale=CAP, causal=True
    )
    expected = (weights / weights.sum(-1, keepdims=True)).sum((1, 2))
    np.testing.assert_allclose(mass, expected, **CLOSE)


def test_a_temperature_divides_what_was_capped():
    np.testing.assert_allclose(within(2.0) / 3, (CAP / 3).cap * np.tanh(2.0 * 0.7 / 0.9))
    assert (CAP / 3).scale / (CAP / 3).cap == pytest.approx(0.7 / 0.9)


def test_no_other_body_takes_a_cap(paged_scene):
    q, pool, table, at, rotary = paged_scene(chunks=(20, 16, 5), queries=4).arguments
    one, settings = (q[:, 0], pool, table, at[:, 0], rotary), {"scale": CAP}
    settings["impl"] = "pallas_interpret"
    rows, k = Rows(at, jnp.full_like(at, 2)), q[:, :, :2]
    for call in (
        lambda: paged_decode_attention(*one, **settings),
        lambda: topn_attention(*one, n=3, renormalise=True, **settings),
        lambda: sparse_attention(q, pool, table, at, rotary, **settings),
        lambda: segment_attention(q, k, k, rows, prefix_visible=True, **settings),
    ):
        with pytest.raises(KernelError, match="'pallas_interpret' does not cap scores"):
            call()


def test_a_model_with_a_cap_takes_no_kernels(tiny_config):
    assert tiny_config("gemma2", kernels="measured").kernels == "measured"
    with pytest.raises(ConfigError, match="pallas_triton.*score_cap=1.3; leave kernels at"):
        tiny_config("gemma2", kernels="pallas_triton")

"""Top-N attention: its bodies against a dense oracle, the selection against a sort."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import topn_attention
from pallas_kernels.triton.topn import TopnTiling, score_kernel, select_kernel, topn_kernel

CLOSE = {"rtol": 2e-4, "atol": 2e-5}


def decoding(scene, which=1):
    """The scene's arguments for one query a row."""
    q, *pages, at, rotary = scene.arguments
    return (q[:, which], *pages, at[:, which], rotary)


def oracle(scene, n, renormalise, which=1):
    """out [B, N, H] and lse [B, N] from KCache section 3.1, in float64."""
    batch, _, heads, dim = scene.queries.shape
    group = heads // scene.keys.shape[2]
    out, lse = np.zeros((batch, heads, dim)), np.full((batch, heads), -np.inf)
    for b, h in np.ndindex(batch, heads):
        see = np.flatnonzero(scene.slots[b].astype(np.int64) <= scene.at[b, which])
        if not see.size:
            continue
        scores = scene.keys[b, see, h // group] @ scene.queries[b, which, h]
        scores = scores * scene.options["scale"]
        best = np.argsort(-scores, kind="stable")[:n]
        over = scores[best] if renormalise else scores
        lse[b, h] = over.max() + np.log(np.exp(over - over.max()).sum())
        out[b, h] = np.exp(scores[best] - lse[b, h]) @ scene.values[see[best], h // group]
    return out, lse


@pytest.mark.parametrize("impl", ["xla", "pallas_interpret"])
@pytest.mark.parametrize(
    ("rope", "n", "renormalise"), [("half", 7, False), ("interleaved", 20, True)]
)
def test_equals_the_oracle_with_poisoned_slots(paged_scene, impl, rope, n, renormalise):
    scene = paged_scene(rope, queries=2, chunks=(37, 16, 5))
    scale = scene.options["scale"]
    op = functools.partial(topn_attention, n=n, renormalise=renormalise, impl=impl, scale=scale)
    out, lse = jax.jit(op)(*decoding(scene))
    assert (out.dtype, lse.dtype) == (jnp.float32, jnp.float32)
    expected, expected_lse = oracle(scene, n, renormalise)
    np.testing.assert_allclose(out, expected, **CLOSE)
    np.testing.assert_allclose(lse, expected_lse, **CLOSE)
    assert np.isneginf(expected_lse[0]).all()  # a row of padding
    assert (np.asarray(out)[0] == 0).all()


@pytest.mark.parametrize("impl", ["xla", "pallas_interpret"])
def test_all_keys_is_dense_attention(paged_scene, impl):
    scene = paged_scene("partial", queries=2, chunks=(20, 5))
    slots = scene.slots.shape[1]
    scale = scene.options["scale"]
    op = functools.partial(topn_attention, renormalise=False, impl=impl, scale=scale)
    expected, expected_lse = (x[:, 1] for x in scene.dense())
    for n in (slots, slots + 100):
        out, lse = jax.jit(functools.partial(op, n=n))(*decoding(scene))
        np.testing.assert_allclose(out, expected, **CLOSE)
        np.testing.assert_allclose(lse, expected_lse, **CLOSE)


@pytest.mark.parametrize(
    ("length", "n", "block"),
    [(100, 7, 128), (100, 100, 16), (300, 5, 16), (300, 29, 16), (1000, 3, 64), (64, 63, 8)],
)
def test_selection_is_that_of_a_sort(rng, length, n, block):
    scores = np.round(rng.normal(size=(2, 3, length)), 1).astype(np.float32)  # many are equal
    scores[0, 0, n // 2 :] = -np.inf  # fewer count than are asked for
    scores[1, 2] = 0.5
    select = functools.partial(select_kernel, n=n, block=block, interpret=True)
    best, at = map(np.asarray, jax.jit(select)(jnp.asarray(scores)))
    for b, h in np.ndindex(2, 3):
        expected = np.argsort(-scores[b, h], kind="stable")[:n]
        assert sorted(at[b, h]) == sorted(expected), (b, h)
        np.testing.assert_array_equal(best[b, h], scores[b, h, at[b, h]])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize("keys", [16, 64])
@pytest.mark.parametrize("page", [16, 32])
def test_product_of_shapes(paged_scene, page, keys, group, dtype):
    scene = paged_scene("half16", dim=40, group=group, queries=2, page=page, dtype=dtype)
    close = CLOSE if dtype == jnp.float32 else {"rtol": 3e-2, "atol": 3e-2}
    q, pool, *tables = decoding(scene)
    options = {"scale": scene.options["scale"], "interpret": True}
    scores, lse = score_kernel(q, pool.k, *tables, keys=keys, **options)
    heads, slots = q.shape[1], scene.slots.shape[1]
    expected = np.einsum("bsnh,bnh->bns", np.repeat(scene.keys, group, 2), scene.queries[:, 1])
    see = scene.slots.astype(np.int64) <= scene.at[:, 1:2]
    expected = np.where(see[:, None], expected * scene.options["scale"], -np.inf)
    assert scores.shape[:2] == (2, heads)
    np.testing.assert_allclose(scores[..., :slots], expected, **close)
    assert np.isneginf(scores[..., slots:]).all()
    np.testing.assert_allclose(lse, scene.dense()[1][:, 1], **close)
    tiling = TopnTiling(keys=keys, block=32, values=8)
    out, _, _ = topn_kernel(*decoding(scene), n=slots, tiling=tiling, **options)
    np.testing.assert_allclose(out, scene.dense()[0][:, 1], **close)

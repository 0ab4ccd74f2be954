"""The Pallas body of the paged ops, interpreted: against a dense oracle, with poisoned slots."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention, paged_decode_attention, sparse_attention
from pallas_kernels.triton.paged import PagedTiling, merge_splits, paged_kernel
from pallas_kernels.triton.work import live_pages, segments_of, tiles_of

CLOSE = {"rtol": 2e-4, "atol": 2e-5}


def run(op, scene, **options):
    return jax.jit(functools.partial(op, **scene.options, **options))(*scene.arguments)


def check(scene, out, lse, **close):
    expected, expected_lse = scene.dense()
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, **(close or CLOSE))
    np.testing.assert_allclose(np.asarray(lse, np.float64), expected_lse, **(close or CLOSE))
    blind = np.isneginf(expected_lse)
    assert blind.any()
    assert (np.asarray(out, np.float64)[blind] == 0).all()


@pytest.mark.parametrize(
    "rope", ["half", "interleaved", pytest.param("partial", marks=pytest.mark.slow)]
)
def test_sparse_attention_equals_dense_with_poisoned_slots(paged_scene, rope):
    scene = paged_scene(rope)
    check(scene, *run(sparse_attention, scene, impl="pallas_interpret"))


def test_window(paged_scene):
    scene = paged_scene(window=40)
    check(scene, *run(sparse_attention, scene, impl="pallas_interpret"))


def test_half_precision_returns_its_dtype(paged_scene):
    scene = paged_scene("half16", dim=16, group=2, dtype=jnp.bfloat16)
    out, lse = run(sparse_attention, scene, impl="pallas_interpret")
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    check(scene, out, lse, rtol=3e-2, atol=3e-2)


def test_decode_equals_dense(paged_scene):
    scene = paged_scene(queries=2)
    q, *pages, at, rotary = scene.arguments
    arguments = (q[:, 1], *pages, at[:, 1], rotary)
    expected, expected_lse = (x[:, 1] for x in scene.dense())
    for impl in ("xla", "pallas_interpret"):
        op = functools.partial(paged_decode_attention, **scene.options, impl=impl)
        out, lse = jax.jit(op)(*arguments)
        assert (out.dtype, lse.dtype) == (jnp.float32, jnp.float32)
        np.testing.assert_allclose(out, expected, **CLOSE)
        np.testing.assert_allclose(lse, expected_lse, **CLOSE)


def test_splits_are_merged(paged_scene):
    scene = paged_scene(queries=5)
    tiling = PagedTiling(rows=16, keys=32, warps=4, stages=2, splits=3)
    check(scene, *run(paged_kernel, scene, interpret=True, tiling=tiling))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("keys", [16, 64])
@pytest.mark.parametrize("group", [1, 4, 5])
@pytest.mark.parametrize("rope", ["half", "partial", "interleaved"])
@pytest.mark.parametrize("splits", [1, 2, 7])
def test_product_of_tilings(paged_scene, rope, group, keys, rows, splits):
    scene = paged_scene(rope, group=group, queries=23)
    tiling = PagedTiling(rows=rows, keys=keys, warps=4, stages=2, splits=splits)
    check(scene, *run(paged_kernel, scene, interpret=True, tiling=tiling))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("dim", [16, 24, 40])
@pytest.mark.parametrize("window", [None, 1, 100])
def test_product_of_shapes(paged_scene, dtype, dim, window):
    scene = paged_scene("half16", dim=dim, group=2, queries=30, dtype=dtype, window=window)
    close = CLOSE if dtype == jnp.float32 else {"rtol": 3e-2, "atol": 3e-2}
    check(scene, *run(sparse_attention, scene, impl="pallas_interpret"), **close)


def test_reference_agrees_with_the_same_oracle(paged_scene):
    scene = paged_scene("interleaved")
    check(scene, *run(paged_attention, scene))


def slow_segments(live, offsets, splits, pages_per_tile):
    """Page by page: [(start, stop)] of every split."""
    pages = np.flatnonzero(live)
    share = max(1, -(-len(pages) // (splits * pages_per_tile)) * pages_per_tile)
    found = [[] for _ in range(splits)]
    for rank, m in enumerate(pages):
        here = found[rank // share]
        if here and here[-1][1] == m and offsets[m] == offsets[m - 1]:
            here[-1][1] = m + 1
        else:
            here.append([m, m + 1])
    return found


def test_segments_are_ranges_of_live_pages_with_one_offset(rng):
    for trial in range(30):
        pages, splits, per_tile = 23, int(rng.integers(1, 5)), int(rng.integers(1, 5))
        live = rng.random((2, 3, pages)) < rng.choice([0.1, 0.6, 1.0])
        offsets = np.sort(rng.integers(0, 4, (2, pages)), axis=1).astype(np.int32)
        got = segments_of(jnp.asarray(live), jnp.asarray(offsets), splits, per_tile)
        for b, i in np.ndindex(2, 3):
            expected = slow_segments(live[b, i], offsets[b], splits, per_tile)
            first = np.asarray(got.first[b, i])
            for split in range(splits):
                here = slice(first[split], first[split + 1])
                ranges = np.stack((got.start[b, i, here], got.stop[b, i, here]), -1).tolist()
                assert ranges == expected[split], (trial, split)


def slow_tiles(live, offsets, pages_per_tile):
    """Page by page: [start, stop] of every tile."""
    found = []
    for m in np.flatnonzero(live):
        last = found[-1] if found else None
        grows = last is not None and last[1] == m and offsets[m] == offsets[m - 1]
        if grows and last[1] - last[0] < pages_per_tile:
            last[1] = m + 1
        else:
            found.append([m, m + 1])
    return found


def test_tiles_are_short_ranges_of_live_pages_with_one_offset(rng):
    for trial in range(30):
        pages, splits, per_tile = 23, int(rng.integers(1, 5)), int(rng.integers(1, 5))
        live = rng.random((2, 3, pages)) < rng.choice([0.1, 0.6, 1.0])
        offsets = np.sort(rng.integers(0, 4, (2, pages)), axis=1).astype(np.int32)
        got = tiles_of(jnp.asarray(live), jnp.asarray(offsets), splits, per_tile)
        for b, i in np.ndindex(2, 3):
            expected = slow_tiles(live[b, i], offsets[b], per_tile)
            first = np.asarray(got.first[b, i])
            assert (first[0], first[-1]) == (0, len(expected))
            sizes = np.diff(first)
            assert sizes.min() >= 0 and sizes.max() - sizes.min() <= 1
            ranges = np.stack((got.start[b, i], got.stop[b, i]), -1)[: len(expected)].tolist()
            assert ranges == expected, trial


def test_pages_that_nobody_can_see_are_left_out():
    hidden = np.iinfo(np.int32).max
    slots = np.array([[0, 1, hidden, hidden, 4, 5, hidden, 7, 90, 91]], np.int32)
    low, high = np.array([[3, 6, 91, 0]]), np.array([[4, 8, 91, -1]])

    def live(window):
        found = live_pages(
            jnp.asarray(slots), 2, *(jnp.asarray(x, jnp.int32) for x in (low, high)), window
        )
        return np.asarray(found)[0].astype(int).tolist()

    assert live(None) == [[1, 0, 1, 0, 0], [1, 0, 1, 1, 0], [1, 0, 1, 1, 1], [0, 0, 0, 0, 0]]
    assert live(3) == [[1, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]


def test_merge_of_splits_ignores_what_saw_nothing(rng):
    out = jnp.asarray(rng.normal(size=(1, 3, 2, 4)), jnp.float32)
    lse = jnp.asarray([[[0.5, -jnp.inf], [-jnp.inf, -jnp.inf], [1.5, -jnp.inf]]], jnp.float32)
    out = jnp.where(jnp.isfinite(lse)[..., None], out, 0.0)
    merged, total = merge_splits(out, lse)
    weights = np.exp([0.5, 1.5]) / np.exp([0.5, 1.5]).sum()
    np.testing.assert_allclose(
        merged[0, 0], weights[0] * out[0, 0, 0] + weights[1] * out[0, 2, 0], rtol=1e-6
    )
    np.testing.assert_allclose(total[0, 0], np.log(np.exp(0.5) + np.exp(1.5)), rtol=1e-6)
    assert np.isneginf(total[0, 1])
    assert (merged[0, 1] == 0).all()

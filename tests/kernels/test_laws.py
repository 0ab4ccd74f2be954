"""Laws 4 to 7 of the attention core through the interpreted kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrag.base.types import HIDDEN, Partial
from jaxrag.models.attention import merge
from pallas_kernels import (
    Pages,
    Pool,
    paged_decode_attention,
    sparse_attention,
    topn_attention,
)

CLOSE = {"rtol": 2e-4, "atol": 2e-5}
SETTINGS = {"scale": 0.3, "impl": "pallas_interpret"}

# Compiled once for all tests: the scenes below have equal shapes.
sparse = jax.jit(functools.partial(sparse_attention, **SETTINGS))
decode = jax.jit(functools.partial(paged_decode_attention, **SETTINGS))
top = jax.jit(functools.partial(topn_attention, n=1000, renormalise=False, **SETTINGS))


@pytest.fixture
def scene(paged_scene):
    return paged_scene(chunks=(20, 16, 5), queries=4)


def newest(arguments):
    """One query a row that stands behind every key."""
    q, *rest, at, rotary = arguments
    return (q[:, 2], *rest, jnp.full_like(at[:, 2], 1000), rotary)


def test_law_4_a_token_never_sees_a_later_one(scene, rng):
    q, pool, table, at, rotary = scene.arguments
    q, table = q[1:], Pages(*(x[1:] for x in table))
    middle = int(np.median(scene.slots[1][scene.slots[1] != HIDDEN]))
    at = jnp.asarray([[middle - 9, middle, middle + 1, 1000]], jnp.int32)
    later = (scene.slots[1] > middle) & (scene.slots[1] != HIDDEN)
    assert later.any()
    page = pool.k.shape[1]
    rows = np.asarray(table.pages[0])[np.flatnonzero(later) // page], np.flatnonzero(later) % page

    def changed(x):
        return x.at[rows].set(rng.normal(size=(later.sum(), *x.shape[2:])))

    outs = []
    for some in (pool, Pool(*map(changed, pool))):
        out, _ = sparse(q, some, table, at, rotary)
        outs.append(np.asarray(out[0]))
    np.testing.assert_array_equal(outs[0][:2], outs[1][:2])
    assert np.abs(outs[0][3] - outs[1][3]).max() > 1e-2


def test_law_5_one_copy_serves_two_places(scene):
    """Both rows show the same pages elsewhere; each gets what a copy of its own gives."""
    q, pool, table, *rest = scene.arguments
    assert (table.pages[0] == table.pages[1]).all()
    assert (table.offsets[0] != table.offsets[1]).any()
    shared, shared_lse = sparse(*scene.arguments)
    own = np.asarray(table.pages).copy()
    used = own[0, : pool.k.shape[0] // 2]
    free = np.setdiff1d(np.arange(pool.k.shape[0]), used)
    copies = Pool(*(x.at[free].set(x[used]) for x in pool))
    own[1, : len(used)] = free
    out, lse = sparse(q, copies, table._replace(pages=jnp.asarray(own)), *rest)
    np.testing.assert_allclose(out, shared, **CLOSE)
    np.testing.assert_allclose(lse, shared_lse, **CLOSE)


def test_law_6_turning_the_query_is_turning_the_keys(scene):
    q, pool, table, at, rotary = scene.arguments
    expected = sparse(*scene.arguments)
    for row in range(2):
        turn = jnp.zeros(pool.k.shape[0], jnp.int32).at[table.pages[row]].set(table.offsets[row])
        moved = pool._replace(k=rotary.rotate_by(pool.k, turn))
        still = table._replace(offsets=jnp.zeros_like(table.offsets))
        out, lse = sparse(q, moved, still, at, rotary)
        np.testing.assert_allclose(out[row], expected[0][row], **CLOSE)
        np.testing.assert_allclose(lse[row], expected[1][row], **CLOSE)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_law_7_parts_over_disjoint_keys_merge(scene, cut):
    """The keys fall into two parts anywhere, also inside a page."""
    q, pool, table, *rest = scene.arguments
    whole = decode(*newest(scene.arguments))
    slots = table.slot_position
    first = np.arange(slots.shape[1]) < cut * pool.k.shape[1] - 5
    parts = []
    for kept in (first, ~first):
        shown = table._replace(slot_position=jnp.where(kept, slots, HIDDEN))
        parts.append(Partial(*decode(*newest((q, pool, shown, *rest)))))
    assert all(np.isfinite(part.lse).all() for part in parts)
    joined = merge(parts)
    np.testing.assert_allclose(joined.out, whole[0], **CLOSE)
    np.testing.assert_allclose(joined.lse, whole[1], **CLOSE)


def test_law_8_top_n_of_all_keys_is_dense(scene):
    arguments = newest(scene.arguments)
    for got, expected in zip(top(*arguments), decode(*arguments), strict=True):
        np.testing.assert_allclose(got, expected, **CLOSE)

"""Attention received by paged keys, and shares of parts, against dense numpy.

Groups, offsets, windows, hidden slots.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrag.base.config import RopeConfig
from jaxrag.base.types import HIDDEN
from jaxrag.models.rope import place, rope_table
from pallas_kernels import Pages, Pool, Rotary, key_mass, paged_attention

PAGE, POOL, K, G, H = 16, 60, 2, 3, 10
N = K * G
ROPES = {
    "half": RopeConfig(5_000.0, 10, False, None),
    "interleaved": RopeConfig(5_000.0, 6, True, None),
}


def rotated(x, turn, rope):
    """x [..., H] turned by the angles of ``turn`` [...], negative ones too, in float64."""
    dim = rope.rotary_dim
    angle = np.asarray(turn)[..., None] * rope.theta ** -(np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(angle), np.sin(angle)
    first, second = (
        (slice(0, dim, 2), slice(1, dim, 2))
        if rope.interleaved
        else (slice(0, dim // 2), slice(dim // 2, dim))
    )
    out = np.array(x, np.float64)
    a, b = out[..., first].copy(), out[..., second].copy()
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize(
    ("queries", "causal", "window"),
    [(5, True, None), (5, False, None), (70, True, 40), (130, False, None)],
)
def test_mass_is_the_column_sum_of_dense_softmax(rng, rope, queries, causal, window):
    batch, pages = 2, 21
    table = rng.permutation(POOL)[: batch * pages].reshape(batch, pages)
    pool = rng.normal(size=(POOL, PAGE, K, H)).astype(np.float32)
    offsets = rng.integers(-60, 200, (batch, pages))
    groups = np.sort(rng.integers(0, pages, (batch, pages)) // 4, axis=1)
    positions = rng.integers(0, 330, (batch, pages * PAGE))
    hidden = rng.random((batch, pages * PAGE)) < 0.3
    hidden[:, 5 * PAGE : 6 * PAGE] = True
    slots = np.where(hidden, HIDDEN, positions)
    at = rng.integers(100, 400, (batch, queries))
    at[0, queries // 2 :] = -1
    q = rng.normal(size=(batch, queries, N, H)).astype(np.float32)
    poisoned = pool.copy()
    for row in range(batch):
        for slot in np.flatnonzero(hidden[row]):
            poisoned[table[row, slot // PAGE], slot % PAGE] = np.nan
    ropes = rope_table(rope, 1024)
    got = key_mass(
        jnp.asarray(q),
        jnp.asarray(poisoned),
        Pages(*(jnp.asarray(x, jnp.int32) for x in (table, offsets, slots))),
        *(jnp.asarray(x, jnp.int32) for x in (at, groups)),
        Rotary(ropes.cos, ropes.sin, rope.interleaved),
        scale=0.3,
        causal=causal,
        window=window,
    )
    assert got.shape == (batch, pages * PAGE)
    for row in range(batch):
        keys = rotated(
            pool[table[row]], np.broadcast_to(offsets[row, :, None, None], (pages, PAGE, K)), rope
        ).reshape(-1, K, H)
        label = groups[row].repeat(PAGE)
        expected = np.zeros(pages * PAGE)
        for i in np.flatnonzero(at[row] >= 0):
            turned = rotated(q[row, i], np.full(N, at[row, i]), rope)
            see = ~hidden[row]
            if causal:
                see = see & (positions[row] <= at[row, i])
                if window is not None:
                    see &= at[row, i] - positions[row] < window
            for n in range(N):
                scores = 0.3 * keys[:, n // G] @ turned[n]
                for group in np.unique(label):
                    here = see & (label == group)
                    if here.any():
                        w = np.exp(scores[here] - scores[here].max())
                        expected[here] += w / w.sum()
        np.testing.assert_allclose(got[row], expected, rtol=2e-3, atol=2e-4)


def test_a_sink_logit_takes_of_every_softmax(rng):
    """As much as a key without a slot would; and each head has its own."""
    rope, table = ROPES["half"], rope_table(ROPES["half"], 64)
    keys, asked = (rng.normal(size=it).astype(np.float32) for it in ((2, PAGE, K, H), (3, N, H)))
    at = np.array([[33, 40, 57]])

    def mass(q, pool, sinks):
        slots = jnp.arange(2 * PAGE)[None]
        pages = Pages(jnp.array([[0, 1]]), jnp.array([[0, 0]]), slots)
        given = (jnp.asarray(at[:, : q.shape[0]]), jnp.array([[0, 1]]))
        rotary = Rotary(table.cos, table.sin, rope.interleaved)
        sinks = None if sinks is None else jnp.asarray(sinks, jnp.float32)
        rows = jnp.asarray(q[None]), jnp.asarray(pool)
        return np.asarray(
            key_mass(*rows, pages, *given, rotary, scale=0.3, causal=False, sink_logits=sinks)[0]
        )

    one = asked[:1, 4:5], keys[:, :, 1:]
    turned = rotated(one[0][0], at[0, :1], rope)[0]
    scores = 0.3 * one[1][:, :, 0] @ turned
    kept = 1 / (1 + np.exp(0.7 - np.log(np.exp(scores).sum(1))))
    close = {"rtol": 2e-4, "atol": 1e-6}
    expected = mass(*one, None) * np.repeat(kept, PAGE)
    np.testing.assert_allclose(mass(*one, [0.7]), expected, **close)
    sinks = rng.normal(size=N)
    each = [
        mass(asked[:, n : n + 1], keys[:, :, n // G : n // G + 1], sinks[n : n + 1])
        for n in range(N)
    ]
    np.testing.assert_allclose(mass(asked, keys, sinks), sum(each), **close)


def test_keys_in_place_and_turned_keys_are_the_same(rng):
    """A page's offset turns its keys as if they had been placed there."""
    rope, ropes = ROPES["half"], rope_table(ROPES["half"], 1024)
    raw = jnp.asarray(rng.normal(size=(2, PAGE, K, H)), jnp.float32)
    local = jnp.arange(2 * PAGE).reshape(2, PAGE)
    q = jnp.asarray(rng.normal(size=(1, 4, N, H)), jnp.float32)

    def mass(pool, offset):
        return key_mass(
            q,
            pool,
            Pages(
                jnp.array([[0, 1]]),
                jnp.full((1, 2), offset),
                jnp.zeros((1, 2 * PAGE), jnp.int32),
            ),
            jnp.arange(200, 204)[None],
            jnp.zeros((1, 2), jnp.int32),
            Rotary(ropes.cos, ropes.sin, interleaved=False),
            scale=0.3,
            causal=False,
        )

    placed, turned = (
        mass(place(raw, local + 70, ropes, rope), 0),
        mass(place(raw, local, ropes, rope), 70),
    )
    np.testing.assert_allclose(placed, turned, rtol=1e-4)
    assert float(turned.sum()) == pytest.approx(4 * N, rel=1e-5)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize("window", [None, 40])
def test_shares_of_parts_are_sums_of_dense_softmax(rng, rope, window):
    pages, queries, count = 37, 11, 5
    table = rng.permutation(POOL)[:pages]
    pool = rng.normal(size=(POOL, PAGE, K, H)).astype(np.float32)
    offsets = rng.integers(0, 200, pages)
    positions = rng.integers(0, 330, pages * PAGE)
    hidden = rng.random(pages * PAGE) < 0.3
    hidden[16 * PAGE : 33 * PAGE] = True  # a whole tile of it
    parts = rng.integers(-1, count, pages * PAGE)
    at = rng.integers(100, 400, queries)
    at[-2:] = -1
    q = rng.normal(size=(queries, N, H)).astype(np.float32)
    poisoned = pool.copy()
    for slot in np.flatnonzero(hidden):
        poisoned[table[slot // PAGE], slot % PAGE] = np.nan
    ropes = rope_table(rope, 1024)
    slots = np.where(hidden, HIDDEN, positions)
    hot = jnp.asarray(parts[:, None] == np.arange(count), jnp.float32)
    attend = functools.partial(
        paged_attention,
        jnp.asarray(q)[None],
        Pool(jnp.asarray(poisoned), jnp.asarray(poisoned)),
        Pages(*(jnp.asarray(x, jnp.int32)[None] for x in (table, offsets, slots))),
        jnp.asarray(at, jnp.int32)[None],
        Rotary(ropes.cos, ropes.sin, rope.interleaved),
        scale=0.3,
        window=window,
    )
    got, lse = attend(beside=hot[None])
    out, got = got[..., :H], got[..., H:]
    alone, _ = attend()
    np.testing.assert_allclose(out, alone, atol=1e-6)
    assert got.shape == (1, queries, N, count) and lse.shape == (1, queries, N)
    turn = np.broadcast_to(offsets[:, None, None], (pages, PAGE, K))
    keys = rotated(pool[table], turn, rope).reshape(-1, K, H)
    for i in range(queries):
        see = ~hidden & (positions <= at[i]) & (at[i] >= 0)
        if window is not None:
            see &= at[i] - positions < window
        if not see.any():
            assert not np.any(got[0, i]) and np.isneginf(lse[0, i]).all()
            continue
        turned = rotated(q[i], np.full(N, at[i]), rope)
        for head in range(N):
            scores = np.where(see, keys[:, head // G] @ turned[head] * 0.3, -np.inf)
            weights = np.exp(scores - scores.max())
            expected = [weights[parts == part].sum() / weights.sum() for part in range(count)]
            np.testing.assert_allclose(got[0, i, head], expected, atol=2e-6)
            np.testing.assert_allclose(
                lse[0, i, head], scores.max() + np.log(weights.sum()), atol=2e-5
            )

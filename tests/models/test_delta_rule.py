"""The gated delta rule: token by token, in tiles, as maps, and in blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrag.base.types import Tokens
from jaxrag.models.delta_rule import (
    Writes,
    _inverse,
    by_paths,
    by_steps,
    by_tiles,
    chunk_map,
    compose,
    paths,
)
from jaxrag.models.segments import example_ids

B, H, K, V, TILE = 2, 3, 4, 5, 8
IN_STEPS, IN_TILES = jax.jit(by_steps), jax.jit(by_tiles, static_argnums=3)
MAP, BLOCKS = jax.jit(chunk_map, static_argnums=1), jax.jit(by_paths)
PATHS = jax.jit(paths, static_argnums=(1, 2, 3))
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


def made(length, seed=0, decays="mixed"):
    """Queries and writes; decays near 1, near 0 (their logarithm is -300), or of all sizes."""
    rng = np.random.default_rng(seed)
    shape = (B, length, H)
    sizes = {"none": [1e-7], "strong": [300.0], "mixed": [1e-6, 1e-2, 1.0, 80.0, 300.0]}[decays]
    k = rng.normal(size=(*shape, K))
    writes = Writes(
        k=k / np.linalg.norm(k, axis=-1, keepdims=True),
        v=rng.normal(size=(*shape, V)),
        decay=-rng.choice(sizes, shape) * rng.uniform(0.5, 1, shape),
        beta=rng.uniform(0, 1, shape),
    )
    q = rng.normal(size=(*shape, K))
    state = rng.normal(size=(B, H, K, V))
    return jax.tree.map(np.float32, (q, writes, state))


def recurrence(q, writes, state, used=None):
    """The definition, in float64: what each token reads, and the state behind the last."""
    state, out = np.array(state, np.float64), np.zeros((*q.shape[:-1], V))
    identity = np.eye(K)
    for row, at, head in np.ndindex(q.shape[:3]):
        if used is not None and not used[row, at]:
            continue
        k, v, decay, beta = (
            np.float64(x[row, at, head]) for x in (writes.k, writes.v, writes.decay, writes.beta)
        )
        its = np.exp(decay) * (identity - beta * np.outer(k, k)) @ state[row, head]
        state[row, head] = its + beta * np.outer(k, v)
        out[row, at, head] = q[row, at, head] @ state[row, head]
    return out, state


@pytest.mark.parametrize("decays", ["none", "strong", "mixed"])
@pytest.mark.parametrize("length", [1, 5, 8, 21])
def test_steps_and_tiles_are_the_recurrence(length, decays):
    given = made(length, length, decays)
    wanted = recurrence(*given)
    for found in (IN_STEPS(*given), IN_TILES(*given, TILE)):
        for got, want in zip(found, wanted, strict=True):
            np.testing.assert_allclose(got, want, **CLOSE)


def test_a_map_is_what_the_tokens_do_and_maps_compose_in_any_grouping():
    q, writes, state = made(29)
    parts = [jax.tree.map(lambda x, s=s: x[:, s], writes) for s in
             (slice(0, 3), slice(3, 20), slice(20, 29))]  # fmt: skip
    first, second, third = (MAP(it, TILE) for it in parts)
    whole = MAP(writes, TILE)
    for found in (compose(compose(first, second), third), compose(first, compose(second, third))):
        np.testing.assert_allclose(found.a, whole.a, **CLOSE)
        np.testing.assert_allclose(found.b, whole.b, **CLOSE)
    wanted = recurrence(q, writes, state)[1]
    np.testing.assert_allclose(whole(state), wanted, **CLOSE)
    np.testing.assert_allclose(third(second(first(state))), wanted, **CLOSE)


def test_what_is_not_used_changes_nothing():
    """Padding in front, between and behind, in another number of tiles."""
    q, writes, state = made(21)
    used = np.random.default_rng(5).uniform(size=(B, 21)) < 0.6
    wanted = recurrence(q, writes, state, used)
    for found in (IN_TILES(q, writes.of(used), state, TILE), IN_STEPS(q, writes.of(used), state)):
        np.testing.assert_allclose(np.asarray(found[0])[used], wanted[0][used], **CLOSE)
        np.testing.assert_allclose(found[1], wanted[1], **CLOSE)
    nothing = MAP(writes.of(np.zeros_like(used)), TILE)
    np.testing.assert_array_equal(nothing(state), state)


def test_gradients_of_tiles_are_those_of_steps():
    given = made(13, 3)

    def loss(run, *given):
        out, state = run(*given)
        return jnp.sin(out).sum() + jnp.cos(state).sum()

    def gradient(run):
        return jax.jit(jax.grad(lambda *it: loss(run, *it), argnums=(0, 1, 2)))(*given)

    wanted, found = gradient(by_steps), gradient(lambda *it: by_tiles(*it, 4))
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.isfinite(want).all()
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


# Rows of (segment, question, tokens); an example is a list of them.
P, Q, C = 1, 2, 3
ROWS = {
    "one prompt": [[(P, 0, 3), (C, 0, 9), (C + 1, 0, 2), (Q, 0, 7)]],
    "no prefix": [[(C, 0, 3), (C + 1, 0, 12), (Q, 0, 6)]],
    "no chunk": [[(P, 0, 9), (Q, 0, 12)]],
    "full, two questions": [[(Q, 0, 9), (Q, 1, 2), (Q, 2, 6)]],
    "two examples": [[(P, 0, 2), (C, 0, 3), (C + 1, 0, 1), (Q, 1, 2), (Q, 2, 2)],
                     [(P, 0, 1), (C, 0, 3), (Q, 1, 5), (Q, 2, 2)]],
}  # fmt: skip


def laid(rows):
    segments, examples = np.zeros((B, 23), np.int32), np.zeros((B, 23), np.int32)
    for row in range(B):
        at = 0
        for number, parts in enumerate(rows[:: 1 if row else -1]):  # the other way round as well
            for segment, question, size in parts:
                segments[row, at : at + size] = segment
                examples[row, at : at + size] = example_ids(number, question)
                at += size
    return segments, examples


def block_recurrence(q, writes, segments, examples, prefix_visible):
    """Every part run alone from the state that it is to begin with; the last tokens before each."""
    out, lasts = np.zeros((*q.shape[:-1], V)), {}
    for row in range(B):
        marks = list(zip(segments[row].tolist(), examples[row].tolist(), strict=True))
        prefix, order = {}, {}
        zero, at = np.zeros((1, H, K, V)), 0
        while at < len(marks):
            segment, example = marks[at]
            end = at
            while end < len(marks) and marks[end] == marks[at]:
                end += 1
            here = jax.tree.map(
                lambda x, at=(slice(row, row + 1), slice(at, end)): x[at], (q, writes)
            )
            number = example & 0xFFFF
            state, tail = order.get(number, (zero, []))
            if segment > Q:
                state, tail = prefix.get(number, (zero, [])) if prefix_visible else (zero, [])
            its, after = recurrence(*here, state)
            out[row, at:end] = its[0] * (segment != 0)
            for token in range(at, end):
                lasts[row, token] = (tail + list(range(at, token)))[-3:]
            tail = tail + list(range(at, end))
            if segment == P:
                prefix[number] = after, tail
            if segment and example == number:  # of all questions
                through = recurrence(*here, order.get(number, (zero, []))[0])[1]
                order[number] = through, tail
            at = end
    return out, lasts


@pytest.mark.parametrize("prefix_visible", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_in_blocks_each_part_is_run_alone(name, prefix_visible):
    segments, examples = laid(ROWS[name])
    q, writes, _ = made(23, 7)
    tokens = Tokens(segments, segments, segments, examples)
    wanted, lasts = block_recurrence(q, writes, segments, examples, prefix_visible)
    for tile in (4, 64):
        found = PATHS(jax.tree.map(jnp.asarray, tokens), prefix_visible, 4, tile)
        got = np.asarray(BLOCKS(q, writes, found))
        np.testing.assert_allclose(got[segments != 0], wanted[segments != 0], **CLOSE)
        assert np.isfinite(got).all()
    for (row, at), its in lasts.items():
        if segments[row, at]:
            assert [it for it in np.asarray(found.before)[row, at] if it >= 0] == its


@pytest.mark.parametrize("size", [1, 9, 64])
def test_systems_are_solved_however_alike_their_keys(size):
    """Of one key again and again, where powers of the system are of all sizes; and the slopes."""
    rng = np.random.default_rng(2)
    drawn = rng.uniform(-0.4, 0.4, (2, size, size))
    system, weights = (
        np.concatenate([drawn, np.ones((1, size, size))]),
        rng.normal(size=(size, size)),
    )

    def exact(system):
        return np.linalg.inv(np.eye(size) + np.tril(system, -1))

    def weighed(system):
        return (_inverse(system) * weights).sum()

    found, slopes = jax.jit(_inverse)(np.float32(system)), jax.jit(jax.grad(weighed))(system)
    np.testing.assert_allclose(
        found, exact(system), rtol=0, atol=1e-5 * np.abs(exact(system)).max()
    )
    rows = [(at, below) for at in range(size) for below in (0, at - 1) if at > 0]
    for at, below in rows[-6:]:
        step = np.zeros_like(system)
        step[:, at, below] = 1e-5
        up, down = ((exact(system + it) * weights).sum((1, 2)) for it in (step, -step))
        most = np.abs(slopes).max((1, 2))
        np.testing.assert_array_less(np.abs(slopes[:, at, below] - (up - down) / 2e-5), 1e-4 * most)
    assert not np.triu(slopes).any()

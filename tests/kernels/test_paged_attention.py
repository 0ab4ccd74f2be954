"""Paged attention against a dense oracle: offsets, hidden slots, rotation sides, merging."""

import functools
import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrag.base.config import RopeConfig, YarnScaling
from jaxrag.base.rotary import attention_factor
from jaxrag.base.types import HIDDEN, Partial
from jaxrag.models.attention import merge
from jaxrag.models.rope import place, rope_table
from pallas_kernels import (
    Pages,
    Pool,
    Rotary,
    paged_attention,
    paged_attention_by_row,
    paged_decode_attention,
)
from pallas_kernels.rotation import rotate

STEP = importlib.import_module("pallas_kernels.paged_decode_attention")
PAGE, NUM_PAGES, K, G, H = 16, 64, 2, 3, 10
N = K * G
ROPES = {
    "half": RopeConfig(5_000.0, 10, False, None),
    "partial": RopeConfig(5_000.0, 6, False, None),
    "interleaved": RopeConfig(5_000.0, 6, True, None),
}


class Scene:
    """A pool with un-rotated keys known to the test, and one request's table over it."""

    def __init__(self, rng, rope, chunk_lengths, offsets, queries, poison=np.nan):
        self.rope, self.table = rope, rope_table(rope, 1024)
        self.k_raw = rng.normal(size=(NUM_PAGES, PAGE, K, H)).astype(np.float32)
        self.v = rng.normal(size=(NUM_PAGES, PAGE, K, H)).astype(np.float32)
        free = list(rng.permutation(NUM_PAGES))
        self.chunks = [[free.pop() for _ in range(-(-n // PAGE))] for n in chunk_lengths]
        self.lengths, self.offsets = chunk_lengths, offsets
        local = np.zeros((NUM_PAGES, PAGE), np.int32)
        used = np.zeros((NUM_PAGES, PAGE), bool)
        for pages, length in zip(self.chunks, chunk_lengths, strict=True):
            at = np.arange(len(pages) * PAGE).reshape(-1, PAGE)
            local[pages], used[pages] = at, at < length
        pool = place(jnp.asarray(self.k_raw), jnp.asarray(local), self.table, rope)
        self.k_pool = jnp.where(used[..., None, None], pool, poison)
        self.v_pool = jnp.where(used[..., None, None], self.v, poison)
        self.q = jnp.asarray(rng.normal(size=(1, len(queries), N, H)), jnp.float32)
        self.query_position = jnp.asarray([queries], jnp.int32)

    def arrays(self, chunks=None):
        chunks = range(len(self.chunks)) if chunks is None else chunks
        pages, offsets, positions = [], [], []
        for c in chunks:
            slots = np.arange(len(self.chunks[c]) * PAGE)
            pages += self.chunks[c]
            offsets += [self.offsets[c]] * len(self.chunks[c])
            positions.append(np.where(slots < self.lengths[c], slots + self.offsets[c], HIDDEN))
        pad = 3  # hidden pages behind
        positions = np.concatenate([*positions, np.full(pad * PAGE, HIDDEN)])
        return Pages(
            *(
                jnp.asarray(x, jnp.int32)[None]
                for x in (pages + [0] * pad, offsets + [0] * pad, positions)
            )
        )

    def attend(self, chunks=None, **options):
        return paged_attention(
            self.q, Pool(self.k_pool, self.v_pool), self.arrays(chunks), self.query_position,
            self.rotary, scale=0.3, **options,
        )  # fmt: skip

    def step(self, **options):
        """What the first query gets in a decode step, [1, 1, N, H] and [1, 1, N]."""
        out, lse = paged_decode_attention(
            self.q[:, 0], Pool(self.k_pool, self.v_pool), self.arrays(None),
            self.query_position[:, 0], self.rotary, scale=0.3, **options,
        )  # fmt: skip
        return out[:, None], lse[:, None]

    @property
    def rotary(self):
        return Rotary(self.table.cos, self.table.sin, self.rope.interleaved)

    def dense(self, window=None):
        """Every key placed at its absolute position, every pair scored in float64."""
        keys, values, positions = [], [], []
        for pages, length, offset in zip(self.chunks, self.lengths, self.offsets, strict=True):
            keys.append(self.k_raw[pages].reshape(-1, K, H)[:length])
            values.append(self.v[pages].reshape(-1, K, H)[:length])
            positions.append(np.arange(length) + offset)
        positions = np.concatenate(positions)
        at = jnp.asarray(positions)
        keys = np.asarray(place(jnp.asarray(np.concatenate(keys)), at, self.table, self.rope))
        q = np.asarray(place(self.q, jnp.maximum(self.query_position, 0), self.table, self.rope))[0]
        mask = positions[None] <= np.asarray(self.query_position)[0][:, None]
        if window is not None:
            mask &= np.asarray(self.query_position)[0][:, None] - positions[None] < window
        out = np.zeros(q.shape)
        lse = np.full(q.shape[:2], -np.inf)
        for n in range(N):
            scores = np.where(mask, q[:, n].astype(np.float64) @ keys[:, n // G].T * 0.3, -np.inf)
            rows = mask.any(1)
            top = scores[rows].max(1, keepdims=True)
            weights = np.exp(scores[rows] - top)
            total = weights.sum(1, keepdims=True)
            out[rows, n] = weights / total @ np.concatenate(values)[:, n // G]
            lse[rows, n] = (top + np.log(total))[:, 0]
        return out, lse


@pytest.mark.parametrize("side", ["query", "keys", None])
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_equals_dense_with_poisoned_unused_slots(rng, rope, side):
    # chunks out of place, gaps in the positions, padding queries (-1), a query that sees nothing
    scene = Scene(rng, rope, [37, 16, 5], [300, 0, 100], [-1, 104, 310, 400, 3, 336])
    out, lse = scene.attend(rotate_side=side)
    expected, expected_lse = scene.dense()
    np.testing.assert_allclose(out[0], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse[0], expected_lse, rtol=1e-5, atol=1e-5)
    assert (np.asarray(out)[0, 0] == 0).all() and np.isneginf(np.asarray(lse)[0, 0]).all()


@pytest.fixture(params=[1, 1 << 20], ids=["heads apart", "heads together"])
def step_heads(request, monkeypatch):
    """How a decode step's products have the KV heads, which follows from their size."""
    monkeypatch.setattr(STEP, "_APART", request.param)


@pytest.mark.usefixtures("step_heads")
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("at", [3, 104, 336, 900, -1])
def test_one_query_equals_dense(rng, at, window):
    """Over several tiles of keys; chunks placed and in place; by both ops."""
    for offsets, op in itertools.product(([300, 0, 100], [0, 600, 700]), ("step", "rows")):
        scene = Scene(rng, ROPES["half"], [590, 16, 5], offsets, [at])
        out, lse = scene.step(window=window) if op == "step" else scene.attend(window=window)
        expected, expected_lse = scene.dense(window)
        np.testing.assert_allclose(out[0], expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(lse[0], expected_lse, rtol=1e-5, atol=1e-5)


def test_many_query_tiles_and_key_tiles(rng):
    queries = [*range(500, 800), *[-1] * 20]
    scene = Scene(rng, ROPES["half"], [290, 130], [150, 0], queries)
    out, lse = scene.attend()
    expected, expected_lse = scene.dense()
    np.testing.assert_allclose(out[0], expected, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(lse[0], expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("queries", [[70], list(range(40, 330))])
@pytest.mark.parametrize("window", [1, 9, 64])
def test_window(rng, queries, window):
    scene = Scene(rng, ROPES["half"], [300], [0], queries)
    out, _ = scene.attend(window=window)
    np.testing.assert_allclose(out[0], scene.dense(window)[0], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_rotating_query_by_offset_equals_rotating_keys(rng, rope):
    scene = Scene(rng, rope, [20, 40], [512, 31], [700, 600])
    by_query, by_keys = scene.attend(rotate_side="query"), scene.attend(rotate_side="keys")
    for one, other in zip(by_query, by_keys, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_rows_in_turn_are_the_rows_together(rng):
    """Other tables and positions a row, one row of padding only."""
    scene = Scene(rng, ROPES["half"], [290, 130, 40], [150, 0, 600], [-1] * 20)
    orders = ([0, 1, 2], [2, 0, 1], [1, 2, 0])
    table = jax.tree.map(lambda *rows: jnp.concatenate(rows), *map(scene.arrays, orders))
    q = jnp.asarray(rng.normal(size=(3, 300, N, H)), jnp.float32)
    positions = jnp.stack([jnp.arange(500, 800), jnp.full(300, -1), jnp.arange(20, 320)])

    outs = [
        op(
            q, Pool(scene.k_pool, scene.v_pool), table, positions.astype(jnp.int32), scene.rotary,
            scale=0.3, window=450,
        )
        for op in (paged_attention_by_row, paged_attention)
    ]  # fmt: skip
    for in_turn, together in zip(*outs, strict=True):
        np.testing.assert_allclose(in_turn, together, rtol=2e-5, atol=2e-6)


@pytest.mark.usefixtures("step_heads")
def test_a_step_of_a_row_is_bit_equal_whoever_has_the_others(rng):
    """Rows that see four tiles, one and two; alone, and at another place in the batch."""
    scene = Scene(rng, ROPES["half"], [590, 330, 5], [0, 100, 900], [-1] * 3)
    orders = ([0, 1, 2], [2, 0, 1], [1, 2, 0])
    tables = [jax.tree.map(np.asarray, scene.arrays(order)) for order in orders]
    at = np.array([1000, 7, 500], np.int32)
    q = rng.normal(size=(3, N, H)).astype(np.float32)
    step = jax.jit(functools.partial(paged_decode_attention, scale=0.3))

    def run(rows, empty=()):
        table = Pages(*(np.concatenate(x) for x in zip(*(tables[r] for r in rows), strict=True)))
        positions = np.array([-1 if r in empty else at[r] for r in rows])
        pool = Pool(scene.k_pool, scene.v_pool)
        return step(q[rows], pool, table, positions, scene.rotary)

    together = run([0, 1, 2])
    for row in range(3):
        for rows, empty in (([row], ()), ([2, 1, 0], set(range(3)) - {row}), ([1, 0, 2], ())):
            for one, other in zip(together, run(rows, empty), strict=True):
                np.testing.assert_array_equal(one[row], other[rows.index(row)])


def test_rotations_compose_and_scale_nothing(rng):
    table = rope_table(ROPES["partial"], 400)
    x = jnp.asarray(rng.normal(size=(7, N, H)), jnp.float32)

    def turn(x, by):
        return rotate(x, table.cos[by], table.sin[by], interleaved=False)

    np.testing.assert_allclose(turn(turn(x, 130), 217), turn(x, 347), atol=1e-5)
    np.testing.assert_allclose(
        np.linalg.norm(turn(x, 333), axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5
    )


def test_yarn_factor_enters_once(rng):
    """Moving a placed key by another rotation must not multiply its attention factor again."""
    rope = RopeConfig(5_000.0, 6, False, YarnScaling(4.0, 64, 32.0, 1.0, 1.3, True))
    table = rope_table(rope, 400)
    x = jnp.asarray(rng.normal(size=(5, 1, H)), jnp.float32)
    direct = place(x, jnp.full(5, 250), table, rope)
    moved = rotate(
        place(x, jnp.full(5, 30), table, rope), table.cos[220], table.sin[220], interleaved=False
    )
    np.testing.assert_allclose(moved, direct, atol=1e-5)
    rotary, rest = np.asarray(direct)[..., :6], np.asarray(direct)[..., 6:]
    np.testing.assert_allclose(
        np.linalg.norm(rotary, axis=-1), 1.3 * np.linalg.norm(x[..., :6], axis=-1), rtol=1e-5
    )
    np.testing.assert_array_equal(rest, x[..., 6:])
    assert attention_factor(rope) == 1.3


@pytest.mark.parametrize("parts", [[[0], [1], [2]], [[0, 2], [1]], [[1, 2, 0]]])
def test_split_and_merge_equals_not_splitting(rng, parts):
    scene = Scene(rng, ROPES["half"], [37, 16, 50], [300, 0, 100], [104, 310, 400, 3])
    whole, whole_lse = scene.attend()
    merged = merge([Partial(*scene.attend(part)) for part in parts])
    np.testing.assert_allclose(merged.out, whole, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(merged.lse, whole_lse, rtol=1e-5, atol=1e-5)


def test_merge_is_associative_and_ignores_what_saw_nothing(rng):
    def part(lse):
        out = jnp.asarray(rng.normal(size=(1, 1, 2, 3)), jnp.float32)
        return Partial(out=out, lse=jnp.asarray(lse, jnp.float32)[None, None])

    a, b, c = part([1.0, -3.0]), part([0.5, 40.0]), part([-2.0, 39.0])
    left, right = merge([merge([a, b]), c]), merge([a, merge([b, c])])
    np.testing.assert_allclose(left.out, right.out, atol=1e-6)
    np.testing.assert_allclose(left.lse, right.lse, atol=1e-6)
    blind = Partial(out=jnp.full((1, 1, 2, 3), jnp.nan), lse=jnp.full((1, 1, 2), -jnp.inf))
    same = merge([blind, a, blind])
    np.testing.assert_allclose(same.out, a.out, atol=1e-6)
    nothing = merge([blind, blind])
    assert (np.asarray(nothing.out) == 0).all() and np.isneginf(np.asarray(nothing.lse)).all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_repeats_what_several_angles_turn(rng, interleaved):
    """One head, several angles: as for copies of the head; dimensions beyond R pass through."""
    x = rng.normal(size=(2, 1, 3, 10)).astype(np.float32)
    angle = rng.normal(size=(2, 4, 1, 3)).astype(np.float32)
    angles = (np.cos(angle), np.sin(angle))
    copies = np.repeat(x, 4, axis=1)
    expected = rotate(jnp.asarray(copies), *angles, interleaved=interleaved)
    found = rotate(jnp.asarray(x), *angles, interleaved=interleaved)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(found[..., 6:], copies[..., 6:])

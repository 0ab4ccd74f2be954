"""Laws 4 to 7 through ``forward`` over a pool with the interpreted kernels inside.

Recomputed and new tokens of two requests that show the same chunks at different places, and one
decode step. Slots that nobody may see hold NaN.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrag.base.types import Step
from jaxrag.engine.steps import run_tokens
from jaxrag.kv.cache import PAGE, CachedChunk, PagePool, PageTable, TableBuilder
from jaxrag.models.decoder import Decoder
from jaxrag.models.rope import rope_table, rotate
from jaxrag.models.spec import init_params
from pallas_kernels.triton import paged

CLOSE = {"rtol": 1e-4, "atol": 2e-5}
LAYERS, PAGES = 2, 12  # of the pool, a layer
FIRST, SECOND = CachedChunk((3, 5), 29), CachedChunk((8,), 13)  # chunks
OWN = ((1, 2), (4, 6))  # pages of each request
AGAIN = ((3, 20), (1, 30))  # positions of the tokens that are computed again
NEW = 5  # tokens of the final block


@dataclasses.dataclass(frozen=True)
class Work:
    """A model, its pool, and the new tokens of two requests."""

    config: Any
    params: Any
    rope: Any
    pool: PagePool
    ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    builders: tuple[TableBuilder, ...]

    def forward(self, only=None, **changes):
        """Hidden states [2, T, D] and the pool; of one new token a request (``only``) or all."""
        work = dataclasses.replace(self, **changes)
        some = slice(None) if only is None else slice(only, only + 1)
        rows = zip(*(builder.rows(8) for builder in work.builders), strict=True)
        table = PageTable(*(jnp.asarray(np.stack(part)) for part in rows))
        if only is not None:  # the others were computed before
            table = table.reveal(work.slots[:, :only], work.positions[:, :only])
        decoder = Decoder(params=work.params, rope=work.rope, config=work.config)
        new = Step(*(jnp.asarray(x[:, some]) for x in (work.ids, work.positions, work.slots)))
        fresh = jax.jit(lambda *given: run_tokens(*given))  # traced anew: tests change what runs
        hidden, pool, _ = fresh(decoder, work.pool, table, new)
        return np.asarray(hidden), pool


def tables(second_pages=SECOND.pages):
    """Both chunks in either order, the originals of AGAIN hidden; pages for the new tokens."""
    one, other = TableBuilder(), TableBuilder()
    one.map_chunk(FIRST, 0)
    one.map_chunk(SECOND, 29)
    other.map_chunk(dataclasses.replace(SECOND, pages=second_pages), 0)
    other.map_chunk(FIRST, 13)
    one.hide(np.array([3, 20]))
    other.hide(np.array([1, PAGE + 17]))
    for builder, pages in zip((one, other), OWN, strict=True):
        builder.reserve(pages)
    return one, other


@pytest.fixture
def work(tiny_config, rng):
    config = tiny_config(num_layers=LAYERS, kernels="pallas_interpret")
    shape = (LAYERS * PAGES, PAGE, config.num_kv_heads, config.head_dim)
    shown = np.zeros((PAGES, PAGE), bool)
    for chunk in (FIRST, SECOND):
        shown[list(chunk.pages)] = np.arange(PAGE * len(chunk.pages)).reshape(-1, PAGE) < (
            chunk.tokens
        )
    shown = np.tile(shown, (LAYERS, 1))[..., None, None]
    pool = PagePool(
        *(jnp.asarray(np.where(shown, rng.normal(size=shape), np.nan), jnp.float32) for _ in "kv")
    )
    first = PAGE * 3  # of the requests' own slots
    positions = np.stack([np.r_[again, 42 + np.arange(NEW)] for again in AGAIN]).astype(np.int32)
    slots = np.broadcast_to(first + np.arange(positions.shape[1]), positions.shape)
    return Work(
        config=config,
        params=init_params(config, jax.random.key(5)),
        rope=rope_table(config.rope, 128),
        pool=pool,
        ids=rng.integers(3, 101, positions.shape).astype(np.int32),
        positions=positions,
        slots=slots.astype(np.int32),
        builders=tables(),
    )


def a_step(work):
    """The last token alone, once all others are in the pool."""
    _, pool = work.forward()
    return dataclasses.replace(work, pool=pool), {"only": work.ids.shape[1] - 1}


def both(work):
    """(work, how): all new tokens at once, and the last one as a decode step."""
    return (work, {}), a_step(work)


def test_the_interpreted_forward_is_that_of_the_reference(work):
    reference = dataclasses.replace(work.config, kernels="xla")
    hidden, pool = work.forward()
    assert np.isfinite(hidden).all()
    expected, expected_pool = work.forward(config=reference)
    np.testing.assert_allclose(hidden, expected, **CLOSE)
    np.testing.assert_allclose(pool.k, expected_pool.k, **CLOSE)
    step, how = a_step(work)
    np.testing.assert_allclose(step.forward(**how)[0][:, 0], hidden[:, -1], **CLOSE)


@pytest.mark.parametrize("first", [1, 4])
def test_law_4_later_tokens_change_nothing(work, first):
    """With the selection and stored KV fixed; 1: a recomputed token, 4: one of the question."""
    other = work.ids.copy()
    other[:, first:] = 3 + (other[:, first:] + 5) % 90
    (one, pool), (two, changed) = work.forward(), work.forward(ids=other)
    np.testing.assert_array_equal(one[:, :first], two[:, :first])
    assert np.abs(one[:, first:] - two[:, first:]).max((1, 2)).min() > 1e-2
    rows = [own[0] + layer * PAGES for own in OWN for layer in range(LAYERS)]
    for x, y in zip(jax.tree.leaves(pool), jax.tree.leaves(changed), strict=True):
        np.testing.assert_array_equal(x[np.array(rows), :first], y[np.array(rows), :first])


@pytest.mark.slow
def test_law_5_one_copy_serves_two_places(work):
    copy = (9,)
    at = np.arange(LAYERS) * PAGES
    copied = jax.tree.map(lambda x: x.at[at + copy[0]].set(x[at + SECOND.pages[0]]), work.pool)
    apart = dataclasses.replace(work, pool=copied, builders=tables(copy))
    for (shared, how), (own, _) in zip(both(work), both(apart), strict=True):
        hidden, pool = shared.forward(**how)
        expected, _ = own.forward(**how)
        np.testing.assert_array_equal(hidden, expected)
        pages = np.array([*FIRST.pages, *SECOND.pages])
        np.testing.assert_array_equal(pool.k[pages], work.pool.k[pages])
        np.testing.assert_array_equal(pool.v[pages], work.pool.v[pages])


@pytest.mark.slow
def test_law_6_turning_the_query_is_turning_the_keys(work):
    """Of the second request: its chunks' keys stand where they are shown, at offset 0."""
    turn = np.zeros(PAGES, np.int32)
    turn[list(FIRST.pages)] = 13
    turn = jnp.asarray(np.tile(turn, LAYERS))
    cos, sin = (x[turn][:, None, None] for x in (work.rope.cos, work.rope.sin))
    for made, how in both(work):
        expected, _ = made.forward(**how)
        keys = rotate(made.pool.k, cos, sin, interleaved=False)
        moved = work.builders[1].copy()
        moved._offsets = [0] * len(moved._offsets)
        turned = PagePool(k=keys, v=made.pool.v)
        hidden, _ = made.forward(**how, pool=turned, builders=(work.builders[0], moved))
        np.testing.assert_allclose(hidden[1], expected[1], **CLOSE)
        assert np.abs(hidden[0] - expected[0]).max() > 1e-2


@pytest.mark.parametrize("splits", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_law_7_parts_over_disjoint_keys_merge(work, monkeypatch, splits):
    """Several programs share the pages of a tile, as where there are few tiles."""
    asked = []

    def split_in(count):
        monkeypatch.setattr(paged, "splits_for", lambda *sizes: asked.append(count) or count)

    for made, how in both(work):
        split_in(1)
        expected, _ = made.forward(**how)
        split_in(splits)
        hidden, _ = made.forward(**how)
        np.testing.assert_allclose(hidden, expected, **CLOSE)
    assert np.isfinite(hidden).all() and asked.count(splits) == asked.count(1) == 2

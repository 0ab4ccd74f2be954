"""Scenes for the paged ops: shared pages at several places, poisoned slots, a dense oracle."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrag.base.config import RopeConfig
from jaxrag.base.types import HIDDEN
from jaxrag.models.rope import place, rope_table
from pallas_kernels import Pages, Pool, Rotary

ROPES = {
    "half": RopeConfig(5_000.0, 10, False, None),
    "partial": RopeConfig(5_000.0, 6, False, None),
    "interleaved": RopeConfig(5_000.0, 6, True, None),
    "half16": RopeConfig(5_000.0, 16, False, None),
    "half128": RopeConfig(5_000.0, 128, False, None),
}


@dataclasses.dataclass
class PagedScene:
    """Arguments of a paged op in its order, its keyword arguments, and what the oracle reads."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    queries: np.ndarray  # [B, T, N, H] where they stand
    keys: np.ndarray  # [B, S, K, H] where they stand
    values: np.ndarray  # [S, K, H]
    slots: np.ndarray  # [B, S]
    at: np.ndarray  # [B, T]

    def dense(self):
        """out [B, T, N, H] and lse [B, T, N] by scoring every pair in float64."""
        batch, length, heads, _ = self.queries.shape
        group = heads // self.keys.shape[2]
        out, lse = np.zeros(self.queries.shape), np.full((batch, length, heads), -np.inf)
        slots, at = self.slots.astype(np.int64), self.at.astype(np.int64)
        for b, t, n in np.ndindex(batch, length, heads):
            see = slots[b] <= at[b, t]
            if self.options["window"] is not None:
                see &= at[b, t] - slots[b] < self.options["window"]
            if not see.any():
                continue
            scores = self.keys[b, see, n // group] @ self.queries[b, t, n] * self.options["scale"]
            weights = np.exp(scores - scores.max())
            lse[b, t, n] = scores.max() + np.log(weights.sum())
            out[b, t, n] = weights @ self.values[see, n // group] / weights.sum()
        return out, lse


@pytest.fixture
def paged_scene(rng):
    """Make a scene: two requests show the same chunks at different places; what is hidden is NaN.

    Some slots inside chunks are hidden as if they were computed again, one whole page is, tails of
    pages are, and pages behind the last. Queries: scattered, one that sees nothing, one of padding.
    """

    def make(rope="half", dim=10, kv_heads=2, group=3, chunks=(37, 16, 50, 5), queries=9,
             page=16, dtype=jnp.float32, window=None):  # fmt: skip
        config, table, batch = ROPES[rope], rope_table(ROPES[rope], 1024), 2
        counts = [-(-n // page) for n in chunks]
        used, num_pages = sum(counts), sum(counts) + 3
        local = np.concatenate([np.arange(n * page) for n in counts])
        lengths = np.repeat(chunks, np.array(counts) * page)
        shown = (local < lengths) & (rng.random(local.size) > 0.15)
        shown[page : 2 * page] = False
        shape = (local.size, kv_heads, dim)
        k, v = (jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2))
        pool_pages = 2 * used
        pages = np.zeros((batch, num_pages), np.int32)
        pages[:, :used] = rng.permutation(pool_pages)[:used]

        def pool(x):
            out = np.full((pool_pages, page, kv_heads, dim), np.nan, np.asarray(x).dtype)
            rows = np.where(shown[:, None, None], np.asarray(x), np.nan)
            out[pages[0, :used]] = rows.reshape(used, page, kv_heads, dim)
            return jnp.asarray(out)

        offsets = np.zeros((batch, num_pages), np.int32)
        slots = np.full((batch, num_pages * page), HIDDEN, np.int32)
        for b in range(batch):
            where = rng.integers(30, 400, len(chunks))
            offsets[b, :used] = np.repeat(where, counts)
            slots[b, : local.size] = np.where(
                shown, local + np.repeat(offsets[b, :used], page), HIDDEN
            )
        stand = np.where(shown, slots[:, : local.size], 0)
        at = np.sort(rng.integers(60, 460, (batch, queries)), axis=1).astype(np.int32)
        at[:, 0], at[0, -1] = 3, -1
        q = jnp.asarray(rng.normal(size=(batch, queries, kv_heads * group, dim)), dtype)

        def wide(x):
            return np.asarray(x, np.float64)

        k_pool, v_pool = pool(place(k, jnp.asarray(local), table, config)), pool(v)
        keys = [
            place(k.astype(jnp.float32), jnp.asarray(stand[b]), table, config) for b in range(batch)
        ]
        tail = ((0, 3 * page), (0, 0), (0, 0))
        return PagedScene(
            arguments=(
                q, Pool(k_pool, v_pool), Pages(*map(jnp.asarray, (pages, offsets, slots))),
                jnp.asarray(at), Rotary(table.cos, table.sin, config.interleaved),
            ),
            options={"scale": 0.3, "window": window},
            queries=wide(
                place(q.astype(jnp.float32), jnp.asarray(np.maximum(at, 0)), table, config)
            ),
            keys=np.stack([np.pad(wide(x), tail) for x in keys]),
            values=np.pad(wide(v), tail),
            slots=slots,
            at=at,
        )  # fmt: skip

    return make

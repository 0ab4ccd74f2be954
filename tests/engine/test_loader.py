"""Chunks read in many windows through two staging buffers land where one window puts them."""

import dataclasses

import jax
import numpy as np

from jaxrag.cache import PAGE
from jaxrag.engine import loader as load
from jaxrag.engine.loader import bring_in, release
from jaxrag.models.model import random_model


def stored_pages(model, loaded):
    """K and V of every chunk's pages, [L, M, page, K, H] each."""
    pool = model.cache.pool
    layers = model.config.num_layers
    k, v = (np.asarray(x).reshape(layers, -1, *x.shape[1:]) for x in (pool.k, pool.v))
    return [(k[:, list(r.pages)], v[:, list(r.pages)], r.tokens) for r in loaded.residents]


def test_many_windows_give_what_one_gives(tiny_config, rng, monkeypatch):
    model = random_model(tiny_config(), cache_tokens=1024)
    chunks = [rng.integers(3, 101, size, dtype=np.int32) for size in (40, 17, 33, 64, 5, 48, 21)]
    empty = np.zeros(0, np.int32)
    first = bring_in(model, model.memory, "isolated", empty, chunks)
    assert all(first.encoded)
    encoded = stored_pages(model, first)
    release(model, first)

    again = {}
    for window in (2048, 50):
        monkeypatch.setattr(load, "WINDOW_TOKENS", window)
        fresh = dataclasses.replace(model)
        fresh.memory = model.memory
        loaded = bring_in(fresh, fresh.memory, "isolated", empty, chunks)
        assert not any(loaded.encoded)
        again[window] = stored_pages(fresh, loaded)

    for one, many, at_first in zip(again[2048], again[50], encoded, strict=True):
        tokens = one[2]
        for x, y, z in zip(one[:2], many[:2], at_first[:2], strict=True):
            flat = [np.reshape(a, (a.shape[0], -1, *a.shape[3:]))[:, :tokens] for a in (x, y, z)]
            assert flat[0].any()
            np.testing.assert_array_equal(flat[0], flat[1])
            np.testing.assert_array_equal(flat[0], flat[2])


def test_a_load_leaves_no_work_running(tiny_config, rng):
    model = random_model(tiny_config(), cache_tokens=256)
    chunk = rng.integers(3, 101, 3 * PAGE, dtype=np.int32)
    bring_in(model, model.memory, "isolated", np.zeros(0, np.int32), [chunk])
    assert all(x.is_ready() for x in jax.tree.leaves(model.cache.pool))

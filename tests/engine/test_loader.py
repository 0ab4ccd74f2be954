"""Chunks read in many windows through two staging buffers land where one window puts them."""

import ast
import dataclasses
from pathlib import Path

import numpy as np
import pytest

import jaxrag
from jaxrag.engine import loader as load
from jaxrag.engine.engine import engine_of
from jaxrag.engine.loader import load_chunks, release
from jaxrag.models.model import random_model


def stored_pages(model, loaded):
    """K and V of every chunk's pages, [L, M, page, K, H] each."""
    pool = engine_of(model).runner.cache.pool
    layers = model.config.num_layers
    k, v = (np.asarray(x).reshape(layers, -1, *x.shape[1:]) for x in (pool.k, pool.v))
    return [(k[:, list(r.pages)], v[:, list(r.pages)], r.tokens) for r in loaded.residents]


def test_many_windows_give_what_one_gives(tiny_config, rng, monkeypatch):
    model = random_model(tiny_config(), cache_tokens=1024)
    chunks = [rng.integers(3, 101, size, dtype=np.int32) for size in (40, 17, 33, 64, 5, 48, 21)]
    empty = np.zeros(0, np.int32)
    first = load_chunks(engine_of(model).runner, engine_of(model).memory, "isolated", empty, chunks)
    assert all(first.encoded)
    encoded = stored_pages(model, first)
    release(engine_of(model).runner, first)

    again = {}
    for window in (2048, 50):
        monkeypatch.setattr(load, "WINDOW_TOKENS", window)
        fresh = dataclasses.replace(model)
        engine_of(fresh).memory = engine_of(model).memory
        loaded = load_chunks(
            engine_of(fresh).runner, engine_of(fresh).memory, "isolated", empty, chunks
        )
        assert not any(loaded.encoded)
        again[window] = stored_pages(fresh, loaded)

    for one, many, at_first in zip(again[2048], again[50], encoded, strict=True):
        tokens = one[2]
        for x, y, z in zip(one[:2], many[:2], at_first[:2], strict=True):
            flat = [np.reshape(a, (a.shape[0], -1, *a.shape[3:]))[:, :tokens] for a in (x, y, z)]
            assert flat[0].any()
            np.testing.assert_array_equal(flat[0], flat[1])
            np.testing.assert_array_equal(flat[0], flat[2])


@pytest.mark.parametrize("room", ["decode", "engine", "select", "serve"])
def test_nothing_waits_for_the_device_but_for_its_results(room):
    """A question is served without ``block_until_ready``: a clock reads what was handed over."""
    for path in (Path(jaxrag.__file__).parent / room).glob("*.py"):
        named = {
            x.attr for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.Attribute)
        }
        assert "block_until_ready" not in named, path

"""Chunks read alone, in groups and in parts land where one that is encoded on the way is put."""

import ast
import dataclasses
from pathlib import Path

import numpy as np
import pytest

import jaxrag
from jaxrag.engine import runner as running
from jaxrag.engine import staging as load
from jaxrag.engine.engine import engine_of
from jaxrag.engine.mapping import sequence_of
from jaxrag.engine.prompt_inspection import inspect_prompts
from jaxrag.engine.request import Prompt, Request
from jaxrag.models.model import random_model
from jaxrag.reuse.methods import METHODS


def brought_in(model, request):
    """How each chunk comes into the pool."""
    (*_, last) = engine_of(model).iterate([request])
    assert last.finish_reason == "length"
    return [(row.how, row.where) for row in last.outcome.reuse if row.part != "prefix"]


def stored_pages(model, request):
    """K and V of every chunk's tokens, [L, T, K, H] each, of chunks that are in the pool."""

    def look(runner, state, there):
        layers, found = model.config.num_layers, []
        for part in state.parts[1:]:
            assert part.origin.how == "pool"
            pages = list(part.resident.pages)
            for x in (runner.cache.pool.k, runner.cache.pool.v):
                kv = np.asarray(x).reshape(layers, -1, *x.shape[1:])[:, pages]
                found.append(kv.reshape(layers, -1, *kv.shape[3:])[:, : len(part.ids)])
        return found

    [found] = inspect_prompts(engine_of(model), [request], look)
    return found


def test_however_chunks_are_read_they_land_alike(tiny_config, rng, monkeypatch):
    model = random_model(tiny_config(), cache_tokens=1024)
    chunks = [rng.integers(3, 101, size, dtype=np.int32) for size in (40, 17, 33, 64, 5, 48, 21)]
    prompt = Prompt(np.zeros(0, np.int32), tuple(chunks), np.array([5], np.int32))
    request = Request(prompt, engine_of(model).memory, METHODS["turborag"], 1)
    assert {how for how, _ in brought_in(model, request)} == {"encoded"}
    encoded = stored_pages(model, request)
    assert all(kv.any() for kv in encoded)
    assert len(list(load.groups(load_of(model, request)))) == 1
    for block, groups in ((256, 1), (60, 5), (16, 7)):  # all at once; some; each alone, in parts
        monkeypatch.setattr(load, "BLOCK_TOKENS", block)
        monkeypatch.setattr(running, "BLOCK_TOKENS", block)
        fresh = dataclasses.replace(model)
        assert len(list(load.groups(load_of(fresh, request)))) == groups
        assert set(brought_in(fresh, request)) == {("chunk hit", "store"), ("prefix hit", "store")}
        for one, other in zip(encoded, stored_pages(fresh, request), strict=True):
            np.testing.assert_array_equal(one, other)


def load_of(model, request):
    return sequence_of(model, request).loads.values()


@pytest.mark.parametrize("room", ["decode", "engine", "select", "serve"])
def test_nothing_waits_for_the_device_but_for_its_results(room):
    """A question is served without ``block_until_ready``: a clock reads what was handed over."""
    for path in (Path(jaxrag.__file__).parent / room).glob("*.py"):
        named = {
            x.attr for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.Attribute)
        }
        assert "block_until_ready" not in named, path

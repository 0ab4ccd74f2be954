"""Chunks of which a store dropped tokens: hidden from every request, and computed again."""

import dataclasses

import numpy as np
import pytest

from jaxrag.base.types import HIDDEN
from jaxrag.engine.prompt_inspection import inspect_prompts
from jaxrag.kv.cache import PAGE
from jaxrag.kv.store import MemoryStore, derive
from jaxrag.kv.store.dropping import dropped_tokens
from jaxrag.reuse.methods import METHODS
from jaxrag.reuse.select import FirstK, KvDeviation, QueryGuided, RandomTokens

SELECTORS = {
    "random": RandomTokens(seed=3),
    "first_k": FirstK(),
    "kv_deviation": KvDeviation(),
    "query_guided": QueryGuided(),
    "over_cache": QueryGuided(over="cache"),
}


def store_of(model, stored="int4-half"):
    layout = dataclasses.replace(model.kv_layout, stored=stored)
    return MemoryStore(derive(model.fingerprint, stored), layout)


@pytest.fixture
def long(rng, asked):
    """``long(engine, ...)``: a request of two chunks of 90 and 70 tokens."""
    chunks = tuple(rng.integers(3, 101, size).astype(np.int32) for size in (90, 70))

    def make(engine, method="turborag", **more):
        request = asked(engine, method, **more)
        prompt = dataclasses.replace(request.prompt, chunks=chunks, neighbours=None)
        return dataclasses.replace(request, prompt=prompt)

    return make


def test_nobody_sees_them(engine_on, long, alone):
    engine = engine_on()
    store = store_of(engine.runner.model)
    request = long(engine, store=store)
    first = alone(engine, [request])
    chunks = engine.runner.cache.allocator.chunks
    assert len(chunks) == 2  # the prefix is computed with the question
    hidden = 0
    for key, chunk in chunks.items():
        dropped = dropped_tokens(store.get(key))
        assert chunk.dropped.tolist() == dropped.tolist()
        assert len(dropped) == store.head([key])[0].tokens // 2
        hidden += len(dropped)

    def spoil(runner):
        """What lies in their places may be anything."""
        pool = runner.cache.pool
        layers = runner.model.config.num_layers
        k, v, pages = pool.k, pool.v, pool.k.shape[0] // layers
        for chunk in chunks.values():
            page = np.asarray(chunk.pages)[chunk.dropped // PAGE]
            for layer in range(layers):
                rows = page + layer * pages
                k = k.at[rows, chunk.dropped % PAGE].set(50.0)
                v = v.at[rows, chunk.dropped % PAGE].set(1e4)
        runner.cache.update(lambda _: (pool.replace(k=k, v=v), None))

    engine.call(spoil)
    assert alone(engine, [request]) == first

    def shown(runner, state, there):
        slots = np.concatenate([part.slots for part in state.parts[1:]])
        positions = np.concatenate(state.table._positions)[slots]
        return int((positions == HIDDEN).sum()), len(slots)

    assert inspect_prompts(engine, [request], shown) == [(hidden, 160)]


@pytest.mark.parametrize("stored", ["native", "int4", "int4-half"])
@pytest.mark.parametrize("method", ["turborag", "epic"])
def test_who_comes_first_gets_what_the_next_one_gets(engine_on, long, alone, stored, method):
    first, again = engine_on(), engine_on()
    store = store_of(first.runner.model, stored)
    request = long(first, method, store=store)
    encoded = alone(first, [request])
    assert alone(first, [request]) == encoded
    assert alone(again, [request]) == encoded


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("encoder", ["isolated", "after_prefix"])
def test_ratio_1_is_full_attention(engine_on, long, name, encoder):
    """Law 3: all tokens are computed again, the dropped among them."""
    engine = engine_on()
    store = store_of(engine.runner.model, "int4-half")
    method = dataclasses.replace(
        METHODS["epic"], encoder=encoder, selector=SELECTORS[name], recompute_ratio=1.0
    )

    def logits(runner, state, there):
        return np.asarray(there.logits)[0]

    request = long(engine, method, store=store)
    same = dataclasses.replace(request, method=METHODS["full_attention"], store=engine.memory)
    full = inspect_prompts(engine, [same], logits)
    for _ in range(2):  # encoded, then from the store
        got = inspect_prompts(engine, [request], logits)
    np.testing.assert_allclose(got, full, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", SELECTORS)
def test_what_is_chosen_may_be_a_dropped_token(engine_on, long, alone, name):
    engine = engine_on()
    store = store_of(engine.runner.model)
    method = dataclasses.replace(METHODS["epic"], selector=SELECTORS[name], recompute_ratio=0.3)
    [(ids, _)] = alone(engine, [long(engine, method, store=store)])
    assert len(ids) == 8

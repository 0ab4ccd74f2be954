"""An answer does not depend on who came first: KV that is encoded on the way is as it is stored."""

import dataclasses

import numpy as np
import pytest

from jaxrag.kv.store import KVLayout, MemoryStore


def store_of(engine, stored):
    model = engine.runner.model
    layout = dataclasses.replace(model.kv_layout, stored=stored)
    assert isinstance(layout, KVLayout)
    return MemoryStore(model.fingerprint, layout)


@pytest.mark.parametrize("stored", ["native", "int8"])
def test_who_has_a_chunk_encoded_gets_what_the_next_one_reads(engine_on, asked, alone, stored):
    first = engine_on()
    store = store_of(first, stored)
    request = asked(first, tokens=8, store=store)
    encoded = alone(first, [request])
    held = store.get_many(list(store.keys()))
    again = engine_on()
    assert alone(again, [request]) == encoded
    np.testing.assert_array_equal(store.get_many(list(store.keys())).kv, held.kv)


def test_what_a_chunk_is_encoded_beside_does_not_change_it(engine_on, asked, alone):
    many, one = engine_on(), engine_on()
    request = asked(many, chunks=4, tokens=1)
    alone(many, [request])
    chunk = request.prompt.chunks[2]
    single = dataclasses.replace(request.prompt, chunks=(chunk,), neighbours=None)
    alone(one, [dataclasses.replace(request, prompt=single, store=one.memory)])
    shared = set(one.memory.keys()) & set(many.memory.keys())
    assert len(shared) == 2  # the prefix and the chunk
    for key in shared:
        np.testing.assert_array_equal(one.memory.get(key), many.memory.get(key))

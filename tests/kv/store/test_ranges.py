"""Ranges of layers, and which layers are hashed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusal import refused

from jaxrag.base.errors import ChunkCorrupt, StoreError
from jaxrag.kv.store import (
    ChunkStore,
    KVLayout,
    MemoryStore,
    Provenance,
    chunk_key,
    content_id,
    context_id,
)
from jaxrag.kv.store.quantise import quantise

LAYOUTS = {
    stored: KVLayout(num_layers=5, num_kv_heads=2, head_dim=4, dtype="float16", stored=stored)
    for stored in ("native", "int8")
}
TOKENS = (1, 6, 11)


@pytest.fixture(scope="module", params=["memmap", "default", "memory", "remote", "two files"])
def kind(request):
    return request.param


@pytest.fixture(scope="module", params=["native", "int8"])
def filled(kind, request, tmp_path_factory):
    """A store with chunks of 1, 6 and 11 tokens, and what each must come back as."""
    layout = LAYOUTS[request.param]
    model = "ab" * 32
    if kind == "memory":
        store = MemoryStore(model, layout)
    else:
        io_mode = "default" if kind == "default" else "memmap"
        directory = f"memory://{request.param}"
        if kind != "remote":
            directory = tmp_path_factory.mktemp("kb")
        store = ChunkStore.open(directory, model, layout, mode="rw", io_mode=io_mode)
    chunks = {}
    for tokens in TOKENS:
        ids = np.full(tokens, tokens, np.int32)
        record = Provenance("isolated", content_id("t", ids), context_id("isolated", ids[:0]))
        key = chunk_key(model, record.content_id, record.context_id)
        kv = np.random.default_rng(tokens).standard_normal(layout.shape(tokens)).astype(np.float16)
        if kind == "two files":
            attempt = store.begin(key, tokens, record, ways=2)
            halves = [np.ascontiguousarray(half) for half in np.split(kv, 2, axis=3)]
            shards = [store.put_shard(attempt, rank, half) for rank, half in enumerate(halves)]
            assert store.commit(attempt, shards).won
        else:
            store.put(key, kv, record=record)
        if layout.stored == "int8":
            elements, scale = quantise(kv)
            kv = (elements * scale[..., None]).astype(np.float16)
        chunks[key] = kv
    return store, chunks


def ranges(size):
    return st.integers(0, size - 1).flatmap(
        lambda first: st.tuples(st.just(first), st.integers(first + 1, size))
    )


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_a_range_is_a_slice_of_the_whole(filled, data):
    store, chunks = filled
    key = data.draw(st.sampled_from(sorted(chunks)))
    layers = data.draw(st.none() | ranges(5))
    wanted = chunks[key][slice(*layers or (None,))]
    out = None
    if data.draw(st.booleans()):
        out = np.full((wanted.shape[0], 2, wanted.shape[2] + 3, 2, 4), 7, np.float16)
    got = store.get(key, out, layers=layers)
    assert got.shape == wanted.shape
    assert got.tobytes() == wanted.tobytes()
    if out is not None:
        assert np.shares_memory(got, out)
        assert (out[:, :, wanted.shape[2] :] == 7).all()


@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_get_many_of_some_layers(filled, data):
    store, chunks = filled
    layers = data.draw(ranges(5))
    keys = data.draw(st.lists(st.sampled_from(sorted(chunks)), min_size=1, unique=True))
    got = store.get_many(keys, layers=layers)
    wanted = np.concatenate([chunks[key] for key in keys], axis=2)[slice(*layers)]
    assert got.kv.tobytes() == wanted.tobytes()


@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_a_set_of_layers_comes_in_ascending_order(filled, data):
    store, chunks = filled
    layers = data.draw(st.frozensets(st.integers(0, 4)))
    keys = data.draw(st.lists(st.sampled_from(sorted(chunks)), min_size=1, unique=True))
    wanted = np.concatenate([chunks[key] for key in keys], axis=2)[sorted(layers)]
    out = np.full((len(layers), 2, wanted.shape[2] + 1, 2, 4), 7, np.float16)
    for got in (store.get_many(keys, layers=layers), store.get_many(keys, out, layers=layers)):
        assert got.kv.shape == wanted.shape
        assert got.kv.tobytes() == wanted.tobytes()
    assert (out[:, :, wanted.shape[2] :] == 7).all()


@pytest.mark.parametrize(
    "layers",
    [(0, 6), (3, 3), (-1, 3), [0, 3], (4, 6), (0, True), frozenset({0, 5}), frozenset({0, -1})],
)
def test_ranges_that_are_not_in_the_chunk(filled, layers):
    store, chunks = filled
    with refused(StoreError, "0"):
        store.get(next(iter(chunks)), layers=layers)


def test_exactly_the_layers_that_are_read_are_hashed(open_store, chunk, tmp_path):
    store, c = open_store(), chunk(1)
    store.put(c.key, c.kv, record=c.record)
    (path,) = (tmp_path / "kb").glob(f"kv/*/*/{c.key}/*/c/0/0/0/0/0")
    data = bytearray(path.read_bytes())
    data[2 * c.kv[0].nbytes - 1] ^= 1  # in layer 1 of 3
    path.write_bytes(data)
    for layers in ((1, 3), (1, 2), None, frozenset({0, 1})):
        with refused(ChunkCorrupt, "1"):
            store.get(c.key, layers=layers)
    for layers in ((0, 1), (2, 3)):
        assert store.get(c.key, layers=layers).tobytes() == c.kv[slice(*layers)].tobytes()
    assert store.get(c.key, layers=frozenset({0, 2})).tobytes() == c.kv[[0, 2]].tobytes()

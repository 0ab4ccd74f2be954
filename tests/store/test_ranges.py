"""Ranges of layers and tokens, and which layers are hashed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrag.errors import ChunkCorrupt, StoreError
from jaxrag.store import (
    ChunkStore,
    KVLayout,
    MemoryStore,
    Provenance,
    chunk_key,
    content_id,
    context_id,
)
from jaxrag.store.quantise import quantise

LAYOUTS = {
    stored: KVLayout(num_layers=5, num_kv_heads=2, head_dim=4, dtype="float16", stored=stored)
    for stored in ("native", "int8")
}
TOKENS = (1, 6, 11)


@pytest.fixture(scope="module", params=["memmap", "default", "memory", "two files"])
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
    tokens = data.draw(st.none() | ranges(chunks[key].shape[2]))
    verify = data.draw(st.sampled_from(["always", "first", "never"]))
    wanted = chunks[key][slice(*layers or (None,)), :, slice(*tokens or (None,))]
    out = None
    if data.draw(st.booleans()):
        out = np.full((wanted.shape[0], 2, wanted.shape[2] + 3, 2, 4), 7, np.float16)
    got = store.get(key, out, layers=layers, tokens=tokens, verify=verify)
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


@pytest.mark.parametrize(
    "options",
    [{"tokens": (0, 12)}, {"tokens": (3, 3)}, {"tokens": (-1, 3)}, {"tokens": [0, 3]},
     {"layers": (4, 6)}, {"tokens": (0, True)}],
)  # fmt: skip
def test_ranges_that_are_not_in_the_chunk(filled, options):
    store, chunks = filled
    with pytest.raises(StoreError, match=r"expected \(first, end\) with 0 <= first < end <="):
        store.get(max(chunks, key=lambda key: chunks[key].shape[2]), **options)


@pytest.fixture
def damaged(open_store, chunk, tmp_path):
    """A store whose chunk of 7 tokens, 3 layers has a flipped bit in layer 1, last token."""
    store, c = open_store(), chunk(1)
    store.put(c.key, c.kv, record=c.record)

    def damage():
        (path,) = (tmp_path / "kb").glob(f"kv/*/*/{c.key}/*/c/0/0/0/0/0")
        data = bytearray(path.read_bytes())
        data[2 * c.kv[0].nbytes - 1] ^= 1
        path.write_bytes(data)

    return store, c, damage


def test_a_range_of_tokens_verifies_its_whole_layers_and_no_others(damaged):
    store, c, damage = damaged
    damage()
    with pytest.raises(ChunkCorrupt, match="layer 1 of 3"):
        store.get(c.key, layers=(1, 3), tokens=(0, 1))
    for layers in ((0, 1), (2, 3)):
        kv = store.get(c.key, layers=layers, tokens=(2, 5))
        assert kv.tobytes() == c.kv[slice(*layers), :, 2:5].tobytes()
    unchecked = store.get(c.key, layers=(1, 2), tokens=(0, 1), verify="never")
    assert unchecked.tobytes() == c.kv[1:2, :, :1].tobytes()


def test_first_hashes_a_layer_once(damaged, open_store):
    store, c, damage = damaged
    store.get(c.key, layers=(0, 2), verify="first")
    damage()
    assert store.get(c.key, layers=(1, 2), verify="first").tobytes() != c.kv[1:2].tobytes()
    with pytest.raises(ChunkCorrupt):
        store.get(c.key, verify="first")  # layer 2 was not read before, so all are hashed
    with pytest.raises(ChunkCorrupt):
        store.get(c.key, layers=(1, 2))
    with pytest.raises(ChunkCorrupt):
        open_store("r").get(c.key, layers=(1, 2), verify="first")  # it has not seen them


def test_first_hashes_what_replaced_a_chunk(damaged):
    store, c, _ = damaged
    store.get(c.key, verify="first")
    store.put(c.key, c.kv, record=c.record, replace=True)
    old, new = sorted(p for p in store._backend.directory.glob(f"kv/*/*/{c.key}/*") if p.is_dir())
    record = store.head([c.key])[0]
    path = (old if old.name == record.attempt else new) / "c/0/0/0/0/0"
    path.write_bytes(bytes(path.stat().st_size - 52) + path.read_bytes()[-52:])
    with pytest.raises(ChunkCorrupt):
        store.get(c.key, verify="first")


def test_never_does_not_vouch_for_first(damaged):
    store, c, damage = damaged
    damage()
    store.get(c.key, verify="never")
    with pytest.raises(ChunkCorrupt):
        store.get(c.key, verify="first")

"""Chunks that no window reaches back to: layers with a window are neither read nor seen there."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrag.base.errors import ContextExceeded
from jaxrag.base.sharding import make_mesh
from jaxrag.engine import mapping
from jaxrag.engine.engine import Engine, engine_of
from jaxrag.engine.mapping import most_pages, sequence_of
from jaxrag.engine.request import Prompt, Request
from jaxrag.engine.state import EngineSettings
from jaxrag.kv.cache import PAGE, pages_for
from jaxrag.kv.placement import KVPlacement
from jaxrag.kv.store import ChunkStore, MemoryStore
from jaxrag.kv.store.wrapper import StoreWrapper
from jaxrag.models.model import random_model
from jaxrag.reuse.methods import METHODS
from jaxrag.server.state.members import pieces_of
from jaxrag.server.state.replica import Replica

SIZES = (20, 33, 16, 7, 40, 6)  # of chunks behind a prefix of 5
NO_PRIMER = np.zeros(0, np.int32)


class Logged(StoreWrapper):
    """A store that remembers which layers of which chunks were read."""

    def __init__(self, inner):
        super().__init__(inner)
        self.read = []

    def _load(self, wanted):
        self.read += [(it.record.tokens, it.layers) for it in wanted]
        return self.inner._load(wanted)


@pytest.fixture(scope="module")
def models(tiny_config):
    """Of three layers: the second without a window, all with one, and the first alone."""
    made = {}

    def make(family):
        if family not in made:
            layers = {"gemma3": (True, False, True), "most": (True, False, False)}.get(family)
            name = "gemma3" if family == "gemma3" else "mistral"
            windows = {"window_layers": layers, "sliding_window": 7}
            made[family] = random_model(tiny_config(name, eos_ids=(), **windows))
        return dataclasses.replace(made[family], cache_tokens=2048)

    return make


@pytest.fixture
def prompt(rng):
    ids = [rng.integers(3, 101, size).astype(np.int32) for size in (5, *SIZES, 9)]
    around = tuple((ids[2], ids[5]) for _ in SIZES)
    return Prompt(ids[0], tuple(ids[1:-1]), ids[-1], around)


def poison(runner):
    """What nobody wrote to the pool is no number."""
    cache = runner.cache
    cache._pool = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache.pool)


def answered(model, request, alone):
    """Tokens and log-probabilities of a request to a new engine, whose pool holds NaN."""
    model.engine = Engine(model)
    model.engine.call(poison)
    [found] = alone(model.engine, [request])
    return found


@pytest.mark.parametrize(
    ("family", "method", "pages"),
    [
        ("gemma3", METHODS["turborag"], 4 + 1),  # 11 parts and a whole one
        ("gemma3", dataclasses.replace(METHODS["turborag"], prefix_cache=True), 4 + 1),
        ("most", METHODS["turborag"], 12),  # two of three layers without a window: as many pages
        ("mistral", METHODS["full_reuse"], 1),  # nothing of the prefix and of five chunks
    ],
    ids=["gemma3", "prefix cache", "most", "mistral"],
)
def test_answers_are_equal_with_and_without(
    models, prompt, alone, monkeypatch, family, method, pages
):
    model = models(family)
    store = Logged(MemoryStore(model.fingerprint, model.kv_layout))
    request = Request(prompt, store, method, 12)
    told = [answered(model, request, alone) for _ in range(2)]  # encoded, then read
    part = model.config.global_layers
    assert sorted(layers for _, layers in store.read) == sorted([*[part] * 6, (0, 1, 2)])
    pool_bytes = engine_of(model).tiers().pool_bytes
    with monkeypatch.context() as patch:
        patch.setattr(mapping, "_read_in_part", lambda *_: None)
        told.append(answered(model, request, alone))
    page = PAGE * model.config.kv_bytes_per_token
    assert pool_bytes == pages * page
    assert told[0] == told[1] == told[2]
    assert all(np.isfinite(told[0][1]))


REUSING = sorted(
    name
    for name, it in METHODS.items()
    if it.encoder is not None and not (it.overlapping or it.wraps)  # these are refused
)


@pytest.mark.parametrize("name", REUSING)
def test_whoever_may_run_tokens_of_chunks_has_all_of_them(models, prompt, name):
    """Which tokens are computed again is known once their KV is there."""
    model, method = models("gemma3"), METHODS[name]
    for misses in ("encode", "in_place"):
        how = dataclasses.replace(method, misses=misses, decode=METHODS["turborag"].decode)
        request = Request(prompt, engine_of(model).memory, how, 1, primer=NO_PRIMER)
        layers = [part.load.layers for part in sequence_of(model, request).parts if part.load]
        in_part = misses == "encode" and not method.recomputes
        assert layers == ([(1,)] * 6 + [None] if in_part else [None] * 7)


def test_exactly_what_the_last_window_sees_is_read(models, prompt, alone):
    """Six tokens before the question: of the last chunk all layers, of others the second."""
    model = models("gemma3")
    store = Logged(MemoryStore(model.fingerprint, model.kv_layout))
    request = Request(prompt, store, METHODS["turborag"], 2)
    answered(model, request, alone)
    assert not store.read
    answered(model, request, alone)
    expected = {(5, (1,)), *((size, (1,)) for size in SIZES[:-1]), (SIZES[-1], (0, 1, 2))}
    assert sorted(store.read) == sorted(expected)
    row = model.kv_layout.nbytes(1) // 3
    [link] = [it for it in engine_of(model).tiers().links if it.bytes_read]
    assert engine_of(model).tiers().pool_chunks == 7
    pages = -(-sum(pages_for(it) for it in (5, *SIZES[:-1])) // 3) + 1  # chunks share them
    assert engine_of(model).tiers().pool_bytes == PAGE * 3 * row * pages
    assert link.bytes_read == row * sum(tokens * len(layers) for tokens, layers in store.read)


@pytest.mark.parametrize(("last", "reach"), [(6, 1), (5, 2), (1, 2)])
def test_the_first_token_that_is_run_sees_a_window_less_one_back(models, rng, last, reach):
    """W = 7: a last chunk of six tokens is all it sees; of five, one token of the one before."""
    model = models("gemma3")
    chunks = tuple(rng.integers(3, 101, size).astype(np.int32) for size in (30, 30, last))
    made = Prompt(NO_PRIMER, chunks, np.array([5], np.int32))
    request = Request(made, engine_of(model).memory, METHODS["turborag"], 1)
    layers = [part.load.layers for part in sequence_of(model, request).parts[1:]]
    assert layers == [(1,)] * (3 - reach) + [None] * reach


def test_all_layers_in_the_pool_serve_who_needs_some_and_not_the_other_way(models, prompt, alone):
    model = models("gemma3")
    store = Logged(MemoryStore(model.fingerprint, model.kv_layout))
    turned = dataclasses.replace(prompt, chunks=prompt.chunks[::-1], neighbours=None)
    first, second = (Request(it, store, METHODS["turborag"], 3) for it in (prompt, turned))
    expected = [answered(model, it, alone) for it in (first, second)]
    model.engine = engine = Engine(model)
    engine.call(poison)
    store.read.clear()
    assert alone(engine, [first, second, first]) == [*expected, expected[0]]
    # The last chunk of the first is first in the second: it lies there. That of the second does
    # not with all layers, and is read again, with all of them.
    assert store.read.count((SIZES[0], (1,))) == 1
    assert store.read.count((SIZES[0], (0, 1, 2))) == 1
    assert store.read.count((SIZES[-1], (0, 1, 2))) == 1
    assert len(store.read) == 1 + len(SIZES) + 1


def test_an_earlier_turn_that_is_run_sees_its_window(models, prompt, alone, monkeypatch):
    """Where a turn begins, which may be computed again, is where windows end."""
    model = models("gemma3")
    turn = np.arange(3, 40, dtype=np.int32)
    spoken = dataclasses.replace(prompt, chunks=(*prompt.chunks, turn), neighbours=None)
    spoken = spoken.with_turns({len(SIZES)})
    store = MemoryStore(model.fingerprint, model.kv_layout)
    request = Request(spoken, store, METHODS["turborag"], 3)
    layers = [part.load.layers for part in sequence_of(model, request).parts if part.load]
    assert layers == [(1,)] * len(SIZES) + [None]
    told = answered(model, request, alone)
    again = alone(model.engine, [request])  # the turn is in the pool now
    monkeypatch.setattr(mapping, "_read_in_part", lambda *_: None)
    assert answered(model, request, alone) == told
    np.testing.assert_allclose(again[0][1], told[1], rtol=2e-5)
    assert again[0][0] == told[0]


def test_a_pool_of_what_windows_imply_serves_what_it_did_not_hold(
    models, prompt, alone, at_rest, monkeypatch
):
    """Pages are whole for one request and parts for the next; others' chunks lie beside parts."""
    big = models("gemma3")
    turned = dataclasses.replace(prompt, chunks=prompt.chunks[::-1], neighbours=None)
    requests = [
        Request(it, engine_of(big).memory, METHODS["turborag"], 3) for it in (prompt, turned)
    ]
    expected = [answered(big, it, alone) for it in requests]
    # The prefix, and chunks of which the last is whole: 12 pages of all layers, or 5 and 4 + 2.
    model = dataclasses.replace(big, cache_tokens=PAGE * (6 + 1))
    model.engine = engine = Engine(model)
    engine.call(poison)
    assert alone(engine, requests * 2) == expected * 2
    at_rest(engine)
    assert engine.runner.cache.allocator.evicted
    twice = dataclasses.replace(prompt, chunks=(*prompt.chunks, prompt.chunks[0]), neighbours=None)
    repeated = dataclasses.replace(requests[0], prompt=twice)
    assert most_pages(model, repeated) == 4 + 2 + 1  # the first chunk in part and whole
    engine.drop([record.key for record in requests[0].store.records()])  # no part stays
    assert not engine.tiers().pool_chunks
    monkeypatch.setattr(mapping, "_read_in_part", lambda *_: None)
    with pytest.raises(ContextExceeded):
        engine.check_fits(requests[0])


def test_heads_of_parts_on_two_devices(models, prompt, alone):
    model = models("gemma3")
    store = Logged(MemoryStore(model.fingerprint, model.kv_layout))
    request = Request(prompt, store, METHODS["turborag"], 3)
    expected, _ = answered(model, request, alone)
    spread = random_model(model.config, mesh=make_mesh(1, 1, 2), cache_tokens=2048)
    assert answered(spread, request, alone)[0] == expected
    assert sorted(layers for _, layers in store.read) == sorted([*[(1,)] * 6, (0, 1, 2)])


@pytest.mark.parametrize("form", ["native", "int8"])
def test_what_host_memory_has_of_all_layers_serves_who_needs_some(
    models, prompt, alone, tmp_path, form
):
    model = models("gemma3")
    layout = dataclasses.replace(model.kv_layout, stored=form)
    store = Logged(ChunkStore.open(tmp_path, model.fingerprint, layout, mode="rw"))
    turned = dataclasses.replace(prompt, chunks=prompt.chunks[::-1], neighbours=None)
    first, second = (Request(it, store, METHODS["turborag"], 3) for it in (prompt, turned))
    expected = [answered(model, it, alone) for it in (first, second)]
    model.engine = engine = Engine(model, EngineSettings(arena_bytes=1 << 20))
    engine.call(poison)
    store.read.clear()
    assert alone(engine, [second]) == expected[1:]
    assert len(store.read) == 1 + len(SIZES)
    for key in list(engine.runner.cache.allocator.chunks):
        engine.call(lambda runner, key=key: runner.cache.allocator.evict(key))
    store.read.clear()
    assert alone(engine, [first]) == expected[:1]
    assert store.read == [(SIZES[-1], (0, 1, 2))]  # its second layer alone was in host memory
    assert engine.tiers().hits["host"] == len(SIZES)


def test_a_chunk_that_is_missing_in_part_and_whole(models, prompt, alone, tmp_path, monkeypatch):
    """One of the two leads and encodes it, whatever layers are wanted of it where."""
    model = models("gemma3")
    twice = dataclasses.replace(prompt, chunks=(*prompt.chunks, prompt.chunks[0]), neighbours=None)
    found = []
    for folder in ("in part", "whole"):
        store = ChunkStore.open(tmp_path / folder, model.fingerprint, model.kv_layout, mode="rw")
        request = Request(twice, store, METHODS["turborag"], 3)
        found += [answered(model, request, alone), answered(model, request, alone)]
        assert len(list(store.keys())) == 1 + len(SIZES)
        monkeypatch.setattr(mapping, "_read_in_part", lambda *_: None)
    assert found[0] == found[1] == found[2] == found[3]


@pytest.mark.parametrize("placement", [KVPlacement("host"), KVPlacement(value_layers=1)], ids=str)
def test_pages_in_host_memory_have_no_parts(models, prompt, alone, placement):
    """A model with windows is served there for a single token."""
    model = models("gemma3")
    request = Request(prompt, engine_of(model).memory, METHODS["turborag"], 1)
    expected = answered(model, request, alone)
    placed = dataclasses.replace(model, placement=placement)
    placed.engine = Engine(placed)
    for _ in range(2):  # encoded, then read
        [(ids, logprobs)] = alone(placed.engine, [request])
        assert ids == expected[0]
        np.testing.assert_allclose(logprobs, expected[1], rtol=1e-5)


class Memory:
    """Of a replica: chunks that it holds for a tenant."""

    def __init__(self, store):
        self.memory_keys = store.keys


def test_a_replica_names_what_serves_in_part(models, prompt, alone):
    model = models("gemma3")
    store = MemoryStore(model.fingerprint, model.kv_layout)
    answered(model, Request(prompt, store, METHODS["turborag"], 1), alone)
    turned = dataclasses.replace(prompt, chunks=prompt.chunks[::-1], neighbours=None)
    sequence = sequence_of(model, Request(turned, store, METHODS["turborag"], 1))
    wanted = [piece.name for piece in pieces_of(sequence, private=True)]
    report = Replica(model.engine, Memory(store), {}).report("server")
    held = [name in set(report.pool.tolist()) for name in wanted]
    assert held == [True] * 5 + [False]  # the last is there in part, and wanted whole
    assert set(wanted) <= set(report.host.tolist())
